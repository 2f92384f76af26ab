"""Device tables of every rank's addresses, as this rank sees them; renewed with the workspace."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from ...buffers import SLOTS, Workspace
from ...protocol import ABORT_WORD

__all__ = ["PeerTables"]

_HOST_TO_DEVICE = runtime.memcpyHostToDevice


class PeerTables:
    """Addresses of uint64 [ranks] tables in device memory.

    Attributes:
        recv: of receive buffers.
        signals: of signal words.
        returned: of return buffers, one table per slot.
    """

    def __init__(self, workspace: Workspace, world: Any):
        self._workspace, self._world = workspace, world
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._generation = -1
        self._tables: dict[str, Any] = {}

    @property
    def recv(self) -> int:
        return self._address("recv")

    @property
    def signals(self) -> int:
        return self._address("signals")

    @property
    def returned(self) -> tuple[int, ...]:
        return tuple(self._address(f"returned{slot}") for slot in range(SLOTS))

    def set_abort(self, word: int) -> None:
        """Set the abort word of every rank, from the host, whatever the streams are doing."""
        signals = self._workspace.signals
        if signals is None:
            return
        value = np.array([word], np.uint64)
        for pointer in signals.pointers:
            to = int(pointer) + value.itemsize * ABORT_WORD
            runtime.memcpyAsync(to, value.ctypes.data, 8, _HOST_TO_DEVICE, self._stream.ptr)
        self._stream.synchronize()

    def _address(self, name: str) -> int:
        if self._generation != self._workspace.generation:
            self._renew()
        return int(self._tables[name].data.ptr)

    def _renew(self) -> None:
        workspace = self._workspace
        pointers = {
            name: buffer.pointers
            for name in ("recv", "signals")
            if (buffer := getattr(workspace, name)) is not None
        }
        if workspace.returned is not None:
            for slot in range(SLOTS):
                offset = np.uint64(workspace.slot_offset(slot))
                pointers[f"returned{slot}"] = workspace.returned.pointers + offset
        self._tables = {name: cupy.asarray(table) for name, table in pointers.items()}
        self._generation = workspace.generation
        cupy.cuda.runtime.deviceSynchronize()  # the tables are there for every stream

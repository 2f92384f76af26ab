"""Upload of a forward's small tables: one pinned block, one copy, one address per table.

Kernels of the forward before may still read device tables when the next ones are enqueued on the
same stream, which orders the copy behind them. Host blocks are used in turn, each again only when
its copy has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cupy
import numpy as np

__all__ = ["TableUploader"]

_ALIGN = 256
_BLOCKS = 4
_LEAST_BYTES = 1 << 16


class _Block:
    """Pinned memory and the event that says that its last copy has ended."""

    def __init__(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        self.copied = cupy.cuda.Event(disable_timing=True)

    def take(self, nbytes: int) -> np.ndarray:
        self.copied.synchronize()
        if self.bytes.nbytes < nbytes:
            memory = cupy.cuda.alloc_pinned_memory(max(_LEAST_BYTES, 2 * nbytes))
            self.bytes = np.frombuffer(memory, np.uint8)
        return self.bytes[:nbytes]


class TableUploader:
    """Copies named arrays to the device."""

    def __init__(self) -> None:
        self._blocks = [_Block() for _ in range(_BLOCKS)]
        self._next = 0
        self._device: Any = None

    def upload(self, tables: Mapping[str, np.ndarray], stream: Any) -> dict[str, int]:
        """Enqueue the copy of `tables` on `stream`; return each table's device address."""
        offsets, nbytes = {}, 0
        for name, table in tables.items():
            offsets[name] = nbytes
            nbytes += -(-max(1, table.nbytes) // _ALIGN) * _ALIGN
        block = self._blocks[self._next]
        self._next = (self._next + 1) % _BLOCKS
        staged = block.take(nbytes)
        for name, table in tables.items():
            first = offsets[name]
            flat = np.ascontiguousarray(table).reshape(-1).view(np.uint8)
            staged[first : first + table.nbytes] = flat
        device = self._room(nbytes)
        device.data.copy_from_host_async(staged.ctypes.data, nbytes, stream)
        block.copied.record(stream)
        return {name: int(device.data.ptr) + first for name, first in offsets.items()}

    def _room(self, nbytes: int) -> Any:
        if self._device is None or self._device.nbytes < nbytes:
            # Work that is in flight may still read the smaller block.
            cupy.cuda.runtime.deviceSynchronize()
            self._device = cupy.empty(max(_LEAST_BYTES, 2 * nbytes), cupy.uint8)
        return self._device

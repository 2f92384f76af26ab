"""The words that kernels talk through on one rank: control words, signals, the error record.

Addresses are looked up in the workspace at every use, since its regions may move when it grows.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from ...buffers import Workspace
from ...errors import ProtocolTimeout
from ...protocol import (
    ABORT_WORD,
    ERROR_RECORD,
    ControlLayout,
    SignalLayout,
    WaitKind,
    timeout_from_record,
)
from ..base import Forward
from .peers import PeerTables

__all__ = ["Words", "control_layout", "posted_epoch", "signal_layout"]


def control_layout(forward: Forward) -> ControlLayout:
    """Return where the forward's control words are."""
    config = forward.plan.config
    return ControlLayout(config.ranks, config.experts_per_rank, config.max_bands)


def signal_layout(forward: Forward) -> SignalLayout:
    """Return where the forward's signal words are."""
    config = forward.plan.config
    return SignalLayout(config.ranks, config.num_experts)


def posted_epoch(epoch: int, muted: bool) -> int:
    """Return what signals are set to: the epoch, or the one before it from a muted rank."""
    return (epoch - muted) & ((1 << 64) - 1)


class Words:
    """Addresses and clearing of one rank's words.

    Attributes:
        peers: addresses of all ranks.
    """

    def __init__(self, workspace: Workspace, world: Any):
        self._workspace, self._world = workspace, world
        self.peers = PeerTables(workspace, world)
        memory = cupy.cuda.alloc_pinned_memory(ERROR_RECORD.itemsize)
        self._record = np.frombuffer(memory, ERROR_RECORD, count=1)
        self._record[:] = 0

    # -- addresses -------------------------------------------------------------------------------

    @property
    def control(self) -> int:
        return int(self._workspace.local["control"].data.ptr)

    @property
    def signals(self) -> int:
        assert self._workspace.signals is not None
        return int(self._workspace.signals.local.data.ptr)

    @property
    def abort(self) -> int:
        return self.signals + 8 * ABORT_WORD

    def site(self, forward: Forward) -> dict[str, int]:
        """Return the parameters of a kernel that waits or stops for abort."""
        return {
            "abort": self.abort,
            "record": self._record.ctypes.data,
            "peer_signals": self.peers.signals,
            "timeout_ns": int(forward.timeout_s * 1e9),
            "rank": self._world.rank,
            "ranks": self._world.size,
        }

    # -- clearing --------------------------------------------------------------------------------

    def zero_control(self, forward: Forward) -> None:
        """Zero tickets and counters in-stream, before a producer."""
        layout = control_layout(forward)
        self._zero(0, layout.band_counters + forward.plan.num_bands, forward.stream)

    def zero_send_counters(self, forward: Forward) -> None:
        """Zero what the consumer counts; bands stay full from the GEMM before."""
        layout = control_layout(forward)
        self._zero(layout.consumer_ticket, layout.band_counters, forward.stream)

    def _zero(self, first: int, last: int, stream: Any) -> None:
        region = self._workspace.local["control"][4 * first : 4 * last]
        region.data.memset_async(0, region.nbytes, stream)

    def reset(self, epoch: int) -> None:
        """Clear abort and the record, set every signal to `epoch`; no kernel may run."""
        if self._workspace.signals is not None:
            words = self._workspace.signals.local.view(cupy.uint64)
            words[:] = cupy.uint64(epoch)
            words[ABORT_WORD] = 0
        cupy.cuda.runtime.deviceSynchronize()
        self._record[:] = 0

    # -- failures --------------------------------------------------------------------------------

    def failure(self) -> ProtocolTimeout | None:
        """Return what a kernel has put on record, without blocking."""
        return timeout_from_record(self._record)

    def note_abort(self) -> None:
        """Put another rank's failure on record where no kernel of this rank has met it."""
        if self._workspace.signals is None or self._record["state"][0]:
            return
        words = self._workspace.signals.local[: 8 * (ABORT_WORD + 1)].view(np.uint64)
        word = int(words[ABORT_WORD])
        if word:
            rank = self._world.rank
            self._record[0] = (2, WaitKind.ABORTED, rank, word - 1, -1, 0, word, 0)

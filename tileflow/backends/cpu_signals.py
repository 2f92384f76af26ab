"""Signal words on the CPU: set at a peer, waited for at home, aborted everywhere.

A word is an aligned 8-byte store, which no reader sees half done; the fences around it are the
caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..buffers import Workspace
from ..errors import ProtocolTimeout
from ..protocol import ABORT_WORD, SignalLayout, WaitKind, reached, wait_until
from .base import Forward

if TYPE_CHECKING:
    from ..worlds.base import World

__all__ = ["Signals"]


class Signals:
    """The signal blocks of all ranks, as one rank uses them."""

    def __init__(self, world: World, workspace: Workspace):
        self._world, self._rank, self._workspace = world, world.rank, workspace

    def words(self, rank: int) -> np.ndarray:
        """Return the signal block of `rank`, uint64."""
        assert self._workspace.signals is not None
        return self._workspace.signals.peer(rank).view(np.uint64)

    def post(self, forward: Forward, peer: int, kind: str, index: int) -> None:
        """Set word `index` of `kind` (a name of SignalLayout) at `peer`; nothing after an abort."""
        muted = forward.faults.mute_dispatch if kind == "dispatched" else forward.faults.mute_done
        if not muted and not self._abort_word():
            self.words(peer)[getattr(_layout(forward), kind) + index] = forward.epoch

    # -- waits -----------------------------------------------------------------------------------

    def wait_dispatched(self, forward: Forward, peer: int) -> None:
        """Wait until `peer` has stored all its rows in this rank's receive buffer."""
        word = _layout(forward).dispatched + peer
        self._wait_word(forward, WaitKind.DISPATCH, peer, word, lambda: -1)

    def wait_done(self, forward: Forward, peer: int) -> None:
        """Wait until `peer` has stored all of this rank's rows in its return buffer."""
        word = _layout(forward).done + peer
        missing = self._missing_run
        self._wait_word(forward, WaitKind.RETURN, peer, word, lambda: missing(forward, peer))

    def _wait_word(
        self, forward: Forward, kind: WaitKind, peer: int, word: int, index: Callable[[], int]
    ) -> None:
        words, epoch = self.words(self._rank), forward.epoch

        def timeout(seconds: float) -> ProtocolTimeout:
            return ProtocolTimeout(
                kind.name.lower(),
                rank=self._rank,
                peer=peer,
                index=index(),
                expected=epoch,
                seen=int(words[word]),
                seconds=seconds,
            )

        self.wait(forward, lambda: reached(int(words[word]), epoch), timeout)

    def wait(
        self,
        forward: Forward,
        ready: Callable[[], bool],
        timeout: Callable[[float], ProtocolTimeout],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait within the forward's limit until `ready`; `stopped` ends it like an abort of ours.

        Raises:
            ProtocolTimeout: what `timeout(seconds)` made, or "aborted" naming the rank that failed.
        """
        started = time.monotonic()

        def failed(kind: WaitKind | None, peer: int) -> ProtocolTimeout:
            seconds = time.monotonic() - started
            return timeout(seconds) if kind is None else self._aborted(peer, seconds)

        wait_until(
            ready,
            timeout_s=forward.timeout_s,
            aborted=lambda: 1 + self._rank if stopped() else self._abort_word(),
            on_fail=failed,
        )

    def _missing_run(self, forward: Forward, peer: int) -> int:
        """Return the first run of `peer`'s experts that has not arrived here, or -1."""
        arrived = self.words(self._rank)[_layout(forward).arrived :]
        experts = forward.plan.config.experts_per_rank
        for expert in range(peer * experts, (peer + 1) * experts):
            sent = forward.plan.counts[self._rank, expert] > 0
            if sent and not reached(int(arrived[expert]), forward.epoch):
                return expert
        return -1

    # -- failures --------------------------------------------------------------------------------

    def _abort_word(self) -> int:
        return int(self.words(self._rank)[ABORT_WORD])

    def _aborted(self, peer: int, seconds: float = 0.0) -> ProtocolTimeout:
        return ProtocolTimeout("aborted", rank=self._rank, peer=peer, seconds=seconds)

    def _usable(self) -> bool:
        signals = self._workspace.signals
        return signals is not None and signals.local is not None

    def abort(self) -> None:
        """Tell all ranks that this one has failed, except those that know of another one."""
        for rank in range(self._world.size) if self._usable() else ():
            words = self.words(rank)
            if not words[ABORT_WORD]:
                words[ABORT_WORD] = 1 + self._rank

    def failure(self) -> ProtocolTimeout | None:
        """Return the failure that another rank has announced here, if one has."""
        word = self._abort_word() if self._usable() else 0
        return None if word in (0, 1 + self._rank) else self._aborted(word - 1)

    def reset(self, epoch: int) -> None:
        """Clear this rank's abort and set all its other words to `epoch`."""
        words = self.words(self._rank)
        words[:] = epoch
        words[ABORT_WORD] = 0


def _layout(forward: Forward) -> SignalLayout:
    return SignalLayout(forward.plan.config.ranks, forward.plan.config.num_experts)

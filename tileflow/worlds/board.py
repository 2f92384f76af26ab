"""The board where the virtual ranks of one process meet: exchanges and turns.

One board serves one ``run()`` of a loopback world. Every wait on it is bounded, and ends at once
when the awaited rank can no longer come: it has left the run, or it has gone on to a later round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import ProtocolTimeout, WorldBroken

__all__ = ["LAST_ROUND", "Board"]

LAST_ROUND = 1 << 62  # the round of close()
Key = tuple[int, int]  # round, number in the round


class Board:
    """Meeting point of `size` threads, one per virtual rank."""

    def __init__(self, size: int):
        self._size = size
        self._changed = threading.Condition()
        self._round = [0] * size
        self._exchanges = [0] * size  # of the round, entered so far
        self._turns = [0] * size  # of the round, finished so far
        self._posts: dict[Key, dict[int, Any]] = {}
        self._left: set[int] = set()
        self._failed = False

    # -- what ranks do ---------------------------------------------------------------------------

    def exchange(self, rank: int, item: Any, limit_s: float) -> list[Any]:
        """Post `item` and return what every rank posted, in rank order.

        Raises:
            ProtocolTimeout: a rank did not come in time, or went on after a failure ("aborted").
            WorldBroken: a rank left the run.
        """
        with self._changed:
            key = (self._round[rank], self._exchanges[rank])
            self._exchanges[rank] += 1
            post = self._posts.setdefault(key, {})
            post[rank] = item
            if len(post) == self._size:
                del self._posts[key]
            self._changed.notify_all()
            self._wait("allgather", rank, lambda peer: peer in post, limit_s)
            return [post[peer] for peer in range(self._size)]

    def begin_turn(self, rank: int, limit_s: float) -> None:
        """Wait until all lower ranks have finished this turn, and all ranks the one before."""
        with self._changed:
            mine = self._turns[rank]
            self._wait("turn", rank, lambda p: self._turns[p] >= mine + (p < rank), limit_s)

    def end_turn(self, rank: int) -> None:
        """Pass the turn on."""
        with self._changed:
            self._turns[rank] += 1
            self._changed.notify_all()

    def await_turns(self, rank: int, limit_s: float) -> None:
        """Wait until all ranks have finished the turn that this rank finished last."""
        with self._changed:
            mine = self._turns[rank]
            self._wait("turn", rank, lambda peer: self._turns[peer] >= mine, limit_s)

    def begin_round(self, rank: int, *, last: bool = False) -> None:
        """Go on to the next round: meet nobody who still waits in this one."""
        with self._changed:
            self._round[rank] = LAST_ROUND if last else self._round[rank] + 1
            self._exchanges[rank] = self._turns[rank] = 0
            self._changed.notify_all()

    # -- what the run does -----------------------------------------------------------------------

    def leave(self, rank: int, *, failed: bool = False) -> None:
        """Note that `rank` takes part no longer."""
        with self._changed:
            self._left.add(rank)
            self._failed |= failed
            self._changed.notify_all()

    def await_end(self, grace_s: float) -> set[int]:
        """Wait until all ranks left; return those that have not `grace_s` after a failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or len(self._left) == self._size)
            self._changed.wait_for(lambda: len(self._left) == self._size, grace_s)
            return set(range(self._size)) - self._left

    # -- the one wait ----------------------------------------------------------------------------

    def _wait(self, what: str, rank: int, came: Callable[[int], bool], limit_s: float) -> None:
        started = time.monotonic()
        mine = self._round[rank]
        while True:
            missing = [p for p in range(self._size) if self._round[p] < mine or not came(p)]
            if not missing:
                return
            self._refuse_vain_wait(rank, missing)
            waited = time.monotonic() - started
            if waited >= limit_s:
                raise ProtocolTimeout(what, rank=rank, peer=missing[0], seconds=waited)
            self._changed.wait(limit_s - waited)

    def _refuse_vain_wait(self, rank: int, missing: list[int]) -> None:
        for peer in missing:
            if self._round[peer] > self._round[rank]:
                raise ProtocolTimeout("aborted", rank=rank, peer=peer)
            if peer in self._left:
                raise WorldBroken(f"rank {rank}: rank {peer} has left world.run()")

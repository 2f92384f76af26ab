"""Words, epochs and failures: what ranks say to each other, the same on CPU and GPU.

Guarantees this module's layouts stand for:

* a *signal* word has exactly one writer, which *sets* it to the epoch of the forward; so a reader
  can never mistake an old arrival for a new one, and no word needs to be cleared between forwards;
* *control* words are local to a rank and zeroed before each producer, so targets are those of this
  forward alone;
* values compare as signed 64-bit distances, so epochs may pass 2^63 and wrap.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from .errors import ProtocolTimeout

__all__ = [
    "ABORT_WORD",
    "ERROR_RECORD",
    "ControlLayout",
    "SignalLayout",
    "WaitKind",
    "next_epoch",
    "pause",
    "reached",
    "timeout_from_record",
    "wait_until",
]

EPOCH_MASK = (1 << 64) - 1
ABORT_WORD = 0  # 0: none; otherwise 1 + the first rank that failed
_EAGER_POLLS = 200
_LINE_WORDS = 16  # signal words of different kinds stay on different 128-byte lines


class WaitKind(IntEnum):
    """What a bounded wait waits for; the number stands in the error record."""

    BAND = 1  # consumer, for a band of its own rank's producer; index: band
    DISPATCH = 2  # for the rows that a peer dispatches; index: -1
    RETURN = 3  # for the rows that a peer sends home; index: first missing global expert (run)
    ABORTED = 4  # another rank failed first; peer: that rank


# State 0: free, 1: being written, 2: complete. Written by the first failing wait only.
ERROR_RECORD = np.dtype(
    [
        (name, np.int64)
        for name in ("state", "kind", "rank", "peer", "index", "expected", "seen", "elapsed_ns")
    ]
)


def next_epoch(epoch: int) -> int:
    """Return the epoch after `epoch`, wrapped to 64 bits."""
    return (epoch + 1) & EPOCH_MASK


def reached(value: int, epoch: int) -> bool:
    """Tell whether a word set to `value` satisfies a wait for `epoch` (64-bit wrapping)."""
    return ((value - epoch) & EPOCH_MASK) < (1 << 63)


@dataclass(frozen=True)
class SignalLayout:
    """Word numbers in the symmetric signal block (uint64), one block per rank.

    ``dispatched + s``: rank s has stored all its rows in my receive buffer.
    ``done + s``: rank s has stored all my rows in my return buffer and no longer reads its own
    receive buffer. ``arrived + e``: run (global expert e) has arrived in my return buffer.
    """

    ranks: int
    num_experts: int

    @property
    def dispatched(self) -> int:
        return _LINE_WORDS

    @property
    def done(self) -> int:
        return self.dispatched + _round_up(self.ranks, _LINE_WORDS)

    @property
    def arrived(self) -> int:
        return self.done + _round_up(self.ranks, _LINE_WORDS)

    @property
    def num_words(self) -> int:
        return self.arrived + _round_up(self.num_experts, _LINE_WORDS)


@dataclass(frozen=True)
class ControlLayout:
    """Word numbers in the local control block (uint32), zeroed before each producer."""

    ranks: int
    experts_per_rank: int
    max_bands: int

    producer_ticket = 0
    consumer_ticket = 32  # another 128-byte line

    @property
    def run_counters(self) -> int:
        return 64

    @property
    def owner_counters(self) -> int:
        return self.run_counters + self.experts_per_rank * self.ranks

    @property
    def band_counters(self) -> int:
        return _round_up(self.owner_counters + self.ranks, 32)

    @property
    def num_words(self) -> int:
        return self.band_counters + max(1, self.max_bands)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pause(polls: int) -> None:
    """Give the core away after the given number of vain polls: ranks may outnumber cores.

    First only as long as another thread or rank wants it, then for 0.1 ms, so that a long wait
    does not take the time of those it waits for.
    """
    time.sleep(0 if polls < _EAGER_POLLS else 1e-4)


def wait_until(
    ready: Callable[[], bool],
    *,
    timeout_s: float,
    aborted: Callable[[], int],
    on_fail: Callable[[WaitKind | None, int], ProtocolTimeout],
) -> None:
    """Poll `ready` on the CPU until it holds; the only wait loop of the CPU backend.

    Args:
        ready: reads the awaited word.
        timeout_s: bound of the wait in seconds.
        aborted: returns the own abort word (0: none).
        on_fail: makes the error from ``(WaitKind.ABORTED, peer)`` where a rank failed first, or
            ``(None, -1)`` where the time ran out.

    Raises:
        ProtocolTimeout: the one that `on_fail` made.
    """
    deadline, polls = time.monotonic() + timeout_s, 0
    while not ready():
        word = aborted()
        if word:
            raise on_fail(WaitKind.ABORTED, word - 1)
        if time.monotonic() > deadline:
            raise on_fail(None, -1)
        polls += 1
        pause(polls)


def timeout_from_record(record: np.ndarray) -> ProtocolTimeout | None:
    """Return the failure that a complete error record (0-d or [1], ERROR_RECORD) names."""
    entry = record.reshape(-1)[0]
    if entry["state"] != 2:
        return None
    return ProtocolTimeout(
        WaitKind(int(entry["kind"])).name.lower(),
        rank=int(entry["rank"]),
        peer=int(entry["peer"]),
        index=int(entry["index"]),
        expected=int(entry["expected"]),
        seen=int(entry["seen"]),
        seconds=int(entry["elapsed_ns"]) * 1e-9,
    )

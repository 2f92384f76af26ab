"""Where every run lies: in the receive buffer of its expert's rank and at home, on all ranks.

A receive buffer holds expert after expert; inside an expert the owners follow in the order
r+1, r+2, ..., r (mod W) of its rank r: remote first, so that a band's own rows are always its last
ones, and rotated, so that not all ranks write to one peer at once. ``aligned`` starts every run at
a multiple of tile_m, ``packed`` leaves no gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..errors import CapacityError, InputError
from .config import MAX_INT32, PlanConfig

__all__ = ["Layout", "check_counts", "lay_out", "number_within"]


@dataclass(frozen=True, eq=False)
class Layout:
    """Row numbers of all runs; "in layout order" means [rank, local expert, rotated owner].

    Attributes:
        send_offset: int32 [W, E], row of run (e, s) in the return buffer of rank s.
        recv_offset: int32 [E, W], row of run (e, s) in the receive buffer of the expert's rank.
        recv_rows: int32 [W], rows that each receive buffer takes, padding included.
        run_rows: int32 [W, E_local, W], rows of the runs in layout order.
        run_first: int32 [W, E_local, W], their first rows in the receive buffer.
        run_home: int32 [W, E_local, W], their first rows in the owner's return buffer.
    """

    send_offset: np.ndarray
    recv_offset: np.ndarray
    recv_rows: np.ndarray
    run_rows: np.ndarray
    run_first: np.ndarray
    run_home: np.ndarray


def check_counts(counts: np.ndarray, config: PlanConfig) -> np.ndarray:
    """Return `counts` as int32 [W, E]; the answer, or the refusal, is the same on all ranks.

    Raises:
        InputError: wrong shape, no integers, or a negative count.
        CapacityError: a rank would receive more than ``max_recv_rows`` rows.
    """
    counts = np.asarray(counts)
    expected = (config.ranks, config.num_experts)
    if counts.shape != expected:
        raise InputError("counts.shape", counts.shape, f"[ranks, num_experts] = {expected}")
    if counts.dtype.kind not in "iu":
        raise InputError("counts.dtype", str(counts.dtype), "an integer type")
    if counts.min() < 0 or counts.max() > MAX_INT32:
        rank, expert = np.argwhere((counts < 0) | (counts > MAX_INT32))[0]
        value = int(counts[rank, expert])
        raise InputError(f"counts[{rank}, {expert}]", value, f"0 to {MAX_INT32}")
    received = counts.sum(axis=0, dtype=np.int64).reshape(config.ranks, -1).sum(axis=1)
    _check_capacity(received, config.max_recv_rows, "receive buffer")
    _check_capacity(counts.sum(axis=1, dtype=np.int64), MAX_INT32, "return buffer")
    return np.array(counts, np.int32, order="C")


def _check_capacity(rows: np.ndarray, capacity: int, what: str) -> None:
    if rows.max() > capacity:
        rank = int(np.argmax(rows > capacity))
        raise CapacityError(rank, what, int(rows[rank]), capacity)


def lay_out(counts: np.ndarray, config: PlanConfig) -> Layout:
    """Return the layout of checked `counts`, int32 [W, E]."""
    in_counts, in_order = _rotation(config.ranks, config.num_experts)
    send_offset = counts.cumsum(axis=1, dtype=np.int32) - counts
    run_rows = counts.take(in_counts)
    room = run_rows
    if config.layout == "aligned":
        room = -(-run_rows // config.tile_m) * config.tile_m
    ends = room.reshape(config.ranks, -1).cumsum(axis=1, dtype=np.int32)
    run_first = ends.reshape(room.shape) - room
    return Layout(
        send_offset=send_offset,
        recv_offset=run_first.take(in_order),
        recv_rows=ends[:, -1].copy(),
        run_rows=run_rows,
        run_first=run_first,
        run_home=send_offset.take(in_counts),
    )


@lru_cache(maxsize=64)
def _rotation(ranks: int, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return flat indices: into [W, E] for each run in layout order, and the other way round.

    The second is [E, W] and indexes [W, E_local, W].
    """
    experts = np.arange(num_experts).reshape(ranks, -1, 1)  # [W, E_local, 1]
    owners = np.add.outer(np.arange(ranks), np.arange(1, ranks + 1)) % ranks  # [W, W]
    in_counts = owners[:, None, :] * num_experts + experts
    in_recv_offset = experts * ranks + owners[:, None, :]
    return in_counts, np.argsort(in_recv_offset, axis=None).reshape(num_experts, ranks)


def number_within(lengths: np.ndarray) -> np.ndarray:
    """Return 0 .. lengths[0]-1, then 0 .. lengths[1]-1, and so on, as int32 [sum(lengths)]."""
    ends = lengths.cumsum(dtype=np.int32)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total, dtype=np.int32) - (ends - lengths).astype(np.int32).repeat(lengths)

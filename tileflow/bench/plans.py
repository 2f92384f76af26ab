"""Summaries of the ranks' plans: what a case computes, sends and to whom."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from ..config import ITEMSIZE
from ..plan import Plan
from ..worlds.base import World
from .report import Printer

__all__ = ["PlanSummary", "gather", "show"]

_MOST_PEERS = 8  # columns that a terminal holds


@dataclass(frozen=True)
class PlanSummary:
    """One rank's plan in numbers; bytes are those of the returned rows."""

    rank: int
    useful_rows: int
    computed_rows: int
    num_bands: int
    num_segments: int
    bytes_to_peer: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> PlanSummary:
        """Summarise a plan."""
        row_bytes = plan.config.num_cols * ITEMSIZE
        return cls(
            rank=plan.rank,
            useful_rows=int(plan.useful_rows),
            computed_rows=int(plan.computed_rows),
            num_bands=int(plan.num_bands),
            num_segments=int(plan.num_segments),
            bytes_to_peer=tuple(int(rows) * row_bytes for rows in plan.rows_to_peer),
        )

    @property
    def remote_bytes(self) -> int:
        """Bytes that this rank sends to others."""
        return sum(self.bytes_to_peer)


def gather(world: World, plan: Plan) -> list[PlanSummary]:
    """Return every rank's summary, equal on all ranks (collective)."""
    answers = world.allgather(pickle.dumps(PlanSummary.of(plan)))
    return [pickle.loads(answer) for answer in answers]


def show(printer: Printer, plans: list[PlanSummary]) -> None:
    """Print a table, a line per rank: rows, bands, segments, KiB to each peer."""
    each = len(plans) <= _MOST_PEERS
    others = [f"to {rank}" for rank in range(1, len(plans))]
    peers = ["KiB to 0", *others] if each else ["KiB to peers"]
    headers = ["rank", "useful", "computed", "ratio", "bands", "segments", *peers]
    printer.table(headers, [_cells(plan, each) for plan in plans])


def _cells(plan: PlanSummary, each_peer: bool) -> list[str]:
    share = plan.useful_rows / plan.computed_rows if plan.computed_rows else 1.0
    rows = [str(plan.rank), str(plan.useful_rows), str(plan.computed_rows), f"{share:.2f}"]
    nbytes = plan.bytes_to_peer if each_peer else (plan.remote_bytes,)
    kib = [f"{count / 1024:.0f}" for count in nbytes]
    return [*rows, str(plan.num_bands), str(plan.num_segments), *kib]

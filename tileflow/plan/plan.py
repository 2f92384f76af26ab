"""The plan of one rank for one forward, a pure function of the counts and the configuration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import InputError
from .config import PlanConfig
from .layout import check_counts, lay_out
from .schedule import make_schedule
from .segments import cut_segments
from .tiles import cut_bands

__all__ = ["Plan", "build_plan"]


@dataclass(frozen=True, eq=False)
class Plan:
    """What one rank computes, in which order, and where its rows go.

    Row numbers are int32; multiply them by row sizes in 64 bits.

    Attributes:
        config: what the plan was made from, beside `counts`.
        rank: whose plan it is; `bands`, `schedule` and `segments` are this rank's.
        counts: int32 [W, E], rows that source rank s has for global expert e.
        send_offset: int32 [W, E], first row of run (e, s) in the return buffer of rank s.
        recv_offset: int32 [E, W], first row of run (e, s) in the receive buffer of e's rank.
        recv_rows: int32 [W], rows of each receive buffer that are taken, padding included.
        bands: BAND_DTYPE [num_bands], in layout order (``plan.tiles``).
        schedule: SCHEDULE_DTYPE [num_bands], the order of bands (``plan.schedule``).
        segments: SEGMENT_DTYPE [num_segments], in the order in which their last tile is issued
            (``plan.segments``).
    """

    config: PlanConfig
    rank: int
    counts: np.ndarray
    send_offset: np.ndarray
    recv_offset: np.ndarray
    recv_rows: np.ndarray
    bands: np.ndarray
    schedule: np.ndarray
    segments: np.ndarray

    @property
    def num_bands(self) -> int:
        """Bands that this rank computes."""
        return len(self.bands)

    @property
    def num_segments(self) -> int:
        """Puts that this rank does."""
        return len(self.segments)

    @property
    def num_tiles(self) -> int:
        """Tiles that this rank computes."""
        return self.num_bands * self.config.tiles_n

    @property
    def useful_rows(self) -> int:
        """Routed rows that this rank receives and computes."""
        return int(self._counts_here.sum(dtype=np.int64))

    @property
    def computed_rows(self) -> int:
        """Rows of all computed tiles, wasted ones included."""
        return self.num_bands * self.config.tile_m

    @property
    def local_rows(self) -> int:
        """Computed rows that belong to this rank."""
        return int(self._counts_here[self.rank].sum(dtype=np.int64))

    @property
    def remote_rows(self) -> int:
        """Computed rows that belong to other ranks."""
        return self.useful_rows - self.local_rows

    @property
    def sent_rows(self) -> int:
        """Rows that this rank sends to experts anywhere, the rows of its return buffer."""
        return int(self.counts[self.rank].sum(dtype=np.int64))

    @property
    def rows_to_peer(self) -> np.ndarray:
        """int64 [W], rows that this rank sends home to each owner; 0 to itself."""
        rows = self._counts_here.sum(axis=1, dtype=np.int64)
        rows[self.rank] = 0
        return rows

    @property
    def dispatch_delta(self) -> np.ndarray:
        """int32 [E]; send row i with expert e is row ``i + delta[e]`` at e's rank."""
        return self.recv_offset[:, self.rank] - self.send_offset[self.rank]

    @property
    def local_range(self) -> tuple[int, int]:
        """First row, and row after the last, of the own return buffer that this rank computes."""
        first = int(self.send_offset[self.rank, self.rank * self.config.experts_per_rank])
        return first, first + self.local_rows

    @property
    def _counts_here(self) -> np.ndarray:
        """[W, E_local], the counts of this rank's experts."""
        local = self.config.experts_per_rank
        return self.counts[:, self.rank * local : (self.rank + 1) * local]


def build_plan(counts: np.ndarray, config: PlanConfig, rank: int) -> Plan:
    """Make the plan of one rank.

    Args:
        counts: int [W, E], rows that source rank s has for global expert e; equal on all ranks.
        config: equal on all ranks.
        rank: whose plan to make.

    Raises:
        InputError: `counts` has a wrong shape, dtype or value, or there is no such rank.
        CapacityError: a rank would receive more rows than ``config.max_recv_rows``; raised on all
            ranks, naming the first such rank.
    """
    if not 0 <= rank < config.ranks:
        raise InputError("rank", rank, f"0 to {config.ranks - 1}")
    counts = check_counts(counts, config)
    layout = lay_out(counts, config)
    bands = cut_bands(layout, config, rank)
    schedule = make_schedule(bands, config)
    segments = cut_segments(layout, bands, schedule, config, rank)
    return Plan(
        config=config,
        rank=rank,
        counts=counts,
        send_offset=layout.send_offset,
        recv_offset=layout.recv_offset,
        recv_rows=layout.recv_rows,
        bands=bands,
        schedule=schedule,
        segments=segments,
    )

"""What a plan depends on beside the counts, equal on all ranks, and the bounds that follow.

The bounds hold for every routing that the capacity admits, so buffers made from them never grow.
Row and tile numbers are int32 everywhere in a plan: a configuration whose rows or tiles could
exceed that is refused here, once, instead of in every plan.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ..config import LAYOUTS, _check_choice, _check_int
from ..errors import ConfigError

__all__ = ["MAX_INT32", "PlanConfig"]

MAX_INT32 = (1 << 31) - 1


@dataclass(frozen=True)
class PlanConfig:
    """Sizes and choices that a plan is made from.

    Attributes:
        ranks: W.
        num_experts: E, a multiple of W; expert e lives on rank ``e // experts_per_rank``.
        num_cols: columns of the last GEMM's output.
        layout: ``"packed"`` or ``"aligned"``.
        tile_m: rows of a tile, the most rows of a band.
        tile_n: columns of a tile.
        mgb: most bands that an interior segment covers.
        group_bands: most bands that are computed column by column together.
        max_recv_rows: routed rows that a rank can receive, padding not counted.
        arrivals_per_tile: how often a finished tile raises its band's counter.

    Raises:
        ConfigError: a value is not allowed, or rows or tiles could exceed int32.
    """

    ranks: int
    num_experts: int
    num_cols: int
    layout: str
    tile_m: int
    tile_n: int
    mgb: int
    group_bands: int
    max_recv_rows: int
    arrivals_per_tile: int = 1

    def __post_init__(self) -> None:
        _check_choice("PlanConfig", "layout", self.layout, LAYOUTS)
        for name in ("ranks", "num_experts", "num_cols", "mgb", "group_bands", "arrivals_per_tile"):
            _check_int("PlanConfig", name, getattr(self, name), 1, 1 << 20)
        for name in ("tile_m", "tile_n"):
            _check_int("PlanConfig", name, getattr(self, name), 1, 1 << 12)
        _check_int("PlanConfig", "max_recv_rows", self.max_recv_rows, 0, MAX_INT32)
        if self.num_experts % self.ranks:
            allowed = f"a multiple of the {self.ranks} ranks"
            raise ConfigError("PlanConfig.num_experts", self.num_experts, allowed)
        if max(self.max_layout_rows, self.max_bands * self.band_target) > MAX_INT32:
            allowed = f"so few that rows and tiles of a rank stay below {MAX_INT32}"
            raise ConfigError("PlanConfig.max_recv_rows", self.max_recv_rows, allowed)

    @property
    def experts_per_rank(self) -> int:
        """E_local."""
        return self.num_experts // self.ranks

    @property
    def tiles_n(self) -> int:
        """Tiles of one band."""
        return -(-self.num_cols // self.tile_n)

    @property
    def band_target(self) -> int:
        """Arrivals that make a band's counter full."""
        return self.tiles_n * self.arrivals_per_tile

    @property
    def max_layout_rows(self) -> int:
        """Rows that a receive buffer must hold, padding included."""
        if self.layout == "packed":
            return self.max_recv_rows
        return self.max_recv_rows + self.experts_per_rank * self.ranks * (self.tile_m - 1)

    @property
    def max_bands(self) -> int:
        """Bands that no plan of a rank exceeds: one may be cut short per expert (aligned: run)."""
        short = self.experts_per_rank * (self.ranks if self.layout == "aligned" else 1)
        bound = (self.max_recv_rows + short * (self.tile_m - 1)) // self.tile_m
        return min(bound, self.max_recv_rows)

    @property
    def max_segments(self) -> int:
        """Segments that no plan of a rank exceeds: each ends at a band's or a remote run's end."""
        if self.ranks == 1:
            return 0
        remote_runs = self.experts_per_rank * (self.ranks - 1)
        return min(self.max_bands + remote_runs, self.max_recv_rows)

    def digest(self) -> bytes:
        """Return 32 bytes that are equal where all fields are, to be compared across ranks."""
        return hashlib.sha256(repr(self).encode()).digest()

"""The order in which bands are computed: what peers wait for first, weights reused from L2.

Experts with more remote bands come first; all bands with remote rows precede the local-only ones.
Consecutive bands of one expert form groups, whose tiles are numbered column by column. The last
groups of both parts shrink, so that their bands do not all finish at the very end.

Tile t belongs to the group of position ``q = t // tiles_n``, since groups are whole bands:
``i = t - group_first * tiles_n``; its band is that at position ``group_first + i % group_size``,
its column ``i // group_size``. So bands finish in the order of their positions.
"""

from __future__ import annotations

import numpy as np

from .config import PlanConfig
from .layout import number_within

__all__ = ["SCHEDULE_DTYPE", "make_schedule"]

SCHEDULE_DTYPE = np.dtype(
    [
        ("band", np.int32),  # index of the band at this position
        ("group_first", np.int32),  # first position of this position's group
        ("group_size", np.int32),  # bands of the group
        ("pad", np.int32),
    ]
)


def make_schedule(bands: np.ndarray, config: PlanConfig) -> np.ndarray:
    """Return the order of `bands` (of one rank, in layout order), SCHEDULE_DTYPE [num_bands]."""
    firsts, sizes = _stripes(bands, config.experts_per_rank)
    in_stripe = number_within(sizes.ravel())
    edges = _group_edges(in_stripe, int(sizes[0].sum()), config.group_bands)
    group_sizes = edges[1:] - edges[:-1]
    schedule = np.zeros(len(bands), SCHEDULE_DTYPE)
    schedule["band"] = firsts.ravel().repeat(sizes.ravel()) + in_stripe
    schedule["group_first"] = edges[:-1].repeat(group_sizes)
    schedule["group_size"] = group_sizes.repeat(group_sizes)
    return schedule


def _stripes(bands: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return first bands and sizes [2, E_local]: remote stripes in order, then local-only ones.

    The remote bands of an expert are its first ones, because own rows come last.
    """
    expert = bands["expert"]
    num_bands = np.bincount(expert, minlength=num_experts)
    num_remote = np.bincount(expert[bands["num_remote"] > 0], minlength=num_experts)
    first = num_bands.cumsum() - num_bands
    order = np.argsort(-num_remote, kind="stable")
    firsts = np.stack((first, first + num_remote))
    sizes = np.stack((num_remote, num_bands - num_remote))
    return firsts[:, order], sizes[:, order]


def _group_edges(in_stripe: np.ndarray, num_remote: int, group_bands: int) -> np.ndarray:
    """Return the first positions of all groups, and the end of the last."""
    is_edge = np.ones(len(in_stripe) + 1, bool)
    np.equal(in_stripe % group_bands, 0, out=is_edge[:-1])
    _taper(is_edge[:num_remote], group_bands)
    _taper(is_edge[num_remote:-1], group_bands)
    return np.flatnonzero(is_edge)


def _taper(is_edge: np.ndarray, group_bands: int) -> None:
    """Halve the last group of a part again and again: 4, 2, 1, 1 instead of 8."""
    distance = 1
    while distance < group_bands and distance <= len(is_edge):
        is_edge[-distance] = True
        distance *= 2

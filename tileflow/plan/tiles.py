"""Bands: the rows that a rank computes, cut so that each has one expert and at most tile_m rows.

A band never crosses an expert; in ``aligned`` it never crosses a run either, so it has one owner.
Its own rows, which no put carries, are always its last ones.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .config import PlanConfig
from .layout import Layout, number_within

__all__ = ["BAND_DTYPE", "cut_bands"]

BAND_DTYPE = np.dtype(
    [
        ("row", np.int32),  # first row in the receive and staging buffers
        ("num_rows", np.int32),  # valid rows
        ("num_remote", np.int32),  # leading rows that have another owner
        ("expert", np.int32),  # local index
        ("local_row", np.int32),  # row of the first own row in the own return buffer, or 0
        ("target", np.int32),  # arrivals that make the band's counter full
        ("pad0", np.int32),
        ("pad1", np.int32),
    ]
)


def cut_bands(layout: Layout, config: PlanConfig, rank: int) -> np.ndarray:
    """Return the bands of `rank`, BAND_DTYPE [num_bands], in layout order."""
    stretches = _stretches(layout, config, rank)
    num_bands = -(-stretches["num_rows"] // config.tile_m)
    bands = stretches.repeat(num_bands)
    skipped = number_within(num_bands) * config.tile_m  # rows before the band
    num_rows = np.minimum(bands["num_rows"] - skipped, config.tile_m)
    remote_left = bands["num_remote"] - skipped  # negative: own rows before the band
    num_remote = np.minimum(np.maximum(remote_left, 0), num_rows)
    local_row = bands["local_row"] - np.minimum(remote_left, 0)
    bands["row"] += skipped
    bands["num_rows"] = num_rows
    bands["num_remote"] = num_remote
    bands["local_row"] = local_row * (num_remote < num_rows)
    return bands


def _stretches(layout: Layout, config: PlanConfig, rank: int) -> np.ndarray:
    """Return the rows that bands may not leave, an expert's or a run's, as if each were a band."""
    rows, first = layout.run_rows[rank], layout.run_first[rank]  # [E_local, W], own run last
    stretches = _blank_stretches(config).copy()
    stretches["local_row"] = layout.run_home[rank, :, -1:]
    if config.layout == "aligned":
        stretches["row"] = first
        stretches["num_rows"] = rows
        stretches["num_remote"][:, :-1] = rows[:, :-1]
    else:
        num_rows = rows.sum(axis=1, dtype=np.int32)
        stretches["row"] = first[:, :1]
        stretches["num_rows"][:, 0] = num_rows
        stretches["num_remote"][:, 0] = num_rows - rows[:, -1]
    return stretches.ravel()


@lru_cache(maxsize=64)
def _blank_stretches(config: PlanConfig) -> np.ndarray:
    per_expert = config.ranks if config.layout == "aligned" else 1
    blank = np.zeros((config.experts_per_rank, per_expert), BAND_DTYPE)
    blank["expert"] = np.arange(config.experts_per_rank)[:, None]
    blank["target"] = config.band_target
    return blank

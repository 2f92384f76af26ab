"""Segments: what single puts carry, in the order in which their rows become ready.

Runs of other owners are cut at band borders. The first and the last segment of a run cover one
band: its ends share bands with other runs, and a short last put ends early. Interior ones cover up
to mgb bands, fewer and longer puts. Own rows have no segments; the GEMM stores them at home.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .config import PlanConfig
from .layout import Layout, number_within

__all__ = ["SEGMENT_DTYPE", "cut_segments"]

SEGMENT_DTYPE = np.dtype(
    [
        ("src_row", np.int32),  # first row in the staging buffer
        ("num_rows", np.int32),
        ("owner", np.int32),  # rank that the rows go to
        ("dst_row", np.int32),  # first row in the owner's return buffer
        ("band_first", np.int32),  # first band that must be full
        ("num_bands", np.int32),  # consecutive bands that must be full
        ("expert", np.int32),  # global index
        ("run", np.int32),  # local expert * W + owner
        ("run_segments", np.int32),  # segments of that run
        ("owner_segments", np.int32),  # segments to that owner
        ("pad0", np.int32),
        ("pad1", np.int32),
    ]
)


def cut_segments(
    layout: Layout, bands: np.ndarray, schedule: np.ndarray, config: PlanConfig, rank: int
) -> np.ndarray:
    """Return the segments of `rank`, SEGMENT_DTYPE [num_segments].

    Args:
        layout: of all ranks.
        bands: BAND_DTYPE [num_bands] of `rank`.
        schedule: SCHEDULE_DTYPE [num_bands], their order.
        config: what `layout`, `bands` and `schedule` were made from.
        rank: the sender.
    """
    runs = _remote_runs(layout, config, rank)
    band_row = bands["row"].copy()
    _set_bands(runs, band_row, config.mgb)
    segments = runs.repeat(runs["run_segments"])
    _cut_at_bands(segments, number_within(runs["run_segments"]), config.mgb)
    _cut_rows(segments, band_row, band_row + bands["num_rows"])
    owners = segments["owner"]
    segments["owner_segments"] = np.bincount(owners, minlength=config.ranks)[owners]
    return segments[_issue_order(segments, schedule)]


def _remote_runs(layout: Layout, config: PlanConfig, rank: int) -> np.ndarray:
    """Return the runs that have rows and another owner, as if each were one segment."""
    runs = _blank_runs(config, rank).copy()
    runs["src_row"] = layout.run_first[rank, :, :-1]
    runs["num_rows"] = layout.run_rows[rank, :, :-1]
    runs["dst_row"] = layout.run_home[rank, :, :-1]
    return runs[runs["num_rows"] > 0]


@lru_cache(maxsize=64)
def _blank_runs(config: PlanConfig, rank: int) -> np.ndarray:
    """Return SEGMENT_DTYPE [E_local, W-1] with what does not depend on counts."""
    experts = np.arange(config.experts_per_rank)[:, None]
    owners = (rank + np.arange(1, config.ranks)) % config.ranks
    blank = np.zeros((config.experts_per_rank, config.ranks - 1), SEGMENT_DTYPE)
    blank["owner"] = owners
    blank["expert"] = experts + rank * config.experts_per_rank
    blank["run"] = experts * config.ranks + owners
    return blank


def _set_bands(runs: np.ndarray, band_row: np.ndarray, mgb: int) -> None:
    """Set the bands that each run touches and the number of its segments."""
    row = runs["src_row"]
    first = band_row.searchsorted(row, "right") - 1
    num_bands = band_row.searchsorted(row + runs["num_rows"], "left") - first
    runs["band_first"] = first
    runs["num_bands"] = num_bands
    interior = np.maximum(num_bands - 2, 0)
    runs["run_segments"] = np.minimum(num_bands, 2) - (-interior // mgb)


def _cut_at_bands(segments: np.ndarray, number: np.ndarray, mgb: int) -> None:
    """Replace a run's bands by those of its segment `number`: 1, mgb, mgb, ..., 1."""
    last = segments["num_bands"] - 1  # of the run
    first = np.minimum(np.maximum((number - 1) * mgb + 1, 0), last)
    stop = np.minimum(number * mgb + 1, last) + (number == segments["run_segments"] - 1)
    segments["band_first"] += first
    segments["num_bands"] = stop - first


def _cut_rows(segments: np.ndarray, band_row: np.ndarray, band_stop: np.ndarray) -> None:
    """Replace a run's rows by those that lie in its segment's bands."""
    first_band = segments["band_first"]
    last_band = first_band + segments["num_bands"] - 1
    run_row = segments["src_row"].copy()
    row = np.maximum(run_row, band_row[first_band])
    stop = np.minimum(run_row + segments["num_rows"], band_stop[last_band])
    segments["src_row"] = row
    segments["num_rows"] = stop - row
    segments["dst_row"] += row - run_row


def _issue_order(segments: np.ndarray, schedule: np.ndarray) -> np.ndarray:
    """Return the order in which the last tiles of segments are issued.

    A segment lies in consecutive remote bands of one expert, which the schedule keeps in order, so
    its last band decides.
    """
    position = np.empty(len(schedule), np.int32)
    position[schedule["band"]] = np.arange(len(schedule), dtype=np.int32)
    last_band = segments["band_first"] + segments["num_bands"] - 1
    return np.argsort(position[last_band], kind="stable")

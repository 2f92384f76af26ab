"""Segments: every remote row is sent once, as soon as its bands can be full."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from test_plan import PROPERTY, cases, config_for, plans
from test_plan_schedule import tiles_in_order

from tileflow.plan import build_plan


def by_run(plan):
    """Return {(expert, owner): its segments by row}."""
    runs = {}
    for segment in np.sort(plan.segments, order="src_row"):
        runs.setdefault((int(segment["expert"]), int(segment["owner"])), []).append(segment)
    return runs


@PROPERTY
@given(cases())
def test_the_segments_of_a_run_cover_it_without_gap_or_overlap(case):
    counts, config = case
    for plan in plans(*case):
        runs, local = by_run(plan), config.experts_per_rank
        for expert in range(plan.rank * local, (plan.rank + 1) * local):
            for owner in range(config.ranks):
                src, dst = plan.recv_offset[expert, owner], plan.send_offset[owner, expert]
                for segment in runs.pop((expert, owner), ()):
                    assert (segment["src_row"], segment["dst_row"]) == (src, dst)
                    assert segment["num_rows"] > 0
                    src, dst = src + segment["num_rows"], dst + segment["num_rows"]
                sent = src - plan.recv_offset[expert, owner]
                assert sent == (counts[owner, expert] if owner != plan.rank else 0)
        assert not runs


@PROPERTY
@given(cases())
def test_destinations_are_disjoint_and_inside_the_owners_remote_rows(case):
    all_plans = plans(*case)
    for owner, home in enumerate(all_plans):
        hits = np.zeros(home.sent_rows, int)
        for plan in all_plans:
            for segment in plan.segments[plan.segments["owner"] == owner]:
                first, last = segment["dst_row"], segment["dst_row"] + segment["num_rows"]
                assert 0 <= first < last <= home.sent_rows
                hits[first:last] += 1
        first, last = home.local_range
        assert (hits[first:last] == 0).all()
        assert (np.delete(hits, np.s_[first:last]) == 1).all()


@PROPERTY
@given(cases())
def test_a_segments_bands_are_exactly_those_that_hold_its_rows(case):
    for plan in plans(*case):
        bands = plan.bands
        for segment in plan.segments:
            first, last = segment["src_row"], segment["src_row"] + segment["num_rows"]
            stop = bands["row"] + bands["num_remote"]  # own rows are never sent
            holds = np.flatnonzero((bands["row"] < last) & (stop > first))
            listed = segment["band_first"] + np.arange(segment["num_bands"])
            assert np.array_equal(holds, listed)


@PROPERTY
@given(cases())
def test_the_ends_of_a_run_cover_one_band_and_its_interior_up_to_mgb(case):
    _, config = case
    for plan in plans(*case):
        for segments in by_run(plan).values():
            sizes = [int(segment["num_bands"]) for segment in segments]
            assert sizes[0] == sizes[-1] == 1
            assert all(size == config.mgb for size in sizes[1:-2])
            assert max(sizes) <= max(1, config.mgb)


@PROPERTY
@given(cases())
def test_segments_stand_in_the_order_in_which_their_last_tile_is_issued(case):
    for plan in plans(*case):
        last_tile = {band: t for t, (band, _) in enumerate(tiles_in_order(plan))}
        issued = [
            max(last_tile[segment["band_first"] + i] for i in range(segment["num_bands"]))
            for segment in plan.segments
        ]
        assert issued == sorted(issued)


@PROPERTY
@given(cases())
def test_segments_know_their_run_and_how_many_belong_to_it_and_to_the_owner(case):
    _, config = case
    for plan in plans(*case):
        per_run = Counter(plan.segments["run"].tolist())
        per_owner = Counter(plan.segments["owner"].tolist())
        for segment in plan.segments:
            local = segment["expert"] - plan.rank * config.experts_per_rank
            assert 0 <= local < config.experts_per_rank
            assert segment["run"] == local * config.ranks + segment["owner"]
            assert segment["run_segments"] == per_run[segment["run"]]
            assert segment["owner_segments"] == per_owner[segment["owner"]]


@pytest.mark.parametrize(
    ("bands", "mgb", "sizes"),
    [
        (1, 2, [1]),
        (2, 2, [1, 1]),
        (3, 2, [1, 1, 1]),
        (7, 2, [1, 2, 2, 1, 1]),
        (7, 64, [1, 5, 1]),
        (4, 1, [1, 1, 1, 1]),
    ],
)
def test_a_run_is_cut_into_one_band_then_mgb_bands_then_one(bands, mgb, sizes):
    counts = np.array([[0, 0], [8 * bands, 0]])
    plan = build_plan(counts, config_for(counts, mgb=mgb), 0)
    assert plan.segments["num_bands"].tolist() == sizes
    assert plan.segments["num_rows"].tolist() == [8 * size for size in sizes]


def test_a_world_of_one_rank_sends_nothing():
    counts = np.array([[30, 0, 5]])
    assert build_plan(counts, config_for(counts), 0).num_segments == 0

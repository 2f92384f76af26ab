"""Bands: what a rank computes is covered once, and own rows know their way home."""

import numpy as np
import pytest
from hypothesis import given
from test_plan import LAYOUTS, PROPERTY, cases, config_for, plans

from tileflow.plan import build_plan


def rows_of(records, first="row"):
    """Return the rows of all records, one after the other."""
    return np.concatenate(
        [np.arange(r[first], r[first] + r["num_rows"]) for r in records] or [np.zeros(0, int)]
    )


def owners_by_row(plan):
    """Return (expert, owner) of every row of the receive buffer, -1 where it is padding."""
    local, rank = plan.config.experts_per_rank, plan.rank
    found = np.full((plan.recv_rows[rank], 2), -1)
    for expert in range(local):
        for owner in range(plan.config.ranks):
            first = plan.recv_offset[rank * local + expert, owner]
            rows = plan.counts[owner, rank * local + expert]
            found[first : first + rows] = expert, owner
    return found


@PROPERTY
@given(cases())
def test_bands_cover_every_received_row_once_and_no_padding(case):
    for plan in plans(*case):
        valid = np.flatnonzero(owners_by_row(plan)[:, 0] >= 0)
        assert np.array_equal(rows_of(plan.bands), valid)


@PROPERTY
@given(cases())
def test_a_band_has_one_expert_and_its_own_rows_last(case):
    for plan in plans(*case):
        table = owners_by_row(plan)
        for band in plan.bands:
            expert, owner = table[band["row"] : band["row"] + band["num_rows"]].T
            assert (expert == band["expert"]).all()
            is_own = np.arange(band["num_rows"]) >= band["num_remote"]
            assert np.array_equal(owner == plan.rank, is_own)


@PROPERTY
@given(cases())
def test_bands_are_full_except_at_the_end_of_an_expert_or_aligned_run(case):
    _, config = case
    for plan in plans(*case):
        key = owners_by_row(plan)
        for band in plan.bands:
            assert 0 < band["num_rows"] <= config.tile_m
            stop = band["row"] + band["num_rows"]
            if band["num_rows"] < config.tile_m and stop < len(key):
                columns = 1 if config.layout == "packed" else 2
                assert (key[stop, :columns] != key[stop - 1, :columns]).any()


@PROPERTY
@given(cases(layouts=("aligned",)))
def test_aligned_bands_have_one_owner_and_start_at_a_multiple_of_the_tile(case):
    _, config = case
    for plan in plans(*case):
        assert (plan.bands["row"] % config.tile_m == 0).all()
        table = owners_by_row(plan)
        for band in plan.bands:
            rows = table[band["row"] : band["row"] + band["num_rows"]]
            assert len(np.unique(rows[:, 1])) == 1


@PROPERTY
@given(cases())
def test_own_rows_fill_the_local_range_of_the_return_buffer_in_order(case):
    for plan in plans(*case):
        home = [
            np.arange(band["local_row"], band["local_row"] + band["num_rows"] - band["num_remote"])
            for band in plan.bands
        ]
        first, last = plan.local_range
        assert np.array_equal(np.concatenate([*home, np.zeros(0, int)]), np.arange(first, last))


@PROPERTY
@given(cases())
def test_bands_without_own_rows_have_local_row_zero(case):
    for plan in plans(*case):
        bands = plan.bands
        assert (bands["local_row"][bands["num_remote"] == bands["num_rows"]] == 0).all()


@PROPERTY
@given(cases())
def test_every_tile_of_a_band_counts_towards_its_target(case):
    _, config = case
    for plan in plans(*case):
        assert (plan.bands["target"] == config.tiles_n * config.arrivals_per_tile).all()


def test_the_target_counts_each_arrival_of_a_tile():
    counts = np.full((2, 2), 9)
    plan = build_plan(counts, config_for(counts, num_cols=40, tile_n=16, arrivals_per_tile=2), 0)
    assert set(plan.bands["target"].tolist()) == {6}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("empty", [[0], [3], [7], [0, 3, 7], range(8)])
def test_experts_without_rows_have_no_band(layout, empty):
    counts = np.full((2, 8), 11)
    counts[:, list(empty)] = 0
    config = config_for(counts, layout=layout)
    for plan in plans(counts, config):
        experts = np.unique(plan.bands["expert"]) + plan.rank * config.experts_per_rank
        lived = set(range(8)) - set(empty)
        assert set(experts.tolist()) == {e for e in lived if e // 4 == plan.rank}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("idle", [[0], [1, 2], [0, 1, 2]])
def test_ranks_without_tokens_still_compute_for_the_others(layout, idle):
    counts = np.full((3, 6), 5)
    counts[idle] = 0
    for plan in plans(counts, config_for(counts, layout=layout)):
        assert plan.useful_rows == 10 * (3 - len(idle))
        assert plan.sent_rows == (0 if plan.rank in idle else 30)

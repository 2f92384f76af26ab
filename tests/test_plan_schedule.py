"""Schedule: the arithmetic of tile numbers reaches every tile once, remote bands first."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from test_plan import PROPERTY, cases, config_for, plans

from tileflow.plan import build_plan


def tiles_in_order(plan):
    """Return (band, n_tile) of tile numbers 0, 1, ..., by the arithmetic of the kernels."""
    tiles_n, order = plan.config.tiles_n, plan.schedule
    tiles = []
    for t in range(plan.num_tiles):
        group = order[t // tiles_n]
        i = t - group["group_first"] * tiles_n
        band = order[group["group_first"] + i % group["group_size"]]["band"]
        tiles.append((int(band), int(i // group["group_size"])))
    return tiles


def group_sizes(plan):
    """Return the sizes of all groups in order."""
    order = plan.schedule
    is_first = order["group_first"] == np.arange(len(order))
    return order["group_size"][is_first].tolist()


@PROPERTY
@given(cases())
def test_tile_numbers_reach_every_tile_of_every_band_once(case):
    _, config = case
    for plan in plans(*case):
        every = {(b, n) for b in range(plan.num_bands) for n in range(config.tiles_n)}
        assert Counter(tiles_in_order(plan)) == Counter(every)


@PROPERTY
@given(cases())
def test_bands_finish_in_the_order_of_their_positions(case):
    for plan in plans(*case):
        last_tile = {band: t for t, (band, _) in enumerate(tiles_in_order(plan))}
        finished = [last_tile[band] for band in plan.schedule["band"].tolist()]
        assert finished == sorted(finished)


@PROPERTY
@given(cases())
def test_bands_with_remote_rows_come_before_local_only_ones(case):
    for plan in plans(*case):
        is_local_only = plan.bands["num_remote"][plan.schedule["band"]] == 0
        assert (np.diff(is_local_only.astype(int)) >= 0).all()


@PROPERTY
@given(cases())
def test_groups_are_consecutive_bands_of_one_expert_within_the_limit(case):
    _, config = case
    for plan in plans(*case):
        first = 0
        for size in group_sizes(plan):
            members = plan.schedule[first : first + size]
            assert 1 <= size <= config.group_bands
            assert (members["group_first"] == first).all() and (members["group_size"] == size).all()
            assert len(set(plan.bands["expert"][members["band"]].tolist())) == 1
            assert (np.diff(members["band"]) == 1).all()
            first += size
        assert first == plan.num_bands


@PROPERTY
@given(cases())
def test_experts_with_more_remote_bands_come_first(case):
    for plan in plans(*case):
        is_remote = plan.bands["num_remote"] > 0
        order = plan.schedule["band"][is_remote[plan.schedule["band"]]]
        experts = list(dict.fromkeys(plan.bands["expert"][order].tolist()))
        remote = Counter(plan.bands["expert"][is_remote].tolist())
        assert experts == sorted(experts, key=lambda e: (-remote[e], e))


@pytest.mark.parametrize("layout", ["packed", "aligned"])
def test_the_last_groups_of_both_parts_shrink(layout):
    counts = np.array([[160], [160]]).repeat(2, axis=1)  # 20 remote and 20 local-only bands each
    plan = build_plan(counts, config_for(counts, group_bands=8, layout=layout), 0)
    assert group_sizes(plan) == [8, 8, 2, 1, 1, 8, 8, 2, 1, 1]


def test_a_group_of_one_band_needs_no_shrinking():
    counts = np.full((2, 2), 40)
    plan = build_plan(counts, config_for(counts, group_bands=1), 1)
    assert group_sizes(plan) == [1] * plan.num_bands

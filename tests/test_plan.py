"""Plans: offsets, agreement between ranks, refusals; and the cases that all plan tests draw."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tileflow import CapacityError, ConfigError, InputError
from tileflow.plan import PlanConfig, build_plan

LAYOUTS = ("packed", "aligned")
RANKS = (1, 2, 3, 5, 6, 8)
PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)


def received(counts):
    """Return the routed rows that each rank receives, [W]."""
    return counts.sum(axis=0).reshape(len(counts), -1).sum(axis=1)


def config_for(counts, **changes):
    """Return a configuration whose capacity is just enough for `counts`."""
    ranks, num_experts = counts.shape
    settings = {
        "layout": "packed",
        "num_cols": 40,
        "tile_m": 8,
        "tile_n": 16,
        "mgb": 2,
        "group_bands": 4,
        "max_recv_rows": int(received(counts).max()),
    }
    return PlanConfig(ranks, num_experts, **(settings | changes))


def plans(counts, config):
    """Return the plans of all ranks."""
    return [build_plan(counts, config, rank) for rank in range(config.ranks)]


@st.composite
def cases(draw, layouts=LAYOUTS, ranks=RANKS):
    """Draw (counts, config): runs of none to several bands, some of them whole ones, many empty."""
    tile_m, num_ranks = draw(st.sampled_from((1, 4, 8))), draw(st.sampled_from(ranks))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    size = (num_ranks, num_ranks * draw(st.integers(1, 5)))
    counts = rng.integers(0, draw(st.integers(1, 9)) * tile_m, size)
    counts[rng.random(size) < 0.3] //= tile_m
    counts[rng.random(size) < 0.3] *= tile_m
    counts[rng.random(size) < draw(st.sampled_from((0.0, 0.3, 0.9)))] = 0
    config = config_for(
        counts,
        tile_m=tile_m,
        layout=draw(st.sampled_from(layouts)),
        mgb=draw(st.integers(1, 4)),
        group_bands=draw(st.integers(1, 9)),
        num_cols=draw(st.integers(1, 5)) * 16,
    )
    return counts, config


@PROPERTY
@given(cases())
def test_all_ranks_derive_the_same_offsets(case):
    counts, config = case
    first, *others = plans(counts, config)
    for plan in others:
        for name in ("counts", "send_offset", "recv_offset", "recv_rows"):
            assert np.array_equal(getattr(plan, name), getattr(first, name))


@PROPERTY
@given(cases())
def test_own_rows_are_sorted_by_expert_without_gaps(case):
    counts, config = case
    plan = build_plan(counts, config, 0)
    assert np.array_equal(plan.send_offset, np.cumsum(counts, axis=1) - counts)


@PROPERTY
@given(cases())
def test_runs_follow_each_other_by_expert_and_rotated_owner_with_the_own_run_last(case):
    counts, config = case
    plan, local = build_plan(counts, config, 0), config.experts_per_rank
    for rank in range(config.ranks):
        row = 0
        for expert in range(rank * local, (rank + 1) * local):
            for owner in [(rank + 1 + i) % config.ranks for i in range(config.ranks)]:
                assert plan.recv_offset[expert, owner] == row
                row += counts[owner, expert]
                if config.layout == "aligned":
                    row = -(-row // config.tile_m) * config.tile_m
        assert plan.recv_rows[rank] == row


@PROPERTY
@given(cases())
def test_a_sender_and_its_owner_agree_on_where_a_run_lies(case):
    counts, config = case
    all_plans = plans(counts, config)
    experts = np.arange(config.num_experts)
    for source, plan in enumerate(all_plans):
        for rank, other in enumerate(all_plans):
            here = experts // config.experts_per_rank == rank
            first = plan.send_offset[source] + plan.dispatch_delta
            assert np.array_equal(first[here], other.recv_offset[here, source])


@PROPERTY
@given(cases())
def test_row_totals_agree_with_the_counts(case):
    counts, config = case
    all_plans = plans(counts, config)
    owned = counts.reshape(config.ranks, config.ranks, -1).sum(axis=2)  # [source, expert rank]
    for rank, plan in enumerate(all_plans):
        assert plan.sent_rows == counts[rank].sum()
        assert plan.useful_rows == received(counts)[rank] == plan.bands["num_rows"].sum()
        assert plan.local_rows == owned[rank, rank]
        assert plan.remote_rows == plan.useful_rows - plan.local_rows == plan.rows_to_peer.sum()
        assert np.array_equal(np.delete(plan.rows_to_peer, rank), np.delete(owned[:, rank], rank))
        assert plan.computed_rows == plan.num_bands * config.tile_m >= plan.useful_rows
        assert plan.local_range[1] - plan.local_range[0] == plan.local_rows


@PROPERTY
@given(cases())
def test_no_plan_exceeds_the_bounds_of_its_configuration(case):
    counts, config = case
    for plan in plans(counts, config):
        assert plan.recv_rows.max() <= config.max_layout_rows
        assert plan.num_bands <= config.max_bands
        assert plan.num_segments <= config.max_segments


@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_are_flat_int32_of_the_agreed_sizes(layout):
    counts = np.full((2, 4), 20)
    plan = build_plan(counts, config_for(counts, layout=layout), 1)
    for records, nbytes in ((plan.bands, 32), (plan.schedule, 16), (plan.segments, 48)):
        assert records.dtype.itemsize == nbytes and records.flags.c_contiguous
        assert {records.dtype[name] for name in records.dtype.names} == {np.dtype(np.int32)}
    for name in ("counts", "send_offset", "recv_offset", "recv_rows", "dispatch_delta"):
        assert getattr(plan, name).dtype == np.int32
    assert plan.rows_to_peer.dtype == np.int64


def test_a_plan_keeps_its_own_counts():
    counts = np.ones((1, 2), np.int32)
    plan = build_plan(counts, config_for(counts), 0)
    counts[:] = 9
    assert plan.counts.tolist() == [[1, 1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_too_many_rows_are_refused_alike_on_all_ranks(layout):
    counts = np.array([[0, 1, 5, 6], [0, 0, 5, 4]])
    config = config_for(counts, layout=layout, max_recv_rows=19)
    for rank in range(2):
        with pytest.raises(CapacityError) as refused:
            build_plan(counts, config, rank)
        error = refused.value
        assert (error.rank, error.rows, error.capacity) == (1, 20, 19)
        assert "rank 1" in str(error) and "20" in str(error) and "19" in str(error)


def test_rows_at_the_capacity_are_accepted():
    counts = np.array([[0, 1, 5, 6], [0, 0, 5, 4]])
    assert build_plan(counts, config_for(counts, max_recv_rows=20), 0).recv_rows.tolist() == [1, 20]


@pytest.mark.parametrize(
    ("counts", "field"),
    [
        (np.zeros((2, 5), np.int32), "counts.shape"),
        (np.zeros(8, np.int32), "counts.shape"),
        (np.zeros((2, 4), np.float32), "counts.dtype"),
        (np.array([[0, 0, 0, 0], [0, 0, -3, 0]]), "counts[1, 2]"),
        (np.array([[0, 1 << 31, 0, 0], [0, 0, 0, 0]]), "counts[0, 1]"),
    ],
)
def test_counts_that_are_none_are_refused_by_name(counts, field):
    config = config_for(np.zeros((2, 4), np.int32))
    with pytest.raises(InputError) as refused:
        build_plan(counts, config, 0)
    assert refused.value.field == field


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused(rank):
    counts = np.zeros((2, 2), np.int32)
    with pytest.raises(InputError, match="rank"):
        build_plan(counts, config_for(counts), rank)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 5},
        {"ranks": 0},
        {"layout": "other"},
        {"tile_m": 0},
        {"mgb": 0},
        {"max_recv_rows": -1},
        {"max_recv_rows": 1 << 31},
        {"layout": "aligned", "max_recv_rows": (1 << 31) - 1},
        {"num_cols": 1 << 20, "tile_n": 8, "tile_m": 8, "max_recv_rows": 1 << 20},
    ],
)
def test_configurations_that_cannot_work_are_refused(changes):
    with pytest.raises(ConfigError):
        replace(config_for(np.zeros((2, 4), np.int32)), **changes)


def test_digests_differ_exactly_where_a_field_does():
    config = config_for(np.zeros((2, 4), np.int32))
    assert config.digest() == replace(config).digest()
    assert config.digest() != replace(config, mgb=config.mgb + 1).digest()

"""Routing: the sort of pairs by expert, and what every router mode promises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tileflow import ConfigError, InputError
from tileflow.routing import MODES, make_counts, make_routing, place_rows

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)
SKEWS = {"moderate_skew": 1.75, "stress_skew": 4.0}


def route(mode, *, tokens=512, experts=32, top_k=4, ranks=4, seed=0):
    """Return (topk_ids, topk_weights) of all ranks."""
    shared = {"num_experts": experts, "top_k": top_k, "ranks": ranks, "seed": seed}
    return [make_routing(mode, tokens=tokens, rank=rank, **shared) for rank in range(ranks)]


def rows_by_source(mode, *, experts=32, **sizes):
    """Return rows of each (source, expert), [W, E]."""
    return np.stack(
        [place_rows(ids, experts)[0] for ids, _ in route(mode, experts=experts, **sizes)]
    )


@PROPERTY
@given(st.integers(0, 1 << 32), st.sampled_from((1, 2, 7, 254, 255, 256, 257, 1024, 65536)))
def test_pairs_are_sorted_by_expert_in_token_order_and_masked_ones_left_out(seed, experts):
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, experts, (rng.integers(0, 30), rng.integers(1, 17)))
    counts, send_row = place_rows(ids, experts)
    flat = ids.ravel()
    valid = np.flatnonzero(flat >= 0)
    expected = np.full(flat.size, -1)
    expected[valid[np.lexsort((valid, flat[valid]))]] = np.arange(valid.size)
    assert np.array_equal(send_row, expected.reshape(ids.shape))
    assert np.array_equal(counts, np.bincount(flat[valid], minlength=experts))
    assert counts.dtype == send_row.dtype == np.int32


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_largest_expert_is_not_taken_for_a_masked_slot(dtype):
    counts, send_row = place_rows(np.array([[254, -1], [0, 254]], dtype), 255)
    assert (counts[0], counts[254], counts.sum()) == (1, 2, 3)
    assert send_row.tolist() == [[1, -1], [0, 2]]


@pytest.mark.parametrize("value", [-2, 8, 1 << 40])
def test_an_id_outside_the_experts_is_refused_with_its_value_and_position(value):
    ids = np.zeros((3, 2), np.int64)
    ids[2, 1] = value
    with pytest.raises(InputError) as refused:
        place_rows(ids, 8)
    assert (refused.value.field, refused.value.value) == ("topk_ids[2, 1]", value)


def test_no_tokens_give_no_rows():
    counts, send_row = place_rows(np.zeros((0, 4), np.int32), 8)
    assert not counts.any() and send_row.shape == (0, 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("top_k", [1, 2, 4, 8, 16])
def test_routings_are_dropless_seeded_and_weighted_to_one(mode, top_k):
    tokens = [100, 0, 33, 1]
    for rank, (ids, weights) in enumerate(route(mode, tokens=tokens, top_k=top_k, seed=3)):
        assert ids.shape == weights.shape == (tokens[rank], top_k)
        assert (ids.dtype, weights.dtype) == (np.int32, np.float32)
        assert ((ids >= 0) & (ids < 32)).all() and (weights > 0).all()
        assert np.allclose(weights.sum(axis=1), 1.0, atol=1e-6)
        again = route(mode, tokens=tokens, top_k=top_k, seed=3)[rank]
        assert np.array_equal(again[0], ids) and np.array_equal(again[1], weights)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("experts", "top_k"), [(32, 1), (32, 8), (32, 16), (4, 2), (1024, 16)])
def test_the_experts_of_a_token_are_distinct(mode, experts, top_k):
    for ids, _ in route(mode, experts=experts, top_k=top_k, tokens=200):
        assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 16), (2, 3), (4, 4), (8, 6)])
def test_few_experts_are_repeated_rather_than_a_mode_refused(mode, experts, top_k):
    ids, _ = route(mode, experts=experts, top_k=top_k, ranks=1)[0]
    assert ids.min() >= 0 and ids.max() < experts


@pytest.mark.parametrize("mode", [m for m in MODES if m != "first_k"])
def test_another_seed_gives_another_routing(mode):
    assert not np.array_equal(route(mode, seed=0)[0][0], route(mode, seed=1)[0][0])


@pytest.mark.parametrize("tokens", [512, 513, [512, 1, 0, 77]])
def test_balanced_experts_are_equal_to_one_row_over_all_ranks(tokens):
    rows = rows_by_source("balanced", tokens=tokens, experts=24, top_k=5).sum(axis=0)
    assert rows.max() - rows.min() <= 1


@pytest.mark.parametrize("mode", ["balanced", "moderate_skew", "random_uneven", "power_law"])
def test_every_rank_has_its_share_of_every_expert(mode):
    rows = rows_by_source(mode, tokens=500)
    assert (np.ptp(rows, axis=0) <= 1).all()


def test_ranks_with_unequal_tokens_have_the_same_proportions():
    tokens = np.array([900, 60, 0, 240])
    rows = rows_by_source("stress_skew", tokens=tokens.tolist())
    expected = np.outer(tokens / tokens.sum(), rows.sum(axis=0))
    assert np.abs(rows - expected).max() < 2


def test_every_slot_sees_every_expert():
    ids, _ = route("first_k", top_k=4)[0]
    assert [len(np.unique(ids[:, slot])) for slot in range(4)] == [4, 4, 4, 4]


@pytest.mark.parametrize("mode", SKEWS)
@pytest.mark.parametrize("tokens", [512, [1000, 0, 300, 12]])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (16, 2), (32, 8), (128, 8), (1024, 16)])
def test_skewed_experts_have_the_promised_ratio(mode, tokens, experts, top_k):
    rows = rows_by_source(mode, tokens=tokens, experts=experts, top_k=top_k).sum(axis=0)
    assert rows.max() / rows.mean() == pytest.approx(SKEWS[mode], rel=0.05)


def test_a_ratio_that_distinct_experts_forbid_becomes_the_largest_possible():
    rows = rows_by_source("stress_skew", experts=8, top_k=4).sum(axis=0)
    assert rows.max() / rows.mean() == pytest.approx(2.0)  # an expert in every token


@pytest.mark.parametrize("seed", range(20))
def test_random_uneven_experts_stay_in_their_interval(seed):
    rows = rows_by_source("random_uneven", experts=4, top_k=1, seed=seed).sum(axis=0)
    assert rows.sum() == 4 * 512
    assert np.floor(0.2 * 512) <= rows.min() < rows.max() <= np.ceil(1.8 * 512)


def test_first_k_uses_the_first_experts_alone():
    rows = rows_by_source("first_k", top_k=4)
    assert (rows[:, :4] == 512).all() and not rows[:, 4:].any()


def test_half_empty_leaves_half_of_the_experts_without_rows():
    rows = rows_by_source("half_empty").sum(axis=0)
    assert np.count_nonzero(rows == 0) == 16 and np.ptp(rows[rows > 0]) <= 1


def test_one_owner_gets_ninety_percent_of_one_ranks_rows():
    rows = rows_by_source("one_owner_90").reshape(4, 4, -1).sum(axis=2)  # [source, rank]
    assert rows[0, 1] / rows[0].sum() == pytest.approx(0.9, abs=0.005)
    assert (np.ptp(rows[1:], axis=1) <= 8).all()


def test_power_law_rows_fall_with_the_rank_of_popularity():
    rows = np.sort(rows_by_source("power_law", experts=64, top_k=1).sum(axis=0))[::-1]
    assert rows[0] / rows[9] == pytest.approx(10, rel=0.05)


def test_uniform_tokens_choose_every_expert_alike():
    rows = rows_by_source("uniform", tokens=4096, experts=16, top_k=6).sum(axis=0)
    assert rows.mean() == 6144 and np.abs(rows / 6144 - 1).max() < 0.05


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("ranks", "experts"), [(1, 1), (2, 3), (4, 16), (5, 1)])
@pytest.mark.parametrize("rows", [0, 1, 777])
def test_generated_counts_give_every_rank_exactly_its_rows(mode, ranks, experts, rows):
    counts = make_counts(mode, rows=rows, experts_per_rank=experts, ranks=ranks, seed=2)
    assert counts.dtype == np.int32 and counts.min() >= 0
    received = counts.reshape(ranks, ranks, experts).sum(axis=(0, 2))
    assert (received == rows).all()


@pytest.mark.parametrize("mode", SKEWS)
def test_generated_counts_are_skewed_on_every_rank(mode):
    counts = make_counts(mode, rows=16384, experts_per_rank=16, ranks=4, seed=0)
    rows = counts.sum(axis=0).reshape(4, 16)
    assert rows.max(axis=1) / 1024 == pytest.approx(np.full(4, SKEWS[mode]), rel=0.05)


def test_generated_balanced_counts_are_equal_in_every_cell():
    counts = make_counts("balanced", rows=1001, experts_per_rank=7, ranks=3, seed=0)
    assert np.ptp(counts.sum(axis=0)) <= 1 and np.ptp(counts) <= 1


def test_generated_counts_return_ninety_percent_of_one_ranks_rows_to_one_owner():
    counts = make_counts("one_owner_90", rows=1000, experts_per_rank=8, ranks=4, seed=0)
    assert counts[:, :8].sum(axis=1).tolist() == pytest.approx([33, 900, 33, 33], abs=1)


@pytest.mark.parametrize(
    "changes", [{"mode": "other"}, {"tokens": -1}, {"tokens": [1, 2]}, {"experts": 30}]
)
def test_impossible_arguments_are_refused(changes):
    with pytest.raises(ConfigError):
        route(**({"mode": "balanced"} | changes))

"""MoELayer on the CPU loopback: any routing, shape and world against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from layer_problems import RNG, assert_right, forward, poison, problem, run_ranks

from tileflow import (
    CapacityError,
    Config,
)
from tileflow.faults import Faults
from tileflow.routing import MODES

LAYOUTS = pytest.mark.parametrize("layout", ["packed", "aligned"])

# -- routing and counts ----------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("mode", MODES)
def test_every_router_mode_agrees_with_the_reference_and_overlap_equals_serial(mode, layout):
    case = problem(mode=mode, tokens=40, e_local=4, top_k=3)
    config = Config(layout=layout, tile_m=64)
    overlapped = forward(case, config)
    assert_right(case, overlapped)
    for first, second in zip(overlapped, forward(case, config, "serial"), strict=True):
        assert first.tobytes() == second.tobytes()


@LAYOUTS
def test_tokens_that_differ_per_rank_and_change_every_forward_are_right(layout):
    sizes = [(3, 130, 0, 41), (64, 1, 130, 7), (0, 0, 130, 129), (130, 130, 130, 130)]
    cases = [problem(tokens=s, seed=i) for i, s in enumerate(sizes)]
    shape = replace(cases[0].shape, max_tokens=130)
    weights = cases[0].gate_up, cases[0].down
    for case in cases:
        case.shape, (case.gate_up, case.down) = shape, weights

    def main(world: Any) -> list[np.ndarray]:
        layer = cases[0].layer(world, Config(layout=layout))
        return [layer(*case.arguments(world.rank)) for case in cases]

    by_rank = run_ranks(4, main)
    for number, case in enumerate(cases):
        assert_right(case, [results[number] for results in by_rank])


@pytest.mark.parametrize("tokens", [(0, 9, 9), (0, 0, 9), (9, 0, 0), (0, 0, 0)])
def test_ranks_without_tokens_get_an_empty_result_and_hold_nobody_up(tokens):
    case = problem(ranks=3, tokens=tokens)
    case.shape = replace(case.shape, max_tokens=16)
    results = forward(case)
    assert [y.shape for y in results] == [(t, 64) for t in tokens]
    assert_right(case, results)


def test_a_layer_for_no_tokens_at_all_works():
    case = problem(ranks=2, tokens=0)
    assert case.shape.max_tokens == 0
    assert [y.shape for y in forward(case)] == [(0, 64), (0, 64)]


@LAYOUTS
@pytest.mark.parametrize("empty", [(0,), (3,), (7,), (0, 1), (6, 7), (1, 3, 5, 7), range(8)])
def test_experts_without_rows_leave_no_trace_of_what_lay_in_the_buffers(empty, layout):
    case = problem(tokens=30)
    for ids in case.ids:
        left = [e for e in range(8) if e not in empty] or [-1]
        ids[np.isin(ids, list(empty))] = left[0]

    def main(world: Any) -> np.ndarray:
        layer = case.layer(world, Config(layout=layout))
        poison(world)
        return layer(*case.arguments(world.rank))

    results = run_ranks(4, main)
    assert all(np.isfinite(y).all() for y in results)
    assert_right(case, results)


@LAYOUTS
def test_masked_slots_add_nothing_and_masked_tokens_are_exactly_zero(layout):
    case = problem(tokens=33, top_k=4, e_local=3)
    for rank, ids in enumerate(case.ids):
        ids[RNG(rank).uniform(size=ids.shape) < 0.4] = -1
        ids[5] = ids[20] = -1
        case.shares[rank][5] = np.nan  # a masked slot's weight is never looked at
    results = forward(case, Config(layout=layout))
    for rank, y in enumerate(results):
        assert not y[[5, 20]].any()
        case.shares[rank][5] = 0
    assert_right(case, results)


def test_all_tokens_masked_on_all_ranks_give_zeros():
    case = problem(ranks=2)
    for ids in case.ids:
        ids[:] = -1
    assert not any(y.any() for y in forward(case))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_an_expert_named_twice_by_a_token_counts_twice(dtype):
    case = problem(top_k=4)
    for ids in case.ids:
        ids[:, 1] = ids[:, 0]
        ids[::2] = ids[::2, :1]
    case.ids = [ids.astype(dtype) for ids in case.ids]
    assert_right(case, forward(case))


@pytest.mark.parametrize("top_k", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("e_local", [1, 2, 16, 64, 256])
def test_every_top_k_and_number_of_experts_agrees_with_the_reference(top_k, e_local):
    case = problem(ranks=2, tokens=12, hidden=16, ffn=16, e_local=e_local, top_k=top_k)
    assert_right(case, forward(case))


def test_1024_experts_in_all_agree_with_the_reference():
    case = problem(ranks=4, tokens=64, hidden=16, ffn=8, e_local=256, top_k=8)
    assert_right(case, forward(case))


def test_more_rows_than_the_capacity_are_refused_on_all_ranks_before_anything_runs():
    case = problem(ranks=3, tokens=20, mode="first_k", e_local=2)

    def main(world: Any) -> CapacityError:
        layer = case.layer(world, Config(max_recv_rows=60))
        epoch = world.epoch
        with pytest.raises(CapacityError) as refused:
            layer(*case.arguments(world.rank))
        assert world.epoch == epoch and not world.broken
        masked = np.full_like(case.ids[world.rank], -1)
        assert not layer(case.x[world.rank], masked, case.shares[world.rank]).any()
        return refused.value

    for error in run_ranks(3, main):
        assert (error.rank, error.rows, error.capacity) == (0, 120, 60)
        assert "rank 0" in str(error) and "120" in str(error) and "60" in str(error)


# -- shapes and worlds -----------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("hidden", [512, 768, 2048, 2880, 3072, 5120, 7168])
def test_the_hidden_sizes_of_known_models_are_right(hidden, layout):
    case = problem(ranks=2, tokens=9, hidden=hidden, ffn=40, e_local=1, top_k=2)
    assert_right(case, forward(case, Config(layout=layout)))


@LAYOUTS
@pytest.mark.parametrize(("hidden", "ffn", "out"), [(8, 8, 8), (264, 136, 72), (72, 200, 520)])
def test_sizes_that_no_tile_divides_and_other_widths_out_than_in_are_right(
    hidden, ffn, out, layout
):
    case = problem(tokens=70, hidden=hidden, ffn=ffn, hidden_out=out)
    results = forward(case, Config(layout=layout, tile_m=64, tile_n=128))
    assert results[0].shape == (70, out)
    assert_right(case, results)


@LAYOUTS
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 8])
def test_any_number_of_ranks_works(ranks, layout):
    case = problem(ranks=ranks, tokens=21, e_local=2, top_k=2)
    config = Config(layout=layout, tile_m=64)
    overlapped = forward(case, config)
    assert_right(case, overlapped)
    for first, second in zip(overlapped, forward(case, config, "serial"), strict=True):
        assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize(("tile_m", "tile_n", "mgb"), [(64, 128, 1), (128, 256, 3), (64, 256, 64)])
def test_no_tile_shape_nor_segment_length_changes_more_than_rounding(tile_m, tile_n, mgb):
    case = problem(tokens=300, e_local=1, hidden_out=264)
    config = Config(tile_m=tile_m, tile_n=tile_n, mgb=mgb, group_bands=2)
    assert_right(case, forward(case, config))


def test_bfloat16_is_within_its_own_tolerance():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = problem(dtype=ml_dtypes.bfloat16)
    results = forward(case)
    assert results[0].dtype == ml_dtypes.bfloat16
    assert_right(case, results)


def test_a_rank_does_not_see_in_its_bits_how_many_tokens_others_have():
    case = problem(ranks=3, tokens=50)
    alone = problem(ranks=3, tokens=50)
    for rank in (1, 2):
        alone.x[rank], alone.ids[rank] = alone.x[rank][:3], alone.ids[rank][:3]
        alone.shares[rank] = alone.shares[rank][:3]
    assert forward(case)[0].tobytes() == forward(alone)[0].tobytes()


# -- overlap ---------------------------------------------------------------------------------------


def test_poisoned_buffers_before_every_call_change_nothing():
    case = problem(tokens=90)

    def main(world: Any) -> list[np.ndarray]:
        layer = case.layer(world, Config(tile_m=64))
        results = []
        for _ in range(6):
            poison(world)
            out = np.full((90, 64), np.nan, np.float16)
            results.append(layer(*case.arguments(world.rank), out=out))
        return results

    by_rank = run_ranks(4, main)
    for results in by_rank:
        assert len({y.tobytes() for y in results}) == 1
    assert_right(case, [results[0] for results in by_rank])


def test_sends_in_another_order_and_delayed_tiles_never_satisfy_an_earlier_wait():
    cases = [problem(tokens=80, seed=seed) for seed in range(2)]
    cases[1].gate_up, cases[1].down = cases[0].gate_up, cases[0].down

    def main(world: Any) -> list[list[np.ndarray]]:
        layer = cases[0].layer(world, Config(tile_m=64, mgb=1))
        shuffled = layer.engine.plan
        rng = RNG(world.rank)

        def plan(counts: np.ndarray) -> Any:
            made = shuffled(counts)
            return replace(made, segments=rng.permutation(made.segments))

        layer.engine.plan = plan
        layer.engine.faults = Faults(tile_delay_s=2e-3, put_delay_s=1e-3, seed=world.rank)
        return [[layer(*case.arguments(world.rank)) for case in cases] for _ in range(4)]

    by_rank = run_ranks(4, main)
    for rounds in zip(*by_rank, strict=True):
        for number, case in enumerate(cases):
            assert_right(case, [results[number] for results in rounds])

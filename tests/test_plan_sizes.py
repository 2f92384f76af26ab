"""Plans of real sizes: padding, many experts, many tokens, offsets beyond 32 bits of elements."""

import numpy as np
import pytest
from test_plan import LAYOUTS, config_for, plans, received

from tileflow.plan import build_plan
from tileflow.routing import make_counts

REAL = {"num_cols": 7168, "tile_m": 128, "tile_n": 256, "group_bands": 8}


@pytest.mark.parametrize(
    ("layout", "tile_m", "factor"),
    [("aligned", 128, 2), ("aligned", 256, 4), ("packed", 128, 1), ("packed", 256, 1)],
)
def test_padding_costs_what_the_layout_says(layout, tile_m, factor):
    counts = make_counts("balanced", rows=16384, experts_per_rank=64, ranks=4, seed=0)
    config = config_for(counts, **REAL | {"tile_m": tile_m, "layout": layout})
    for plan in plans(counts, config):
        assert plan.useful_rows == 16384
        assert plan.computed_rows == factor * plan.useful_rows


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ranks", "local"), [(2, 256), (8, 64), (8, 128), (4, 256), (512, 1)])
def test_hundreds_of_experts_are_planned(ranks, local, layout):
    rng = np.random.default_rng(3)
    counts = rng.poisson(3, (ranks, ranks * local)) * rng.integers(0, 2, (ranks, ranks * local))
    config = config_for(counts, **REAL | {"layout": layout})
    plan = build_plan(counts, config, ranks - 1)
    sent = np.bincount(plan.segments["owner"], plan.segments["num_rows"], minlength=ranks)
    assert np.array_equal(sent, plan.rows_to_peer)
    assert plan.bands["num_rows"].sum() == received(counts)[-1]
    assert plan.num_bands <= config.max_bands and plan.num_segments <= config.max_segments


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [65536, 131072])
def test_rows_fit_int32_where_their_elements_need_64_bits(tokens, layout):
    counts = make_counts("balanced", rows=tokens * 8, experts_per_rank=16, ranks=4, seed=0)
    plan = build_plan(counts, config_for(counts, **REAL | {"layout": layout}), 3)
    last = plan.bands[-1]
    end_row = last["row"] + last["num_rows"]
    assert end_row == plan.recv_rows[3] == tokens * 8
    assert int(end_row) * plan.config.num_cols > 1 << 31
    assert plan.local_range[1] == plan.sent_rows == tokens * 8
    sizes = (plan.num_tiles, plan.computed_rows, plan.useful_rows, plan.sent_rows)
    assert all(type(size) is int for size in sizes)


def test_one_expert_may_take_every_row():
    counts = np.zeros((4, 8), np.int32)
    counts[:, 5] = [3000, 0, 1, 4096]
    plan = build_plan(counts, config_for(counts, **REAL), 2)
    assert plan.num_bands == -(-7097 // 128)
    assert plan.segments["num_rows"].sum() == 7096
    assert set(plan.segments["owner"].tolist()) == {0, 3}


def test_token_numbers_may_differ_by_far_between_ranks():
    counts = np.concatenate([np.full((1, 16), 64), np.full((3, 16), 4096)])  # 128 and 8192 tokens
    for plan in plans(counts, config_for(counts, **REAL)):
        assert plan.sent_rows == counts[plan.rank].sum()
        assert plan.useful_rows == 4 * (64 + 3 * 4096)

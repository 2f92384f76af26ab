"""The operator alone, the times of stages, and the example that stands in the documentation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layer_problems import RNG, problem, run_ranks

import tileflow
from tileflow import (
    Config,
    ConfigError,
    InputError,
    MoELayer,
    MoEShape,
    reference,
)
from tileflow.routing import make_counts

LAYOUTS = pytest.mark.parametrize("layout", ["packed", "aligned"])


@LAYOUTS
@pytest.mark.parametrize("mode", ["overlap", "serial"])
@pytest.mark.parametrize("routing", ["balanced", "random_uneven", "one_owner_90", "half_empty"])
def test_the_operator_brings_every_row_home_sorted_by_expert(routing, mode, layout):
    ranks, e_local, ffn, out = 3, 4, 24, 136
    counts = make_counts(routing, rows=150, experts_per_rank=e_local, ranks=ranks, seed=3)
    down = (RNG(0).standard_normal((12, out, ffn)) / 5).astype(np.float16)
    sent = [
        RNG(s).standard_normal((n, ffn)).astype(np.float16) for s, n in enumerate(counts.sum(1))
    ]
    shape = MoEShape(8, ffn, 12, 1, int(counts.sum(1).max()), hidden_out=out)

    def main(world: Any) -> np.ndarray:
        mine = slice(world.rank * e_local, (world.rank + 1) * e_local)
        config = Config(layout=layout, tile_m=64, tile_n=128)
        layer = MoELayer(world, shape, None, down[mine], config=config)
        plan = layer.plan(counts)
        activated = np.full((plan.recv_rows[world.rank], ffn), np.nan, np.float16)  # pads stay
        for expert in range(12)[mine]:
            for source in range(ranks):
                first, n = plan.send_offset[source, expert], counts[source, expert]
                row = plan.recv_offset[expert, source]
                activated[row : row + n] = sent[source][first : first + n]
        return layer.operator(activated, counts, mode=mode)

    for rank, returned in enumerate(run_ranks(ranks, main)):
        experts = np.repeat(np.arange(12), counts[rank])
        want = reference.operator_reference(sent[rank], experts, down)
        assert reference.check_tokens(returned, want.y, want.row_norms, "float16")[0]


def operator_refusal(change: Callable[[Any, dict[str, Any]], None]) -> list[Exception]:
    """Return what each of 2 ranks raises when `change` has changed a good operator call."""
    shape = MoEShape(8, 16, 4, 1, 40)
    counts = np.full((2, 4), 5, np.int32)
    down = np.zeros((2, 8, 16), np.float16)

    def main(world: Any) -> Exception:
        layer = MoELayer(world, shape, None, down)
        arguments = {"activated": np.zeros((20, 16), np.float16), "counts": counts}
        assert layer.operator(**arguments).shape == (20, 8)
        changed = dict(arguments)
        change(world, changed)
        with pytest.raises(tileflow.TileflowError) as refused:
            layer.operator(**changed)
        assert layer.operator(**arguments).shape == (20, 8)
        return refused.value

    return run_ranks(2, main)


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("activated", np.zeros((19, 16), np.float16), "activated.shape"),
        ("activated", np.zeros((20, 8), np.float16), "activated.shape"),
        ("activated", np.zeros((20, 16), np.float32), "activated.dtype"),
        ("counts", np.full((2, 3), 5, np.int32), "counts.shape"),
        ("counts", np.full((2, 4), -1, np.int32), "counts[0, 0]"),
        ("mode", "gemm", "mode"),
    ],
)
def test_a_bad_operator_input_on_one_rank_is_refused_on_all(name, value, field):
    def change(world: Any, arguments: dict[str, Any]) -> None:
        if world.rank == 1:
            arguments[name] = value

    for error in operator_refusal(change):
        assert isinstance(error, InputError) and error.field == field


def test_counts_that_differ_between_ranks_are_refused():
    def change(world: Any, arguments: dict[str, Any]) -> None:
        if world.rank == 1:
            arguments["counts"] = np.array([[4, 6, 5, 5], [5, 5, 5, 5]], np.int32)

    for error in operator_refusal(change):
        assert isinstance(error, ConfigError | InputError) and "counts" in error.field


def test_a_layer_without_a_first_weight_refuses_whole_forwards():
    def main(world: Any) -> None:
        layer = MoELayer(world, MoEShape(8, 16, 4, 1, 40), None, np.zeros((2, 8, 16), np.float16))
        x = np.zeros((3, 8), np.float16)
        ids, shares = np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32)
        with pytest.raises(InputError, match="w_gate_up"):
            layer(x, ids, shares)

    run_ranks(2, main)


def test_timings_name_the_stages_that_ran():
    case = problem(ranks=2)

    def main(world: Any) -> dict[str, float]:
        timings: dict[str, float] = {}
        case.layer(world).forward(*case.arguments(world.rank), timings=timings)
        return timings

    stages = ["dispatch", "wait_dispatch", "gemm1", "produce_and_send", "wait_return", "combine"]
    for timings in run_ranks(2, main):
        assert list(timings) == stages
        assert all(value >= 0 for value in timings.values())


def test_the_numpy_example_runs_as_it_stands():
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, root / "examples" / "numpy_layer.py"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("y (64, 256) float16") == 4

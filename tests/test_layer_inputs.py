"""What a layer accepts and refuses, in a call and when it is made, on all ranks together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from layer_problems import assert_right, forward, problem, refusals, run_ranks

import tileflow
from tileflow import (
    Config,
    ConfigError,
    InputError,
    MoELayer,
    WorldError,
)
from tileflow.worlds import open_worlds

# -- the call --------------------------------------------------------------------------------------


def test_out_is_written_in_place_and_returned_and_a_fresh_result_belongs_to_the_caller():
    case = problem(ranks=2)

    def main(world: Any) -> None:
        layer = case.layer(world)
        out = np.empty((24, 64), np.float16)
        assert layer(*case.arguments(world.rank), out=out) is out
        first = layer(*case.arguments(world.rank))
        kept = first.copy()
        for _ in range(3):
            layer(case.x[world.rank] * np.float16(2), case.ids[world.rank], case.shares[world.rank])
        assert first.tobytes() == kept.tobytes() == out.tobytes()

    run_ranks(2, main)


def test_the_inputs_are_not_written():
    case = problem(ranks=2)
    before = [array.copy() for arrays in (case.x, case.ids, case.shares) for array in arrays]
    forward(case)
    after = [array for arrays in (case.x, case.ids, case.shares) for array in arrays]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True))


def test_inputs_that_are_read_only_are_accepted():
    case = problem(ranks=2)
    for array in (*case.x, *case.ids, *case.shares):
        array.flags.writeable = False
    assert_right(case, forward(case))


def wrong(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[Any, MoELayer], Any]:
    """Return a call in which rank 1 alone passes a changed array."""
    names = ("x", "topk_ids", "topk_weights")

    def call(world: Any, layer: MoELayer) -> Any:
        arrays = dict(zip(names, BAD.arguments(world.rank), strict=True))
        if world.rank == 1:
            arrays[name] = change(arrays.get(name, np.empty((24, 64), np.float16)))
        return layer(**arrays)

    return call


BAD = problem(ranks=3)


@pytest.mark.parametrize(
    ("name", "change", "field", "value"),
    [
        ("x", lambda x: x.astype(np.float32), "x.dtype", "float32"),
        ("x", lambda x: x.view(np.uint16), "x.dtype", "uint16"),
        ("x", lambda x: x[:, :32], "x.shape", (24, 32)),
        ("x", lambda x: x[None], "x.shape", (1, 24, 64)),
        ("x", lambda x: x.ravel(), "x.shape", (24 * 64,)),
        ("x", lambda x: np.asfortranarray(x), "x.strides", (2, 48)),
        ("x", lambda x: x.tolist(), "x", "list"),
        ("x", lambda x: np.concatenate([x, x]), "x.shape[0]", 48),
        ("topk_ids", lambda ids: ids.astype(np.int16), "topk_ids.dtype", "int16"),
        ("topk_ids", lambda ids: ids[:, :1], "topk_ids.shape", (24, 1)),
        ("topk_ids", lambda ids: ids[:5], "topk_ids.shape", (5, 2)),
        ("topk_ids", lambda ids: ids[..., None], "topk_ids.shape", (24, 2, 1)),
        ("topk_ids", lambda ids: np.where(ids == ids[3, 1], 6, ids), None, 6),
        ("topk_ids", lambda ids: np.full_like(ids, -2), "topk_ids[0, 0]", -2),
        ("topk_weights", lambda w: w.astype(np.float64), "topk_weights.dtype", "float64"),
        ("topk_weights", lambda w: w[:, 0], "topk_weights.shape", (24,)),
        ("out", lambda out: out[:3], "out.shape", (3, 64)),
        ("out", lambda out: out.astype(np.float32), "out.dtype", "float32"),
        ("mode", lambda _: "send", "mode", "send"),
        ("mode", lambda _: "fast", "mode", "fast"),
        ("stream", lambda _: 7, "stream", 7),
    ],
)
def test_a_bad_input_on_one_rank_is_refused_on_all_with_field_value_and_allowed(
    name, change, field, value
):
    errors = refusals(BAD, wrong(name, change))
    assert all(isinstance(error, InputError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    error = errors[0]
    assert field is None or error.field == field
    assert error.value == value
    assert error.allowed and error.allowed in str(error) and repr(value) in str(error)


def test_an_out_that_cannot_be_written_is_refused():
    out = np.empty((24, 64), np.float16)
    out.flags.writeable = False
    errors = refusals(BAD, wrong("out", lambda _: out))
    assert all(isinstance(error, InputError) and "out" in error.field for error in errors)


def test_modes_that_differ_between_ranks_are_refused():
    def call(world: Any, layer: MoELayer) -> Any:
        return layer(*BAD.arguments(world.rank), mode="serial" if world.rank else "overlap")

    for error in refusals(BAD, call):
        assert isinstance(error, InputError) and error.field == "mode" and error.rank == 1


# -- making layers ---------------------------------------------------------------------------------


def made_wrong(change: Callable[[Any, dict[str, Any]], None], ranks: int = 3) -> list[Exception]:
    """Return what each rank raises when `change` has changed the arguments of some rank's layer."""
    case = problem(ranks=ranks)

    def main(world: Any) -> Exception:
        mine = slice(world.rank * 2, world.rank * 2 + 2)
        arguments = {"shape": case.shape, "w_gate_up": case.gate_up[mine]}
        arguments |= {"w_down": case.down[mine], "config": Config()}
        change(world, arguments)
        with pytest.raises(tileflow.TileflowError) as refused:
            MoELayer(world, **arguments)
        case.layer(world)(*case.arguments(world.rank))  # the world is as good as new
        return refused.value

    return run_ranks(ranks, main)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("config", "layout", "aligned"),
        ("config", "mgb", 3),
        ("config", "tile_m", 64),
        ("config", "max_recv_rows", 500),
        ("shape", "max_tokens", 77),
        ("shape", "ffn", 8),
        ("shape", "top_k", 1),
    ],
)
def test_ranks_that_disagree_on_a_field_are_refused_with_its_name(part, name, value):
    def change(world: Any, arguments: dict[str, Any]) -> None:
        if world.rank == 2:
            arguments[part] = replace(arguments[part], **{name: value})

    owner = "Config" if part == "config" else "MoEShape"
    for error in made_wrong(change):
        assert isinstance(error, ConfigError)
        assert (error.field, error.value, error.rank) == (f"{owner}.{name}", value, 2)


@pytest.mark.parametrize(
    ("name", "make", "field"),
    [
        ("w_down", lambda w: w[:1], "w_down.shape"),
        ("w_down", lambda w: w[0], "w_down.shape"),
        ("w_down", lambda w: w.astype(np.float32), "w_down.dtype"),
        ("w_down", lambda w: w.transpose(0, 2, 1), "w_down.shape"),
        ("w_down", lambda w: w[:, :, ::-1], "w_down.strides"),
        ("w_gate_up", lambda w: w[:, :48], "w_gate_up.shape"),
        ("w_gate_up", lambda w: w.reshape(-1, 64), "w_gate_up.shape"),
    ],
)
def test_a_bad_weight_on_one_rank_is_refused_on_all(name, make, field):
    def change(world: Any, arguments: dict[str, Any]) -> None:
        if world.rank == 1:
            arguments[name] = make(arguments[name])

    for error in made_wrong(change):
        assert isinstance(error, InputError) and error.field == field


def test_experts_that_do_not_divide_by_the_ranks_are_refused():
    def change(world: Any, arguments: dict[str, Any]) -> None:
        arguments["shape"] = replace(arguments["shape"], num_experts=7)

    for error in made_wrong(change):
        assert isinstance(error, ConfigError) and error.field == "MoEShape.num_experts"
        assert "multiple" in error.allowed


def test_many_layers_of_different_shapes_share_one_world():
    cases = [
        problem(ranks=2, tokens=20, hidden=64, ffn=48, seed=0),
        problem(ranks=2, tokens=50, hidden=128, ffn=8, e_local=5, top_k=4, seed=1),
        problem(ranks=2, tokens=7, hidden=8, ffn=16, e_local=1, top_k=1, seed=2),
    ]
    configs = [Config(), Config(layout="aligned", tile_m=64), Config(put_path="serial")]

    def main(world: Any) -> list[list[np.ndarray]]:
        layers = [case.layer(world, config) for case, config in zip(cases, configs, strict=True)]
        rounds = []
        for _ in range(3):
            rounds.append([y(*c.arguments(world.rank)) for y, c in zip(layers, cases, strict=True)])
        return rounds

    for rounds in zip(*run_ranks(2, main), strict=True):
        for number, case in enumerate(cases):
            assert_right(case, [results[number] for results in rounds])


def test_a_hundred_worlds_and_layers_leave_nothing_behind():
    case = problem(ranks=2, tokens=4, hidden=16, ffn=8)
    threads = threading.active_count()
    for _ in range(100):
        forward(case)
    assert open_worlds() == ()
    assert threading.active_count() == threads


def test_the_workspace_has_the_size_that_was_told_before():
    case = problem(ranks=2)
    told = tileflow.workspace_nbytes(case.shape, 2)

    def main(world: Any) -> int:
        case.layer(world)
        workspace = world.backend.workspace
        buffers = [workspace.recv, workspace.returned, workspace.signals]
        local = sum(array.nbytes for array in workspace.local.values())
        return local + sum(buffer.local.nbytes for buffer in buffers)

    assert run_ranks(2, main) == [told, told]


def test_warming_up_changes_no_result_and_tuning_is_refused():
    case = problem(ranks=2)

    def main(world: Any) -> np.ndarray:
        layer = case.layer(world)
        layer.warmup()
        with pytest.raises(ConfigError, match="tune"):
            layer.warmup(tune=True)
        y = layer(*case.arguments(world.rank))
        layer.check()
        return y

    assert_right(case, run_ranks(2, main))


def test_a_closed_world_refuses_its_layers():
    case = problem(ranks=1)
    kept = []

    def main(world: Any) -> None:
        kept.append(case.layer(world))

    run_ranks(1, main)
    with pytest.raises(WorldError, match="closed"):
        kept[0](*case.arguments(0))

"""MoELayer on a GPU loopback: every kernel family, tile shape, layout and dtype, any routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from layer_problems import Problem, assert_right, place, poison, problem, run_ranks, to_host

from tileflow import Config, InputError
from tileflow.routing import MODES

pytestmark = pytest.mark.gpu

BFLOAT16 = ml_dtypes.bfloat16
LAYOUTS = pytest.mark.parametrize("layout", ["packed", "aligned"])
PRODUCERS = pytest.mark.parametrize("producer", ["auto", "generic"])
TILES = pytest.mark.parametrize(
    ("tile_m", "tile_n"), [(128, 256), (128, 128), (64, 256), (64, 128)]
)


def run(case: Problem, config: Config, link: str = "hbm") -> list[np.ndarray]:
    """Run overlapped, serial and overlapped again on poisoned buffers; all bits must agree."""

    def main(world: Any) -> np.ndarray:
        layer = case.layer(world, config)
        poison(world)
        arguments = case.placed(world)
        results = [to_host(layer(*arguments, mode=m)) for m in ("overlap", "serial", "overlap")]
        layer.check()
        assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
        return results[0]

    return run_ranks(case.ranks, main, backend="cuda", link=link)


@LAYOUTS
@TILES
@PRODUCERS
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_every_kernel_agrees_with_the_reference_and_overlap_equals_serial(
    producer, tile_m, tile_n, layout, dtype
):
    case = problem(tokens=(150, 0, 300, 77), hidden=200, ffn=136, hidden_out=328, dtype=dtype)
    config = Config(layout=layout, producer=producer, tile_m=tile_m, tile_n=tile_n)
    assert_right(case, run(case, config))


@LAYOUTS
@pytest.mark.parametrize("mode", MODES)
def test_every_router_mode_agrees_with_the_reference(mode, layout):
    case = problem(mode=mode, tokens=160, e_local=4, top_k=3, hidden_out=264)
    assert_right(case, run(case, Config(layout=layout)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 8])
def test_any_number_of_ranks_works(ranks):
    case = problem(ranks=ranks, tokens=90, e_local=3)
    assert_right(case, run(case, Config()))


@pytest.mark.parametrize("link", ["hbm", "host"])
def test_rows_come_home_over_either_link(link):
    case = problem(tokens=500, hidden_out=520)
    assert_right(case, run(case, Config(), link))


@pytest.mark.parametrize("hidden", [512, 768, 2048, 2880, 3072, 5120, 7168])
def test_common_widths_are_right(hidden):
    case = problem(ranks=2, tokens=70, hidden=hidden, ffn=264, e_local=2)
    assert_right(case, run(case, Config()))


@pytest.mark.parametrize("top_k", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("e_local", [1, 2, 16, 64, 256])
def test_every_top_k_and_number_of_experts_agrees_with_the_reference(top_k, e_local):
    case = problem(ranks=2, tokens=24, hidden=64, ffn=64, e_local=e_local, top_k=top_k)
    assert_right(case, run(case, Config()))


@PRODUCERS
def test_consumer_shares_from_one_sm_to_all_but_one_give_the_same_bits(producer):
    case = problem(tokens=600, hidden_out=520)

    def main(world: Any) -> list[bytes]:
        case.layer(world)
        most, results = world.backend.num_sms - 1, []
        for sms in (1, 2, 7, most // 2, most):
            layer = case.layer(world, Config(consumer_sms=sms, producer=producer))
            results.append(layer(*case.placed(world)).tobytes())
        return results

    for results in run_ranks(4, main, backend="cuda"):
        assert len(set(results)) == 1


@PRODUCERS
@LAYOUTS
def test_rows_beside_each_expert_and_buffer_stay_untouched(layout, producer):
    case = problem(tokens=(33, 170, 64, 1), hidden_out=136)

    def main(world: Any) -> None:
        layer = case.layer(world, Config(layout=layout, producer=producer))
        layer(*case.placed(world))
        plan, workspace = layer.engine.last_plan, world.backend.workspace
        activated = np.ones((plan.recv_rows[world.rank], case.shape.ffn), np.float16)
        poison(world)
        layer.operator(place(world, activated), plan.counts)
        layer.check()
        world.barrier()
        returned = to_host(workspace.returned.local).reshape(2, -1)
        used = plan.sent_rows * 136 * 2
        slot = world.epoch & 1
        assert (returned[1 - slot] == 0xFF).all() and (returned[slot, used:] == 0xFF).all()
        staging = to_host(workspace.local["staging"]).view(np.uint16)
        rows = staging[: plan.config.max_layout_rows * 136].reshape(-1, 136)
        written = np.zeros(len(rows), bool)
        for band in plan.bands:
            written[band["row"] : band["row"] + band["num_remote"]] = True
        assert (rows[~written] == 0xFFFF).all()

    run_ranks(4, main, backend="cuda")


def test_routing_and_tile_shape_may_change_in_every_forward_with_epochs_around_2_63():
    modes = ("uniform", "first_k", "half_empty", "power_law", "one_owner_90")
    cases = [
        problem(mode=modes[i % 5], tokens=[(37 * i + 61 * r) % 200 for r in range(4)], seed=i)
        for i in range(10)
    ]
    for case in cases:
        case.shape = replace(cases[0].shape, max_tokens=200)
        case.gate_up, case.down = cases[0].gate_up, cases[0].down

    def main(world: Any) -> list[list[np.ndarray]]:
        layers = [
            cases[0].layer(world, Config(tile_m=m, tile_n=n, layout=layout))
            for m, n in ((128, 256), (64, 128))
            for layout in ("packed", "aligned")
        ]
        world.reset(epoch=2**63 - 50)
        given = [case.placed(world) for case in cases]
        results: list[Any] = [[] for _ in cases]
        for i in range(100):
            y = layers[i % 4](*given[i % 10], mode="serial" if i % 7 == 0 else "overlap")
            results[i % 10].append(to_host(y))
        layers[0].check()
        assert world.epoch == 2**63 + 50
        return results

    by_rank = run_ranks(4, main, backend="cuda")
    for number, case in enumerate(cases):
        for attempt in range(10):
            assert_right(case, [results[number][attempt] for results in by_rank])


def test_inputs_and_output_may_be_written_on_the_callers_stream_just_before():
    import cupy

    case = problem(tokens=300, hidden=512)

    def main(world: Any) -> np.ndarray:
        layer = case.layer(world)
        layer.warmup()
        x, ids, shares = case.placed(world)
        late, out = cupy.empty_like(x), cupy.empty((300, 512), cupy.float16)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            late.fill(cupy.nan)
            out.fill(cupy.nan)
            world.backend.hold(stream, 0.01)
            late[:] = x
        assert layer(late, ids, shares, out=out, stream=stream) is out
        with stream:
            copy = out.copy()
        stream.synchronize()
        return to_host(copy)

    assert_right(case, run_ranks(4, main, backend="cuda"))


def test_arrays_come_in_through_dlpack_and_the_cuda_array_interface():
    case = problem(ranks=1, tokens=40)

    class Foreign:
        def __init__(self, array: Any):
            self.__cuda_array_interface__ = array.__cuda_array_interface__
            self.keep = array

    class Exported:
        def __init__(self, array: Any):
            self.array = array

        def __dlpack__(self, **kwargs: Any) -> Any:
            return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    def main(world: Any) -> list[np.ndarray]:
        layer = case.layer(world)
        x, ids, shares = case.placed(world)
        wrapped = [wrap(x) for wrap in (Foreign, Exported)]
        return [to_host(layer(each, ids, shares)) for each in (x, *wrapped)]

    (results,) = run_ranks(1, main, backend="cuda")
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()


def test_bfloat16_comes_in_through_dlpack():
    torch = pytest.importorskip("torch", reason="needs torch as a foreign array library")
    case = problem(ranks=1, tokens=40, dtype=BFLOAT16)

    def main(world: Any) -> tuple[np.ndarray, np.ndarray]:
        layer = case.layer(world)
        x, ids, shares = case.placed(world)
        foreign = torch.from_numpy(case.x[0].view(np.int16)).view(torch.bfloat16).cuda()
        return to_host(layer(x, ids, shares)), to_host(layer(foreign, ids, shares))

    ((ours, theirs),) = run_ranks(1, main, backend="cuda")
    assert ours.dtype == BFLOAT16 and ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("kind", ["numpy", "uint16", "float32"])
def test_arrays_of_another_kind_are_refused_on_all_ranks(kind):
    case = problem(tokens=20)

    def wrong(world: Any, x: np.ndarray) -> Any:
        if kind == "numpy":
            return x
        return place(world, x.view(np.uint16) if kind == "uint16" else x.astype(np.float32))

    def main(world: Any) -> Exception:
        layer = case.layer(world)
        x, ids, shares = case.placed(world)
        if world.rank == 2:
            x = wrong(world, case.x[2])
        with pytest.raises(InputError) as refused:
            layer(x, ids, shares)
        return refused.value

    errors = run_ranks(4, main, backend="cuda")
    assert {error.field.split(".")[0] for error in errors} == {"x"}


def test_layers_of_different_sizes_share_one_workspace():
    cases = [
        problem(tokens=t, hidden=h, e_local=e, seed=t) for t, h, e in ((90, 64, 2), (200, 264, 5))
    ]

    def main(world: Any) -> list[np.ndarray]:
        layers = [case.layer(world) for case in cases]
        given = [case.placed(world) for case in cases]
        for _ in range(3):
            results = [to_host(layer(*g)) for layer, g in zip(layers, given, strict=True)]
        return results

    by_rank = run_ranks(4, main, backend="cuda")
    for number, case in enumerate(cases):
        assert_right(case, [results[number] for results in by_rank])


def test_worlds_come_and_go_without_leaking_device_memory():
    import cupy

    case = problem(tokens=64)

    def once() -> int:
        run_ranks(4, lambda world: case.layer(world)(*case.placed(world)), backend="cuda")
        cupy.get_default_memory_pool().free_all_blocks()
        return cupy.cuda.runtime.memGetInfo()[0]

    first = [once() for _ in range(3)][-1]
    last = [once() for _ in range(97)][-1]
    assert first - last < 16 << 20


def test_a_kernel_edited_by_the_user_is_used_by_the_next_call(tmp_path, monkeypatch):
    import shutil
    import time

    from tileflow import jit

    case = problem(ranks=1, tokens=16)
    folder = tmp_path / "cuda_src"
    shutil.copytree(jit.source_dir(), folder)

    def main(world: Any) -> tuple[np.ndarray, np.ndarray]:
        layer = case.layer(world)
        before = to_host(layer(*case.placed(world)))
        monkeypatch.setenv("TILEFLOW_CUDA_SRC", str(folder))
        source = folder / "combine.cu"
        text = source.read_text()
        assert "fmaf(weight, pair.x" in text
        source.write_text(text.replace("fmaf(weight, pair.", "fmaf(2.0f * weight, pair."))
        time.sleep(0.01)
        return before, to_host(layer(*case.placed(world)))

    ((before, after),) = run_ranks(1, main, backend="cuda")
    np.testing.assert_allclose(after, 2 * before.astype(np.float32), rtol=2e-3, atol=2e-3)

"""What holds on every world also holds on GPUs: loopback in turns, NVSHMEM between processes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from launch import run_program
from layer_problems import problem, run_ranks, to_host
from world_cases import CASES

import tileflow
from tileflow import Config, ConfigError, ProtocolTimeout, WorldBroken
from tileflow.faults import Faults

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("link", ["hbm", "host"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_a_gpu_loopback(case, ranks, link):
    with tileflow.init("loopback", ranks=ranks, backend="cuda", link=link) as world:
        world.run(case)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_over_nvshmem_with_all_ranks_on_the_gpus_at_hand(ranks):
    finished = run_program("cases", ranks, "nvshmem")
    assert finished.returncode == 0, finished.output
    assert f"cases passed on {ranks} ranks" in finished.output


def test_a_fresh_process_needs_no_cuda_call_before_init():
    program = (
        "import tileflow\n"
        "with tileflow.init('loopback', ranks=2, backend='cuda') as world:\n"
        "    print(world.run(lambda w: w.size))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert finished.stdout.strip() == "[2, 2]", finished.stderr


def test_a_producer_that_never_starts_is_named_by_its_consumer_and_the_context_lives_on():
    case = problem(tokens=64)

    def main(world: Any) -> str:
        layer = case.layer(world)
        want = to_host(layer(*case.placed(world)))
        world.timeout_s = world.warmup_timeout_s = 0.5
        backend = world.backend
        produce, backend._produce = backend._produce, lambda *arguments: None
        with pytest.raises(ProtocolTimeout) as failed:
            layer(*case.placed(world))
        backend._produce = produce
        with pytest.raises(WorldBroken):
            layer(*case.placed(world))
        world.timeout_s = world.warmup_timeout_s = 20.0
        world.reset()
        assert to_host(layer(*case.placed(world))).tobytes() == want.tobytes()
        return failed.value.what

    assert "band" in run_ranks(4, main, backend="cuda")


@pytest.mark.parametrize("consumer_first", [True, False])
def test_the_consumer_may_start_before_or_after_the_producer(consumer_first):
    case = problem(tokens=400, hidden_out=520)

    def main(world: Any) -> None:
        layer = case.layer(world)
        backend = world.backend
        want = layer(*case.placed(world), mode="serial").tobytes()
        produce = backend._produce

        def late(*arguments: Any) -> None:
            if consumer_first:  # it polls its flags for a while
                backend.hold(arguments[0].stream, 5e-3)
            produce(*arguments)
            if not consumer_first:
                backend.hold(backend.put["sm"].stream, 5e-3)

        backend._produce = late
        for _ in range(5):
            assert layer(*case.placed(world)).tobytes() == want
        backend._produce = produce

    run_ranks(4, main, backend="cuda")


def test_one_rank_that_is_50_ms_late_in_every_stage_of_50_forwards_mixes_nothing_up():
    cases = [problem(ranks=2, tokens=40, seed=seed) for seed in range(2)]
    for case in cases:
        case.gate_up, case.down = cases[0].gate_up, cases[0].down

    def main(world: Any) -> None:
        layer = cases[0].layer(world)
        given = [case.placed(world) for case in cases]
        want = [layer(*each).tobytes() for each in given]
        layer.engine.faults = Faults(stage_delay_s=0.05 if world.rank == 1 else 0.0)
        for number in range(50):
            assert layer(*given[number % 2]).tobytes() == want[number % 2]

    run_ranks(2, main, backend="cuda")


def test_another_busy_stream_does_not_hold_a_forward_up():
    import cupy

    case = problem(ranks=2, tokens=200)

    def main(world: Any) -> None:
        layer = case.layer(world)
        want = layer(*case.placed(world)).tobytes()
        foreign = cupy.cuda.Stream(non_blocking=True)
        a = cupy.ones((2048, 2048), cupy.float32)
        for _ in range(5):
            with foreign:
                for _ in range(20):
                    a @ a
            assert layer(*case.placed(world)).tobytes() == want

    run_ranks(2, main, backend="cuda")


def test_a_consumer_that_leaves_the_producer_no_sm_is_refused_on_all_ranks():
    case = problem(ranks=3, tokens=8)

    def main(world: Any) -> int:
        case.layer(world)
        most = world.backend.num_sms - 1
        case.layer(world, Config(consumer_sms=most))
        with pytest.raises(ConfigError, match=f"at most {most}"):
            case.layer(world, Config(consumer_sms=most + 1))
        return most

    assert len(set(run_ranks(3, main, backend="cuda"))) == 1


def test_overlap_is_refused_where_launches_block(monkeypatch):
    case = problem(ranks=2, tokens=8)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")

    def main(world: Any) -> None:
        with pytest.raises(ConfigError, match="CUDA_LAUNCH_BLOCKING"):
            case.layer(world)
        case.layer(world, Config(put_path="serial"))(*case.placed(world))

    run_ranks(2, main, backend="cuda")

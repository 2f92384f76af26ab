"""Choosing a world, and the loopback world: runs, failures, reset, close."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from layer_problems import problem
from world_cases import CASES

import tileflow
from tileflow import ConfigError, InputError, ProtocolTimeout, RankLost, WorldBroken, WorldError
from tileflow import worlds as worlds_module
from tileflow.config import Environment
from tileflow.protocol import EPOCH_MASK
from tileflow.worlds import choose_world, gpu_available, mpi_shm
from tileflow.worlds.board import Board

ALONE = Environment()
LAUNCHED = Environment(launcher_size=4, launcher_name="OMPI_COMM_WORLD_SIZE")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(worlds_module, "gpu_problem", lambda: "CuPy sees no GPU")


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(worlds_module, "gpu_problem", lambda: None)


def loopback(ranks: int = 3, timeout_s: float = 10.0):
    return tileflow.init("loopback", ranks=ranks, backend="cpu", timeout_s=timeout_s)


# -- choosing --------------------------------------------------------------------------------------


def chosen(environment=ALONE, **options):
    name, backend, reason = choose_world(environment=environment, **options)
    assert reason.startswith(f"world {name}: ")
    return name, backend


def test_without_a_gpu_auto_is_loopback_alone_and_shared_memory_under_a_launcher(no_gpu):
    assert chosen() == ("loopback", "cpu")
    assert chosen(LAUNCHED) == ("mpi_shm", "cpu")
    assert "OMPI_COMM_WORLD_SIZE" in choose_world(environment=LAUNCHED).reason
    assert "CuPy sees no GPU" in choose_world(environment=LAUNCHED).reason


def test_with_a_gpu_auto_uses_it(a_gpu):
    assert chosen() == ("loopback", "cuda")
    assert chosen(LAUNCHED) == ("nvshmem", "cuda")
    assert chosen(LAUNCHED, backend="cpu") == ("mpi_shm", "cpu")
    assert chosen(LAUNCHED, world="mpi_shm") == ("mpi_shm", "cpu")
    assert chosen(backend="cpu") == ("loopback", "cpu")


@pytest.mark.parametrize(
    ("options", "environment", "error", "text"),
    [
        ({"world": "mpi"}, ALONE, ConfigError, "one of auto, loopback, mpi_shm, nvshmem"),
        ({"backend": "gpu"}, ALONE, ConfigError, "one of auto, cpu, cuda"),
        ({"world": "mpi_shm", "backend": "cuda"}, LAUNCHED, ConfigError, "cpu on world 'mpi_shm'"),
        ({"world": "nvshmem", "backend": "cpu"}, LAUNCHED, ConfigError, "cuda on world 'nvshmem'"),
        ({"world": "nvshmem"}, LAUNCHED, WorldError, "CuPy sees no GPU"),
        ({"backend": "cuda"}, ALONE, WorldError, "CuPy sees no GPU"),
        ({"backend": "cuda"}, LAUNCHED, WorldError, "CuPy sees no GPU"),
        ({"world": "loopback"}, LAUNCHED, WorldError, "holds all its ranks in one process"),
        ({"ranks": 0}, ALONE, ConfigError, "an int from 1"),
        ({"ranks": True}, ALONE, ConfigError, "an int from 1"),
        ({"ranks": 65}, ALONE, ConfigError, "at most 64"),
        ({"ranks": 3}, LAUNCHED, ConfigError, "None or 4"),
    ],
)
def test_an_impossible_choice_is_refused_with_the_reason(no_gpu, options, environment, error, text):
    with pytest.raises(error, match=text):
        choose_world(environment=environment, **options)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"link": "nvlink"}, "link"),
        ({"link": "host"}, "link"),
        ({"device": 0}, "device"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_s": "30"}, "timeout_s"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_with_its_name(options, field):
    with pytest.raises(ConfigError) as refused:
        tileflow.init("loopback", backend="cpu", **options)
    assert refused.value.field == field


def test_looking_for_a_gpu_never_raises():
    assert gpu_available() in (True, False)


# -- loopback --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_every_case_holds_between_threads(function, ranks):
    with loopback(ranks, timeout_s=20.0) as world:
        world.run(function)


def test_run_returns_results_by_rank_and_handles_live_on():
    with loopback(4) as world:
        first = world.run(lambda w: (w.rank, w.size, id(w)))
        assert first == world.run(lambda w: (w.rank, w.size, id(w)))
        assert [rank for rank, _, _ in first] == [0, 1, 2, 3]


def test_layers_made_in_one_run_work_in_the_next():
    case = problem(ranks=3)
    with loopback(3) as world:
        layers = world.run(case.layer)
        ys = world.run(lambda w: layers[w.rank](*case.arguments(w.rank)))
        again = world.run(lambda w: layers[w.rank](*case.arguments(w.rank)))
    assert [y.tobytes() for y in ys] == [y.tobytes() for y in again]


def test_one_virtual_rank_is_its_own_handle():
    case = problem(ranks=1)
    with loopback(1) as world:
        direct = case.layer(world)(*case.arguments(0))
        (in_run,) = world.run(lambda w: case.layer(w)(*case.arguments(0)))
        world.reset(epoch=7)
        assert world.allgather(b"x") == [b"x"] and world.epoch == 7
    assert direct.tobytes() == in_run.tobytes()


def test_the_group_is_no_handle_and_a_handle_needs_a_run():
    case = problem(ranks=2)
    with loopback(2) as world:
        with pytest.raises(WorldError, match=r"world\.run\(fn\)"):
            tileflow.MoELayer(world, case.shape, case.gate_up, case.down)
        with pytest.raises(WorldError, match=r"inside world\.run"):
            world.handles[0].allgather(b"")
        with pytest.raises(WorldError, match="not over"):
            world.run(lambda w: world.run(lambda _: None))


def test_the_error_of_the_rank_that_failed_is_raised_and_the_others_end_at_once():
    echoes = {}

    def main(w):
        if w.rank == 1:
            raise ZeroDivisionError("on rank 1")
        try:
            w.barrier()
        except WorldBroken as error:
            echoes[w.rank] = str(error)
            raise

    started, before = time.monotonic(), threading.active_count()
    with loopback(3) as world:
        with pytest.raises(ZeroDivisionError, match="on rank 1"):
            world.run(main)
        assert time.monotonic() - started < 5
        assert set(echoes) == {0, 2} and "rank 1 has left" in echoes[0]
        assert threading.active_count() == before
        assert all(handle.broken for handle in world.handles)
        with pytest.raises(WorldBroken, match="on rank 1"):
            world.run(lambda w: w.require_usable())
        world.reset()
        assert world.run(lambda w: w.allgather(b"%d" % w.rank))[0] == [b"0", b"1", b"2"]


def test_a_rank_that_returns_early_does_not_keep_the_others_waiting():
    started = time.monotonic()
    with loopback(3) as world:
        with pytest.raises(WorldBroken, match="rank 2 has left"):
            world.run(lambda w: None if w.rank == 2 else w.barrier())
    assert time.monotonic() - started < 5


def test_a_refusal_that_all_ranks_share_leaves_the_world_usable():
    with loopback(3) as world:
        with pytest.raises(InputError, match="on rank 1"):
            world.run(lambda w: w.agree(InputError("x", 1, "2", rank=1) if w.rank == 1 else None))
        assert not any(handle.broken for handle in world.handles)
        world.run(lambda w: w.barrier())


def test_a_refusal_of_one_rank_alone_breaks_the_world():
    with loopback(3) as world:
        with pytest.raises(ConfigError, match="tile_m"):
            world.run(lambda w: tileflow.Config(tile_m=7) if w.rank == 0 else w.barrier())
        assert all(handle.broken for handle in world.handles)


def test_a_rank_that_does_not_come_to_a_collective_is_named_after_the_limit():
    def main(w):
        w.warm = True
        if w.rank == 2:
            time.sleep(1.0)
            return
        w.barrier()

    with loopback(3, timeout_s=0.2) as world:
        with pytest.raises(ProtocolTimeout) as failed:
            world.run(main)
        assert (failed.value.what, failed.value.rank, failed.value.peer) == ("allgather", 0, 2)


def test_reset_says_which_rank_is_lost():
    def main(w):
        w.warm = True
        if w.rank == 2:
            time.sleep(1.0)
            return
        with pytest.raises(RankLost) as lost:
            w.reset()
        assert lost.value.ranks == (2,)

    with loopback(3, timeout_s=0.2) as world:
        world.run(main)


def test_a_rank_that_never_returns_after_a_failure_does_not_hold_the_caller(monkeypatch):
    monkeypatch.setattr("tileflow.worlds.loopback._GRACE_S", 0.1)
    release = threading.Event()

    def main(w):
        if w.rank == 0:
            raise ZeroDivisionError
        release.wait(20)

    with loopback(2, timeout_s=0.1) as world:
        for handle in world.handles:
            handle.warm = True
        with pytest.raises(WorldError, match=r"ranks \[1\] did not return"):
            world.run(main)
        release.set()
        with pytest.raises(WorldError, match="closed"):
            world.run(lambda w: None)


def test_closing_twice_is_allowed_and_using_a_closed_world_is_not():
    world = loopback(2)
    world.close()
    world.close()
    with pytest.raises(WorldError, match="closed"):
        world.run(lambda w: None)
    with pytest.raises(WorldError, match="closed"):
        world.handles[0].require_usable()
    with pytest.raises(WorldError, match="closed"):
        world.handles[0].reset()


@pytest.mark.parametrize(
    "epochs", [(5, 6, 6), (EPOCH_MASK, 0, EPOCH_MASK), (1 << 63, 2**63 - 1, 1)]
)
def test_reset_takes_the_latest_epoch_of_all_ranks_also_where_it_wraps(epochs):
    def main(w):
        w.epoch = epochs[w.rank]
        w.reset()
        return w.epoch

    latest = {(5, 6, 6): 6, (EPOCH_MASK, 0, EPOCH_MASK): 0}.get(epochs)
    with loopback(3) as world:
        results = world.run(main)
    assert len(set(results)) == 1
    assert latest is None or results[0] == latest


def test_fresh_signal_words_count_as_reached_for_no_later_epoch():
    case = problem(ranks=3)
    with loopback(3) as world:
        world.reset(epoch=(1 << 63) + 5)  # a word of 0 would be ahead of this
        layers = world.run(case.layer)
        words = world.run(lambda w: w.backend.workspace.signals.local.view(np.uint64).copy())
        assert all((w[1:] == (1 << 63) + 5).all() and w[0] == 0 for w in words)
        world.run(lambda w: layers[w.rank](*case.arguments(w.rank)))


def test_a_growth_that_is_refused_leaves_the_layers_that_exist_at_work(monkeypatch):
    case = problem(ranks=2)
    with loopback(2) as world:
        layers = world.run(case.layer)
        want = world.run(lambda w: layers[w.rank](*case.arguments(w.rank)))
        for handle in world.handles:
            error = WorldError("no room for it")
            monkeypatch.setattr(handle, "check_memory", lambda nbytes, e=error: e)
        larger = replace(case.shape, max_tokens=4096)
        with pytest.raises(WorldError, match="no room"):
            world.run(lambda w: case.layer(w, max_tokens=larger.max_tokens))
        got = world.run(lambda w: layers[w.rank](*case.arguments(w.rank)))
    assert [y.tobytes() for y in got] == [y.tobytes() for y in want]


def test_shared_memory_that_is_too_small_for_all_ranks_is_refused(monkeypatch):
    stat = SimpleNamespace(f_bavail=16384, f_frsize=4096)  # 64 MB, a container's default
    monkeypatch.setattr(mpi_shm, "os", SimpleNamespace(statvfs=lambda path: stat))
    world = SimpleNamespace(size=4)
    check = mpi_shm.MpiShmWorld.check_memory
    assert check(world, 15 << 20) is None
    refused = check(world, 16 << 20)
    assert isinstance(refused, WorldError)
    assert "4 ranks need" in str(refused) and "--shm-size" in str(refused)


# -- turns -----------------------------------------------------------------------------------------


def test_turns_are_taken_in_rank_order_and_end_together():
    board, order, lock = Board(4), [], threading.Lock()

    def rank(number: int) -> None:
        for turn in range(5):
            board.begin_turn(number, 5.0)
            with lock:
                order.append((turn, number))
            board.end_turn(number)
            board.await_turns(number, 5.0)
            with lock:
                assert len([entry for entry in order if entry[0] == turn]) == 4

    threads = [threading.Thread(target=rank, args=(n,)) for n in (3, 1, 2, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert order == [(turn, number) for turn in range(5) for number in range(4)]


def test_a_rank_that_fails_in_its_turn_does_not_hold_up_the_others():
    board = Board(2)
    board.begin_turn(0, 1.0)
    board.end_turn(0)
    board.leave(0, failed=True)
    board.begin_turn(1, 1.0)
    board.end_turn(1)
    with pytest.raises(WorldBroken, match="rank 0 has left"):
        board.begin_turn(1, 1.0)

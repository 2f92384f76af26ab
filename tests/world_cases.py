"""What must hold on every CPU world: run on loopback by pytest, on mpi_shm under mpirun.

A case is a function of one rank's handle; every rank of the world calls it. A case leaves the world
usable for the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from layer_problems import Problem, expected, poison, problem, to_host

from tileflow import Config, ConfigError, InputError, ProtocolTimeout, WorldBroken, reference
from tileflow.faults import Faults

Case = Callable[[Any], None]
CASES: list[Case] = []
NEAR_WRAP = (1 << 63) - 50


def case(function: Case) -> Case:
    """Register a case."""
    CASES.append(function)
    return function


def check(world: Any, given: Problem, y: np.ndarray) -> None:
    want = expected(given)[world.rank]
    fits, error = reference.check_tokens(to_host(y), want.y, want.row_norms, given.shape.dtype)
    assert fits, f"rank {world.rank}: relative error {error}"


def variants(world: Any, number: int, tokens: int = 24) -> list[Problem]:
    """Return problems of one shape and one set of weights with other tokens and routings."""
    modes = ("uniform", "first_k", "half_empty", "power_law")
    sizes = [
        [(rank * 7 + i * 5) % (tokens + 1) for rank in range(world.size)] for i in range(number)
    ]
    made = [
        problem(ranks=world.size, tokens=sizes[i], mode=modes[i % 4], seed=i, top_k=2)
        for i in range(number)
    ]
    shape = replace(made[0].shape, max_tokens=tokens)
    for other in made:
        other.shape, other.gate_up, other.down = shape, made[0].gate_up, made[0].down
    return made


@contextmanager
def timeout(world: Any, seconds: float) -> Iterator[None]:
    """Bound waits by `seconds`, warm or not."""
    before = world.timeout_s, world.warmup_timeout_s
    world.timeout_s = world.warmup_timeout_s = seconds
    try:
        yield
    finally:
        world.timeout_s, world.warmup_timeout_s = before


# -- agreement -------------------------------------------------------------------------------------


@case
def bytes_of_any_length_reach_every_rank(world):
    for length in (0, 1, 1000, 1 << 20):
        mine = bytes([world.rank]) * (length * (world.rank + 1))
        answers = world.allgather(mine)
        assert answers == [bytes([r]) * (length * (r + 1)) for r in range(world.size)]


@case
def an_error_of_one_rank_is_raised_on_all(world):
    last = world.size - 1
    error = InputError("x", 7, "8", rank=last) if world.rank == last else None
    with pytest.raises(InputError) as refused:
        world.agree(error)
    assert (refused.value.field, refused.value.value, refused.value.rank) == ("x", 7, last)
    world.agree()


@case
def a_field_that_differs_is_named_on_all_ranks(world):
    with pytest.raises(ConfigError) as refused:
        world.agree_on(same=1, tile_m=128 if world.rank == 0 else 64)
    assert refused.value.field == "tile_m" and refused.value.value == 64
    assert refused.value.rank == 1 and "rank 0 has 128" in str(refused.value)


@case
def sizes_that_differ_are_refused_before_anything_is_allocated(world):
    with pytest.raises(ConfigError, match="bytes of recv region"):
        world.allocate(64 + world.rank, "recv region")


@case
def memory_is_zeroed_and_every_rank_sees_what_a_peer_stores(world):
    for nbytes in (0, 8, 1000):
        buffer = world.allocate(nbytes, "test region")
        assert buffer.nbytes == nbytes and buffer.local.shape == (nbytes,)
        assert not buffer.local.any()
        world.barrier()
        for peer in range(world.size):
            buffer.peer(peer)[world.rank : world.rank + 1] = 1 + world.rank
        world.fence()
        world.barrier()
        world.fence()
        if nbytes:
            assert buffer.landing[: world.size].tolist() == list(range(1, world.size + 1))
            assert not buffer.local[world.size :].any()
        assert len(buffer.pointers) == world.size
        world.barrier()
        buffer.free()


# -- forwards --------------------------------------------------------------------------------------


@case
def overlap_equals_serial_and_both_agree_with_the_reference(world):
    for layout in ("packed", "aligned"):
        given = problem(ranks=world.size, tokens=90, mode="power_law", hidden_out=520, e_local=3)
        layer = given.layer(world, Config(layout=layout, tile_m=64))
        y = layer(*given.placed(world))
        check(world, given, y)
        again = layer(*given.placed(world), mode="serial")
        assert y.tobytes() == again.tobytes()


@case
def random_delays_of_tiles_and_sends_change_nothing(world):
    given = problem(ranks=world.size, tokens=60)
    layer = given.layer(world, Config(tile_m=64, tile_n=128))
    want = layer(*given.placed(world), mode="serial")
    for seed in range(5):
        layer.engine.faults = Faults(
            tile_delay_s=2e-3, put_delay_s=2e-3, seed=seed * world.size + world.rank
        )
        y = layer(*given.placed(world))
        assert y.tobytes() == want.tobytes()


def _late_rank_never_mixes_forwards(world: Any, delay_s: float, forwards: int) -> None:
    given = variants(world, 3)
    layer = given[0].layer(world)
    want = [layer(*each.placed(world), mode="serial") for each in given]
    for number, each in enumerate(given):
        check(world, each, want[number])
    for number in range(forwards):
        late = number % world.size == world.rank
        layer.engine.faults = Faults(stage_delay_s=delay_s if late else 0.0)
        y = layer(*given[number % 3].placed(world))
        assert y.tobytes() == want[number % 3].tobytes(), f"forward {number}"


@case
def one_late_rank_in_50_forwards_never_sees_another_forwards_data(world):
    _late_rank_never_mixes_forwards(world, 2e-3, 50)


@case
def a_rank_that_is_50_ms_late_at_every_stage_is_waited_for(world):
    _late_rank_never_mixes_forwards(world, 50e-3, 3)


@case
def ranks_without_tokens_are_served(world):
    for tokens in ([0] * world.size, [5] + [0] * (world.size - 1), [0] * (world.size - 1) + [5]):
        given = problem(ranks=world.size, tokens=tokens)
        given.shape = replace(given.shape, max_tokens=8)
        check(world, given, given.layer(world)(*given.placed(world)))


@case
def shapes_that_change_every_forward_near_the_epochs_sign_change_are_right(world):
    given = variants(world, 10)
    configs = [
        Config(tile_m=64, mgb=1, group_bands=1),
        Config(tile_m=128, tile_n=128),
        Config(layout="aligned", tile_m=64, put_path="serial"),
    ]
    layers = [given[0].layer(world, config) for config in configs]
    want = [layers[0](*each.placed(world)) for each in given]
    for each, y in zip(given, want, strict=True):
        check(world, each, y)
    world.reset(epoch=NEAR_WRAP)
    for number in range(100):
        y = layers[number % 3](*given[number % 10].placed(world))
        assert np.allclose(to_host(y), to_host(want[number % 10]), rtol=1e-2, atol=1e-3), (
            f"forward {number}"
        )
    assert world.epoch == NEAR_WRAP + 100 > 1 << 63
    world.reset(epoch=0)


# -- what is written -------------------------------------------------------------------------------


def _changed(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    return np.flatnonzero(before != after)


@case
def no_byte_outside_of_its_rows_is_written(world):
    given = problem(ranks=world.size, tokens=[11 + rank for rank in range(world.size)], top_k=3)
    layer = given.layer(world, Config(tile_m=64))
    backend, workspace = world.backend, world.backend.workspace
    poison(world)
    y = layer(*given.placed(world))
    check(world, given, y)
    world.barrier()
    plan, shape = layer.engine.last_plan, given.shape
    received = int(plan.recv_rows[world.rank])
    used = {
        "recv": (0, received * shape.hidden * 2),
        "activated": (0, received * shape.ffn * 2),
        "staging": (0, received * max(shape.hidden_out, 2 * shape.ffn) * 2),
    }
    home = workspace.slot_offset(world.epoch & 1)
    used["returned"] = (home, home + plan.sent_rows * shape.hidden_out * 2)
    for name, (first, last) in used.items():
        region = getattr(workspace, name, None)
        bytes_now = workspace.local[name] if region is None else region.local
        outside = to_host(bytes_now)
        outside = np.concatenate([outside[:first], outside[last:]])
        assert (outside == 0xFF).all(), f"{name}: {np.flatnonzero(outside != 0xFF)[:4]}"
    assert backend.failure() is None
    world.barrier()


# -- failures --------------------------------------------------------------------------------------


def _silent_rank_is_named(world: Any, fault: str, what: str) -> None:
    given = problem(ranks=world.size, tokens=30)
    layer = given.layer(world)
    want = layer(*given.placed(world))
    silent, failure = world.size - 1, None
    layer.engine.faults = Faults(**{fault: world.rank == silent})
    with timeout(world, 1.0):
        started = time.monotonic()
        try:
            layer(*given.placed(world))
            layer.check()  # on a GPU the call returns before its waits have ended
            while world.rank == silent and time.monotonic() - started < 10:
                layer.check()  # the silent rank has all it needs; it learns of it later
                time.sleep(0.01)
        except ProtocolTimeout as error:
            failure = error
        assert failure is not None and time.monotonic() - started < 5
        assert failure.rank == world.rank
        if failure.what != "aborted":
            assert (failure.what, failure.peer) == (what, silent)
            expert = failure.index
            if what == "return":
                assert expert // 2 == silent and layer.engine.last_plan.counts[world.rank, expert]
            assert failure.seen == failure.expected - 1 and f"rank {silent}" in str(failure)
        with pytest.raises(WorldBroken, match="reset"):
            layer(*given.placed(world))
        whats = [answer.decode() for answer in _after_failure(world, failure.what)]
        assert what in whats, whats
    layer.engine.faults = Faults()
    assert layer(*given.placed(world)).tobytes() == want.tobytes()


def _after_failure(world: Any, text: str) -> list[bytes]:
    with timeout(world, 10.0):
        world.reset()
        return world.allgather(text.encode())


@case
def a_peer_that_never_says_done_is_named_and_the_world_recovers(world):
    _silent_rank_is_named(world, "mute_done", "return")


@case
def a_peer_that_never_says_dispatched_is_named_and_the_world_recovers(world):
    _silent_rank_is_named(world, "mute_dispatch", "dispatch")


@case
def a_rank_that_comes_late_to_a_collective_finds_it_aborted_and_all_recover(world):
    given = problem(ranks=world.size, tokens=10)
    layer = given.layer(world)
    want = layer(*given.placed(world))
    world.barrier()
    with timeout(world, 1.0):
        if world.rank == 1:
            time.sleep(1.4)
        with pytest.raises(ProtocolTimeout) as failed:
            layer(*given.placed(world))
        assert failed.value.what in ("allgather", "aborted")
        assert failed.value.what == "aborted" or failed.value.peer == 1
    with timeout(world, 10.0):
        world.reset()
    assert layer(*given.placed(world)).tobytes() == want.tobytes()

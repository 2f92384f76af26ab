"""Rank 1 is killed, in a stage or between forwards; the survivors say how they find out.

Arguments: ``forward`` or ``between``, and ``reset`` or ``close`` (close without a reset).
"""

from __future__ import annotations

import os
import signal
import sys
import time

from layer_problems import problem

import tileflow
from tileflow import ProtocolTimeout, RankLost, WorldBroken

LIMIT_S, SLACK_S = 2.0, 3.0
VICTIM = 1


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def survive(world, layer, given, then: str) -> None:
    started = time.monotonic()
    try:
        layer(*given.arguments(world.rank))
        raise AssertionError("the forward ended without the killed rank")
    except ProtocolTimeout as error:
        assert error.what == "aborted" or error.peer == VICTIM, error
        found = f"{error.what} of rank {error.peer}"
    assert time.monotonic() - started < LIMIT_S + SLACK_S, "the forward took too long to fail"
    try:
        layer(*given.arguments(world.rank))
        raise AssertionError("a broken world ran a forward")
    except WorldBroken:
        pass
    if then == "reset":
        try:
            world.reset()
            raise AssertionError("reset() went on without the killed rank")
        except RankLost as error:
            assert error.ranks == (VICTIM,), error
    started = time.monotonic()
    world.close()
    assert time.monotonic() - started < LIMIT_S + SLACK_S, "close() took too long"
    print(f"survivor {world.rank}: {found}", flush=True)


def main(where: str, then: str) -> None:
    world = tileflow.init("mpi_shm", timeout_s=LIMIT_S)
    given = problem(ranks=world.size, tokens=40)
    layer = given.layer(world)
    layer(*given.arguments(world.rank))
    if world.rank == VICTIM and where == "between":
        die()
    if world.rank == VICTIM:
        world.backend.gemm1 = die
        layer(*given.arguments(world.rank))
    survive(world, layer, given, then)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Refusals that need several processes; prints ``refused: ...`` on every rank.

Argument: ``shm``, ``hosts``, ``ranks``, ``loopback`` or ``raise``.
"""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

from layer_problems import problem

import tileflow
from tileflow.worlds import mpi, mpi_shm


def say(error: BaseException) -> None:
    print(f"refused: {type(error).__name__}: {error}", flush=True)


def too_little_shared_memory_on_one_rank() -> None:
    with tileflow.init("mpi_shm", timeout_s=20.0) as world:
        given = problem(ranks=world.size)
        if world.rank == 1:
            small = SimpleNamespace(f_bavail=16, f_frsize=4096)
            mpi_shm.os = SimpleNamespace(statvfs=lambda path: small)
        try:
            given.layer(world)
        except tileflow.WorldError as error:
            say(error)
        mpi_shm.os = os
        given.layer(world)(*given.arguments(world.rank))  # all ranks refused, none is broken


def several_hosts() -> None:
    comm = mpi.start(None, 20.0)

    class TwoHosts:
        """Claims that no other rank shares memory with this one."""

        def Split_type(self, *_: object, **__: object):
            return comm.Split(comm.Get_rank())

        def __getattr__(self, name: str):
            return getattr(comm, name)

    try:
        mpi_shm.MpiShmWorld(TwoHosts())
    except tileflow.WorldError as error:
        say(error)


def another_number_of_ranks() -> None:
    try:
        tileflow.init("mpi_shm", ranks=17)
    except tileflow.ConfigError as error:
        say(error)


def loopback_under_the_launcher() -> None:
    try:
        tileflow.init("loopback")
    except tileflow.WorldError as error:
        say(error)


def one_rank_raises() -> None:
    """The others' forward ends at once, and all ranks leave the ``with`` statement."""
    started = time.monotonic()
    try:
        with tileflow.init("mpi_shm", timeout_s=20.0) as world:
            given = problem(ranks=world.size)
            layer = given.layer(world)
            if world.rank == 1:
                raise ZeroDivisionError("of the user's own")
            layer(*given.arguments(world.rank))
    except (ZeroDivisionError, tileflow.ProtocolTimeout) as error:
        assert time.monotonic() - started < 10
        say(error)


CASES = {
    "shm": too_little_shared_memory_on_one_rank,
    "hosts": several_hosts,
    "ranks": another_number_of_ranks,
    "loopback": loopback_under_the_launcher,
    "raise": one_rank_raises,
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()

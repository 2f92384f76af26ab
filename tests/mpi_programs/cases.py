"""Run the cases of ``world_cases.py`` on a world; all ranks fail together, with all reasons."""

from __future__ import annotations

import sys
import time
import traceback

from world_cases import CASES

import tileflow


def attempt(function, world) -> str:
    try:
        function(world)
    except BaseException:
        return f"rank {world.rank}, {function.__name__}:\n{traceback.format_exc()}"
    return ""


def main(name: str = "mpi_shm") -> int:
    with tileflow.init(name, timeout_s=20.0) as world:
        for function in CASES:
            started = time.perf_counter()
            answers = world.allgather(attempt(function, world).encode())
            failures = [answer.decode() for answer in answers if answer]
            if world.rank == 0:
                print(function.__name__, f"{time.perf_counter() - started:.2f} s", flush=True)
                print(*failures, sep="\n", flush=True)
            if failures:
                return 1
        if world.rank == 0:
            print(f"{len(CASES)} cases passed on {world.size} ranks", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

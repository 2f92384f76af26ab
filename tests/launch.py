"""Run a program of ``tests/mpi_programs`` under mpirun, within a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.mpi_env import find_mpirun, mpi_environment

PROGRAMS = Path(__file__).parent / "mpi_programs"
LIMIT_S = 120.0
MAX_RANKS = 5


@dataclass(frozen=True)
class Finished:
    """How a program ended; `output` holds stdout and stderr of all ranks."""

    returncode: int
    output: str


def run_program(
    name: str, ranks: int, *arguments: str, fault_tolerant: bool = False, limit_s: float = LIMIT_S
) -> Finished:
    """Run ``mpi_programs/<name>.py`` on `ranks` ranks.

    Args:
        name: of the program.
        ranks: at most MAX_RANKS.
        arguments: of the program.
        fault_tolerant: a dead rank does not end the others (Open MPI with ULFM).
        limit_s: after this the whole process group is ended and TimeoutError raised.
    """
    assert ranks <= MAX_RANKS
    options = ["--with-ft", "ulfm"] if fault_tolerant else []
    launcher = [str(find_mpirun()), *options, "-n", str(ranks)]
    return run_command(
        [*launcher, sys.executable, str(PROGRAMS / f"{name}.py"), *arguments], limit_s=limit_s
    )


def run_command(command: list[str], *, limit_s: float = LIMIT_S, **variables: str) -> Finished:
    """Run a command with the MPI environment and the repository on Python's path."""
    folders = [str(PROGRAMS.parents[1]), str(PROGRAMS.parent)]
    environment = {**os.environ, **mpi_environment(), **variables}
    environment["PYTHONPATH"] = os.pathsep.join([*folders, environment.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        output = _end_group(process)
        raise TimeoutError(f"{command} took more than {limit_s} s:\n{output}") from None
    return Finished(process.returncode, output)


def _end_group(process: subprocess.Popen[str]) -> str:
    """End the process group; mpirun gets a moment to end the ranks itself."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            return process.communicate(timeout=5)[0]
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
    return process.communicate(timeout=5)[0]

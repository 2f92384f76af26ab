"""Say in plain words what this machine can run, and why not more: ``python -m tileflow.doctor``.

Needs NumPy alone; on a terminal a table where rich is installed. Changes nothing and starts
nothing that stays.
The exit code is 0 whatever is found, and something else only where the doctor itself fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from .config import Environment
from .probes import gpu, machine, mpi, packages
from .probes.finding import Finding, guard
from .version import __version__

__all__ = ["Finding", "Job", "collect", "jobs", "main"]

_MARKS = {True: "ok", False: "no", None: "note"}
_COMPILER = ("NVRTC", "headers", "CUTLASS")
_CUDA = ("driver", "GPU", "CuPy", *_COMPILER)
_COLORS = {True: "green", False: "red", None: "yellow"}


def collect(environment: Environment | None = None) -> list[Finding]:
    """Look at everything and return what was found; a probe that throws becomes a finding."""
    env = environment or Environment.read()
    report = gpu.read_report()
    driver = report["driver"]
    probes: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("Python", machine.python),
        ("driver", partial(gpu.cuda, report)),
        ("GPU", partial(gpu.gpus, report)),
        ("peer access", partial(gpu.peer_access, report)),
        ("MPS", partial(gpu.mps, report, env)),
        ("CuPy", partial(packages.cupy, driver)),
        ("NVRTC", partial(packages.nvrtc, driver)),
        ("headers", packages.headers),
        ("NVSHMEM", partial(packages.nvshmem, driver)),
        ("MPI", mpi.mpi),
        ("shared memory", machine.shared_memory),
        ("kernel cache", partial(machine.kernel_cache, env)),
        ("environment", partial(machine.variables, env)),
        ("launcher", partial(machine.launcher, env)),
    ]
    return [finding for name, probe in probes for finding in guard(name, probe)]


@dataclass(frozen=True)
class Job:
    """One thing that a user can run.

    Attributes:
        what: in words.
        command: how to start it.
        missing: names of the findings that stand against it; it runs where there are none.
    """

    what: str
    command: str
    missing: tuple[str, ...] = ()


def jobs(findings: Sequence[Finding]) -> list[Job]:
    """Return what can run here and what cannot, with the command of each."""
    num_gpus = sum(f.name.startswith("GPU ") and f.ok is True for f in findings)
    bad = {f.name for f in findings if f.ok is False or f.failed}
    if num_gpus == 0:
        bad.add("GPU")
    return [
        Job(what, command, tuple(name for name in needs if name in bad))
        for what, command, needs in _known_jobs(num_gpus)
    ]


def _known_jobs(num_gpus: int) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (what, command, names of the findings that it needs)."""
    bench = f"{_python()} -m tileflow.bench"
    yield "CPU, virtual ranks in one process (loopback)", f"{bench} --backend cpu", ()
    command = f"{mpirun(4)} {bench} --backend cpu --world mpi_shm"
    yield "CPU, a process per rank (mpi_shm)", command, ("MPI", "shared memory")
    yield "compile every kernel, in a checkout", f"{_python()} -m tools.compile_all", _COMPILER
    command = f"{bench} --backend cuda --world loopback"
    yield "GPU, virtual ranks on one (loopback)", command, _CUDA
    if find_spec("tileflow.worlds.nvshmem") is not None:
        command = f"{mpirun(num_gpus if num_gpus > 1 else 4)} {bench} --world nvshmem"
        yield "GPU, a process per rank (nvshmem)", command, (*_CUDA, "NVSHMEM", "MPI")


def mpirun(ranks: int) -> str:
    """Return the start of a command that runs `ranks` ranks, as root and on few cores too."""
    found = mpi.find_mpirun() or "mpirun"
    root = " --allow-run-as-root" if os.geteuid() == 0 else ""
    few = " --oversubscribe" if 2 * ranks > (os.cpu_count() or 1) else ""
    return f"{_short('mpirun', found)}{root}{few} -n {ranks}"


def _python() -> str:
    return _short("python", sys.executable)


def _short(name: str, path: str) -> str:
    """Return the bare name where the shell finds this very file by it."""
    return name if shutil.which(name) == path else path


def report_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the findings as plain text."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        first, *rest = finding.text.splitlines() or [""]
        yield f"{_MARKS[finding.ok]:4}  {finding.name:{width}}  {first}"
        rest += [f"-> {finding.hint}"] if finding.hint else []
        yield from (f"{'':{width + 8}}{line}" for line in rest)


def job_lines(listed: Sequence[Job]) -> Iterator[str]:
    """Yield the summary as plain text, commands on lines of their own."""
    for job in listed:
        if job.missing:
            yield f"  no   {job.what}; first mend: {', '.join(job.missing)}"
        else:
            yield f"  yes  {job.what}"
            yield f"         {job.command}"


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print a table on a terminal with rich; else plain lines, which no column folds."""
    try:
        from rich.console import Console
    except ImportError:
        print(*report_lines(findings), sep="\n")
        return
    console = Console()
    if console.is_terminal:
        console.print(_table(findings))
    else:
        print(*report_lines(findings), sep="\n")


def _table(findings: Sequence[Finding]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "part")
    table.add_column("what was found, and what would help", overflow="fold")
    for finding in findings:
        text = Text(finding.text)
        if finding.hint:
            text.append(f"\n-> {finding.hint}", style="bold")
        table.add_row(Text(_MARKS[finding.ok], style=_COLORS[finding.ok]), finding.name, text)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return 0."""
    parser = argparse.ArgumentParser(prog="python -m tileflow.doctor", description=__doc__)
    parser.parse_args(argv)
    findings = collect()
    print(f"tileflow {__version__} on this machine (ok: usable, no: missing, note: look at it)\n")
    _print_findings(findings)
    print("\nWhat can run here:")
    print(*job_lines(jobs(findings)), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

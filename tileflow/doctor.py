"""Say in plain words what this machine can run, and why not more: ``python -m tileflow.doctor``.

Needs NumPy alone; a table where rich is installed. Changes nothing and starts nothing that stays.
The exit code is 0 whatever is found, and something else only where the doctor itself fails.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from .config import Environment
from .probes import gpu, machine, mpi, packages
from .probes.finding import Finding, guard
from .version import __version__

__all__ = ["Finding", "Job", "collect", "jobs", "main"]

_MARKS = {True: "ok", False: "no", None: "note"}
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
    count = sum(f.name.startswith("GPU ") and f.ok is True for f in findings)
    bad = {f.name for f in findings if f.ok is False or f.text.startswith("could not be")}
    bad |= {"GPU"} if count == 0 else set()
    compiler = ("NVRTC", "headers", "CUTLASS")
    cuda = ("driver", "GPU", "CuPy", *compiler)
    bench = "python -m tileflow.bench"
    few = mpirun(4)

    def job(what: str, command: str, *needs: str) -> Job:
        return Job(what, command, tuple(name for name in needs if name in bad))

    listed = [
        job("CPU, 4 virtual ranks in one process (loopback)", f"{bench} --backend cpu"),
        job(
            "CPU, 4 processes (mpi_shm)",
            f"{few} {bench} --backend cpu --world mpi_shm",
            "MPI",
            "shared memory",
        ),
        job("compile every kernel", "python -m tools.compile_all  (in a checkout)", *compiler),
        job(
            "GPU, 4 virtual ranks on one (loopback)",
            f"{bench} --backend cuda --world loopback",
            *cuda,
        ),
    ]
    if find_spec("tileflow.worlds.nvshmem") is not None:
        command = f"{mpirun(max(count, 2))} {bench} --backend cuda --world nvshmem"
        listed.append(job("GPU, one process per GPU (nvshmem)", command, *cuda, "NVSHMEM", "MPI"))
    return listed


def mpirun(ranks: int) -> str:
    """Return the start of a command that runs `ranks` ranks, as root and on few cores too."""
    found = mpi.find_mpirun() or "mpirun"
    on_path = Path(found).parent in map(Path, os.get_exec_path())
    root = " --allow-run-as-root" if os.geteuid() == 0 else ""
    few = " --oversubscribe" if 2 * ranks > (os.cpu_count() or 1) else ""
    return f"{'mpirun' if on_path else found}{root}{few} -n {ranks}"


def report_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the findings as plain text."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        yield f"{_MARKS[finding.ok]:4}  {finding.name:{width}}  {finding.text}"
        if finding.hint:
            yield f"{'':4}  {'':{width}}  -> {finding.hint}"


def job_lines(listed: Sequence[Job]) -> Iterator[str]:
    """Yield the summary as plain text, commands on lines of their own."""
    for job in listed:
        if job.missing:
            yield f"  no   {job.what}; first mend: {', '.join(job.missing)}"
        else:
            yield f"  yes  {job.what}"
            yield f"         {job.command}"


def _print_findings(findings: Sequence[Finding]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(*report_lines(findings), sep="\n")
        return
    table = Table("", "part", "what was found, and what would help")
    for finding in findings:
        text = Text(finding.text)
        if finding.hint:
            text.append(f"\n-> {finding.hint}", style="bold")
        table.add_row(Text(_MARKS[finding.ok], style=_COLORS[finding.ok]), finding.name, text)
    Console().print(table)


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

"""mpi4py, the MPI library that it loads, and the `mpirun` that would start it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, ProbeError, run_json

__all__ = ["family", "find_mpirun", "mpi"]

_ASK = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps({"mpi4py": mpi4py.__version__, "library": MPI.Get_library_version()}))
"""
_INSTALL = "pip install 'tileflow[mpi]'"
_FAMILIES = {"Open MPI": "Open MPI|OpenRTE|PRRTE", "Intel MPI": "Intel", "MPICH": "MPICH|HYDRA"}


def find_mpirun() -> str | None:
    """Return the first `mpirun` on PATH, else the one beside this interpreter, else None."""
    return shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))


def family(text: str) -> tuple[str, str]:
    """Return (implementation, version) from what a library or an `mpirun` says of itself."""
    name = next((n for n, words in _FAMILIES.items() if re.search(words, text, re.I)), "unknown")
    version = re.search(r"\d+\.\d+(\.\d+)?", text)
    return name, version.group() if version else "?"


def mpi() -> Iterator[Finding]:
    """Does mpi4py load a library, and does `mpirun` belong to it?"""
    try:
        seen = run_json(["-c", _ASK])
    except ProbeError as error:
        yield Finding("MPI", False, f"mpi4py does not work here ({error})", _INSTALL)
        return
    name, version = family(seen["library"])
    text = f"mpi4py {seen['mpi4py']} on {name} {version}"
    mpirun = find_mpirun()
    if mpirun is None:
        yield Finding("MPI", False, f"{text}, but there is no mpirun to start ranks", _INSTALL)
    else:
        yield _launcher(text, (name, version), mpirun)


def _launcher(text: str, library: tuple[str, str], mpirun: str) -> Finding:
    launcher = family(_version_of(mpirun))
    text += f"; {mpirun} is of {launcher[0]} {launcher[1]}"
    majors = [version.split(".")[0] for _, version in (library, launcher)]
    if launcher[0] != library[0] or (library[0] == "Open MPI" and majors[0] != majors[1]):
        text += ": ranks started by it would each see a world of one"
        hint = "put the mpirun of mpi4py's library first on PATH, or build mpi4py for the other one"
        return Finding("MPI", None, text, hint)
    return Finding("MPI", True, text)


def _version_of(mpirun: str) -> str:
    command = [mpirun, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout + done.stderr

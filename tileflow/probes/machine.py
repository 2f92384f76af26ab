"""Python, shared memory, the kernel cache, and what the environment says."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..config import Environment
from .finding import Finding

__all__ = ["kernel_cache", "launcher", "python", "shared_memory", "variables"]

MIN_PYTHON, MAX_PYTHON = (3, 10), (3, 13)
SMALL_SHM = 256 << 20  # bytes; a container's default is 64 MiB
SMALL_CACHE = 64 << 20
_BLOCKING = "every launch waits for its kernel, so overlap is refused"


def python() -> Iterator[Finding]:
    """Are Python and NumPy of a version that is tested?"""
    text = f"{platform.python_version()} with NumPy {np.__version__}, {sys.executable}"
    if MIN_PYTHON <= sys.version_info[:2] <= MAX_PYTHON:
        yield Finding("Python", True, text)
    else:
        yield Finding("Python", None, f"{text}; tested are 3.10 to 3.13")


def shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """How much can CPU ranks share?"""
    if not folder.is_dir():
        text = f"{folder} is missing: the ranks of mpi_shm have no memory to share"
        yield Finding("shared memory", False, text, "use --world loopback")
        return
    free = shutil.disk_usage(folder).free
    text = f"{free} bytes ({free / 2**20:.0f} MiB) free in {folder}"
    if free < SMALL_SHM:
        text += "; larger shapes of mpi_shm are refused"
        yield Finding("shared memory", None, text, "in a container: docker run --shm-size=2g")
    else:
        yield Finding("shared memory", True, text)


def kernel_cache(environment: Environment) -> Iterator[Finding]:
    """Can compiled kernels be kept? If not, they are compiled anew, which works and takes time."""
    folder = environment.cache
    hint = "set TILEFLOW_CACHE to a folder that you can write"
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        text = f"{folder} cannot be written ({error}): every process compiles its kernels anew"
        yield Finding("kernel cache", False, text, hint)
        return
    text = f"{folder}, {free / 2**20:.0f} MiB free"
    yield Finding("kernel cache", free >= SMALL_CACHE or None, text, hint * (free < SMALL_CACHE))


def variables(environment: Environment) -> Iterator[Finding]:
    """Are variables set that are known to cause trouble?"""
    if not environment.troublesome:
        yield Finding("environment", True, "no variable is set that is known to cause trouble")
    for name, value in environment.troublesome.items():
        why = _BLOCKING if name == "CUDA_LAUNCH_BLOCKING" else "known to cause trouble"
        text = f"{name}={value}: {why}"
        yield Finding("environment", None, text, f"unset {name}")


def launcher(environment: Environment) -> Iterator[Finding]:
    """Did a launcher start this process as one of several ranks?"""
    if environment.launcher_size > 1:
        said = f"{environment.launcher_name}={environment.launcher_size}"
        text = f"{said}: a launcher started {environment.launcher_size} ranks, each is told this"
        yield Finding("launcher", None, text, "for one process, start it without mpirun or srun")
    else:
        yield Finding("launcher", True, "none: one process")

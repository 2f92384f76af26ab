"""What all tests share: hypothesis profiles, a watch for open worlds, reasons to skip."""

from __future__ import annotations

import importlib.util
import os

import pytest
from hypothesis import settings

from tileflow.worlds import gpu_problem, open_worlds
from tools.mpi_env import find_mpirun

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _no_world_stays_open():
    """Fail a test that made a world and did not close it."""
    before = set(open_worlds())
    yield
    leaked = set(open_worlds()) - before
    for world in leaked:
        world.close()
    assert not leaked, f"worlds were left open: {leaked}"


def _mpi_problem() -> str | None:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return None if find_mpirun() else "there is no mpirun"


_NEEDS = {
    "gpu": ("an NVIDIA GPU and CuPy", gpu_problem),
    "mpi": ("pip install 'tileflow[mpi]'", _mpi_problem),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (needs, problem) in _NEEDS.items():
        found = problem() if item.get_closest_marker(marker) else None
        if found:
            pytest.skip(f"needs {needs}: {found}")

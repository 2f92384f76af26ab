"""The extra is chosen by what the driver says, and without a driver there is one too."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tools import choose_extra


def driver(version, status=0):
    """Return a loader of a libcuda that answers so."""

    def get_version(out):
        out._obj.value = version
        return status

    return lambda name: SimpleNamespace(cuDriverGetVersion=get_version)


def no_library(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("version", "extra"),
    [
        (14000, "cuda13"),
        (13010, "cuda13"),
        (13000, "cuda13"),
        (12090, "cuda12"),
        (12000, "cuda12"),
        (11080, "mpi"),
        (0, "mpi"),
    ],
)
def test_the_drivers_version_decides(version, extra):
    assert choose_extra.choose(driver(version))[0] == extra


def test_the_reason_names_the_version_that_the_driver_runs():
    assert "CUDA 13.1" in choose_extra.choose(driver(13010))[1]


def test_without_a_driver_the_cpu_is_chosen_and_the_loaders_words_are_told():
    extra, why = choose_extra.choose(no_library)
    assert extra == "mpi"
    assert "libcuda.so.1: cannot open shared object file" in why


def test_a_driver_that_answers_with_an_error_counts_as_none():
    extra, why = choose_extra.choose(driver(13000, status=34))
    assert extra == "mpi"
    assert "34" in why


def test_a_library_that_is_no_driver_counts_as_none():
    assert choose_extra.choose(lambda name: SimpleNamespace())[0] == "mpi"


def test_the_script_prints_one_extra_and_one_line_of_reason():
    command = [sys.executable, "-S", choose_extra.__file__]  # -S: nothing but the standard library
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() in ("cuda13", "cuda12", "mpi")
    assert len(done.stderr.splitlines()) == 1

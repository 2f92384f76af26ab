"""What is installed is what is promised: metadata, wheel, editable install, Makefile."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tileflow.version import __version__
from tools import install
from tools.mpi_env import mpi_environment

ROOT = Path(__file__).resolve().parent.parent
SETUP = runpy.run_path(str(ROOT / "setup.py"))
EXTRAS = SETUP["EXTRAS"]
KERNELS = {path.name for path in (ROOT / "cuda_src").glob("*.cu*")}


def run(*command, **kwargs):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# Metadata


def test_the_core_needs_numpy_alone():
    assert SETUP["CORE"] == ["numpy"]


def test_the_version_stands_in_one_place():
    assert SETUP["read_version"]() == __version__


def test_what_cutlass_cannot_compile_with_is_pinned_in_every_extra_that_compiles():
    for name in ("jit", "cuda13", "test"):
        assert "nvidia-cuda-cccl<13.2" in EXTRAS[name]
    for name in ("jit", "cuda13", "cuda12", "test", "test-cuda12"):
        assert "nvidia-cutlass==4.2.0.0" in EXTRAS[name]


def test_cuda_12_and_13_never_meet_in_one_extra():
    for name, lines in EXTRAS.items():
        twelve = [line for line in lines if "cu12" in line or "cuda12x" in line]
        thirteen = [line for line in lines if re.match(r"nvidia-cuda-\w+(<|$)|.*cu(da)?13", line)]
        assert not (twelve and thirteen), name


def test_development_tools_are_pinned_exactly():
    assert all("==" in line for line in EXTRAS["dev"])


def environment_yml():
    lines = (ROOT / "environment.yml").read_text().splitlines()
    items = [re.match(r"\s+- (\S.*)", line) for line in lines]
    return {found.group(1) for found in items if found} - {"pip:", "conda-forge", "--editable ."}


def test_environment_yml_names_what_setup_py_names():
    wanted = {*SETUP["CORE"], *EXTRAS["mpi"], *EXTRAS["plot"], *EXTRAS["test"]}
    assert environment_yml() - wanted == {"python>=3.10,<3.14", "pip", "make"}
    assert wanted - environment_yml() == set()


def test_pre_commit_calls_the_targets_of_make_check():
    hooks = re.findall(r"entry: make (\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    check = re.search(r"^check: (.*) ##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert check is not None
    assert hooks == check.group(1).split()
    assert "repo: http" not in (ROOT / ".pre-commit-config.yaml").read_text()


# Wheel, editable install, PYTHONPATH


def needs_setuptools():
    """Skip where this interpreter cannot build wheels without the network."""
    have = {name: find_spec(name) is not None for name in ("pip", "setuptools", "wheel")}
    if not (have["pip"] and have["setuptools"]):
        pytest.skip("pip or setuptools is missing in this interpreter")
    found = version("setuptools")
    if not have["wheel"] and tuple(map(int, found.split(".")[:2])) < (70, 1):
        pytest.skip(f"setuptools {found} builds no wheels: 70.1 or the package wheel is needed")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what goes into a wheel, so that building leaves nothing in the real checkout."""
    needs_setuptools()
    folder = tmp_path_factory.mktemp("checkout")
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("tileflow", "cuda_src"):
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run(sys.executable, "-m", "pip", "wheel", *flags, "--wheel-dir", str(target), str(checkout))
    (path,) = target.glob("*.whl")
    return path


def source_dir(*flags, code="", **env):
    """Return what a fresh process finds as (package folder, kernel folder)."""
    show = "import tileflow.jit as j; print(j.__file__, j.source_dir(), sep='\\n')"
    keep = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TILEFLOW_CUDA_SRC")}
    command = [sys.executable, *flags, "-c", f"{code}\n{show}"]
    package, kernels = map(Path, run(*command, env={**keep, **env}, cwd="/").splitlines())
    return package.parent, kernels


def test_the_wheel_holds_every_module_and_every_kernel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "tileflow").rglob("*.py")}
    assert modules <= names
    assert {f"tileflow/cuda_src/{name}" for name in KERNELS} <= names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "cuda_src/"))]


def test_the_wheels_metadata_says_what_setup_py_says(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        text = archive.read(name).decode()
    assert f"Version: {__version__}" in text
    python = re.search("^Requires-Python: (.*)$", text, re.MULTILINE)
    assert python is not None
    assert set(python.group(1).split(",")) == {">=3.10", "<3.14"}
    assert set(re.findall("^Provides-Extra: (.*)$", text, re.MULTILINE)) == set(EXTRAS)


def test_an_installed_wheel_uses_the_kernels_in_it(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    found = source_dir(PYTHONPATH=str(tmp_path))
    assert found == (tmp_path / "tileflow", tmp_path / "tileflow/cuda_src")
    assert {path.name for path in found[1].iterdir()} == KERNELS


def test_an_editable_install_uses_the_checkouts_kernels(checkout, tmp_path):
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--ignore-installed"]
    command = [sys.executable, "-m", "pip", "install", *flags, "--prefix", str(tmp_path)]
    run(*command, "--editable", str(checkout))
    (site,) = tmp_path.glob("lib*/python*/site-packages")
    # Without `site`, so that an editable install of the real checkout does not come first; NumPy's
    # folder is added as it is.
    folders = {str(Path(np.__file__).parent.parent), sysconfig.get_path("purelib")}
    code = f"import site, sys; site.addsitedir({str(site)!r}); sys.path += {sorted(folders)!r}"
    found = source_dir("-S", code=code)
    assert found == (checkout / "tileflow", checkout / "cuda_src")


def test_pythonpath_uses_the_checkouts_kernels():
    assert source_dir(PYTHONPATH=str(ROOT)) == (ROOT / "tileflow", ROOT / "cuda_src")


# The MPI environment


def machine(folder, uid, cores):
    """Return a PATH on which `id` and `nproc` answer so."""
    for name, answer in (("id", uid), ("nproc", cores)):
        (folder / name).write_text(f"#!/bin/sh\necho {answer}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_root_on_few_cores_gets_all_settings(tmp_path):
    assert mpi_environment(machine(tmp_path, 0, 2)) == {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_osc": "^ucx",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def test_a_user_on_many_cores_gets_neither_roots_nor_oversubscribed_settings(tmp_path):
    found = mpi_environment(machine(tmp_path, 1000, 64))
    assert set(found) == {
        "OMPI_MCA_osc",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
    }


def test_what_is_set_already_stays(tmp_path):
    base = {**machine(tmp_path, 0, 2), "OMP_NUM_THREADS": "3", "OMPI_MCA_osc": "sm"}
    found = mpi_environment(base)
    assert "OMP_NUM_THREADS" not in found
    assert "OMPI_MCA_osc" not in found


# The installer and the Makefile


def test_a_python_without_ensurepip_is_told_what_to_install(tmp_path):
    with pytest.raises(install.SetupError, match=r"apt-get install python3\.\d+-venv"):
        install.make_venv(tmp_path / "venv", has_ensurepip=False)


def test_an_old_pip_outside_an_environment_is_told_how_to_upgrade(monkeypatch):
    monkeypatch.setattr(install, "pip_version", lambda python: (20, 0))
    with pytest.raises(install.SetupError, match="pip install --upgrade pip"):
        install.check_pip("python3", in_venv=False)


def test_a_python_without_pip_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(install, "pip_version", lambda python: None)
    with pytest.raises(install.SetupError, match="apt-get install python3-pip"):
        install.check_pip("python3", in_venv=False)


def test_an_unknown_extra_is_refused_with_the_known_ones():
    with pytest.raises(install.SetupError, match=r"cuda14.*cuda12, cuda13"):
        install.parse_extras("mpi,cuda14")


def test_the_environment_of_another_python_is_refused(tmp_path):
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.9.1\n")
    with pytest.raises(install.SetupError, match=r"holds Python 3\.9"):
        install.check_same_python(tmp_path)


def test_a_second_install_of_the_same_extras_does_nothing(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(install, "make_venv", lambda folder: folder / "bin/python")
    monkeypatch.setattr(install, "check_pip", lambda python, in_venv: None)
    monkeypatch.setattr(install, "install", lambda python, targets: calls.append(targets))
    install.install_in_venv(tmp_path, {"mpi", "test"})
    install.install_in_venv(tmp_path, {"mpi"})
    assert calls == [["--editable", ".[mpi,test]"]]
    monkeypatch.setattr(install, "metadata_key", lambda: "setup.py was edited")
    install.install_in_venv(tmp_path, {"mpi"})
    assert calls[1:] == [["--editable", ".[mpi]"]]


def make(*arguments):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    keep = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    env = {
        k: v
        for k, v in keep.items()
        if k not in ("EXTRAS", "ARGS", "VENV", "NO_VENV", "NO_INSTALL")
    }
    return run("make", "--dry-run", *arguments, cwd=ROOT, env=env)


def test_make_bench_installs_the_chosen_extra_and_mpi_and_starts_the_ranks():
    text = make("bench", "EXTRAS=cuda13", "RANKS=3", "ARGS=--quick")
    assert "--extras cuda13,mpi" in text
    assert re.search(r"mpirun -n 3 \S*/\.venv/bin/python -m tileflow\.bench --quick", text)


def test_make_test_selects_gpu_tests_only_with_gpu_packages():
    assert "gpu or not gpu" not in make("test", "EXTRAS=mpi")
    assert '-m "gpu or not gpu"' in make("test", "EXTRAS=cuda13")


def test_make_test_beside_cuda_12_brings_no_packages_of_cuda_13():
    assert "--extras cuda12,mpi,test-cuda12" in make("test", "EXTRAS=cuda12")


def test_no_venv_uses_the_interpreter_that_is_named():
    text = make("test", "EXTRAS=mpi", "NO_VENV=1", f"PYTHON={sys.executable}")
    assert "--no-venv" in text
    assert f"{sys.executable} -m pytest" in text


def test_no_install_runs_with_what_is_there():
    text = make("bench", "EXTRAS=cuda13", "NO_VENV=1", "NO_INSTALL=1")
    assert "tools/install.py" not in text
    assert "-m tileflow.bench" in text

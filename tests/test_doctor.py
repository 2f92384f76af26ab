"""The doctor tells what is missing and how to get it, and nothing that it looks at can break it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tileflow import doctor, jit
from tileflow.config import Environment
from tileflow.probes import driver, gpu, machine, mpi, packages
from tileflow.probes.finding import Finding, ProbeError, guard, run_json

NO_DRIVER = {"error": "libcuda.so.1: cannot open", "driver": 0, "gpus": [], "peers": []}


class FakeCuda:
    """A libcuda with these GPUs, pairs of peers, and status of cuInit."""

    def __init__(self, capabilities, peers=(), version=13000, init=0):
        self.capabilities, self.peers = capabilities, peers
        self.version, self.init = version, init

    def cuDriverGetVersion(self, out):
        return self._give(out, self.version)

    def cuInit(self, flags):
        return self.init

    def cuGetErrorName(self, status, out):
        return self._give(out, b"CUDA_ERROR_NO_DEVICE")

    def cuDeviceGetCount(self, out):
        return self._give(out, len(self.capabilities))

    def cuDeviceGet(self, out, idx):
        return self._give(out, idx)

    def cuDeviceGetName(self, buffer, size, device):
        buffer.value = b"Fake GPU"
        return 0

    def cuDeviceTotalMem_v2(self, out, device):
        return self._give(out, 80 << 30)

    def cuDeviceGetAttribute(self, out, which, device):
        major, minor = self.capabilities[device]
        return self._give(out, {16: 132, 75: major, 76: minor}[which])

    def cuDeviceCanAccessPeer(self, out, device, peer):
        return self._give(out, int((device, peer) in self.peers))

    @staticmethod
    def _give(out, value):
        out._obj.value = value
        return 0


def report_of(*capabilities, **kwargs):
    return driver.cuda_report(lambda name: FakeCuda(capabilities, **kwargs))


def only(findings):
    (finding,) = findings
    return finding


def missing(name):
    def probe(*arguments, **kwargs):
        raise ProbeError(f"ModuleNotFoundError: No module named '{name}'")

    return probe


# The driver and its GPUs


def test_a_machine_without_driver_is_told_the_loaders_words_and_that_the_cpu_works(monkeypatch):
    monkeypatch.setattr(gpu, "read_report", lambda: NO_DRIVER)
    found = {f.name: f for f in doctor.collect(Environment())}
    assert found["driver"].ok is False
    assert found["GPU"].ok is False
    assert "libcuda.so.1: cannot open" in found["GPU"].text
    assert "--backend cpu" in found["GPU"].hint
    assert "MPS" not in found


def test_a_missing_libcuda_is_an_answer():
    def load(name):
        raise OSError(f"{name}: cannot open shared object file")

    report = driver.cuda_report(load)
    assert report["driver"] == 0
    assert "libcuda.so.1" in report["error"]


def test_a_driver_without_gpus_keeps_its_version_and_names_the_error():
    report = report_of(init=100)
    assert report["driver"] == 13000
    assert "cuInit says CUDA_ERROR_NO_DEVICE" in report["error"]
    assert only(gpu.cuda(report)).ok is True
    assert "CUDA_ERROR_NO_DEVICE" in only(gpu.gpus(report)).text


@pytest.mark.parametrize(
    ("capability", "ok", "word"),
    [
        ((7, 0), False, "sm_70"),
        ((7, 5), False, "sm_80 or newer"),
        ((8, 0), True, "mma.sync"),
        ((9, 0), True, "wgmma"),
        ((10, 0), True, "sm_100"),
        ((12, 0), True, "mma.sync"),
    ],
)
def test_a_gpu_is_usable_from_sm_80_on_and_sm_90_gets_wgmma(capability, ok, word):
    finding = only(gpu.gpus(report_of(capability)))
    assert (finding.name, finding.ok) == ("GPU 0", ok)
    assert word in finding.text
    assert "Fake GPU" in finding.text


def test_a_driver_older_than_cuda_12_is_refused():
    finding = only(gpu.cuda(report_of((8, 0), version=11080)))
    assert finding.ok is False
    assert "11.8" in finding.text


def test_missing_links_between_gpus_are_named():
    pairs = {(a, b) for a in range(3) for b in range(3)} - {(2, 0)}
    finding = only(gpu.peer_access(report_of(*[(9, 0)] * 3, peers=pairs)))
    assert finding.ok is None
    assert "1 of 6 pairs" in finding.text
    assert "2->0" in finding.text


def test_one_gpu_needs_no_links():
    assert list(gpu.peer_access(report_of((9, 0)))) == []


def test_mps_is_seen_by_its_pipes_and_its_daemon(tmp_path):
    pipe, proc = tmp_path / "pipe", tmp_path / "proc"
    (proc / "41").mkdir(parents=True)
    pipe.mkdir()
    env = Environment(mps_pipe=str(pipe))
    report = report_of((9, 0))
    assert "nvidia-cuda-mps-control -d" in only(gpu.mps(report, env, proc)).hint
    (pipe / "control").touch()
    assert only(gpu.mps(report, env, proc)).ok is None
    (proc / "41" / "comm").write_text("nvidia-cuda-mps\n")
    assert only(gpu.mps(report, env, proc)).ok is True


# Packages


def test_two_cupys_in_one_environment_are_refused(monkeypatch):
    both = {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}
    monkeypatch.setattr(packages, "_installed", lambda prefix: both)
    finding = only(packages.cupy(13000))
    assert finding.ok is False
    assert "cupy-cuda12x 14.2.0" in finding.text


def test_a_cupy_for_a_newer_cuda_than_the_drivers_is_refused(monkeypatch):
    monkeypatch.setattr(packages, "_installed", lambda prefix: {"cupy-cuda13x": "14.2.0"})
    finding = only(packages.cupy(12040))
    assert finding.ok is False
    assert "tileflow[cuda12]" in finding.hint


def test_missing_nvrtc_names_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setattr(packages, "run_json", missing("cuda"))
    finding = only(packages.nvrtc(0))
    assert finding.ok is False
    assert "No module named 'cuda'" in finding.text
    assert "tileflow[jit]" in finding.hint


def test_an_nvrtc_that_is_newer_than_the_driver_is_refused(monkeypatch):
    seen = {"nvrtc": [13, 5], "core": "1.2.2", "bindings": "13.4.4"}
    monkeypatch.setattr(packages, "run_json", lambda arguments: seen)
    assert only(packages.nvrtc(12080)).ok is False
    assert only(packages.nvrtc(13000)).ok is True


def test_no_header_folder_at_all_is_a_finding(monkeypatch):
    monkeypatch.setattr(jit, "header_dirs", lambda: ())
    finding = only(packages.headers())
    assert finding.ok is False
    assert "TILEFLOW_CUDA_INCLUDE" in finding.hint


def headers_with_cccl(folder, version):
    files = {
        "cuda_fp16.h": "",
        "cutlass/version.h": "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n"
        "#define CUTLASS_PATCH 0\n",
        "cuda/std/__cccl/version.h": f"#define CCCL_VERSION {version}\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(("version", "ok"), [(3001004, True), (3002000, False)])
def test_a_cccl_that_cutlass_does_not_compile_with_is_refused(monkeypatch, tmp_path, version, ok):
    headers_with_cccl(tmp_path, version)
    monkeypatch.setattr(jit, "header_dirs", lambda: (tmp_path,))
    folders, cutlass = packages.headers()
    assert str(tmp_path) in folders.text
    assert cutlass.ok is ok
    assert bool(cutlass.hint) is not ok


def test_missing_cutlass_headers_are_named(monkeypatch, tmp_path):
    (tmp_path / "cuda_fp16.h").touch()
    monkeypatch.setattr(jit, "header_dirs", lambda: (tmp_path,))
    _, cutlass = packages.headers()
    assert cutlass.ok is False
    assert "CUTLASS" in cutlass.text


def nvshmem_machine(monkeypatch, folder, host, device):
    header = folder / "include/non_abi/nvshmem_version.h"
    header.parent.mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), device, strict=True)
    header.write_text("".join(f"#define NVSHMEM_VENDOR_{p}_VERSION {n}\n" for p, n in parts))
    monkeypatch.setattr(packages, "_installed", lambda prefix: {"nvshmem4py-cu13": "0.4.1"})
    library = {"version": list(host), "path": "/opt/libnvshmem_host.so.3"}
    monkeypatch.setattr(packages, "_host_library", lambda: library)
    monkeypatch.setattr(packages, "_package_folders", lambda: [])
    monkeypatch.setattr(jit, "header_dirs", lambda: (folder / "include",))
    return header


def test_a_device_nvshmem_newer_than_the_host_one_is_refused_with_versions_and_paths(
    monkeypatch, tmp_path
):
    header = nvshmem_machine(monkeypatch, tmp_path, (3, 4, 5), (3, 8, 0))
    finding = only(packages.nvshmem(13000))
    assert finding.ok is False
    for word in ("3.4.5", "/opt/libnvshmem_host.so.3", "3.8.0", str(header)):
        assert word in finding.text


def test_a_device_nvshmem_older_than_the_host_one_is_fine(monkeypatch, tmp_path):
    nvshmem_machine(monkeypatch, tmp_path, (3, 8, 0), (3, 4, 5))
    assert only(packages.nvshmem(13000)).ok is True


@pytest.mark.parametrize(("host", "device"), [((4, 0, 0), (3, 8, 0)), ((3, 8, 0), (4, 0, 0))])
def test_another_major_version_of_nvshmem_is_refused_either_way(
    monkeypatch, tmp_path, host, device
):
    nvshmem_machine(monkeypatch, tmp_path, host, device)
    assert only(packages.nvshmem(13000)).ok is False


# MPI


def test_missing_mpi_names_the_module_and_the_extra(monkeypatch):
    monkeypatch.setattr(mpi, "run_json", missing("mpi4py"))
    finding = only(mpi.mpi())
    assert finding.ok is False
    assert "No module named 'mpi4py'" in finding.text
    assert finding.hint == "pip install 'tileflow[mpi]'"


def mpi_machine(monkeypatch, library, launcher):
    seen = {"mpi4py": "4.1.2", "library": library}
    monkeypatch.setattr(mpi, "run_json", lambda arguments: seen)
    monkeypatch.setattr(mpi, "find_mpirun", lambda: "/usr/bin/mpirun" if launcher else None)
    monkeypatch.setattr(mpi, "_version_of", lambda mpirun: launcher)


@pytest.mark.parametrize(
    ("library", "launcher", "ok"),
    [
        ("Open MPI v5.0.11, package: ...", "mpirun (Open MPI) 5.0.11", True),
        ("Open MPI v5.0.11, package: ...", "mpirun (Open MPI) 4.1.6", None),
        ("MPICH Version: 4.2.1", "HYDRA build details:\n Version: 4.2.1", True),
        ("MPICH Version: 4.2.1", "mpirun (Open MPI) 5.0.11", None),
        ("Intel(R) MPI Library 2021.13", "Intel(R) MPI Library for Linux* OS, 2021.13", True),
        ("Open MPI v5.0.11, package: ...", "", False),
    ],
)
def test_an_mpirun_of_another_mpi_is_remarked(monkeypatch, library, launcher, ok):
    mpi_machine(monkeypatch, library, launcher)
    assert only(mpi.mpi()).ok is ok


# The machine


def test_a_cache_that_cannot_be_written_is_told_and_what_follows(tmp_path):
    (tmp_path / "file").touch()
    finding = only(machine.kernel_cache(Environment(cache=tmp_path / "file" / "cache")))
    assert finding.ok is False
    assert "compiles its kernels anew" in finding.text
    assert "TILEFLOW_CACHE" in finding.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only folders")
def test_a_read_only_cache_is_told(tmp_path):
    tmp_path.chmod(0o500)
    assert only(machine.kernel_cache(Environment(cache=tmp_path))).ok is False


def test_looking_at_the_cache_leaves_nothing_behind(tmp_path):
    assert only(machine.kernel_cache(Environment(cache=tmp_path / "a" / "b"))).ok is not False
    assert list(tmp_path.iterdir()) == []


def test_missing_shared_memory_is_told(tmp_path):
    assert only(machine.shared_memory(tmp_path / "shm")).ok is False


def test_troublesome_variables_are_listed_with_their_values():
    env = Environment.read({"CUDA_LAUNCH_BLOCKING": "1"})
    finding = only(machine.variables(env))
    assert finding.ok is None
    assert "CUDA_LAUNCH_BLOCKING=1" in finding.text


def test_a_launcher_with_several_ranks_is_remarked():
    finding = only(machine.launcher(Environment.read({"OMPI_COMM_WORLD_SIZE": "4"})))
    assert finding.ok is None
    assert "OMPI_COMM_WORLD_SIZE=4" in finding.text


# Nothing breaks the doctor


def test_a_probe_that_throws_becomes_a_finding():
    def probe():
        yield Finding("MPI", True, "")
        raise RuntimeError("what now")

    finding = only(guard("MPI", probe))
    assert finding.failed
    assert "RuntimeError: what now" in finding.text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.abort()", "signal 6"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("raise ValueError('broken')", "ValueError: broken"),
        ("print('hello')", "unreadable"),
    ],
)
def test_a_child_that_dies_hangs_or_babbles_is_an_error_with_a_reason(code, words):
    with pytest.raises(ProbeError, match=words):
        run_json(["-c", code], timeout=1 if "sleep" in code else 60)


def test_a_driver_that_kills_its_process_is_a_finding(monkeypatch):
    monkeypatch.setattr(gpu, "run_json", missing("anything"))
    assert "asking the driver failed" in only(gpu.gpus(gpu.read_report())).text


def test_broken_headers_and_a_missing_function_are_findings(monkeypatch):
    monkeypatch.delattr(jit, "header_dirs")
    monkeypatch.setattr(gpu, "read_report", lambda: NO_DRIVER)
    found = {f.name: f for f in doctor.collect(Environment())}
    assert found["headers"].failed


# The summary


def everything(**changes):
    names = ("driver", "GPU 0", "GPU 1", "CuPy", "NVRTC", "headers", "CUTLASS", "NVSHMEM", "MPI")
    return [Finding(name, changes.get(name, True), "") for name in (*names, "shared memory")]


def blocked(findings):
    return {job.what.split(",")[0]: job.missing for job in doctor.jobs(findings) if job.missing}


def test_a_complete_machine_can_run_every_job():
    assert blocked(everything()) == {}


def test_without_mpi_only_the_worlds_of_one_process_remain():
    listed = doctor.jobs(everything(MPI=False))
    assert all(("MPI" in job.missing) == ("mpirun" in job.command) for job in listed)


def test_without_a_gpu_the_cpu_and_the_compiler_remain():
    findings = [f for f in everything() if not f.name.startswith("GPU")]
    assert set(blocked(findings)) == {"GPU"}
    assert "GPU" in blocked(findings)["GPU"]


def test_an_unsupported_gpu_is_no_gpu():
    findings = everything(**{"GPU 0": False, "GPU 1": False})
    assert set(blocked(findings)) == {"GPU"}


def run_doctor(prefix=""):
    code = f"{prefix}; from tileflow.doctor import main; raise SystemExit(main([]))".lstrip("; ")
    root = str(Path(__file__).resolve().parent.parent)
    env = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("prefix", ["", "import sys; sys.modules['rich'] = None"])
def test_it_ends_with_0_and_a_summary_with_and_without_rich(prefix):
    done = run_doctor(prefix)
    assert done.returncode == 0, done.stderr
    assert "What can run here:" in done.stdout
    assert "-m tileflow.bench --backend cpu" in done.stdout


def test_with_rich_a_table_holds_every_finding():
    console = pytest.importorskip("rich.console").Console(width=200)
    findings = everything(MPI=False)
    with console.capture() as capture:
        console.print(doctor._table(findings))
    assert all(f.name in capture.get() for f in findings)

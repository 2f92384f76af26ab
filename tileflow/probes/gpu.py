"""The driver, the GPUs, which of them reach each other, and MPS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config import Environment
from .finding import Finding, ProbeError, run_json

__all__ = ["MIN_CAPABILITY", "MIN_DRIVER", "cuda", "gpus", "mps", "peer_access", "read_report"]

MIN_CAPABILITY = (8, 0)  # mma.sync on bf16, cp.async
MIN_DRIVER = 12000
MPS_PIPE = "/tmp/nvidia-mps"  # where CUDA_MPS_PIPE_DIRECTORY is not set
_CPU_HINT = "the CPU runs everything, slowly: python -m tileflow.bench --backend cpu"
_DRIVER_HINT = "install NVIDIA's driver 580 or newer (CUDA 13); start a container with --gpus all"


def read_report() -> dict[str, Any]:
    """Return what :func:`tileflow.probes.driver.cuda_report` says, from a child process."""
    try:
        return run_json([str(Path(__file__).with_name("driver.py")), "cuda"])
    except ProbeError as error:
        return {"error": f"asking the driver failed: {error}", "driver": 0, "gpus": [], "peers": []}


def spoken(driver: int) -> str:
    """Return 13010 as "13.1"."""
    return f"{driver // 1000}.{driver % 1000 // 10}"


def cuda(report: dict[str, Any]) -> Iterator[Finding]:
    """Is there a driver, and is it new enough?"""
    driver = report["driver"]
    if not driver:
        yield Finding("driver", False, report["error"] or "no CUDA version", _DRIVER_HINT)
    elif driver < MIN_DRIVER:
        text = f"runs CUDA {spoken(driver)}, {spoken(MIN_DRIVER)} or newer is needed"
        yield Finding("driver", False, text, _DRIVER_HINT)
    else:
        yield Finding("driver", True, f"runs CUDA {spoken(driver)}")


def gpus(report: dict[str, Any]) -> Iterator[Finding]:
    """Which GPUs are there, and can the kernels run on them?"""
    if not report["gpus"]:
        why = report["error"] or "the driver lists none"
        yield Finding("GPU", False, f"none ({why})", _CPU_HINT)
    for idx, gpu in enumerate(report["gpus"]):
        yield _gpu(f"GPU {idx}", gpu, tuple(gpu["capability"]))


def _gpu(name: str, gpu: dict[str, Any], capability: tuple[int, ...]) -> Finding:
    arch = "sm_{}{}".format(*capability)
    text = f"{gpu['name']}, {arch}, {gpu['num_sms']} SMs, {gpu['nbytes'] / 2**30:.0f} GiB"
    if capability < MIN_CAPABILITY:
        return Finding(name, False, f"{text}: kernels need sm_80 or newer", _CPU_HINT)
    kind = "wgmma and TMA" if capability == (9, 0) else "mma.sync"
    return Finding(name, True, f"{text}; takes the producer made of {kind}")


def peer_access(report: dict[str, Any]) -> Iterator[Finding]:
    """Can every GPU store into every other one's memory?"""
    count, pairs = len(report["gpus"]), report["peers"]
    if count < 2:
        return
    total = count * (count - 1)
    if len(pairs) == total:
        yield Finding("peer access", True, f"between all {count} GPUs")
        return
    missing = [(a, b) for a in range(count) for b in range(count) if a != b and [a, b] not in pairs]
    some = ", ".join(f"{a}->{b}" for a, b in missing[:8])
    text = f"{total - len(pairs)} of {total} pairs cannot reach each other ({some}, ...)"
    yield Finding("peer access", None, text, "look at the links: nvidia-smi topo -m")


def mps(
    report: dict[str, Any], environment: Environment, proc: Path = Path("/proc")
) -> Iterator[Finding]:
    """Does MPS run? Several ranks on one GPU need it to be quick."""
    if not report["gpus"]:
        return
    pipe = Path(environment.mps_pipe or MPS_PIPE)
    share = environment.mps_percentage
    limit = f", this process may use {share} % of the SMs" if share else ""
    if (pipe / "control").exists() and _runs(proc):
        yield Finding("MPS", True, f"runs, pipes in {pipe}{limit}")
    elif (pipe / "control").exists():
        text = f"pipes in {pipe}, but no daemon is seen here (it may run outside){limit}"
        yield Finding("MPS", None, text)
    else:
        text = "does not run: ranks that share a GPU take turns, each wait lasts milliseconds"
        yield Finding("MPS", None, text, "only to share a GPU: nvidia-cuda-mps-control -d")


def _runs(proc: Path) -> bool:
    for comm in proc.glob("[0-9]*/comm"):
        try:
            if comm.read_text().startswith("nvidia-cuda-mps"):
                return True
        except OSError:  # ended meanwhile
            continue
    return False

"""Ask NVIDIA's libraries by ctypes what is there; run as a script, in a process of its own.

Needs the standard library alone. Prints one JSON object:

    python driver.py cuda               the driver and its GPUs
    python driver.py nvshmem [LIBRARY]  version and path of the NVSHMEM host library
"""

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBCUDA = "libcuda.so.1"
LIBNVSHMEM = "libnvshmem_host.so.3"
# CUdevice_attribute
_SM_COUNT, _MAJOR, _MINOR = 16, 75, 76

Load = Callable[[str], Any]


def cuda_report(load: Load = ctypes.CDLL) -> dict[str, Any]:
    """Return what the driver says of itself and its GPUs; no context is made.

    Keys: ``error`` ("" where all went well), ``driver`` (13010 is CUDA 13.1), ``gpus``, and
    ``peers``: the pairs of GPUs [from, to] of which the first can reach the second's memory.
    """
    report: dict[str, Any] = {"error": "", "driver": 0, "gpus": [], "peers": []}
    try:
        cuda = load(LIBCUDA)
        report["driver"] = _int(cuda, "cuDriverGetVersion")
        _check(cuda, "cuInit", cuda.cuInit(0))
        count = _int(cuda, "cuDeviceGetCount")
        report["gpus"] = [_gpu(cuda, idx) for idx in range(count)]
        report["peers"] = _peers(cuda, count)
    except (OSError, AttributeError) as error:
        report["error"] = str(error)
    return report


def _int(cuda: Any, function: str, *args: Any) -> int:
    value = ctypes.c_int(0)
    _check(cuda, function, getattr(cuda, function)(ctypes.byref(value), *args))
    return value.value


def _check(cuda: Any, function: str, status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        known = cuda.cuGetErrorName(status, ctypes.byref(name)) == 0 and name.value
        spoken = name.value.decode() if known and name.value else f"status {status}"
        raise OSError(f"{function} says {spoken}")


def _gpu(cuda: Any, idx: int) -> dict[str, Any]:
    device = _int(cuda, "cuDeviceGet", idx)
    name = ctypes.create_string_buffer(256)
    _check(cuda, "cuDeviceGetName", cuda.cuDeviceGetName(name, len(name), device))
    nbytes = ctypes.c_size_t(0)
    status = cuda.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device)
    _check(cuda, "cuDeviceTotalMem", status)
    return {
        "name": name.value.decode(errors="replace"),
        "capability": [_attribute(cuda, which, device) for which in (_MAJOR, _MINOR)],
        "num_sms": _attribute(cuda, _SM_COUNT, device),
        "nbytes": nbytes.value,
    }


def _attribute(cuda: Any, which: int, device: int) -> int:
    return _int(cuda, "cuDeviceGetAttribute", which, device)


def _peers(cuda: Any, count: int) -> list[list[int]]:
    pairs = [[a, b] for a in range(count) for b in range(count) if a != b]
    devices = [_int(cuda, "cuDeviceGet", idx) for idx in range(count)]
    return [p for p in pairs if _int(cuda, "cuDeviceCanAccessPeer", *(devices[i] for i in p))]


def nvshmem_report(library: str = LIBNVSHMEM, *, load: Load = ctypes.CDLL) -> dict[str, Any]:
    """Return ``version`` [major, minor, patch] and ``path``; raise OSError where it cannot load."""
    parts = [ctypes.c_int(0) for _ in range(3)]
    handle = load(library)
    handle.nvshmemx_vendor_get_version_info(*(ctypes.byref(part) for part in parts))
    return {"version": [part.value for part in parts], "path": _mapped(library)}


def _mapped(library: str) -> str:
    """Return the file that the loader took for a bare name."""
    maps = Path("/proc/self/maps").read_text(errors="replace").split()
    return next((word for word in maps if word.endswith("/" + Path(library).name)), library)


if __name__ == "__main__":
    job, *names = sys.argv[1:]
    report = cuda_report() if job == "cuda" else nvshmem_report(*names[:1])
    print(json.dumps(report))

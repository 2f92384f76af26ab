"""CuPy, the kernel compiler and its headers, NVSHMEM."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .finding import Finding, ProbeError, run_json

__all__ = ["cupy", "headers", "nvrtc", "nvshmem"]

_ASK_CUPY = "import cupy, json; print(json.dumps({'version': cupy.__version__}))"
_ASK_NVRTC = """
import cuda.bindings, cuda.core, json
from cuda.bindings import nvrtc
status, major, minor = nvrtc.nvrtcVersion()
print(json.dumps({"nvrtc": [major, minor], "core": cuda.core.__version__,
                  "bindings": cuda.bindings.__version__}))
"""
_NO_CCCL = (3, 2)  # CCCL of CUDA 13.2, with which CUTLASS 4.2 does not compile


def gpu_extra(driver: int) -> str:
    """Return the pip command of the GPU packages that fit the driver, CUDA 13's where none is."""
    return f"pip install 'tileflow[{'cuda12' if 0 < driver < 13000 else 'cuda13'}]'"


def _installed(prefix: str) -> dict[str, str]:
    """Return distributions whose name starts so, with their versions."""
    found = ((d.metadata["Name"] or "", d.version) for d in metadata.distributions())
    return {name: version for name, version in found if name.lower().startswith(prefix)}


def cupy(driver: int) -> Iterator[Finding]:
    """Is CuPy there once, importable, and of the driver's CUDA?"""
    found = {n: v for n, v in _installed("cupy").items() if re.fullmatch(r"cupy(-cuda\d+x)?", n)}
    spoken = ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
    major = driver // 1000
    if not found and find_spec("cupy") is None:
        yield Finding("CuPy", False, "not installed; the GPU needs it", gpu_extra(driver))
    elif len(found) > 1:
        text = f"installed {len(found)} times ({spoken}): they overwrite each other's files"
        yield Finding("CuPy", False, text, "pip uninstall all of them, then " + gpu_extra(driver))
    elif major and "cupy-cuda13x" in found and major < 13:
        text = f"{spoken} needs a driver for CUDA 13, this one runs {major}"
        hint = f"pip uninstall cupy-cuda13x, then {gpu_extra(driver)}"
        yield Finding("CuPy", False, text, hint)
    else:
        yield _import_cupy(spoken, driver)


def _import_cupy(spoken: str, driver: int) -> Finding:
    try:
        version = run_json(["-c", _ASK_CUPY])["version"]
    except ProbeError as error:
        text = f"{spoken} is installed but does not import ({error})"
        return Finding("CuPy", False, text, gpu_extra(driver))
    return Finding("CuPy", True, spoken or version)


def nvrtc(driver: int) -> Iterator[Finding]:
    """Can kernels be compiled, and can the driver load the result?"""
    try:
        seen = run_json(["-c", _ASK_NVRTC])
    except ProbeError as error:
        hint = gpu_extra(driver) if driver else "pip install 'tileflow[jit]' (no GPU needed)"
        yield Finding("NVRTC", False, f"kernels cannot be compiled: {error}", hint)
        return
    major, minor = seen["nvrtc"]
    text = f"{major}.{minor} (cuda.core {seen['core']}, cuda.bindings {seen['bindings']})"
    if driver and major > driver // 1000:
        text += f" makes code that a driver for CUDA {driver // 1000} does not load"
        yield Finding("NVRTC", False, text, gpu_extra(driver))
    else:
        yield Finding("NVRTC", True, text)


def headers() -> Iterator[Finding]:
    """Which folders are searched, and do CUTLASS, CCCL and CUDA's headers lie in them?"""
    from ..jit import header_dirs

    folders = header_dirs()
    hint = "pip install 'tileflow[jit]' or set TILEFLOW_CUDA_INCLUDE"
    if not folders:
        yield Finding("headers", False, "no folder of CUDA headers is found", hint)
        return
    fp16 = _first(folders, "cuda_fp16.h")
    text = "\n".join(["searched in this order:", *map(str, folders)])
    if fp16 is None:
        yield Finding("headers", False, f"cuda_fp16.h is in no folder; {text}", hint)
    else:
        yield Finding("headers", True, text)
    yield _cutlass(folders, hint)


def _cutlass(folders: Iterable[Path], hint: str) -> Finding:
    cutlass = _first(folders, "cutlass/version.h")
    cccl = _first(folders, "cuda/std/__cccl/version.h")
    if cutlass is None or cccl is None:
        missing = "CUTLASS" if cutlass is None else "CCCL (cuda/std)"
        return Finding("CUTLASS", False, f"the headers of {missing} are not found", hint)
    wide = _define(cccl, "CCCL_VERSION")  # 3001004 is 3.1.4
    seen = (wide // 1000000, wide // 1000 % 1000)
    parts = [str(_define(cutlass, f"CUTLASS_{part}")) for part in ("MAJOR", "MINOR", "PATCH")]
    text = f"{'.'.join(parts)} with CCCL {seen[0]}.{seen[1]}"
    if seen >= _NO_CCCL:
        text += f" ({cccl}): CUTLASS 4.2 does not compile with CCCL 3.2 (CUDA 13.2) and newer"
        return Finding("CUTLASS", False, text, "pip install 'nvidia-cuda-cccl<13.2'")
    return Finding("CUTLASS", True, text)


def _first(folders: Iterable[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _define(header: Path, name: str) -> int:
    found = re.search(rf"#define\s+{name}\s+(\d+)", header.read_text(errors="replace"))
    if found is None:
        raise ValueError(f"{header} defines no {name}")
    return int(found.group(1))


def nvshmem(driver: int) -> Iterator[Finding]:
    """Are NVSHMEM's Python layer, host library and device side there, and do they fit?"""
    layer = _installed("nvshmem4py")
    if not layer:
        text = "nvshmem4py is not installed; several GPUs need it"
        yield Finding("NVSHMEM", False, text, gpu_extra(driver))
        return
    spoken = ", ".join(f"{name} {version}" for name, version in sorted(layer.items()))
    try:
        host = _host_library()
    except ProbeError as error:
        yield Finding("NVSHMEM", False, f"{spoken}: no host library ({error})", gpu_extra(driver))
        return
    yield _device_side(spoken, host, gpu_extra(driver))


def _device_side(spoken: str, host: dict[str, Any], hint: str) -> Finding:
    from ..worlds.nvshmem_versions import Library, version_problem

    library = Library(tuple(host["version"]), Path(host["path"]))
    text = f"{spoken}, host library {library}"
    header = _device_header()
    if header is None:
        return Finding("NVSHMEM", True, f"{text}; no device headers (peers need pointers)")
    device = Library(_header_version(header), header)
    problem = version_problem(library, device)
    if problem:
        return Finding("NVSHMEM", False, f"{spoken}: {problem}", hint)
    return Finding("NVSHMEM", True, f"{text}, device headers {device}")


def _package_folders() -> list[Path]:
    spec = find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations or []
    return [Path(root) / "nvshmem" for root in roots]


def _host_library() -> dict[str, Any]:
    """Ask the library that nvshmem4py takes: the package's, else the loader's."""
    libraries = [folder / "lib" / "libnvshmem_host.so.3" for folder in _package_folders()]
    chosen = [str(library) for library in libraries if library.exists()][:1]
    return run_json([str(Path(__file__).with_name("driver.py")), "nvshmem", *chosen])


def _device_header() -> Path | None:
    from ..jit import header_dirs

    folders = [*header_dirs(), *(folder / "include" for folder in _package_folders())]
    return _first(folders, "non_abi/nvshmem_version.h")


def _header_version(header: Path) -> tuple[int, int, int]:
    major, minor, patch = (
        _define(header, f"NVSHMEM_VENDOR_{part}_VERSION") for part in ("MAJOR", "MINOR", "PATCH")
    )
    return major, minor, patch

"""Print the extra that fits this machine: ``cuda13``, ``cuda12`` or, without a usable GPU, ``mpi``.

Needs the standard library alone, so that it runs before anything is installed. The driver decides:
it says which CUDA it can run. One line on stderr says why.

    pip install -e ".[$(python tools/choose_extra.py)]"
"""

import ctypes
import sys

LIBRARY = "libcuda.so.1"
CPU_EXTRA = "mpi"


def driver_version(load=ctypes.CDLL):
    """Return what cuDriverGetVersion says (13010 is CUDA 13.1); raise OSError where it cannot.

    Args:
        load: opens a shared library by its name.
    """
    version = ctypes.c_int(0)
    try:
        status = load(LIBRARY).cuDriverGetVersion(ctypes.byref(version))
    except AttributeError as error:
        raise OSError(f"{LIBRARY} is no NVIDIA driver: {error}") from error
    if status:
        raise OSError(f"cuDriverGetVersion returned {status}")
    return version.value


def choose(load=ctypes.CDLL):
    """Return (extra, why)."""
    try:
        version = driver_version(load)
    except OSError as error:
        return CPU_EXTRA, f"no NVIDIA driver ({error})"
    spoken = f"the driver runs CUDA {version // 1000}.{version % 1000 // 10}"
    if version >= 13000:
        return "cuda13", spoken
    if version >= 12000:
        return "cuda12", spoken
    return CPU_EXTRA, f"{spoken}, 12.0 or newer is needed for the GPU"


def main():
    extra, why = choose()
    print(f"choose_extra: {extra}, since {why}", file=sys.stderr)
    print(extra)


if __name__ == "__main__":
    main()

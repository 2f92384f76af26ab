"""Which NVSHMEM libraries are installed, and whether host and device parts fit together.

The host library must be at least as new as the device library that kernels are linked with, and
of the same major version (NVSHMEM's compatibility rule).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

__all__ = ["Library", "device_library", "host_library", "version_problem"]

_HEADER = "include/non_abi/nvshmem_version.h"
_FIELDS = tuple(
    re.compile(rf"#define\s+NVSHMEM_VENDOR_{part}_VERSION\s+(\d+)")
    for part in ("MAJOR", "MINOR", "PATCH")
)


@dataclass(frozen=True)
class Library:
    """A version and where it was found."""

    version: tuple[int, int, int]
    path: Path

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.version))} ({self.path})"


def device_library() -> Library | None:
    """Return the device library's version as its headers give it, None where there is none."""
    for folder in _package_folders():
        header = folder / _HEADER
        if header.is_file():
            found = [field.search(header.read_text()) for field in _FIELDS]
            if all(found):
                major, minor, patch = (int(match.group(1)) for match in found if match)
                return Library((major, minor, patch), folder)
    return None


def host_library() -> Library | None:
    """Return the host library that nvshmem4py opens, None where it cannot."""
    try:
        import nvshmem.core as nvshmem  # type: ignore[import-not-found]

        version = nvshmem.get_version().libnvshmem_version
        major, minor, patch = (int(part) for part in version.split("."))
    except Exception:  # missing, or the library cannot be loaded
        return None
    return Library((major, minor, patch), _loaded_path())


def version_problem(host: Library | None = None, device: Library | None = None) -> str | None:
    """Return why host and device library do not fit, naming both, or None."""
    host, device = host or host_library(), device or device_library()
    if host is None or device is None:
        return None
    if host.version[0] == device.version[0] and host.version >= device.version:
        return None
    return (
        f"NVSHMEM's host library {host} does not fit its device library {device}: the host's "
        "version must have the same major number and not be older"
    )


def _package_folders() -> list[Path]:
    spec = find_spec("nvidia")
    locations = [] if spec is None else spec.submodule_search_locations or []
    return [Path(location) / "nvshmem" for location in locations]


def _loaded_path() -> Path:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return Path("unknown")
    match = re.search(r"(/\S*libnvshmem_host\S*)", maps)
    return Path(match.group(1)) if match else Path("unknown")

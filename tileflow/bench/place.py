"""Where the bench runs, and what to think of times that are measured there."""

from __future__ import annotations

import pickle
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import Environment
from ..version import __version__
from ..worlds.base import World
from .cases import Case

__all__ = ["Place"]

_REPEATS_WITHOUT_MPS = 3
_START_MPS = (
    "export CUDA_MPS_PIPE_DIRECTORY=/tmp/tileflow-mps CUDA_MPS_LOG_DIRECTORY=/tmp/tileflow-mps-log",
    "mkdir -p $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY",
    "nvidia-cuda-mps-control -d",
    "# run the bench again in this shell; stop it with: echo quit | nvidia-cuda-mps-control",
)


@dataclass(frozen=True)
class Place:
    """The machine and the world of a run.

    Attributes:
        backend: ``"cpu"`` or ``"cuda"``.
        device: name of rank 0's CPU or GPU.
        world: registry name.
        link: where a peer's memory lies, None where that is no choice.
        ranks: number of ranks.
        sharing: most ranks on one device.
        reason: why this world.
        mps: whether every rank's environment names an MPS pipe.
    """

    backend: str
    device: str
    world: str
    link: str | None
    ranks: int
    sharing: int
    reason: str
    mps: bool

    @classmethod
    def of(cls, world: World, reason: str) -> Place:
        """Describe an open world, chosen for `reason`; equal on all ranks (collective)."""
        own = cls(
            backend=world.device,
            device=_device_name(world.device),
            world=world.name,
            link=world.link,
            ranks=world.size,
            sharing=len(world.device_ranks()),
            reason=reason,
            mps=Environment.read().mps_pipe is not None,
        )
        places = [pickle.loads(answer) for answer in world.allgather(pickle.dumps(own))]
        sharing = max(place.sharing for place in places)
        return replace(places[0], sharing=sharing, mps=all(place.mps for place in places))

    @property
    def most_repeats(self) -> int | None:
        """Cap of the repeats: processes that time-slice a GPU take seconds per forward."""
        return _REPEATS_WITHOUT_MPS if self._time_sliced else None

    @property
    def _time_sliced(self) -> bool:
        return self.world == "nvshmem" and self.sharing > 1 and not self.mps

    def lines(self) -> list[str]:
        """Return what a reader must know before the first number."""
        link = f", link {self.link}" if self.link else ""
        lines = [
            f"device: {self.device}",
            f"world:  {self.world}, {self.ranks} ranks{link}",
            f"reason: {self.reason}",
        ]
        return lines + self._warnings()

    def _warnings(self) -> list[str]:
        if self.backend == "cpu":
            return [
                "note:   on a CPU this shows that everything functions, not how fast it is;",
                "        overlap is usually slower than serial here",
            ]
        if self.sharing == 1:
            return []
        lines = [f"note:   {self.sharing} ranks share one GPU: no multi-GPU result"]
        if self._time_sliced:
            cut = f"cut to {_REPEATS_WITHOUT_MPS} repeats"
            lines.append(f"note:   without MPS they take turns on it: {cut}; to start MPS:")
            lines += [f"          {command}" for command in _START_MPS]
        return lines

    def key(self, case: Case) -> str:
        """Return the key under which a finished case is found again."""
        return case.key(self.backend, self.device, self.world, self.link, self.ranks, __version__)


def _device_name(device: str) -> str:
    return _gpu_name() if device == "cuda" else _cpu_name()


def _gpu_name() -> str:
    import cupy

    properties: dict[str, Any] = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return properties["name"].decode()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

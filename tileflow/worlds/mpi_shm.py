"""The mpi_shm world: one process per rank on one host, memory in MPI shared windows (CPU).

Every rank maps every other rank's part of a window, so a put is a plain store; a fence is MPI's
window synchronisation, which is a full memory barrier.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TileflowError, WorldError
from .base import SymmetricBuffer
from .mpi import MpiWorld, start

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiShmWorld", "create"]

SHM_DIR = "/dev/shm"
_PAGE = 4096
_SLACK_BYTES = 1 << 20  # what MPI itself adds to a window


def create(
    *, ranks: int | None, backend: str, link: str, device: int | None, timeout_s: float
) -> MpiShmWorld:
    """Start MPI and make the world (collective)."""
    return MpiShmWorld(start(ranks, max(timeout_s, MpiShmWorld.warmup_timeout_s)), timeout_s)


class MpiShmWorld(MpiWorld):
    """One rank's handle."""

    name = "mpi_shm"
    device = "cpu"

    def __init__(self, comm: MPI.Intracomm, timeout_s: float = 30.0):
        super().__init__(comm, timeout_s=timeout_s)
        self._windows: list[MPI.Win] = []
        self._fence_lock = threading.Lock()  # one thread at a time calls MPI
        self._node = self._join_node()

    def _join_node(self) -> Any:
        """Return a communicator of the ranks that share memory; refuse unless all do."""
        from mpi4py import MPI

        hosts = [answer.decode() for answer in self.allgather(MPI.Get_processor_name().encode())]
        self._node = self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        if self._node.Get_size() != self.size:
            self.close()
            raise WorldError(
                f"world 'mpi_shm' needs all ranks on one host; they are on {sorted(set(hosts))}"
            )
        return self._node

    def device_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def check_memory(self, nbytes: int) -> TileflowError | None:
        needed = self.size * (-(-nbytes // _PAGE) * _PAGE) + _SLACK_BYTES
        stat = os.statvfs(SHM_DIR)
        free = stat.f_bavail * stat.f_frsize
        if needed <= free:
            return None
        return WorldError(
            f"{self.size} ranks need {needed} bytes of shared memory, {SHM_DIR} has {free} free; "
            "enlarge it (docker run --shm-size=...) or make the layer smaller"
        )

    def fence(self) -> None:
        with self._fence_lock:
            for window in self._windows[:1]:
                window.Sync()

    def _allocate(self, nbytes: int, crosses_link: bool) -> SymmetricBuffer:
        from mpi4py import MPI

        # No window of size 0 for any rank: MPI may then return no address for it.
        window = MPI.Win.Allocate_shared(max(nbytes, 8), 1, comm=self._node)
        window.Lock_all(MPI.MODE_NOCHECK)
        self._windows.append(window)
        buffer = _WindowBuffer(self, window, nbytes)
        buffer.local[:] = 0
        self.fence()
        self.barrier()  # zeros are in place before a peer can store
        return buffer

    def free_window(self, window: MPI.Win) -> None:
        """Free a window (collective); left alone where a rank does not come any more."""
        if window in self._windows and self.all_here():
            self._windows.remove(window)
            window.Unlock_all()
            window.Free()

    def _close(self) -> None:
        if self.all_here():
            self._node.Free()
        super()._close()


def _part(window: MPI.Win, rank: int, nbytes: int) -> Any:
    """Return the bytes of `rank` in a shared window as an array that writes through."""
    memory: Any = window.Shared_query(rank)[0]
    return np.frombuffer(memory, np.uint8)[:nbytes]


class _WindowBuffer(SymmetricBuffer):
    def __init__(self, world: MpiShmWorld, window: MPI.Win, nbytes: int):
        self._world, self._window = world, window
        self.nbytes = nbytes
        self.pointers = np.zeros(world.size, np.uint64)
        self._ranks = [_part(window, rank, nbytes) for rank in range(world.size)]
        self.local = self.landing = self._ranks[world.rank]

    def peer(self, rank: int) -> Any:
        return self._ranks[rank]

    def free(self) -> None:
        self._ranks = []
        self.local = self.landing = None
        self._world.free_window(self._window)

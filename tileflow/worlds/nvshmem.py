"""The nvshmem world: one process per rank, GPUs, memory in NVSHMEM's symmetric heap.

MPI starts the ranks and carries the bootstrap; afterwards kernels reach peers by plain pointers
into their heaps. Any number of GPUs on one host, several ranks per GPU allowed.

Allocation and release are collective and synchronise the device, so they happen only while no
kernel of ours runs; every array is released before the library is finalised.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TileflowError, WorldError
from .base import SymmetricBuffer
from .mpi import MpiWorld, start
from .nvshmem_versions import version_problem

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["NvshmemWorld", "create"]

# Taken before the library starts, unless the user has set them.
_DEFAULTS = {
    "NVSHMEM_DISABLE_NVLS": "1",  # no multicast: it is not used
    "NVSHMEM_REMOTE_TRANSPORT": "none",  # one host: peers are reached by pointer
    "NVSHMEM_DISABLE_NCCL": "1",  # its collectives are not used, and fail with shared GPUs
    "NVSHMEM_CUMEM_GRANULARITY": str(64 << 20),  # the default reserves 512 MiB a rank
}


def create(
    *, ranks: int | None, backend: str, link: str, device: int | None, timeout_s: float
) -> NvshmemWorld:
    """Start MPI and NVSHMEM and make the world (collective)."""
    comm = start(ranks, max(timeout_s, NvshmemWorld.warmup_timeout_s))
    return NvshmemWorld(comm, device, timeout_s)


class NvshmemWorld(MpiWorld):
    """One rank's handle; its GPU is the current one of the process from now on."""

    name = "nvshmem"
    device = "cuda"
    link = None

    def __init__(self, comm: MPI.Intracomm, device: int | None, timeout_s: float = 30.0):
        super().__init__(comm, timeout_s=timeout_s)
        self._started = False
        self.agree(_library_problem())
        self._sharing = self._take_device(device)
        self._start_library()

    def _take_device(self, device: int | None) -> tuple[int, ...]:
        """Make a GPU current; return the ranks that have taken the same one."""
        import cupy
        from mpi4py import MPI

        hosts = [answer.decode() for answer in self.allgather(MPI.Get_processor_name().encode())]
        if len(set(hosts)) > 1:
            raise WorldError(f"ranks are on several hosts {sorted(set(hosts))}; one is supported")
        count = cupy.cuda.runtime.getDeviceCount()
        index = self.rank % count if device is None else device
        error = None if index < count else WorldError(f"device {index}: there are {count} GPUs")
        self.agree(error)
        cupy.cuda.Device(index).use()
        cupy.cuda.runtime.free(0)  # the context must live before NVSHMEM starts
        uuid = cupy.cuda.runtime.getDeviceProperties(index)["uuid"]
        answers = self.allgather(bytes(uuid))
        return tuple(rank for rank, answer in enumerate(answers) if answer == answers[self.rank])

    def _start_library(self) -> None:
        import cupy
        import nvshmem.core as nvshmem  # type: ignore[import-not-found]
        from cuda.core import Device

        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        device = Device(cupy.cuda.Device().id)
        device.set_current()
        self.barrier()  # the bootstrap below blocks without limit: all ranks are here
        nvshmem.init(device=device, mpi_comm=self.comm, initializer_method="emulated_mpi")
        self._started = True

    def device_ranks(self) -> tuple[int, ...]:
        return self._sharing

    def check_memory(self, nbytes: int) -> TileflowError | None:
        import cupy

        free, total = cupy.cuda.runtime.memGetInfo()
        needed = nbytes * len(self._sharing)
        if needed <= free:
            return None
        return WorldError(
            f"rank {self.rank}: {len(self._sharing)} rank(s) on this GPU need {nbytes} bytes each, "
            f"{free} of {total} are free"
        )

    def _allocate(self, nbytes: int, crosses_link: bool) -> SymmetricBuffer:
        return _HeapBuffer(self, nbytes)

    def _close(self) -> None:
        if self._started and self.all_here():
            import nvshmem.core as nvshmem

            nvshmem.finalize()
            self._started = False
        super()._close()


class _HeapBuffer(SymmetricBuffer):
    """A block of the symmetric heap and every peer's address of it."""

    def __init__(self, world: NvshmemWorld, nbytes: int):
        import cupy
        import nvshmem.core as nvshmem

        self._world, self.nbytes = world, nbytes
        world.barrier()  # the allocation below blocks without limit
        self._array = nvshmem.array((max(nbytes, 16),), dtype="uint8")
        self.local = self.landing = self._array[:nbytes]
        self._peers: dict[int, Any] = {world.rank: self.local}
        problem = self._find_peers(nvshmem)
        self._array.fill(0)
        cupy.cuda.runtime.deviceSynchronize()
        world.agree(problem)  # also: zeros are in place before a peer can store
        pointers = [self._peers[rank].data.ptr for rank in range(world.size)]
        self.pointers = np.array(pointers, np.uint64)

    def _find_peers(self, nvshmem: Any) -> TileflowError | None:
        for rank in range(self._world.size):
            if rank == self._world.rank:
                continue  # asking for the own one would count as a second reference
            try:
                self._peers[rank] = nvshmem.get_peer_array(self._array, rank)
            except Exception as error:  # its classes differ between releases
                return WorldError(
                    f"rank {self._world.rank} has no pointer to the memory of rank {rank} "
                    f"({type(error).__name__}: {error}); only peers on NVLink or PCIe P2P are "
                    "supported"
                )
        return None

    def peer(self, rank: int) -> Any:
        return self._peers[rank][: self.nbytes]

    def free(self) -> None:
        """Release the block (collective); left alone where a rank does not come any more."""
        import cupy
        import nvshmem.core as nvshmem

        cupy.cuda.runtime.deviceSynchronize()
        array, self._array = self._array, None
        self._peers, self.local, self.landing = {}, None, None
        if self._world.all_here():
            nvshmem.free_array(array)


def _library_problem() -> TileflowError | None:
    """Return why NVSHMEM cannot start here, or None."""
    try:
        importlib.import_module("nvshmem.core")
    except Exception as error:  # ImportError, or a library that cannot be loaded
        hint = "pip install 'tileflow[cuda13]'"
        return WorldError(f"nvshmem4py cannot be used ({error}); {hint}")
    problem = version_problem()
    return None if problem is None else WorldError(problem)

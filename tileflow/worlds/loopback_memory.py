"""Memory of the loopback world: arrays that all virtual ranks of the process hold.

CuPy is imported where a GPU is asked for, nowhere else.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from .base import SymmetricBuffer

__all__ = [
    "LoopbackBuffer",
    "allocate",
    "device_index",
    "free_bytes",
    "on_device",
    "synchronize",
    "use_device",
]


class LoopbackBuffer(SymmetricBuffer):
    """One rank's view of a symmetric buffer; `landings` are what every rank's peers store to."""

    def __init__(self, rank: int, own: Any, landing: Any, landings: list[Any]):
        self.nbytes, self.local, self.landing = own.nbytes, own, landing
        self._peers = list(landings)
        self._peers[rank] = own
        on_cpu = isinstance(own, np.ndarray)
        self.pointers = np.array([0 if on_cpu else p.data.ptr for p in self._peers], np.uint64)

    def peer(self, rank: int) -> Any:
        return self._peers[rank]

    def free(self) -> None:
        """Drop the arrays; a rank's memory goes when the last rank has dropped it."""
        self.local = self.landing = None
        self._peers = []


def allocate(device: str, nbytes: int, *, pinned: bool) -> tuple[Any, Any]:
    """Return zeroed uint8 arrays (own, landing) [nbytes]; `landing` in host memory if `pinned`."""
    if device == "cpu":
        array = np.zeros(nbytes, np.uint8)
        return array, array
    import cupy

    own = landing = cupy.zeros(nbytes, cupy.uint8)
    if pinned and nbytes:
        landing = _pinned_zeros(nbytes)
    synchronize(device)  # zeros are in place before a peer can store
    return own, landing


def _pinned_zeros(nbytes: int) -> Any:
    """Return host memory [nbytes] as a CuPy array: kernels reach it over the link."""
    import cupy

    block = cupy.cuda.alloc_pinned_memory(nbytes)
    np.frombuffer(block, np.uint8, nbytes)[:] = 0
    memory = cupy.cuda.UnownedMemory(block.ptr, nbytes, block, cupy.cuda.Device().id)
    return cupy.ndarray(nbytes, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))


def free_bytes(device: str) -> int | None:
    """Return the free memory of the current GPU, CuPy's cached blocks included; None on a CPU."""
    if device == "cpu":
        return None
    import cupy

    return cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()


def device_index(device: str, index: int | None) -> int | None:
    """Return the GPU to use: `index`, or the current one; None on a CPU."""
    if device == "cpu" or index is not None:
        return index
    import cupy

    return cupy.cuda.Device().id


def on_device(device: str, index: int | None) -> AbstractContextManager[Any]:
    """Return a context in which GPU `index` is the current one of this thread."""
    if device == "cpu":
        return nullcontext()
    import cupy

    return cupy.cuda.Device(index)


def use_device(index: int | None) -> None:
    """Make GPU `index` the current one of this thread from now on; None changes nothing."""
    if index is not None:
        import cupy

        cupy.cuda.Device(index).use()


def synchronize(device: str) -> None:
    """Wait for all work on the current GPU."""
    if device != "cpu":
        import cupy

        cupy.cuda.Device().synchronize()

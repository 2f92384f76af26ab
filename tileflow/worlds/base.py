"""What a world is: the ranks, the memory they share, and how they agree.

A world is one file with one subclass of :class:`World` and one line in the registry
(``worlds/__init__.py``). Every method marked *collective* is called by all ranks in the same order.
What could make ranks diverge is exchanged first (:meth:`World.agree`), so that all of them raise.
"""

from __future__ import annotations

import pickle
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import (
    ConfigError,
    ProtocolTimeout,
    RankLost,
    TileflowError,
    WorldBroken,
    WorldError,
)
from ..protocol import EPOCH_MASK, next_epoch, reached

if TYPE_CHECKING:
    from ..backends.base import Backend

__all__ = ["SymmetricBuffer", "World", "open_worlds"]

Result = TypeVar("Result")
_OPEN: weakref.WeakSet[World] = weakref.WeakSet()


def open_worlds() -> tuple[World, ...]:
    """Return the handles of this process that were made and not closed (tests look for leaks)."""
    return tuple(_OPEN)


def _latest(epochs: list[int]) -> int:
    return next(e for e in epochs if all(reached(e, other) for other in epochs))


class SymmetricBuffer(ABC):
    """The same number of bytes on every rank, reachable by all of them.

    Attributes:
        nbytes: size on each rank.
        local: own bytes, a uint8 array [nbytes] (NumPy on the CPU, CuPy on a GPU).
        landing: the bytes that peers' stores reach, as this rank reads them; `local` except where
            a loopback's link puts host memory between the ranks.
        pointers: uint64 [ranks], the address of every rank's bytes as this rank sees them (on the
            CPU unused, zeros).
    """

    nbytes: int
    local: Any
    landing: Any
    pointers: np.ndarray

    @abstractmethod
    def peer(self, rank: int) -> Any:
        """Return the bytes of `rank` as a uint8 array [nbytes] that writes through."""

    @abstractmethod
    def free(self) -> None:
        """Release the memory (collective)."""


class World(ABC):
    """One rank's handle on a world.

    Attributes:
        name: registry name.
        device: ``"cpu"`` or ``"cuda"``.
        link: where a peer's memory lies on a GPU loopback, ``"hbm"`` or ``"host"``; else None.
        rank, size: this rank and the number of ranks.
        timeout_s: bound of every wait in steady state, in seconds.
        warmup_timeout_s: bound while ranks may still compile kernels.
        epoch: 64-bit number of the last forward in this world, the same on every rank.
        backend: runs the stages on this rank, None before the first layer.
        warm: whether a forward has finished, so that nothing is left to compile; set by the engine.
        reason: why this world was chosen, for printing.
    """

    name: str
    device: str
    link: str | None = None
    rank: int
    size: int
    warmup_timeout_s: float = 600.0
    warm: bool = False
    reason: str = ""

    def __init__(self, rank: int, size: int, *, timeout_s: float):
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.epoch = 0
        self.backend: Backend | None = None
        self._failure: BaseException | None = None
        self._closed = False
        _OPEN.add(self)

    # -- what a world must provide ---------------------------------------------------------------

    @abstractmethod
    def allgather(self, payload: bytes) -> list[bytes]:
        """Exchange bytes of any length; return one entry per rank (collective, bounded)."""

    @abstractmethod
    def _allocate(self, nbytes: int, crosses_link: bool) -> SymmetricBuffer:
        """Allocate after all ranks agreed on the size (collective)."""

    @abstractmethod
    def device_ranks(self) -> tuple[int, ...]:
        """Return the ranks that share this rank's device, itself included, ascending."""

    def check_memory(self, nbytes: int) -> TileflowError | None:
        """Return the error if `nbytes` more cannot be had here, without allocating."""
        return None

    def fence(self) -> None:
        """Order CPU stores before it against CPU stores after it, as other ranks see them."""
        return None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Enclose one stage; worlds whose ranks share one stream of time run them one by one."""
        yield

    def run(self, fn: Callable[[World], Result]) -> list[Result]:
        """Call `fn` with the handle of every rank of this process; return their results."""
        return [fn(self)]

    def _close(self) -> None:
        """Release what the world holds."""
        return None

    def _begin_round(self, *, last: bool = False) -> None:
        """Start collectives that no collective of before the failure can be mistaken for.

        Ranks may have failed at different collectives; `last` is the round of :meth:`close`.
        """
        return None

    # -- what every world shares -----------------------------------------------------------------

    @property
    def limit_s(self) -> float:
        """Bound of a wait that starts now, in seconds."""
        return self.timeout_s if self.warm else max(self.timeout_s, self.warmup_timeout_s)

    def barrier(self) -> None:
        """Wait for all ranks (collective, bounded)."""
        self.allgather(b"")

    def agree(self, error: TileflowError | None = None) -> None:
        """Raise on all ranks if any rank has an error (collective).

        The rank that has one raises it; the others raise the lowest such rank's error.
        """
        payload = b"" if error is None else pickle.dumps(error)
        answers = self.allgather(payload)
        if error is not None:
            raise error
        for answer in answers:
            if answer:
                raise pickle.loads(answer)

    def agree_on(self, **fields: object) -> None:
        """Raise ConfigError on all ranks unless every rank gives equal `fields` (collective)."""
        answers = [pickle.loads(a) for a in self.allgather(pickle.dumps(fields))]
        for name, value in answers[0].items():
            for rank, answer in enumerate(answers):
                if answer.get(name) != value:
                    allowed = f"the same on all ranks; rank 0 has {value!r}"
                    raise ConfigError(name, answer.get(name), allowed, rank=rank)

    def allocate(self, nbytes: int, what: str, *, crosses_link: bool = False) -> SymmetricBuffer:
        """Allocate zeroed symmetric memory (collective; sizes and free memory checked first).

        Args:
            nbytes: bytes on each rank, the same everywhere.
            what: names the memory in errors.
            crosses_link: peers' stores into it cross the world's `link`.
        """
        self.agree_on(**{f"bytes of {what}": nbytes})
        self.agree(self.check_memory(nbytes))
        return self._allocate(nbytes, crosses_link)

    def advance_epoch(self) -> int:
        """Start a forward: return its epoch."""
        self.epoch = next_epoch(self.epoch)
        return self.epoch

    @property
    def broken(self) -> bool:
        """Whether a failure was seen since the last :meth:`reset`."""
        return self._failure is not None

    def mark_broken(self, cause: BaseException) -> None:
        """Refuse further calls until :meth:`reset`; the first cause is kept."""
        self._failure = self._failure or cause

    def _collective_failed(self, error: ProtocolTimeout) -> ProtocolTimeout:
        """Break the world, end the peers' waits for this rank, and return the error to raise."""
        if self.backend is not None:
            if error.what == "aborted":  # a rank that went on may itself have been aborted
                error = self.backend.failure() or error
            self.backend.abort()
        self.mark_broken(error)
        return error

    def require_usable(self) -> None:
        """Raise WorldBroken after a failure, WorldError after close()."""
        if self._closed:
            raise WorldError(f"world {self.name!r} is closed")
        if self._failure is not None:
            raise WorldBroken(
                f"rank {self.rank}: an earlier failure broke this world ({self._failure}); "
                "call world.reset() on all ranks",
                self._failure,
            )

    def reset(self, *, epoch: int | None = None) -> None:
        """Make the world usable again after a failure (collective).

        Drains this rank, waits for the others, clears abort and sets every signal word to the new
        epoch base.

        Args:
            epoch: the new base (64 bits); None keeps the largest epoch of all ranks.

        Raises:
            RankLost: a rank no longer answers.
        """
        if self._closed:
            raise WorldError(f"world {self.name!r} is closed")
        if self.backend is not None:
            self.backend.drain()
        self._begin_round()
        try:
            epochs = [int(e) for e in self.allgather(str(self.epoch).encode())]
            self.epoch = _latest(epochs) if epoch is None else epoch & EPOCH_MASK
            if self.backend is not None:
                self.backend.reset_words(self.epoch)
            self.barrier()
        except ProtocolTimeout as error:
            message = f"rank {self.rank}: rank {error.peer} does not answer; the world stays broken"
            raise RankLost(message, (error.peer,)) from error
        self._failure = None

    def close(self) -> None:
        """Free the backend's memory and the world's resources; further calls raise WorldError."""
        if self._closed:
            return
        self._closed = True
        _OPEN.discard(self)
        self._begin_round(last=True)
        if self.backend is not None:
            self.backend.close()
            self.backend = None
        self._close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is not None and self.backend is not None and not self._closed:
            self.backend.abort()  # peers that wait for this rank need not wait in vain
        self.close()

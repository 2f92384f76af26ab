"""The loopback world: W virtual ranks in one process, one thread each.

It runs the whole stack without MPI: on the CPU for function, on a GPU as an upper bound (link
``"hbm"``: peers share the device memory) or over a real PCIe link (link ``"host"``: what crosses
ranks lands in pinned host memory). On a GPU the ranks take turns, stage by stage, so that the
slowest rank's time is that of W devices; on the CPU they run at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..errors import (
    CapacityError,
    CompileError,
    ConfigError,
    InputError,
    ProtocolTimeout,
    TileflowError,
    WorldBroken,
    WorldError,
)
from . import loopback_memory as memory
from .base import Result, SymmetricBuffer, World
from .board import Board

__all__ = ["Loopback", "LoopbackWorld", "create"]

DEFAULT_RANKS = 4
_GRACE_S = 5.0  # beyond the limit of a wait, for ranks to notice that another one failed
_REFUSALS = (CapacityError, CompileError, ConfigError, InputError, WorldError)


def create(
    *, ranks: int | None, backend: str, link: str, device: int | None, timeout_s: float
) -> Loopback | LoopbackWorld:
    """Make the world; one rank is its own handle, more are run by :meth:`Loopback.run`."""
    size = DEFAULT_RANKS if ranks is None else ranks
    group = Loopback(size, device=backend, link=link, device_index=device, timeout_s=timeout_s)
    if size > 1:
        return group
    memory.use_device(device)
    return group.handles[0]


class Loopback:
    """W virtual ranks; their handles live as long as this does.

    Attributes:
        name, device, link, size, timeout_s: as in :class:`World`.
        handles: one handle per rank, for use inside :meth:`run`.
        reason: why this world was chosen, for printing.
    """

    name = "loopback"
    reason = ""

    def __init__(
        self,
        size: int,
        *,
        device: str = "cpu",
        link: str = "hbm",
        device_index: int | None = None,
        timeout_s: float = 30.0,
    ):
        self.size, self.device, self.timeout_s = size, device, timeout_s
        self.link = link if device == "cuda" else None
        self.board = Board(size)
        self.handles = tuple(LoopbackWorld(self, rank) for rank in range(size))
        self._device_index = memory.device_index(device, device_index)
        self._running = threading.Lock()
        self._closed = False

    @property
    def running(self) -> bool:
        """Whether a run() is going on."""
        return self._running.locked()

    def run(self, fn: Callable[[World], Result]) -> list[Result]:
        """Call ``fn(handle)`` once per virtual rank, at the same time; return results by rank.

        Where ranks fail, the others' waits end at once, and the lowest rank's error that is not
        just the echo of another one is raised. A refusal that all ranks share leaves the world
        usable; any other failure breaks it until :meth:`reset`.

        Raises:
            WorldError: the world is closed, or another run() is not over.
        """
        if self._closed:
            raise WorldError("world 'loopback' is closed")
        if not self._running.acquire(blocking=False):
            raise WorldError("world.run() is called while another run() is not over")
        try:
            self.board = Board(self.size)
            outcomes: list[Any] = [None] * self.size
            stuck = self._run_threads(fn, outcomes)
        finally:
            self._running.release()
        errors = [o.error if isinstance(o, _Failed) else None for o in outcomes]
        self._raise_failure(errors, stuck)
        return outcomes

    def _run_threads(self, fn: Callable[[World], Result], outcomes: list[Any]) -> set[int]:
        board = self.board

        def work(rank: int) -> None:
            try:
                with self.on_device():
                    outcomes[rank] = fn(self.handles[rank])
            except BaseException as error:
                outcomes[rank] = _Failed(error)
            finally:
                board.leave(rank, failed=isinstance(outcomes[rank], _Failed))

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"tileflow rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        try:
            stuck = board.await_end(self.handles[0].limit_s + _GRACE_S)
        except BaseException:  # Ctrl-C: let nobody wait for the others
            for rank in range(self.size):
                board.leave(rank, failed=True)
            raise
        for rank in set(range(self.size)) - stuck:
            threads[rank].join()
        return stuck

    def _raise_failure(self, errors: list[BaseException | None], stuck: set[int]) -> None:
        failed = [error for error in errors if error is not None]
        if not failed and not stuck:
            return
        root = next((error for error in failed if not _is_echo(error)), failed[0])
        if stuck or not all(isinstance(error, _REFUSALS) for error in errors):
            for handle in self.handles:
                handle.mark_broken(root)
        if stuck:
            self._closed = True  # their threads may still use the buffers
            raise WorldError(f"ranks {sorted(stuck)} did not return after {root!r}") from root
        raise root

    def on_device(self) -> AbstractContextManager[Any]:
        """Make the world's GPU the current one of this thread, in a ``with`` block."""
        return memory.on_device(self.device, self._device_index)

    def reset(self, *, epoch: int | None = None) -> None:
        """Make the world usable again after a failure; see :meth:`World.reset`."""
        self.run(lambda world: world.reset(epoch=epoch))

    def close(self) -> None:
        """Free all ranks' memory; further calls raise WorldError."""
        self._closed = True
        with self.on_device():
            for handle in self.handles:
                handle.close()

    def require_usable(self) -> None:
        """Refuse to be used as one rank's handle."""
        raise WorldError(
            f"a loopback world holds {self.size} ranks; use each one's handle: world.run(fn)"
        )

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LoopbackWorld(World):
    """The handle of one virtual rank."""

    name = "loopback"

    def __init__(self, group: Loopback, rank: int):
        super().__init__(rank, group.size, timeout_s=group.timeout_s)
        self.device, self.link = group.device, group.link
        self._group = group

    def allgather(self, payload: bytes) -> list[bytes]:
        return self.exchange(payload)

    def exchange(self, item: Any) -> list[Any]:
        """Give `item` to all ranks, as it is; return one per rank (collective, bounded)."""
        self._require_run()
        try:
            return self._group.board.exchange(self.rank, item, self.limit_s)
        except ProtocolTimeout as error:
            raise self._collective_failed(error) from None

    def run(self, fn: Callable[[World], Result]) -> list[Result]:
        if self.size > 1:
            raise WorldError("run() belongs to the world that made this handle")
        with self._group.on_device():
            return [fn(self)]

    def device_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def check_memory(self, nbytes: int) -> TileflowError | None:
        free = memory.free_bytes(self.device)
        if free is None or nbytes * self.size <= free:
            return None
        return WorldError(
            f"{self.size} virtual ranks need {nbytes} bytes each on one GPU, {free} are free"
        )

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run ranks one after another on a GPU; leave when all have had this turn."""
        if self.device != "cuda":
            yield
            return
        self._require_run()
        board, limit_s = self._group.board, self.limit_s * self.size
        board.begin_turn(self.rank, limit_s)
        try:
            yield
            memory.synchronize(self.device)
        finally:
            board.end_turn(self.rank)
        board.await_turns(self.rank, limit_s)

    def _require_run(self) -> None:
        if self.size > 1 and not self._group.running:
            raise WorldError("a virtual rank's handle works inside world.run(fn) only")

    def _begin_round(self, *, last: bool = False) -> None:
        self._group.board.begin_round(self.rank, last=last)

    def _allocate(self, nbytes: int, crosses_link: bool) -> SymmetricBuffer:
        pinned = crosses_link and self.link == "host"
        own, landing = memory.allocate(self.device, nbytes, pinned=pinned)
        return memory.LoopbackBuffer(self.rank, own, landing, self.exchange(landing))


class _Failed:
    def __init__(self, error: BaseException):
        self.error = error


def _is_echo(error: BaseException) -> bool:
    """Tell whether an error only says that another rank failed."""
    aborted = isinstance(error, ProtocolTimeout) and error.what == "aborted"
    return aborted or isinstance(error, WorldBroken)

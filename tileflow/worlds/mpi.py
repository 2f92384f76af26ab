"""What the MPI worlds share: starting MPI, and collectives that end.

A blocking MPI collective waits for ever for a rank that died or stands still. So ranks exchange
bytes by point-to-point messages that are polled within a limit, and a collective of MPI itself
(a window, a communicator) is entered only after such an exchange has shown that all are there.

Only one thread at a time calls MPI. mpi4py is imported, and so MPI started, by :func:`start` alone.
"""

from __future__ import annotations

import atexit
import signal
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config import Environment
from ..errors import ProtocolTimeout, TileflowError, WorldError
from ..protocol import pause
from .base import World
from .board import LAST_ROUND

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiWorld", "start"]

_TAG = 77
_HEADER = struct.Struct("<qq")  # round, number in the round
Key = tuple[int, int]


def start(ranks: int | None, timeout_s: float) -> MPI.Intracomm:
    """Start MPI and return a communicator of our own over all ranks (collective).

    Args:
        ranks: how many the caller expects; None takes what there are.
        timeout_s: how long the other ranks may take to come.

    Raises:
        WorldError: there is no MPI, or not the one that the launcher speaks to, or another number
            of ranks.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise WorldError(f"MPI cannot be used ({error}); pip install 'tileflow[mpi]'") from error
    size = MPI.COMM_WORLD.Get_size()
    _check_launcher(Environment.read(), size, MPI.Get_library_version())
    if ranks not in (None, size):
        raise WorldError(f"ranks = {ranks} was asked for, the launcher started {size}")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise WorldError("MPI was started for one thread; tileflow needs MPI_THREAD_SERIALIZED")
    comm, request = MPI.COMM_WORLD.Idup()
    if not poll(request.Test, timeout_s):
        raise WorldError(f"not all of {size} ranks came to tileflow.init() in {timeout_s} s")
    return comm


def _check_launcher(env: Environment, size: int, library: str) -> None:
    if env.launcher_size > 1 and size == 1:
        raise WorldError(
            f"the launcher started {env.launcher_size} ranks ({env.launcher_name}), but MPI here "
            f"({library.strip().splitlines()[0]}) sees one: mpirun and mpi4py belong to different "
            "MPI libraries; use the mpirun that was installed with mpi4py's library"
        )


def poll(ready: Callable[[], bool], limit_s: float) -> bool:
    """Call `ready` until it holds or `limit_s` seconds have passed; return whether it held."""
    deadline, polls = time.monotonic() + limit_s, 0
    while not ready():
        if time.monotonic() > deadline:
            return False
        polls += 1
        pause(polls)
    return True


class MpiWorld(World):
    """Bounded collectives over MPI; subclasses add the memory.

    Attributes:
        comm: a communicator of the world's own.
        missing: ranks that did not come to a collective; empty again after a successful reset.
    """

    def __init__(self, comm: MPI.Intracomm, *, timeout_s: float):
        super().__init__(comm.Get_rank(), comm.Get_size(), timeout_s=timeout_s)
        self.comm = comm
        self.missing: set[int] = set()
        self._peers = [p for p in range(self.size) if p != self.rank]
        self._round, self._number = 0, 0
        self._inbox: dict[int, dict[Key, bytes]] = {p: {} for p in self._peers}
        self._incoming: dict[int, tuple[Any, bytearray]] = {}
        self._outgoing: list[tuple[int, Any, bytes]] = []

    # -- exchange --------------------------------------------------------------------------------

    def allgather(self, payload: bytes) -> list[bytes]:
        key, started = (self._round, self._number), time.monotonic()
        limit_s, polls = self.timeout_s if self._round == LAST_ROUND else self.limit_s, 0
        self._number += 1
        self._send_all(key, payload)
        while missing := self._progress(key):
            waited = time.monotonic() - started
            if waited > limit_s:
                raise self._lost(missing[0], waited)
            polls += 1
            pause(polls)
        answers = {p: self._inbox[p].pop(key) for p in self._peers}
        return [payload if p == self.rank else answers[p] for p in range(self.size)]

    def _send_all(self, key: Key, payload: bytes) -> None:
        message = _HEADER.pack(*key) + payload
        for peer in self._peers:
            send = partial(self.comm.Isend, message, dest=peer, tag=_TAG)
            self._outgoing.append((peer, self._guard(peer, send), message))

    def _progress(self, key: Key) -> list[int]:
        """Move messages; return the ranks from or to which one is still missing."""
        self._outgoing = [s for s in self._outgoing if not self._guard(s[0], s[1].Test)]
        for peer in self._peers:
            if key not in self._inbox[peer]:
                self._receive(peer, key)
        late = {p for p in self._peers if key not in self._inbox[p]}
        return sorted(late | {peer for peer, _, _ in self._outgoing})

    def _receive(self, peer: int, key: Key) -> None:
        """Take what `peer` has sent; drop what it sent before a failure."""
        while self._guard(peer, partial(self._take, peer)):
            _, buffer = self._incoming.pop(peer)
            found = _HEADER.unpack_from(buffer)
            if found >= key:
                self._inbox[peer][found] = bytes(buffer[_HEADER.size :])
            skipped = found[0] > key[0] and key not in self._inbox[peer]
            if skipped:  # it went on to reset() or close()
                raise self._collective_failed(ProtocolTimeout("aborted", rank=self.rank, peer=peer))

    def _take(self, peer: int) -> bool:
        """Receive one message from `peer`; return whether one is complete."""
        from mpi4py import MPI

        if peer not in self._incoming:
            status = MPI.Status()
            if not self.comm.Iprobe(source=peer, tag=_TAG, status=status):
                return False
            buffer = bytearray(status.Get_count(MPI.BYTE))
            request = self.comm.Irecv([buffer, MPI.BYTE], source=peer, tag=_TAG)
            self._incoming[peer] = (request, buffer)
        return self._incoming[peer][0].Test()

    # -- failures --------------------------------------------------------------------------------

    def _guard(self, peer: int, call: Callable[[], Any]) -> Any:
        """Call MPI; where it says that `peer` failed (ULFM), raise as after a wait for it."""
        from mpi4py import MPI

        try:
            return call()
        except MPI.Exception as error:
            raise self._lost(peer, 0.0) from error

    def _lost(self, peer: int, seconds: float) -> ProtocolTimeout:
        self.missing.add(peer)
        return self._collective_failed(
            ProtocolTimeout("allgather", rank=self.rank, peer=peer, seconds=seconds)
        )

    def all_here(self) -> bool:
        """Return whether all ranks come to this call, so that a collective of MPI may follow.

        Two barriers: a rank that gave up in the first one never sends for the second, so the
        others give up too instead of following into a collective that it will not join.
        """
        if self.missing:
            return False
        try:
            self.barrier()
            self.barrier()
        except TileflowError:
            return False
        return True

    def _begin_round(self, *, last: bool = False) -> None:
        self._round, self._number = (LAST_ROUND if last else self._round + 1), 0

    def reset(self, *, epoch: int | None = None) -> None:
        self.missing.clear()
        super().reset(epoch=epoch)

    def _close(self) -> None:
        if self.all_here():
            self.comm.Free()
        else:
            atexit.register(_bound_exit, self.timeout_s)


def _bound_exit(limit_s: float) -> None:
    """End this process by SIGALRM unless it exits in time.

    With a rank lost, MPI_Finalize, which mpi4py calls at exit, sometimes waits for ever (seen with
    Open MPI 5.0.11 and ULFM, in 4 of 25 runs on a busy machine).
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s)

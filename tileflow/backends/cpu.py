"""The CPU backend: every stage on NumPy, the same plan and protocol as on a GPU.

It shows function, not speed: the caller's thread stands for the consumer's SMs, a second thread
for the producer's, and peers' memory is written by plain stores between two fences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..buffers import Workspace, view
from ..config import Config, MoEShape
from ..errors import InputError, ProtocolTimeout
from ..trace import now_ns
from .base import Backend, ExpertWeights, Forward
from .cpu_kernels import ExpertMatrices, combine, numpy_dtype, pad_rows, swiglu
from .cpu_return import ReturnTrip
from .cpu_signals import Signals
from .dlpack import from_dlpack

if TYPE_CHECKING:
    from ..worlds.base import World

__all__ = ["CpuBackend"]

_BITS = np.uint16  # rows that are only moved are moved as bits


class CpuBackend(Backend):
    """Stages and arrays of one rank on the CPU.

    Attributes:
        signals: the words that ranks set at each other.
    """

    name = "cpu"

    def __init__(self, world: World):
        super().__init__(world)
        self.signals = Signals(world, self.workspace)

    # -- arrays ----------------------------------------------------------------------------------

    def _make_workspace(self) -> Workspace:
        return Workspace(self.world, lambda nbytes: np.zeros(nbytes, np.uint8))

    def asarray(self, name: str, array: Any) -> np.ndarray:
        if isinstance(array, np.ndarray):
            return np.asarray(array)
        if hasattr(array, "__dlpack__"):
            return from_dlpack(name, array)
        raise InputError(name, type(array).__name__, "a NumPy array or a DLPack tensor on the CPU")

    def dtype_name(self, array: np.ndarray) -> str:
        if not array.dtype.isnative:
            return f"{array.dtype.name} in foreign byte order"
        return array.dtype.name

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.empty(shape, numpy_dtype(dtype))

    def load_weights(self, shape: MoEShape, gate_up: Any, down: Any) -> ExpertWeights:
        numpy_dtype(shape.dtype)
        first = None if gate_up is None else ExpertMatrices(gate_up)
        return ExpertWeights(first, ExpertMatrices(down))

    def local_rows(self, region: str, rows: int, columns: int, dtype: str) -> np.ndarray:
        """Return rows [rows, columns] of a local region of the workspace."""
        return view(self.workspace.local[region], (rows, columns), numpy_dtype(dtype))

    def activated_rows(self, forward: Forward) -> np.ndarray:
        """Return the rows [recv_rows, ffn] that enter the last GEMM."""
        if forward.activated is not None:
            return forward.activated
        rows = int(forward.plan.recv_rows[self.world.rank])
        return self.local_rows("activated", rows, forward.shape.ffn, forward.shape.dtype)

    def home_rows(self, forward: Forward, owner: int) -> np.ndarray:
        """Return the rows [rows of `owner`, hidden_out] of a rank's return buffer."""
        key = f"home {owner}"
        if key not in forward.state:
            assert self.workspace.returned is not None
            rows = int(forward.plan.counts[owner].sum())
            forward.state[key] = view(
                self.workspace.returned.peer(owner),
                (rows, forward.plan.config.num_cols),
                numpy_dtype(forward.shape.dtype),
                offset=self.workspace.slot_offset(forward.slot),
            )
        return forward.state[key]

    # -- what the plan needs to know -------------------------------------------------------------

    def arrivals_per_tile(self, shape: MoEShape, config: Config) -> int:
        return 1

    def put_path(self, config: Config) -> str:
        return "serial" if config.put_path == "serial" else "sm"

    # -- stages, in order ------------------------------------------------------------------------

    def dispatch(self, forward: Forward) -> None:
        with self._stage("dispatch"):
            source = _source_tokens(forward.send_row, forward.plan.sent_rows)  # type: ignore[arg-type]
            for peer in self._from_next_rank():
                self._store_tokens(forward, peer, source)
            self.world.fence()  # release: the rows are stored before a signal says so
            for peer in self._from_next_rank()[:-1]:
                self.signals.post(forward, peer, "dispatched", self.world.rank)

    def _store_tokens(self, forward: Forward, peer: int, source: np.ndarray) -> None:
        """Store the token rows that `peer`'s experts get into its receive buffer."""
        plan, rank = forward.plan, self.world.rank
        first = peer * plan.config.experts_per_rank
        experts = slice(first, first + plan.config.experts_per_rank)
        counts = plan.counts[rank, experts]
        num_rows = int(counts.sum())
        if not num_rows:
            return
        assert self.workspace.recv is not None
        begin = int(plan.send_offset[rank, first])
        send_rows = np.arange(begin, begin + num_rows)
        target = send_rows + np.repeat(plan.dispatch_delta[experts], counts)
        shape = (int(plan.recv_rows[peer]), forward.shape.hidden)
        received = view(self.workspace.recv.peer(peer), shape, _BITS)
        received[target] = forward.x.view(_BITS)[source[send_rows]]

    def wait_dispatch(self, forward: Forward) -> None:
        with self._stage("wait_dispatch"):
            for peer in self._from_next_rank()[:-1]:
                self.signals.wait_dispatched(forward, peer)
            self.world.fence()  # acquire: the rows are read after the signals

    def gemm1(self, forward: Forward) -> None:
        with self._stage("gemm1"), np.errstate(over="ignore", invalid="ignore"):
            plan, shape = forward.plan, forward.shape
            activated = self.activated_rows(forward)
            if not len(activated):
                return
            assert self.workspace.recv is not None
            size = (len(activated), shape.hidden)
            received = view(self.workspace.recv.landing, size, numpy_dtype(shape.dtype))
            block = np.empty((plan.config.tile_m, shape.hidden), np.float32)
            for band in plan.bands:
                rows = slice(int(band["row"]), int(band["row"] + band["num_rows"]))
                weights = forward.weights.gate_up.fp32(int(band["expert"]))
                product = pad_rows(received[rows], block) @ weights.T
                activated[rows] = swiglu(product[: band["num_rows"]])

    def produce_and_send(self, forward: Forward) -> None:
        with self._stage("produce_and_send"):
            mode = forward.mode
            if mode == "overlap" and self.put_path(forward.config) == "serial":
                mode = "serial"
            ReturnTrip(self, forward).run(mode)

    def wait_return(self, forward: Forward) -> None:
        with self._stage("wait_return"):
            for peer in self._from_next_rank()[:-1]:
                self.signals.wait_done(forward, peer)
            self.world.fence()  # acquire: the rows are read after the signals

    def combine(self, forward: Forward) -> None:
        with self._stage("combine"), np.errstate(over="ignore", invalid="ignore"):
            home = self.home_rows(forward, self.world.rank)
            assert forward.send_row is not None
            combine(home, forward.send_row, forward.topk_weights, forward.out)

    def returned(self, forward: Forward) -> np.ndarray:
        return self.home_rows(forward, self.world.rank).copy()

    def _from_next_rank(self) -> list[int]:
        """Return all ranks, the next one first and this one last: not all write to one at once."""
        rank, size = self.world.rank, self.world.size
        return [(rank + step) % size for step in range(1, size + 1)]

    # -- life ------------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Note when a stage ran; where it fails, break the world and tell all ranks."""
        started = now_ns()
        try:
            yield
        except BaseException as error:
            self.abort()
            self.world.mark_broken(error)
            raise
        if self.trace is not None:
            self.trace.add(self.world.rank, "stage", name, started, now_ns())

    def warmup(self, shape: MoEShape, config: Config) -> None:
        numpy_dtype(shape.dtype)

    def timed(
        self, work: Callable[[], None], stream: Any = None, lead: Callable[[], None] | None = None
    ) -> float:
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) * 1e3

    def failure(self) -> ProtocolTimeout | None:
        """Return the failure of another rank; this rank's own have been raised where they were."""
        return self.signals.failure()

    def abort(self) -> None:
        self.signals.abort()

    def drain(self) -> None:
        """Do nothing: every stage has ended when its call returns."""

    def reset_words(self, epoch: int) -> None:
        if self.workspace.signals is not None:
            self.signals.reset(epoch)
            self.workspace.local["control"][:] = 0
            self.world.fence()


def _source_tokens(send_row: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the token of each send row [num_rows] from send_row [T, k]."""
    token, slot = np.nonzero(send_row >= 0)
    source = np.empty(num_rows, np.int64)
    source[send_row[token, slot]] = token
    return source

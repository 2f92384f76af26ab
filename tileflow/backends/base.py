"""What a backend is: the stages of one forward, on one rank of a world.

The engine calls the stages in order; each stage either computes now (CPU) or enqueues work on the
caller's stream (GPU). A backend belongs to one rank of one world and is shared by all its layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import Config, MoEShape
from ..errors import InputError, ProtocolTimeout
from ..faults import Faults

if TYPE_CHECKING:
    from ..buffers import Workspace, WorkspaceSizes
    from ..plan import Plan
    from ..trace import Trace
    from ..worlds.base import World

__all__ = ["MODES", "Backend", "ExpertWeights", "Forward"]

# "overlap" and "serial" are public; "gemm" (the GEMM alone, on everything) and "send" (the send
# alone, of rows that an earlier GEMM left in staging) exist to be timed.
MODES = ("overlap", "serial", "gemm", "send")


@dataclass(frozen=True)
class ExpertWeights:
    """The local experts' weights as the backend wants them.

    Attributes:
        gate_up: [E_local, 2 * ffn, hidden], or None for an operator-only layer.
        down: [E_local, hidden_out, ffn].
    """

    gate_up: Any
    down: Any


@dataclass
class Forward:
    """Everything one forward needs on one rank; made by the engine, read by the stages.

    Attributes:
        shape, config: of the layer.
        plan: what goes where; `plan.config.arrivals_per_tile` is the backend's.
        weights: of the layer.
        epoch: number of this forward.
        mode: one of MODES.
        timeout_s: bound of every wait.
        x: tokens [T, hidden]; None in the operator.
        topk_ids: int32 [T, k] on the backend's device; None in the operator.
        topk_weights: float32 [T, k]; None in the operator.
        send_row: int32 [T, k] in host memory, -1 where masked; None in the operator.
        activated: [plan.recv_rows[rank], ffn] rows that enter the last GEMM; None: those that
            gemm1 left in the workspace.
        out: [T, hidden_out] where combine writes; None in the operator.
        faults: injected faults.
        stream: the caller's stream; None on the CPU.
        timings: receives the milliseconds of each stage; None times nothing.
        state: the backend's own notes (uploaded tables and the like).
    """

    shape: MoEShape
    config: Config
    plan: Plan
    weights: ExpertWeights
    epoch: int
    mode: str
    timeout_s: float
    x: Any = None
    topk_ids: Any = None
    topk_weights: Any = None
    send_row: np.ndarray | None = None
    activated: Any = None
    out: Any = None
    faults: Faults = field(default_factory=Faults)
    stream: Any = None
    timings: dict[str, float] | None = None
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def slot(self) -> int:
        """Half of the return buffer that this forward uses (epoch parity)."""
        return self.epoch & 1


class Backend(ABC):
    """Stages and arrays on one rank.

    Attributes:
        name: ``"cpu"`` or ``"cuda"``.
        world: the rank's handle.
        workspace: buffers shared by all layers of the world.
        trace: collects timeline spans when set, else None.
    """

    name: str

    def __init__(self, world: World):
        self.world = world
        self.workspace: Workspace = self._make_workspace()
        self.trace: Trace | None = None

    # -- arrays ----------------------------------------------------------------------------------

    @abstractmethod
    def _make_workspace(self) -> Workspace:
        """Return an empty workspace with this backend's local allocator."""

    @abstractmethod
    def asarray(self, name: str, array: Any) -> Any:
        """Return `array` as this backend's array type without a copy; InputError if impossible."""

    @abstractmethod
    def dtype_name(self, array: Any) -> str:
        """Return ``"float16"``, ``"bfloat16"``, ``"float32"``, ``"int32"``, ... of an array."""

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Enter the caller's stream (None: the current one); the context's value is that stream.

        Raises:
            InputError: this backend has no streams, or `stream` is not one.
        """
        if stream is not None:
            raise InputError("stream", stream, "None; this backend has no streams")
        return nullcontext()

    @abstractmethod
    def to_host(self, array: Any) -> np.ndarray:
        """Return the array in host memory (waits for the current stream)."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a fresh array that the caller will own."""

    @abstractmethod
    def load_weights(self, shape: MoEShape, gate_up: Any, down: Any) -> ExpertWeights:
        """Return the weights in the form that the stages want (no copy where possible)."""

    # -- what the plan needs to know -------------------------------------------------------------

    @abstractmethod
    def arrivals_per_tile(self, shape: MoEShape, config: Config) -> int:
        """Return how often a finished tile raises its band's counter."""

    def check_config(self, config: Config) -> None:
        """Raise ConfigError where this backend cannot run `config` here."""
        return None

    @abstractmethod
    def put_path(self, config: Config) -> str:
        """Return the put path that this configuration runs: ``"sm"``-like names or ``"serial"``."""

    # -- stages, in order ------------------------------------------------------------------------

    @abstractmethod
    def dispatch(self, forward: Forward) -> None:
        """Store own token rows into the receive buffers of the experts' ranks and say so."""

    @abstractmethod
    def wait_dispatch(self, forward: Forward) -> None:
        """Wait until every peer has dispatched."""

    @abstractmethod
    def gemm1(self, forward: Forward) -> None:
        """Compute ``act(rows @ gate_up.T)`` of all received rows into the workspace."""

    @abstractmethod
    def produce_and_send(self, forward: Forward) -> None:
        """Run the last GEMM and send its rows home, as `forward.mode` says."""

    @abstractmethod
    def wait_return(self, forward: Forward) -> None:
        """Wait until every peer's rows have come home."""

    @abstractmethod
    def combine(self, forward: Forward) -> None:
        """Write ``out[t] = sum_k topk_weights[t, k] * returned[send_row[t, k]]``."""

    @abstractmethod
    def returned(self, forward: Forward) -> Any:
        """Return own rows of the return buffer, [plan.sent_rows, hidden_out], as a fresh array."""

    # -- life ------------------------------------------------------------------------------------

    def reserve(self, sizes: WorkspaceSizes) -> None:
        """Make the workspace at least so large (collective)."""
        if self.workspace.ensure(sizes):
            # A fresh word is 0, which a wait for an epoch beyond 2^63 takes for reached.
            self.reset_words(self.world.epoch)
            self.world.barrier()  # before a peer's next signal could be cleared here

    @abstractmethod
    def warmup(self, shape: MoEShape, config: Config) -> None:
        """Compile and load everything that a forward of this layer launches."""

    @abstractmethod
    def timed(
        self, work: Callable[[], None], stream: Any = None, lead: Callable[[], None] | None = None
    ) -> float:
        """Run `work` and return how long the device took, in milliseconds.

        A GPU runs `lead` just before, so that clocks and caches are those of steady load.
        """

    @abstractmethod
    def failure(self) -> ProtocolTimeout | None:
        """Return the failure that a wait has recorded, without blocking."""

    @abstractmethod
    def abort(self) -> None:
        """Tell all ranks that this one has failed, so that their waits end."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until nothing of this rank runs any more."""

    @abstractmethod
    def reset_words(self, epoch: int) -> None:
        """Clear abort, the error record and control words; set every signal to `epoch`."""

    def close(self) -> None:
        """Free the workspace (collective)."""
        self.workspace.free()

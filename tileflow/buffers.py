"""The workspace: named regions of memory that all layers of a world share.

Symmetric regions (written by peers): the receive buffer, the return buffer in two slots, the
signal words. Local regions: intermediate rows, the staging rows that wait for their put, control
words. Until the last GEMM, staging serves for gate and up columns where the activation is a kernel
of its own. Regions only grow; growing is collective, so every rank always has the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from .config import ITEMSIZE, Config, MoEShape
from .plan import PlanConfig
from .protocol import ControlLayout, SignalLayout

if TYPE_CHECKING:
    from .worlds.base import SymmetricBuffer, World

__all__ = ["Workspace", "WorkspaceSizes", "plan_config", "workspace_nbytes"]

SLOTS = 2  # epoch parity: a peer can be one forward ahead, never two
_ALIGN = 256


def plan_config(
    shape: MoEShape, ranks: int, config: Config, *, arrivals_per_tile: int = 1
) -> PlanConfig:
    """Return the plan configuration of a layer; ConfigError where experts and ranks disagree."""
    shape.experts_per_rank(ranks)
    worst = ranks * shape.max_tokens * shape.top_k
    return PlanConfig(
        ranks=ranks,
        num_experts=shape.num_experts,
        num_cols=shape.hidden_out,  # type: ignore[arg-type]
        layout=config.layout,
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        mgb=config.mgb,
        group_bands=config.group_bands,
        max_recv_rows=worst if config.max_recv_rows is None else config.max_recv_rows,
        arrivals_per_tile=arrivals_per_tile,
    )


@dataclass(frozen=True)
class WorkspaceSizes:
    """Bytes of each region on one rank; `returned` is one slot."""

    recv: int = 0
    returned: int = 0
    signals: int = 0
    activated: int = 0
    staging: int = 0
    control: int = 0

    @classmethod
    def of(cls, shape: MoEShape, config: PlanConfig, *, operator_only: bool) -> WorkspaceSizes:
        """Return what a layer needs; an operator-only layer has no receive buffer."""
        rows = max(1, config.max_layout_rows)  # a layer for no tokens has regions all the same
        layer_rows = 0 if operator_only else rows
        sent_rows = max(1, shape.max_tokens * shape.top_k)
        control = ControlLayout(config.ranks, config.experts_per_rank, config.max_bands)
        return cls(
            recv=_region(layer_rows, shape.hidden),
            returned=_region(sent_rows, config.num_cols),
            signals=SignalLayout(config.ranks, config.num_experts).num_words * 8,
            activated=_region(layer_rows, shape.ffn),
            staging=_region(rows, max(config.num_cols, 0 if operator_only else 2 * shape.ffn)),
            control=control.num_words * 4,
        )

    def union(self, other: WorkspaceSizes) -> WorkspaceSizes:
        """Return sizes that serve both."""
        return WorkspaceSizes(*map(max, astuple(self), astuple(other)))

    @property
    def total(self) -> int:
        """Bytes of all regions, both return slots counted."""
        return sum(astuple(self)) + (SLOTS - 1) * self.returned


def _region(rows: int, columns: int) -> int:
    return -(-rows * columns * ITEMSIZE // _ALIGN) * _ALIGN


def workspace_nbytes(shape: MoEShape, ranks: int, config: Config | None = None) -> int:
    """Return the bytes that a layer's workspace takes on each rank.

    Args:
        shape: sizes of the layer.
        ranks: ranks of the world.
        config: how the layer runs; None takes the defaults.
    """
    resolved = plan_config(shape, ranks, config or Config())
    return WorkspaceSizes.of(shape, resolved, operator_only=False).total


class Workspace:
    """The regions of one rank.

    Attributes:
        sizes: what is allocated.
        recv, returned, signals: symmetric buffers (None while their size is 0).
        local: region name -> local uint8 array of ``activated, staging, control``.
        generation: grows with every allocation, so that cached addresses can be dropped.
    """

    _SYMMETRIC = ("recv", "returned", "signals")

    def __init__(self, world: World, allocate_local: Callable[[int], Any]):
        self._world, self._allocate_local = world, allocate_local
        self.sizes = WorkspaceSizes()
        self.recv: SymmetricBuffer | None = None
        self.returned: SymmetricBuffer | None = None
        self.signals: SymmetricBuffer | None = None
        self.local: dict[str, Any] = {}
        self.generation = 0

    def ensure(self, sizes: WorkspaceSizes) -> bool:
        """Grow to at least `sizes` (collective); return whether anything was allocated."""
        wanted = self.sizes.union(sizes)
        if wanted == self.sizes:
            return False
        self._world.barrier()  # nobody writes into memory that is about to go
        for region in fields(WorkspaceSizes):
            if getattr(wanted, region.name) != getattr(self.sizes, region.name):
                self._grow(region.name, getattr(wanted, region.name))
        self.sizes = wanted
        self.generation += 1
        return True

    def _grow(self, name: str, nbytes: int) -> None:
        if name not in self._SYMMETRIC:
            self.local.pop(name, None)
            self.local[name] = self._allocate_local(nbytes)
            return
        total = nbytes * (SLOTS if name == "returned" else 1)
        buffer = self._world.allocate(total, f"{name} region", crosses_link=name == "returned")
        old = getattr(self, name)
        setattr(self, name, buffer)
        if old is not None:
            old.free()  # only now: a refused growth leaves the layers that exist at work

    def slot_offset(self, slot: int) -> int:
        """Return the byte offset of a return slot; the same for all layers of the world."""
        return slot * self.sizes.returned

    def free(self) -> None:
        """Free all regions (collective)."""
        for name in self._SYMMETRIC:
            buffer = getattr(self, name)
            if buffer is not None:
                buffer.free()
                setattr(self, name, None)
        self.local.clear()
        self.sizes = WorkspaceSizes()
        self.generation += 1


def view(region: Any, shape: tuple[int, ...], dtype: Any, *, offset: int = 0) -> Any:
    """Return a typed view of the start of a uint8 region (NumPy or CuPy)."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return region[offset : offset + nbytes].view(dtype).reshape(shape)

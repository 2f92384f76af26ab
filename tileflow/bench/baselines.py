"""Yardsticks that are timed beside the operator, in the same repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine import LEAD_GEMMS
from ..worlds.base import World

__all__ = ["dense_matmul"]


def dense_matmul(world: World, xp: Any, rows: Any, weight: Any) -> Callable[[], float]:
    """Return a work that multiplies all useful rows by one weight: what a dense cuBLAS GEMM takes.

    Args:
        world: this rank's handle; the layer's backend must exist.
        xp: CuPy.
        rows: [useful_rows, k].
        weight: [n, k].
    """
    backend = world.backend
    assert backend is not None
    result = xp.empty((rows.shape[0], weight.shape[0]), rows.dtype)

    def matmul() -> None:
        xp.matmul(rows, weight.T, out=result)

    def lead() -> None:  # as much as the operator's own lead
        for _ in range(LEAD_GEMMS):
            matmul()

    def work() -> float:
        with world.turn(), backend.on_stream(None) as stream:
            return backend.timed(matmul, stream, lead)

    return work

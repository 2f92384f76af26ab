"""Correctness before times: results against an fp32 reference, overlap against serial bit by bit.

On a CPU the reference is ``tileflow.reference``. On a GPU large results are compared where they
lie: one dense fp32 product per expert, in chunks, from inputs that are made again from their seeds;
nothing of the plan or of the layer's own code takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["TOLERANCE", "Check", "layer_error", "operator_error", "same_bits"]

TOLERANCE = {"float16": 8e-3, "bfloat16": 3e-2}
_CHUNK_ROWS = 8192  # bounds the fp32 product: 8192 x 8192 x 4 bytes


@dataclass(frozen=True)
class Check:
    """The verdict on one case, the same on all ranks.

    Attributes:
        max_rel_err: largest error of a row over all ranks, relative to the row's own scale.
        allowed: largest that passes.
        same_bits: overlapped and serial results are equal bit by bit on all ranks.
    """

    max_rel_err: float
    allowed: float
    same_bits: bool

    @property
    def passed(self) -> bool:
        """Whether the case passes; an error that is not a number does not."""
        return self.max_rel_err <= self.allowed and self.same_bits

    @property
    def verdict(self) -> str:
        """``"pass"`` or ``"fail"``."""
        return "pass" if self.passed else "fail"

    def __str__(self) -> str:
        bits = "==" if self.same_bits else "DIFFERS FROM"
        return (
            f"check {self.verdict.upper()}: max_rel_err {self.max_rel_err:.2e} "
            f"(allowed {self.allowed:.0e}), overlap {bits} serial bitwise"
        )


def same_bits(xp: Any, first: Any, second: Any) -> bool:
    """Return whether two arrays of 2-byte elements have the same shape and bits (NaN included)."""
    if first.shape != second.shape:
        return False
    return bool(xp.array_equal(first.view(xp.uint16), second.view(xp.uint16)))


def operator_error(
    xp: Any,
    rows: Any,
    returned: Any,
    counts_row: np.ndarray,
    weight: Callable[[int], Any],
) -> float:
    """Return the largest ``||returned - rows @ weight.T|| / ||rows @ weight.T||`` of a row.

    Args:
        xp: NumPy or CuPy.
        rows: [R, k], the own rows sorted by expert.
        returned: [R, n], what came home.
        counts_row: [E], own rows per global expert.
        weight: returns the weight [n, k] of a global expert.
    """
    worst, first = 0.0, 0
    for expert in np.flatnonzero(counts_row):
        matrix, end = weight(int(expert)).astype(xp.float32), first + int(counts_row[expert])
        for start in range(first, end, _CHUNK_ROWS):
            part = slice(start, min(end, start + _CHUNK_ROWS))
            expected = rows[part].astype(xp.float32) @ matrix.T
            norms = xp.linalg.norm(expected, axis=1)
            worst = max(worst, _largest_error(xp, returned[part], expected, norms))
        first = end
    return worst


def layer_error(
    xp: Any,
    x: Any,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    y: Any,
    weights: Callable[[int], tuple[Any, Any]],
) -> float:
    """Return the largest ``||y - reference|| / sum_k |w_k| ||row_k||`` of a token.

    Args:
        xp: NumPy or CuPy.
        x: [T, hidden].
        topk_ids, topk_weights: [T, k], on the host.
        y: [T, hidden_out], the layer's result.
        weights: returns (gate_up, down) of a global expert.
    """
    expected = xp.zeros(y.shape, xp.float32)
    scales = xp.zeros(len(y), xp.float32)
    for expert in np.unique(topk_ids[topk_ids >= 0]):
        tokens, slots = np.nonzero(topk_ids == expert)
        rows = _expert_rows(xp, x[xp.asarray(tokens)], *weights(int(expert)))
        share = xp.asarray(topk_weights[tokens, slots])
        xp.add.at(expected, xp.asarray(tokens), share[:, None] * rows)
        xp.add.at(scales, xp.asarray(tokens), xp.abs(share) * xp.linalg.norm(rows, axis=1))
    return _largest_error(xp, y, expected, scales)


def _expert_rows(xp: Any, x: Any, gate_up: Any, down: Any) -> Any:
    """Return one expert's SwiGLU MLP of rows [R, hidden] in fp32, [R, hidden_out]."""
    gate, up = xp.split(x.astype(xp.float32) @ gate_up.astype(xp.float32).T, 2, axis=1)
    return (gate / (1.0 + xp.exp(-gate)) * up) @ down.astype(xp.float32).T


def _largest_error(xp: Any, seen: Any, expected: Any, scales: Any) -> float:
    """Return the largest ``||seen - expected|| / scale``; inf where a row is not finite.

    A row whose scale is 0 (no slot at all) must be exactly 0.
    """
    if len(scales) == 0:
        return 0.0
    distances = xp.linalg.norm(seen.astype(xp.float32) - expected, axis=1)
    relative = distances / xp.where(scales > 0, scales, 1)
    relative = xp.where((scales == 0) & (distances > 0), xp.inf, relative)
    return float(xp.where(xp.isfinite(relative), relative, xp.inf).max())

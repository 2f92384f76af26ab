"""Correctness before times: results against an oracle, overlap against serial bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .oracles import Oracle

__all__ = ["Check", "layer_error", "operator_error", "same_bits"]

_CHUNK_ROWS = 8192  # bounds an fp32 product on the GPU: 8192 x 8192 x 4 bytes


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
    oracle: Oracle,
    rows: Any,
    returned: Any,
    counts_row: np.ndarray,
    weight: Callable[[int], Any],
) -> float:
    """Return the largest ``||returned - rows @ weight.T|| / ||rows @ weight.T||`` of a row.

    Args:
        oracle: computes what is expected.
        rows: [R, k], the own rows sorted by expert.
        returned: [R, n], what came home.
        counts_row: [E], own rows per global expert.
        weight: returns the weight [n, k] of a global expert.
    """
    worst, first = 0.0, 0
    for expert in np.flatnonzero(counts_row):
        matrix, end = weight(int(expert)), first + int(counts_row[expert])
        for start in range(first, end, _CHUNK_ROWS):
            part = slice(start, min(end, start + _CHUNK_ROWS))
            expected = oracle.rows(rows[part], matrix)
            norms = oracle.xp.linalg.norm(expected, axis=1)
            worst = max(worst, oracle.largest_error(returned[part], expected, norms))
        first = end
    return worst


def layer_error(
    oracle: Oracle,
    x: Any,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    y: Any,
    weights: Callable[[int], tuple[Any, Any]],
) -> float:
    """Return the largest ``||y - expected|| / sum_k |w_k| ||row_k||`` of a token.

    Args:
        oracle: computes what is expected.
        x: [T, hidden].
        topk_ids, topk_weights: [T, k], on the host.
        y: [T, hidden_out], the layer's result.
        weights: returns (gate_up, down) of a global expert.
    """
    expected = oracle.xp.zeros(y.shape, np.float32)
    scales = oracle.xp.zeros(len(y), np.float32)
    for expert in np.unique(topk_ids[topk_ids >= 0]):
        pair = weights(int(expert))
        part, norms = oracle.tokens(x, topk_ids == expert, topk_weights, *pair)
        expected += part
        scales += norms
    return oracle.largest_error(y, expected, scales)

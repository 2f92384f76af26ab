"""What a layer should compute: a dense oracle for tests and the bench.

It shares no code with the rest of the library: no plan, no world, no backend. Every (token, slot)
pair goes through its expert by itself, in float32 or float64, one expert's weights at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "TOLERANCES",
    "Reference",
    "check_tokens",
    "moe_reference",
    "operator_reference",
    "relative_error",
]

TOLERANCES = {"float16": 8e-3, "bfloat16": 3e-2}  # of sum_k |w_k| * ||row_k||, per token


@dataclass(frozen=True, eq=False)
class Reference:
    """The exact result of one rank's tokens.

    Attributes:
        y: [T, N], not rounded to the layer's dtype.
        row_norms: [T], ``sum_k |w_k| * ||row_k||`` over the slots of each token, what errors are
            measured by: where the terms of a token cancel, its own norm says little.
    """

    y: np.ndarray
    row_norms: np.ndarray


def moe_reference(
    x_per_rank: Sequence[np.ndarray],
    topk_ids_per_rank: Sequence[np.ndarray],
    topk_weights_per_rank: Sequence[np.ndarray],
    w_gate_up_all: np.ndarray,  # [E, 2 * ffn, hidden], gate rows first
    w_down_all: np.ndarray,  # [E, N, ffn]
    *,
    dtype: Any = None,
    accumulate: Any = np.float64,
) -> list[Reference]:
    """Compute ``y[t] = sum_k w[t, k] * (silu(x[t] @ gate.T) * (x[t] @ up.T)) @ down.T``.

    gate, up and down are those of expert ``topk_ids[t, k]``; a slot with id -1 adds nothing.

    Args:
        x_per_rank: [T, hidden] of every rank, any float dtype.
        topk_ids_per_rank: int [T, k] of every rank, global experts or -1.
        topk_weights_per_rank: float [T, k] of every rank.
        w_gate_up_all: of all experts, any float dtype.
        w_down_all: of all experts, any float dtype.
        dtype: ``"float16"`` or ``"bfloat16"`` rounds the row between the two GEMMs to it, as a
            layer of this dtype must; None rounds nothing. The result is never rounded.
        accumulate: ``np.float32`` or ``np.float64``, of all arithmetic and of the result.

    Returns:
        One :class:`Reference` per rank, arrays of type `accumulate`.
    """
    x = np.concatenate(x_per_rank)  # [T of all ranks, hidden]
    ids = np.concatenate(topk_ids_per_rank)
    weights = np.concatenate(topk_weights_per_rank).astype(accumulate)
    y = np.zeros((len(x), w_down_all.shape[1]), accumulate)
    row_norms = np.zeros(len(x), accumulate)
    for expert in np.unique(ids[ids >= 0]):
        tokens, slots = np.nonzero(ids == expert)
        hidden = _swiglu(x[tokens].astype(accumulate) @ w_gate_up_all[expert].astype(accumulate).T)
        rows = _rounded(hidden, dtype) @ w_down_all[expert].astype(accumulate).T
        for slot in np.unique(slots):  # a token may name an expert twice, but once per slot
            here = slots == slot
            weight = weights[tokens[here], slot]
            y[tokens[here]] += weight[:, None] * rows[here]
            row_norms[tokens[here]] += np.abs(weight) * np.linalg.norm(rows[here], axis=1)
    lasts = np.cumsum([len(x) for x in x_per_rank])
    ranges = [slice(last - len(x), last) for last, x in zip(lasts, x_per_rank, strict=True)]
    return [Reference(y[part], row_norms[part]) for part in ranges]


def operator_reference(
    a_rows: np.ndarray,  # [R, ffn]
    row_experts: np.ndarray,  # int [R]
    w_down_all: np.ndarray,  # [E, N, ffn]
    *,
    accumulate: Any = np.float64,
) -> Reference:
    """Compute ``y[i] = a_rows[i] @ w_down_all[row_experts[i]].T``, a token with one slot per row.

    Args:
        a_rows: any float dtype, rows in any order.
        row_experts: global expert of each row; -1 gives a row of zeros.
        w_down_all: of all experts, any float dtype.
        accumulate: ``np.float32`` or ``np.float64``, of all arithmetic and of the result.
    """
    y = np.zeros((len(a_rows), w_down_all.shape[1]), accumulate)
    for expert in np.unique(row_experts[row_experts >= 0]):
        here = row_experts == expert
        y[here] = a_rows[here].astype(accumulate) @ w_down_all[expert].astype(accumulate).T
    return Reference(y, np.linalg.norm(y, axis=1))


def relative_error(y: np.ndarray, ref: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return ``||y[t] - ref[t]|| / scale[t]`` as float64 [T].

    NaN anywhere in a token gives inf; so does any difference where the scale is 0, as it is for
    masked tokens, which must be exactly 0.
    """
    if y.shape != ref.shape or scale.shape != ref.shape[:1]:
        raise ValueError(f"shapes {y.shape}, {ref.shape} and {scale.shape} do not belong together")
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.linalg.norm(y.astype(np.float64) - ref.astype(np.float64), axis=1)
        error = distance / scale
    error[(distance == 0) & (scale == 0)] = 0.0
    return np.where(np.isnan(error), np.inf, error)


def check_tokens(
    y: np.ndarray, ref: np.ndarray, row_norms: np.ndarray, dtype: Any
) -> tuple[bool, float]:
    """Tell whether every token is within its tolerance; return that and the largest error.

    Args:
        y: [T, N], what a layer computed, any float dtype.
        ref: [T, N], `Reference.y`.
        row_norms: [T], `Reference.row_norms`.
        dtype: the layer's: float16 allows 8e-3 of a token's `row_norms`, bfloat16 3e-2.
    """
    errors = relative_error(y, ref, row_norms)
    return bool((errors <= TOLERANCES[_name(dtype)]).all()), float(errors.max(initial=0.0))


def _swiglu(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up, 2, axis=1)
    with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right 0
        return gate / (1.0 + np.exp(-gate)) * up


def _rounded(array: np.ndarray, dtype: Any) -> np.ndarray:
    return array if dtype is None else array.astype(_numpy_type(dtype)).astype(array.dtype)


def _numpy_type(dtype: Any) -> np.dtype:
    if _name(dtype) == "bfloat16":
        import ml_dtypes  # only where bfloat16 is used

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


def _name(dtype: Any) -> str:
    return dtype if isinstance(dtype, str) else np.dtype(dtype).name

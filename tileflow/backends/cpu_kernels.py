"""The arithmetic of the CPU backend: pure functions on arrays, in fp32, rounded once.

Every product is computed on blocks of exactly ``tile_m`` rows, the missing ones zero: BLAS may add
in another order for another number of rows, so a row's bits would otherwise depend on how many
rows other ranks sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..plan import Plan

__all__ = ["ExpertMatrices", "GroupRows", "combine", "numpy_dtype", "pad_rows", "swiglu", "tiles"]

_KEEP_BYTES = 512 << 20  # fp32 copies of one weight array are kept up to this size
_COMBINE_TOKENS = 1024  # per step, so that the fp32 intermediates stay small


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of ``"float16"``, ``"bfloat16"``, ``"float32"``, ...

    Raises:
        ConfigError: bfloat16 without the package that brings it to NumPy.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        allowed = "float16; bfloat16 on the CPU needs the package ml_dtypes"
        raise ConfigError("MoEShape.dtype", name, allowed) from error
    return np.dtype(ml_dtypes.bfloat16)


class ExpertMatrices:
    """The local experts' weights [E_local, N, K] and their fp32 copies, made when asked for.

    All copies are kept where they are small, else the last expert's alone: tiles come expert by
    expert.
    """

    def __init__(self, weights: np.ndarray):
        self.weights = weights
        self._keep_all = weights.size * 4 <= _KEEP_BYTES
        self._fp32: dict[int, np.ndarray] = {}

    def fp32(self, expert: int) -> np.ndarray:
        """Return expert `expert` (local number) as fp32 [N, K]."""
        if expert not in self._fp32:
            if not self._keep_all:
                self._fp32.clear()
            self._fp32[expert] = self.weights[expert].astype(np.float32)
        return self._fp32[expert]


def pad_rows(rows: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Fill fp32 `block` [tile_m, K] with `rows` [n <= tile_m, K] and zeros; return it."""
    block[: len(rows)] = rows
    block[len(rows) :] = 0
    return block


def swiglu(product: np.ndarray) -> np.ndarray:
    """Return ``silu(gate) * up`` of fp32 [rows, 2 * ffn], gate columns first."""
    gate, up = np.split(product, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def tiles(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """Yield (band, n_tile, position of the band in the schedule) of all tiles in issue order."""
    tiles_n = plan.config.tiles_n
    band_at = plan.schedule["band"].tolist()
    first_at = plan.schedule["group_first"].tolist()
    size_at = plan.schedule["group_size"].tolist()
    for tile in range(plan.num_bands * tiles_n):
        at = tile // tiles_n  # some position of the tile's group
        within = tile - first_at[at] * tiles_n
        position = first_at[at] + within % size_at[at]
        yield band_at[position], within // size_at[at], position


class GroupRows:
    """The fp32 input rows of one schedule group's bands: a group's tiles come together."""

    def __init__(self, plan: Plan, rows: np.ndarray):
        self._plan, self._rows = plan, rows
        self._first = -1
        self._blocks = np.empty((0, plan.config.tile_m, rows.shape[1]), np.float32)

    def block(self, position: int) -> np.ndarray:
        """Return the rows [tile_m, K] of the band at a position of the schedule."""
        first = int(self._plan.schedule["group_first"][position])
        if first != self._first:
            self._load(first)
        return self._blocks[position - first]

    def _load(self, first: int) -> None:
        group = self._plan.schedule[first : first + self._plan.schedule["group_size"][first]]
        if len(group) > len(self._blocks):
            self._blocks = np.empty((len(group), *self._blocks.shape[1:]), np.float32)
        for block, band in zip(self._blocks, self._plan.bands[group["band"]], strict=False):
            pad_rows(self._rows[band["row"] : band["row"] + band["num_rows"]], block)
        self._first = first


def combine(
    returned: np.ndarray, send_row: np.ndarray, topk_weights: np.ndarray, out: np.ndarray
) -> None:
    """Write ``out[t] = sum_k topk_weights[t, k] * returned[send_row[t, k]]``.

    In fp32, in the order of k; a slot with send_row -1 is skipped, not multiplied, so a token
    without slots is exactly 0 and NaN elsewhere does no harm.

    Args:
        returned: rows that came home [rows, N].
        send_row: int32 [T, k].
        topk_weights: float32 [T, k].
        out: [T, N].
    """
    for first in range(0, len(out), _COMBINE_TOKENS):
        chunk = slice(first, first + _COMBINE_TOKENS)
        total = np.zeros(out[chunk].shape, np.float32)
        for rows, weights in zip(send_row[chunk].T, topk_weights[chunk].T, strict=True):
            tokens = np.flatnonzero(rows >= 0)
            total[tokens] += weights[tokens, None] * returned[rows[tokens]].astype(np.float32)
        out[chunk] = total

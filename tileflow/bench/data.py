"""Inputs of cases: seeded, made where they are used (NumPy on a CPU, CuPy on a GPU).

Every array is named by a key (weight of expert e; rows that rank s has for the experts of rank r),
so the rank that checks a result makes the same inputs again instead of asking for them.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..plan import Plan
from .cases import Case, LayerCase, OperatorCase

__all__ = ["Maker", "OperatorInputs", "release_memory"]

_WEIGHT_UP, _WEIGHT_DOWN, _ROWS, _TOKENS = range(4)
_PHILOX = 161  # cuRAND's generator that is seeded at no cost: one is made per array


class Maker:
    """Make the normally distributed arrays of one case on one device.

    Attributes:
        xp: NumPy or CuPy.
        dtype: of the arrays.
    """

    def __init__(self, device: str, case: Case):
        self.xp = _array_module(device)
        self.dtype = _numpy_dtype(case.dtype)
        # Cases differ in all their data: else a row that was not sent could be found where the case
        # before, with another layout and the same routing, had sent its twin.
        self._entropy = (case.seed, zlib.crc32(case.name.encode()))

    def normal(self, key: tuple[int, ...], shape: tuple[int, ...], scale: float = 1.0) -> Any:
        """Return the array that `key` names, rounded to the case's dtype."""
        seeds = np.random.SeedSequence([*self._entropy, *key])
        seed = int(seeds.generate_state(1)[0])
        if 0 in shape:
            return self.xp.zeros(shape, self.dtype)
        if self.xp is np:
            values = np.random.default_rng(seed).standard_normal(shape, np.float32)
        else:
            generator = self.xp.random.RandomState(seed, method=_PHILOX)
            values = generator.standard_normal(shape, self.xp.float32)
        values *= self.xp.float32(scale)
        return values.astype(self.dtype)

    def gate_up(self, case: LayerCase, expert: int) -> Any:
        """Return the first weight [2 * ffn, hidden] of a global expert."""
        shape = (2 * case.ffn, case.hidden)
        return self.normal((_WEIGHT_UP, expert), shape, case.hidden**-0.5)

    def down(self, n: int, k: int, expert: int) -> Any:
        """Return the last weight [n, k] of a global expert."""
        return self.normal((_WEIGHT_DOWN, expert), (n, k), k**-0.5)

    def tokens(self, case: LayerCase, rank: int) -> Any:
        """Return the tokens [T, hidden] of a rank."""
        return self.normal((_TOKENS, rank), (case.tokens, case.hidden))

    def rows(self, source: int, expert_rank: int, shape: tuple[int, int]) -> Any:
        """Return the rows that `source` has for the experts of `expert_rank`, sorted by expert."""
        return self.normal((_ROWS, source, expert_rank), shape)

    def stack(self, arrays: list[Any]) -> Any:
        """Return equally shaped arrays as one, one axis more."""
        return self.xp.stack(arrays)

    def concatenate(self, arrays: list[Any]) -> Any:
        """Return arrays joined along the first axis."""
        return self.xp.concatenate(arrays)


class OperatorInputs:
    """Inputs of an operator case on one rank.

    Args:
        maker: makes the arrays.
        case: the case.
        counts: int32 [W, E].
        rank: this rank.
    """

    def __init__(self, maker: Maker, case: OperatorCase, counts: np.ndarray, rank: int):
        self._maker, self._case, self._counts, self._rank = maker, case, counts, rank

    def down(self, expert: int) -> Any:
        """Return the weight [n, k] of a global expert."""
        return self._maker.down(self._case.n, self._case.k, expert)

    def local_weights(self) -> Any:
        """Return the weights [E_local, n, k] of this rank's experts."""
        return self._maker.stack([self.down(expert) for expert in self._experts(self._rank)])

    def activated(self, plan: Plan) -> Any:
        """Return the rows [plan.recv_rows[rank], k] that enter this rank's GEMM; pad rows are 0."""
        size = (int(plan.recv_rows[self._rank]), self._case.k)
        buffer = self._maker.xp.zeros(size, self._maker.dtype)
        for source in range(len(self._counts)):
            block, first = self._block(source, self._rank), 0
            for expert in self._experts(self._rank):
                num_rows = int(self._counts[source, expert])
                row = int(plan.recv_offset[expert, source])
                buffer[row : row + num_rows] = block[first : first + num_rows]
                first += num_rows
        return buffer

    def sent(self) -> Any:
        """Return the own rows [counts[rank].sum(), k] as this rank sorts them, by expert."""
        ranks = range(len(self._counts))
        return self._maker.concatenate([self._block(self._rank, other) for other in ranks])

    def _block(self, source: int, expert_rank: int) -> Any:
        num_rows = int(self._counts[source, self._experts(expert_rank)].sum())
        return self._maker.rows(source, expert_rank, (num_rows, self._case.k))

    def _experts(self, rank: int) -> range:
        return range(rank * self._case.e_local, (rank + 1) * self._case.e_local)


def release_memory(device: str) -> None:
    """Give the GPU memory of deleted arrays back, for worlds that allocate beside CuPy's pool."""
    if device == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()


def _array_module(device: str) -> Any:
    if device == "cpu":
        return np
    import cupy

    return cupy


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ConfigError("--dtype", name, "float16; bfloat16 needs ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)

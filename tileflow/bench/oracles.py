"""What a case should compute, one expert at a time: on the host, or where large results lie.

Neither oracle knows a plan or a layer. The host's is ``tileflow.reference``; the device's are a few
dense fp32 products on the GPU, for results that a host would take minutes to check.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from .. import reference

__all__ = ["DeviceOracle", "HostOracle", "Oracle", "make_oracle"]


class Oracle(ABC):
    """Results of one expert in fp32, and their distance from what was computed.

    Attributes:
        xp: module of the arrays, NumPy or CuPy.
    """

    xp: Any

    @abstractmethod
    def rows(self, rows: Any, down: Any) -> Any:
        """Return ``rows @ down.T`` [R, N] of rows [R, K] and one expert's weight [N, K]."""

    @abstractmethod
    def tokens(
        self, x: Any, chosen: np.ndarray, shares: np.ndarray, gate_up: Any, down: Any
    ) -> tuple[Any, Any]:
        """Return one expert's part of y [T, N] and of ``sum_k |w_k| ||row_k||`` [T].

        Args:
            x: [T, hidden].
            chosen: bool [T, k], the slots that name this expert, on the host.
            shares: float32 [T, k], the weights of the slots, on the host.
            gate_up: [2 * ffn, hidden].
            down: [N, ffn].
        """

    @abstractmethod
    def largest_error(self, seen: Any, expected: Any, scales: Any) -> float:
        """Return the largest ``||seen - expected|| / scale`` of a row; inf where one is not finite.

        A row with scale 0 must be exactly 0.
        """


class HostOracle(Oracle):
    """The reference, in NumPy."""

    xp = np

    def __init__(self, dtype: str):
        self._dtype = dtype

    def rows(self, rows: Any, down: Any) -> Any:
        experts = np.zeros(len(rows), np.int32)
        return reference.operator_reference(rows, experts, down[None], accumulate=np.float32).y

    def tokens(
        self, x: Any, chosen: np.ndarray, shares: np.ndarray, gate_up: Any, down: Any
    ) -> tuple[Any, Any]:
        (part,) = reference.moe_reference(
            [x],
            [np.where(chosen, 0, -1)],
            [shares],
            gate_up[None],
            down[None],
            dtype=self._dtype,
            accumulate=np.float32,
        )
        return part.y, part.row_norms

    def largest_error(self, seen: Any, expected: Any, scales: Any) -> float:
        return float(reference.relative_error(seen, expected, scales).max(initial=0.0))


class DeviceOracle(Oracle):
    """Dense fp32 products with CuPy (tests pass NumPy)."""

    def __init__(self, xp: Any):
        self.xp = xp

    def rows(self, rows: Any, down: Any) -> Any:
        return rows.astype(self.xp.float32) @ down.astype(self.xp.float32).T

    def tokens(
        self, x: Any, chosen: np.ndarray, shares: np.ndarray, gate_up: Any, down: Any
    ) -> tuple[Any, Any]:
        xp = self.xp
        tokens, slots = np.nonzero(chosen)
        share = xp.asarray(shares[tokens, slots])
        tokens = xp.asarray(tokens)
        gate, up = xp.split(self.rows(x[tokens], gate_up), 2, axis=1)
        rows = self.rows(gate / (1.0 + xp.exp(-gate)) * up, down)
        y = xp.zeros((len(x), len(down)), xp.float32)
        norms = xp.zeros(len(x), xp.float32)
        xp.add.at(y, tokens, share[:, None] * rows)
        xp.add.at(norms, tokens, xp.abs(share) * xp.linalg.norm(rows, axis=1))
        return y, norms

    def largest_error(self, seen: Any, expected: Any, scales: Any) -> float:
        xp = self.xp
        if len(scales) == 0:
            return 0.0
        distances = xp.linalg.norm(seen.astype(xp.float32) - expected, axis=1)
        relative = distances / xp.where(scales > 0, scales, 1)
        relative = xp.where((scales == 0) & (distances > 0), xp.inf, relative)
        return float(xp.where(xp.isfinite(relative), relative, xp.inf).max())


def make_oracle(xp: Any, dtype: str) -> Oracle:
    """Return the oracle for arrays of `xp`."""
    return HostOracle(dtype) if xp is np else DeviceOracle(xp)

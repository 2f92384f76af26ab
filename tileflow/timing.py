"""Times that can be compared: interleaved repeats, max over ranks, medians with their spread.

What is compared is measured in turn inside every repeat, so that a clock that drifts (power limit,
other users) moves all of it alike. A collective is as slow as its slowest rank, so each repeat
counts the maximum over ranks, and only then the median is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .layer import MoELayer
    from .worlds.base import World

__all__ = [
    "OperatorTimes",
    "Spread",
    "bound_ratio",
    "layer_ms",
    "max_over_ranks",
    "measure",
    "measure_operator",
    "operator_ms",
    "overlap_ceiling",
    "overlap_ratio",
]


@dataclass(frozen=True)
class Spread:
    """Milliseconds over repeats: median, 10th and 90th percentile."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    repeats: int

    @classmethod
    def of(cls, samples_ms: Sequence[float] | np.ndarray) -> Spread:
        """Return the spread of at least one sample."""
        p10, median, p90 = np.percentile(np.asarray(samples_ms, np.float64), (10, 50, 90))
        return cls(float(median), float(p10), float(p90), len(samples_ms))


def max_over_ranks(world: World, samples_ms: np.ndarray) -> np.ndarray:
    """Return the elementwise maximum over all ranks (collective; equal shapes on all ranks)."""
    own = np.ascontiguousarray(samples_ms, np.float64)
    gathered = [np.frombuffer(answer, np.float64) for answer in world.allgather(own.tobytes())]
    return np.max(gathered, axis=0).reshape(own.shape)


def measure(
    world: World, works: Mapping[str, Callable[[], float]], *, repeats: int, warmups: int = 1
) -> dict[str, Spread]:
    """Time works in turn (collective).

    Args:
        world: this rank's handle.
        works: name -> function that runs the work once and returns its milliseconds here; the
            same names in the same order on every rank. The order holds inside a repeat, so a work
            may rely on what the one before it left.
        repeats: samples per work, at least 1.
        warmups: rounds before them that are not counted.

    Returns:
        Name -> spread of the per-repeat maximum over ranks, equal on all ranks.
    """
    rounds = [[work() for work in works.values()] for _ in range(warmups + repeats)]
    slowest = max_over_ranks(world, np.array(rounds[warmups:], np.float64))  # [repeats, works]
    return {name: Spread.of(slowest[:, i]) for i, name in enumerate(works)}


def operator_ms(layer: MoELayer, activated: Any, counts: np.ndarray, mode: str) -> float:
    """Run the operator once and return the milliseconds of its GEMM and sends (collective).

    Args:
        layer: the layer whose ``w_down`` is used.
        activated: [plan.recv_rows[rank], ffn] as :meth:`MoELayer.operator` takes it.
        counts: int32 [W, E].
        mode: one of ``backends.base.MODES``; ``"send"`` sends what the ``"gemm"`` or other forward
            just before it left in staging.
    """
    timings: dict[str, float] = {}
    with layer.world.backend.on_stream(None) as stream:  # type: ignore[union-attr]
        layer.engine.operator(layer._weights, activated, counts, mode, None, stream, timings)
    return timings["produce_and_send"]


def layer_ms(layer: MoELayer, arguments: tuple[Any, Any, Any], mode: str) -> dict[str, float]:
    """Run the layer once; return milliseconds per stage and their sum as ``"total"``."""
    timings: dict[str, float] = {}
    layer.forward(*arguments, mode=mode, timings=timings)
    return timings | {"total": sum(timings.values())}


@dataclass(frozen=True)
class OperatorTimes:
    """The four times that describe the overlap of one operator, equal on all ranks.

    Attributes:
        gemm: the GEMM alone, on all SMs.
        send: the remote rows alone, at full width; None where no row is remote.
        serial: the GEMM, then the send.
        overlap: the send under the GEMM.
        extra: further works that were timed in the same repeats.
    """

    gemm: Spread
    send: Spread | None
    serial: Spread
    overlap: Spread
    extra: Mapping[str, Spread]

    @property
    def overlap_ratio(self) -> float | None:
        """Share of the exposed send that the overlap hides; see :func:`overlap_ratio`."""
        if self.send is None:
            return None
        return overlap_ratio(
            self.gemm.median_ms, self.serial.median_ms, overlap_ms=self.overlap.median_ms
        )

    @property
    def overlap_ceiling(self) -> float | None:
        """The best :attr:`overlap_ratio` that the longer of GEMM and send allows."""
        if self.send is None:
            return None
        return overlap_ceiling(
            self.gemm.median_ms, self.serial.median_ms, send_ms=self.send.median_ms
        )

    @property
    def bound_ratio(self) -> float | None:
        """Overlapped time over its lower bound, the longer of GEMM and send."""
        send_ms = 0.0 if self.send is None else self.send.median_ms
        return bound_ratio(self.gemm.median_ms, self.overlap.median_ms, send_ms=send_ms)


def measure_operator(
    layer: MoELayer,
    activated: Any,
    counts: np.ndarray,
    *,
    repeats: int,
    warmups: int = 1,
    extra: Mapping[str, Callable[[], float]] | None = None,
) -> OperatorTimes:
    """Time the operator's GEMM, send, serial and overlapped runs in turn (collective).

    Args:
        layer, activated, counts: as in :func:`operator_ms`.
        repeats: samples per time.
        warmups: rounds that are not counted.
        extra: further works, timed at the end of every round.
    """

    def work(mode: str) -> Callable[[], float]:
        return lambda: operator_ms(layer, activated, counts, mode)

    # "send" stands right behind "gemm": it sends the rows that the GEMM has left in staging.
    modes = ("gemm", "send", "serial", "overlap") if _any_remote(counts) else _UNSENT
    works = {mode: work(mode) for mode in modes} | dict(extra or {})
    spreads = measure(layer.world, works, repeats=repeats, warmups=warmups)
    send = spreads.get("send")
    others = {name: spreads[name] for name in extra or {}}
    return OperatorTimes(spreads["gemm"], send, spreads["serial"], spreads["overlap"], others)


_UNSENT = ("gemm", "serial", "overlap")


def _any_remote(counts: np.ndarray) -> bool:
    """Whether any rank has rows for an expert of another rank (equal on all ranks)."""
    ranks = counts.shape[0]
    by_rank = counts.reshape(ranks, ranks, -1).sum(axis=2)
    return bool((by_rank.sum() - np.trace(by_rank)) > 0)


def overlap_ratio(gemm_ms: float, serial_ms: float, *, overlap_ms: float) -> float | None:
    """Return ``1 - max(0, overlap - gemm) / (serial - gemm)``; None where nothing was exposed.

    1 means that the send is hidden whole, 0 that nothing is won, below 0 that overlap loses.
    """
    exposed_ms = serial_ms - gemm_ms
    if not exposed_ms > 0.0:
        return None
    return 1.0 - max(0.0, overlap_ms - gemm_ms) / exposed_ms


def overlap_ceiling(gemm_ms: float, serial_ms: float, *, send_ms: float) -> float | None:
    """Return the overlap ratio of an overlap that takes ``max(gemm, send)``.

    A send longer than the GEMM cannot be hidden whole, so its ceiling is below 1.
    """
    return overlap_ratio(gemm_ms, serial_ms, overlap_ms=max(gemm_ms, send_ms))


def bound_ratio(gemm_ms: float, overlap_ms: float, *, send_ms: float) -> float | None:
    """Return ``overlap / max(gemm, send)``; None where both are 0."""
    bound_ms = max(gemm_ms, send_ms)
    return overlap_ms / bound_ms if bound_ms > 0.0 else None

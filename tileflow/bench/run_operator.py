"""Operator cases: the last expert GEMM and the return of its rows, and nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import MoEShape
from ..layer import MoELayer
from ..plan import Plan
from ..routing import make_counts
from ..timing import OperatorTimes, measure_operator
from ..trace import Trace
from ..worlds.base import World
from .baselines import dense_matmul
from .cases import OperatorCase
from .checks import operator_error, same_bits
from .data import OperatorInputs
from .place import Place
from .plans import PlanSummary
from .run_case import CaseRun, Times

__all__ = ["OperatorRun"]


class OperatorRun(CaseRun):
    """An operator case on one rank."""

    case: OperatorCase

    def __init__(self, world: World, place: Place, case: OperatorCase):
        super().__init__(world, place, case)
        self.counts = make_counts(
            case.routing,
            rows=case.rows,
            experts_per_rank=case.e_local,
            ranks=world.size,
            seed=case.seed,
        )
        self._inputs = OperatorInputs(self.maker, case, self.counts, world.rank)
        weights = self._inputs.local_weights()
        config = replace(case.config, max_recv_rows=case.rows)
        self.layer = MoELayer(world, self._shape(), None, weights, config=config)
        self.layer.warmup()
        self._activated = self._inputs.activated(self.plan())

    def _shape(self) -> MoEShape:
        case = self.case
        return MoEShape(
            hidden=case.n,
            ffn=case.k,
            num_experts=case.e_local * self.world.size,
            top_k=1,
            max_tokens=int(self.counts.sum(axis=1).max()),
            dtype=case.dtype,
        )

    def plan(self) -> Plan:
        return self.layer.plan(self.counts)

    def compare(self) -> tuple[float, bool]:
        overlapped = self._run("overlap")
        serial = self._run("serial")
        bits = same_bits(self.maker.xp, overlapped, serial)
        own, inputs = self.counts[self.world.rank], self._inputs
        error = operator_error(self.oracle, inputs.sent(), overlapped, own, inputs.down)
        return error, bits

    def _run(self, mode: str) -> Any:
        return self.layer.operator(self._activated, self.counts, mode=mode)

    def measure(self, plans: list[PlanSummary]) -> Times:
        times = measure_operator(
            self.layer,
            self._activated,
            self.counts,
            repeats=self.case.repeats,
            extra={"plan": lambda: self.layer.engine.last_plan_ms} | self._dense(),
        )
        return Times(_spreads(times), self._values(times, plans))

    def _dense(self) -> dict[str, Callable[[], float]]:
        """Return the dense cuBLAS product of as many rows, on a GPU."""
        if self.world.device != "cuda":
            return {}
        case, maker = self.case, self.maker
        rows, weight = maker.rows(0, 0, (case.rows, case.k)), self._inputs.down(0)
        return {"cublas_dense": dense_matmul(self.world, maker.xp, rows, weight)}

    def _values(self, times: OperatorTimes, plans: list[PlanSummary]) -> dict[str, Any]:
        remote_bytes = max(plan.remote_bytes for plan in plans)
        dense = times.extra.get("cublas_dense")
        return {
            "overlap_ratio": times.overlap_ratio,
            "overlap_ceiling": times.overlap_ceiling,
            "bound_ratio": times.bound_ratio,
            "tflops": self._tflops(times.gemm.median_ms),
            "gbps": remote_bytes / times.send.median_ms / 1e6 if times.send else None,
            "tflops_cublas_dense": self._tflops(dense.median_ms) if dense else None,
        }

    def _tflops(self, milliseconds: float) -> float:
        case = self.case
        return 2.0 * case.rows * case.n * case.k / milliseconds / 1e9

    def sizes(self) -> dict[str, Any]:
        return {"rows": self.case.rows, "n": self.case.n, "k": self.case.k}

    def trace(self, path: Path) -> int:
        """Save the timeline of one overlapped run of all ranks; return its number of spans."""
        backend = self.world.backend
        assert backend is not None
        backend.trace = Trace()
        try:
            self._run("overlap")
            answers = self.world.allgather(pickle.dumps(backend.trace.spans))
        finally:
            backend.trace = None
        return _save(path, answers) if self.world.rank == 0 else 0


def _save(path: Path, answers: list[bytes]) -> int:
    trace = Trace()
    for answer in answers:
        trace.extend(pickle.loads(answer))
    trace.save(path)
    return len(trace.spans)


def _spreads(times: OperatorTimes) -> dict[str, Any]:
    named = {"gemm": times.gemm, "send": times.send, "serial": times.serial}
    named |= {"overlap": times.overlap, **times.extra}
    return {name: spread for name, spread in named.items() if spread is not None}

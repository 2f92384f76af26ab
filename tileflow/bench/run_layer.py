"""Layer cases: tokens in, tokens out, every stage of the layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..config import Config, MoEShape
from ..layer import MoELayer
from ..plan import Plan
from ..routing import make_routing
from ..timing import Spread, layer_ms, max_over_ranks, measure
from ..worlds.base import World
from .cases import LayerCase
from .checks import layer_error, same_bits
from .place import Place
from .plans import PlanSummary
from .run_case import CaseRun, Times

__all__ = ["LayerRun"]


class LayerRun(CaseRun):
    """A layer case on one rank."""

    case: LayerCase

    def __init__(self, world: World, place: Place, case: LayerCase):
        super().__init__(world, place, case)
        self._experts = case.e_local * world.size
        self._ids, self._shares = self._routing()
        self.counts = self._gather_counts()
        first = world.rank * case.e_local
        local = [self._weights(expert) for expert in range(first, first + case.e_local)]
        gate_up, down = (self.maker.stack(list(arrays)) for arrays in zip(*local, strict=True))
        self.layer = MoELayer(world, self._shape(), gate_up, down, config=self._config())
        self.layer.warmup()
        xp = self.maker.xp
        self._x = self.maker.tokens(case, world.rank)
        self._arguments = (self._x, xp.asarray(self._ids), xp.asarray(self._shares))

    def _routing(self) -> tuple[np.ndarray, np.ndarray]:
        return make_routing(
            self.case.routing,
            tokens=self.case.tokens,
            num_experts=self._experts,
            top_k=self.case.top_k,
            ranks=self.world.size,
            rank=self.world.rank,
            seed=self.case.seed,
        )

    def _gather_counts(self) -> np.ndarray:
        own = np.bincount(self._ids[self._ids >= 0], minlength=self._experts).astype(np.int32)
        answers = self.world.allgather(own.tobytes())
        return np.stack([np.frombuffer(answer, np.int32) for answer in answers])

    def _shape(self) -> MoEShape:
        case = self.case
        return MoEShape(
            hidden=case.hidden,
            ffn=case.ffn,
            num_experts=self._experts,
            top_k=case.top_k,
            max_tokens=case.tokens,
            dtype=case.dtype,
        )

    def _config(self) -> Config:
        """Return the case's configuration with just the capacity that this routing needs."""
        ranks = self.world.size
        received = self.counts.sum(axis=0).reshape(ranks, -1).sum(axis=1)
        return replace(self.case.config, max_recv_rows=int(received.max()))

    def _weights(self, expert: int) -> tuple[Any, Any]:
        case, maker = self.case, self.maker
        return maker.gate_up(case, expert), maker.down(case.hidden, case.ffn, expert)

    def plan(self) -> Plan:
        return self.layer.plan(self.counts)

    def compare(self) -> tuple[float, bool]:
        overlapped = self.layer(*self._arguments, mode="overlap")
        serial = self.layer(*self._arguments, mode="serial")
        routing = (self._ids, self._shares)
        error = layer_error(self.oracle, self._x, *routing, overlapped, self._weights)
        return error, same_bits(self.maker.xp, overlapped, serial)

    def measure(self, plans: list[PlanSummary]) -> Times:
        stages: list[dict[str, float]] = []

        def overlap() -> float:
            stages.append(layer_ms(self.layer, self._arguments, "overlap"))
            return stages[-1]["total"]

        works = {
            "serial": lambda: layer_ms(self.layer, self._arguments, "serial")["total"],
            "overlap": overlap,
            "plan": lambda: self.layer.engine.last_plan_ms,
        }
        spreads = measure(self.world, works, repeats=self.case.repeats)
        by_stage = self._stage_spreads(stages[-self.case.repeats :])
        medians = {name: spread.median_ms for name, spread in by_stage.items()}
        return Times(spreads | by_stage, {"stages_ms": medians})

    def _stage_spreads(self, samples: Sequence[dict[str, float]]) -> dict[str, Spread]:
        names = [name for name in samples[0] if name != "total"]
        table = np.array([[sample[name] for name in names] for sample in samples])
        slowest = max_over_ranks(self.world, table)  # [repeats, stages]
        return {name: Spread.of(slowest[:, i]) for i, name in enumerate(names)}

    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the tokens and, as rows x n x k, of the last GEMM."""
        case = self.case
        rows = case.tokens * case.top_k
        sizes = {"tokens": case.tokens, "top_k": case.top_k}
        return sizes | {"rows": rows, "n": case.hidden, "k": case.ffn}

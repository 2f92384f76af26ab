"""One case on one rank: make the layer, check its results, then time it and fill in the row."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..backends.base import ExpertWeights, Forward
from ..layer import MoELayer
from ..plan import Plan
from ..reference import TOLERANCES
from ..timing import Spread
from ..version import __version__
from ..worlds.base import World
from .cases import Case
from .checks import Check
from .data import Maker
from .oracles import make_oracle
from .place import Place
from .plans import PlanSummary
from .rows import Row, make_row

__all__ = ["CaseRun", "Times"]


@dataclass(frozen=True)
class Times:
    """Measured times and what follows from them.

    Attributes:
        spreads: name of the time -> spread, in the order in which they are printed.
        values: row fields that follow, such as ratios and throughputs.
    """

    spreads: Mapping[str, Spread]
    values: Mapping[str, Any] = field(default_factory=dict)


class CaseRun(ABC):
    """A case on one rank; every method is collective.

    Attributes:
        layer: the layer under test.
    """

    layer: MoELayer

    def __init__(self, world: World, place: Place, case: Case):
        self.world, self.place, self.case = world, place, case
        self.maker = Maker(world.device, case)
        self.oracle = make_oracle(self.maker.xp, case.dtype)

    @abstractmethod
    def plan(self) -> Plan:
        """Return this rank's plan."""

    @abstractmethod
    def compare(self) -> tuple[float, bool]:
        """Run overlapped and serial; return the largest error here, and whether bits agree."""

    @abstractmethod
    def measure(self, plans: list[PlanSummary]) -> Times:
        """Return the times, equal on all ranks."""

    @abstractmethod
    def sizes(self) -> dict[str, Any]:
        """Return the row fields of the case's sizes."""

    @property
    def put_path(self) -> str:
        """The put path that runs."""
        assert self.world.backend is not None
        return self.world.backend.put_path(self.case.config)

    @property
    def mode(self) -> str:
        """``"overlap"``, or ``"serial"`` where the put path is serial."""
        return "serial" if self.put_path == "serial" else "overlap"

    @property
    def consumer_sms(self) -> int | None:
        """SMs of the consumer in an overlapped run; None on a CPU and where nothing overlaps."""
        plan, backend = self.plan(), self.world.backend
        if self.world.device != "cuda" or self.mode == "serial" or not plan.num_segments:
            return None
        assert backend is not None
        weights, limit_s = ExpertWeights(None, None), self.world.timeout_s
        layer = self.layer
        forward = Forward(layer.shape, layer.config, plan, weights, 0, "overlap", limit_s)
        return backend.partition(forward).consumer  # type: ignore[attr-defined]

    def check(self) -> Check:
        """Return the verdict of all ranks together."""
        answers = self.world.allgather(pickle.dumps(self.compare()))
        errors, bits = zip(*map(pickle.loads, answers), strict=True)
        return Check(max(errors), TOLERANCES[self.case.dtype], all(bits))

    def row(self, plans: list[PlanSummary], check: Check, times: Times | None) -> Row:
        """Return the row of the case; `times` is None where the check failed."""
        busiest = max(plans, key=lambda plan: plan.computed_rows)
        values = self._settings() | self.sizes()
        values |= {"check": check.verdict, "max_rel_err": check.max_rel_err}
        values |= {"useful_rows": busiest.useful_rows, "computed_rows": busiest.computed_rows}
        return make_row(values | ({} if times is None else self._timed(times)))

    def _settings(self) -> dict[str, Any]:
        case, place = self.case, self.place
        return {
            "suite": case.suite,
            "case": case.name,
            "backend": place.backend,
            "world": place.world,
            "link": place.link,
            "ranks": place.ranks,
            "dtype": case.dtype,
            "layout": case.config.layout,
            "routing": case.routing,
            "e_local": case.e_local,
            "put_path": self.put_path,
            "tile_m": case.config.tile_m,
            "consumer_sms": self.consumer_sms,
            "mgb": case.config.mgb,
            "mode": self.mode,
            "seed": case.seed,
            "version": __version__,
            "device": place.device,
            "key": place.key(case),
        }

    def _timed(self, times: Times) -> dict[str, Any]:
        chosen = times.spreads[self.mode]
        medians = {f"t_{name}_ms": spread.median_ms for name, spread in times.spreads.items()}
        known = ("t_gemm_ms", "t_send_ms", "t_serial_ms", "t_overlap_ms", "t_plan_ms")
        return {
            **{name: medians.get(name) for name in known},
            "repeats": chosen.repeats,
            "p10_ms": chosen.p10_ms,
            "p90_ms": chosen.p90_ms,
            **times.values,
        }

"""The bench's main program: open a world, run the cases on every rank, answer with an exit code."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .. import init
from ..config import Environment
from ..errors import (
    CapacityError,
    ConfigError,
    InputError,
    ProtocolTimeout,
    RankLost,
    TileflowError,
    WorldBroken,
    WorldError,
)
from ..worlds.base import World
from . import plans as plan_table
from .cases import Case, LayerCase, OperatorCase, select
from .data import release_memory
from .options import Options, parse
from .place import Place
from .report import Printer, milliseconds, number
from .rows import RowFile
from .run_case import CaseRun, Times
from .run_layer import LayerRun
from .run_operator import OperatorRun

__all__ = ["FAILED", "PASSED", "TIMEOUT", "USAGE", "main"]

PASSED, FAILED, USAGE, TIMEOUT = 0, 1, 2, 3
_RATIOS = (
    *("overlap_ratio", "overlap_ceiling", "bound_ratio"),
    *("tflops", "tflops_cublas_dense", "gbps"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; return 0, 1 (a check failed), 2 (usage) or 3 (a wait timed out)."""
    options = parse(arguments)
    world: Any = None
    try:
        world = init(options.world, ranks=options.ranks, backend=options.backend, link=options.link)
        with world:
            return max(world.run(lambda handle: Runner(handle, options, world.reason).run()))
    except TileflowError as error:
        _complain(error, getattr(world, "rank", None))
        return _code(error)


def _complain(error: TileflowError, rank: int | None) -> None:
    """Print the error; what all ranks refuse alike is printed by rank 0 alone."""
    if rank and _code(error) != TIMEOUT:
        return
    where = "" if rank is None else f" (rank {rank})"
    print(f"tileflow.bench{where}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _code(error: TileflowError) -> int:
    if isinstance(error, ProtocolTimeout | WorldBroken | RankLost):
        return TIMEOUT
    impossible = (ConfigError, InputError, CapacityError, WorldError)
    return USAGE if isinstance(error, impossible) else FAILED


class Runner:
    """The bench on one rank; rank 0 prints and writes, all ranks check and time."""

    def __init__(self, world: World, options: Options, reason: str):
        self.world, self.options = world, options
        self.place = Place.of(world, reason)
        launched = Environment.read().launcher_size > 1
        self.printer = Printer(enabled=world.rank == 0, plain=launched)
        self.rows = RowFile(options.json)

    def run(self) -> int:
        """Run all cases that are not finished; return PASSED or FAILED."""
        cases = self._select()
        for line in self.place.lines():
            self.printer.line(line)
        finished = self._finished()
        traced = self._traced_case(cases)
        verdicts = []
        for position, case in enumerate(cases, 1):
            title = f"[{position}/{len(cases)}] {case.name}"
            if self.place.key(case) in finished and case is not traced:
                self.printer.line(f"\n{title}: finished in {self.options.json}, skipped")
                continue
            self.printer.line(f"\n{title}: {_describe(case)}")
            verdicts.append(self._run_case(case, trace=case is traced))
            release_memory(self.world.device)
        return self._conclude(verdicts, len(cases))

    def _select(self) -> list[Case]:
        options = self.options
        cases = select(options, self.world.device, most_repeats=self.place.most_repeats)
        if not cases:
            known = select(replace(options, only=None), self.world.device)
            everything = ", ".join(case.name for case in known)
            raise ConfigError("--only", options.only, f"part of a name of: {everything}")
        return cases

    def _traced_case(self, cases: list[Case]) -> Case | None:
        if self.options.trace is None:
            return None
        if self.world.device != "cpu":
            allowed = "no --trace; timelines of the GPU are not in this version"
            raise ConfigError("--trace", str(self.options.trace), allowed)
        operators = (case for case in cases if isinstance(case, OperatorCase))
        traced = next(operators, None)
        if traced is None:
            allowed = "given together with an operator case; the selection has none"
            raise ConfigError("--trace", str(self.options.trace), allowed)
        return traced

    def _finished(self) -> set[str]:
        """Return rank 0's set of finished keys; ConfigError where its files cannot be written."""
        finished: set[str] = set()
        error = None
        if self.world.rank == 0:
            try:
                finished = self.rows.finished()
                _require_writable(self.options)
            except OSError as refused:
                error = ConfigError("--json or --trace", refused.filename, f"{refused.strerror}")
        self.world.agree(error)
        return pickle.loads(self.world.allgather(pickle.dumps(finished))[0])

    def _run_case(self, case: Case, *, trace: bool) -> bool:
        with self.printer.working(f"{case.name}: making inputs, compiling"):
            run = _start(self.world, self.place, case)
        self.printer.line(f"  {_how(run)}")
        plans = plan_table.gather(self.world, run.plan())
        plan_table.show(self.printer, plans)
        with self.printer.working(f"{case.name}: checking"):
            check = run.check()
        self.printer.line(f"  {check}")
        times = run.measure(plans) if check.passed else None
        if times is not None:
            self._show(times)
        if trace:
            self._trace(run)
        if self.world.rank == 0:
            self.rows.append(run.row(plans, check, times))
        return check.passed

    def _show(self, times: Times) -> None:
        headers = ["time", "median ms", "p10", "p90"]
        lines = [[name, *milliseconds(spread)] for name, spread in times.spreads.items()]
        self.printer.table(headers, lines)
        values = ((name, times.values.get(name)) for name in _RATIOS)
        shown = [f"{name} {number(value)}" for name, value in values if value is not None]
        if shown:
            self.printer.line("  " + ", ".join(shown))

    def _trace(self, run: CaseRun) -> None:
        assert isinstance(run, OperatorRun)
        assert self.options.trace is not None
        spans = run.trace(self.options.trace)
        self.printer.line(f"  timeline: {spans} spans in {self.options.trace}")

    def _conclude(self, verdicts: list[bool], selected: int) -> int:
        failed = verdicts.count(False)
        skipped = selected - len(verdicts)
        text = f"\n{len(verdicts) - failed} passed, {failed} failed, {skipped} skipped"
        self.printer.line(text)
        return FAILED if failed else PASSED


def _start(world: World, place: Place, case: Case) -> CaseRun:
    if isinstance(case, OperatorCase):
        return OperatorRun(world, place, case)
    assert isinstance(case, LayerCase)
    return LayerRun(world, place, case)


def _describe(case: Case) -> str:
    if isinstance(case, OperatorCase):
        return f"rows {case.rows} x n {case.n} x k {case.k} per rank, {case.dtype}"
    assert isinstance(case, LayerCase)
    sizes = f"{case.tokens} tokens, top-{case.top_k}, {case.hidden} -> {case.ffn} -> {case.hidden}"
    return f"{sizes} per rank, {case.dtype}"


def _how(run: CaseRun) -> str:
    config = run.case.config
    chosen = "default, untuned" if config.put_path == "auto" else "as asked"
    consumer = "" if run.consumer_sms is None else f", consumer SMs {run.consumer_sms}"
    tuned = f"tile_m {config.tile_m}, mgb {config.mgb}{consumer}"
    return f"put path {run.put_path} ({chosen}), {tuned}"


def _require_writable(options: Options) -> None:
    """Raise OSError now rather than after the work is done."""
    for path in (options.json, options.trace):
        if path is not None:
            path.open("a", encoding="utf-8").close()

"""One forward on one rank: agree, plan, then the stages in order.

The engine decides nothing about memory or kernels (that is the backend's) and nothing about who
talks to whom (the plan's). It keeps three promises: whatever one rank refuses, all ranks refuse
before anything is launched; the stages of ranks that share a device never wait for each other on
that device; and a failed wait leaves the world broken, not the process.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .backends.base import Backend, ExpertWeights, Forward
from .buffers import WorkspaceSizes, plan_config
from .config import Config, MoEShape
from .errors import CapacityError, InputError, TileflowError
from .faults import Faults
from .plan import Plan, build_plan
from .routing import place_rows
from .worlds.base import World

__all__ = ["Call", "Engine"]

LEAD_GEMMS = 8  # a GPU reaches its power limit, and so its steady clocks, after some milliseconds


@dataclass
class Call:
    """Checked arrays of one layer call, as the backend's arrays.

    Attributes:
        x: [T, hidden]; topk_ids: int32 [T, k]; topk_weights: float32 [T, k]; out: [T, hidden_out].
        host_ids: the ids in host memory.
        stream: the caller's stream, None on the CPU.
    """

    x: Any
    topk_ids: Any
    topk_weights: Any
    host_ids: np.ndarray
    out: Any
    stream: Any = None


class Engine:
    """Run forwards of one layer on one rank.

    Attributes:
        shape, config: of the layer, equal on all ranks.
        plan_config: what plans are made from.
        last_plan: the plan of the last forward, None before it.
        last_plan_ms: milliseconds that sorting and planning took, the exchange of counts apart.
        faults: faults to inject (tests).
    """

    def __init__(
        self,
        world: World,
        shape: MoEShape,
        config: Config,
        backend: Backend,
        *,
        operator_only: bool = False,
    ):
        self.world, self.shape, self.config, self.backend = world, shape, config, backend
        self.plan_config = plan_config(
            shape,
            world.size,
            config,
            arrivals_per_tile=backend.arrivals_per_tile(shape, config),
        )
        self.sizes = WorkspaceSizes.of(shape, self.plan_config, operator_only=operator_only)
        self.faults = Faults()
        self.last_plan: Plan | None = None
        self.last_plan_ms = 0.0
        backend.reserve(self.sizes)
        world.warm = False  # this layer's kernels may still have to be compiled

    # -- the whole layer -------------------------------------------------------------------------

    def layer(
        self,
        weights: ExpertWeights,
        call: Call | None,
        error: TileflowError | None,
        mode: str,
        timings: dict[str, float] | None = None,
    ) -> Forward:
        """Run dispatch to combine; the result is in the returned forward's `out`.

        Args:
            weights: the layer's weights.
            call: this rank's arrays, None where they were refused.
            error: why they were refused, raised on all ranks.
            mode: ``"overlap"`` or ``"serial"``.
            timings: receives the milliseconds of each stage; None times nothing.
        """
        self.check()
        started = time.perf_counter()
        counts_row, send_row, error = self._place(call, error)
        placed_s = time.perf_counter() - started
        counts = self._exchange(counts_row, mode, error)
        assert call is not None
        forward = self._forward(counts, weights, mode, timings)
        self.last_plan_ms += placed_s * 1e3
        forward.x, forward.topk_ids, forward.topk_weights = call.x, call.topk_ids, call.topk_weights
        forward.send_row, forward.out, forward.stream = send_row, call.out, call.stream
        self._run(forward, ("dispatch",))
        self._run(forward, ("wait_dispatch", "gemm1", "produce_and_send"))
        self._run(forward, ("wait_return", "combine"))
        self._finish()
        return forward

    def _place(
        self, call: Call | None, error: TileflowError | None
    ) -> tuple[np.ndarray, np.ndarray | None, TileflowError | None]:
        nothing = np.zeros(self.shape.num_experts, np.int32)
        if error is not None or call is None:
            return nothing, None, error
        try:
            counts_row, send_row = place_rows(call.host_ids, self.shape.num_experts)
        except InputError as refused:
            return nothing, None, refused
        return counts_row, send_row, None

    # -- the last GEMM and its return, alone -----------------------------------------------------

    def operator(
        self,
        weights: ExpertWeights,
        activated: Any,
        counts: np.ndarray,
        mode: str,
        error: TileflowError | None = None,
        stream: Any = None,
        timings: dict[str, float] | None = None,
    ) -> Forward:
        """Run the last GEMM and the return of its rows; return the forward that was run.

        Args:
            weights: the layer's weights.
            activated: [plan.recv_rows[rank], ffn] rows in the receive layout.
            counts: int32 [W, E], equal on all ranks.
            mode: one of MODES; ``"gemm"`` sends nothing.
            error: why this rank's arrays were refused, raised on all ranks.
            stream: the caller's stream.
            timings: receives the milliseconds of each stage; None times nothing.
        """
        self.check()
        self.world.agree(error)
        self.world.agree_on(counts=counts.tobytes())
        self._exchange(counts[self.world.rank], mode, None)
        forward = self._forward(counts, weights, mode, timings)
        forward.activated, forward.stream = activated, stream
        self._run(forward, ("produce_and_send",))
        if mode != "gemm":
            self._run(forward, ("wait_return",))
        self._finish()
        return forward

    # -- shared ----------------------------------------------------------------------------------

    def plan(self, counts: np.ndarray) -> Plan:
        """Return this rank's plan for counts [W, E]; CapacityError where any rank has no room."""
        plan = build_plan(counts, self.plan_config, self.world.rank)
        room, sent = self.shape.max_tokens * self.shape.top_k, counts.sum(axis=1, dtype=np.int64)
        if sent.max() > room:
            rank = int(sent.argmax())
            raise CapacityError(rank, "return buffer", int(sent[rank]), room)
        return plan

    def check(self) -> None:
        """Raise the failure that a wait of this rank has recorded, or WorldBroken after one."""
        failure = self.backend.failure()
        if failure is not None and not self.world.broken:
            self.world.mark_broken(failure)
            raise failure
        self.world.require_usable()

    def _finish(self) -> None:
        self.check()
        self.world.warm = True

    def _exchange(
        self, counts_row: np.ndarray, mode: str, error: TileflowError | None
    ) -> np.ndarray:
        """Return counts [W, E]; raise on all ranks if any rank refuses or has another mode."""
        payload = pickle.dumps((error, mode, counts_row.tobytes()))
        answers = [pickle.loads(answer) for answer in self.world.allgather(payload)]
        if error is not None:
            raise error
        for refused, _, _ in answers:
            if refused is not None:
                raise refused
        for rank, (_, other, _) in enumerate(answers):
            if other != answers[0][1]:
                allowed = f"the same on all ranks; rank 0 has {answers[0][1]!r}"
                raise InputError("mode", other, allowed, rank=rank)
        return np.stack([np.frombuffer(row, np.int32) for _, _, row in answers])

    def _forward(
        self,
        counts: np.ndarray,
        weights: ExpertWeights,
        mode: str,
        timings: dict[str, float] | None,
    ) -> Forward:
        started = time.perf_counter()
        plan = self.plan(counts)
        self.last_plan, self.last_plan_ms = plan, (time.perf_counter() - started) * 1e3
        return Forward(
            shape=self.shape,
            config=self.config,
            plan=plan,
            weights=weights,
            epoch=self.world.advance_epoch(),
            mode=mode,
            timeout_s=self.world.limit_s,
            faults=self.faults,
            timings=timings,
        )

    def _run(self, forward: Forward, stages: tuple[str, ...]) -> None:
        """Run stages as one turn of this rank on its device."""
        with self.world.turn():
            for stage in stages:
                forward.faults.delay_stage()
                self._run_stage(forward, stage)

    def _run_stage(self, forward: Forward, stage: str) -> None:
        work = getattr(self.backend, stage)
        if forward.timings is None:
            work(forward)
        else:
            lead = self._lead(forward) if stage == "produce_and_send" else None
            ms = self.backend.timed(lambda: work(forward), forward.stream, lead)
            forward.timings[stage] = ms

    def _lead(self, forward: Forward) -> Callable[[], None]:
        """Return work that brings the device to steady load: the same GEMM, sending nothing."""
        gemm = replace(forward, mode="gemm", timings=None, state=dict(forward.state))

        def run() -> None:
            for _ in range(LEAD_GEMMS):
                self.backend.produce_and_send(gemm)

        return run

"""MoELayer: expert weights and an engine; NumPy, CuPy or DLPack arrays in and out."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np

from .backends import create as create_backend
from .backends.base import Backend, ExpertWeights
from .config import Config, MoEShape
from .engine import Call, Engine
from .errors import ConfigError, InputError, TileflowError
from .plan import Plan
from .version import __version__
from .worlds.base import World

__all__ = ["MoELayer"]

_PUBLIC_MODES = ("overlap", "serial")


class MoELayer:
    """One MoE layer with expert parallelism on one rank of a world.

    Args:
        world: the rank's handle (inside ``world.run`` on a loopback).
        shape: sizes, the same on every rank.
        w_gate_up: [E_local, 2 * ffn, hidden], gate rows first, or None for a layer that only ever
            runs :meth:`operator`.
        w_down: [E_local, hidden_out, ffn].
        config: how to run, the same on every rank; None takes the defaults.

    Making a layer is collective. Layers of one world share its workspace, and one forward is in
    flight per world at a time. The arrays are kept, not copied, where the backend can use them as
    they are; do not change them afterwards.

    Attributes:
        engine: runs the forwards; `engine.last_plan` is the last plan.

    Raises:
        ConfigError: ranks disagree, or experts do not divide by the ranks (on all ranks).
        InputError: a weight array has a wrong shape, dtype or device (on all ranks).
        WorldError: the workspace does not fit into memory (on all ranks).
    """

    def __init__(
        self,
        world: World,
        shape: MoEShape,
        w_gate_up: Any,
        w_down: Any,
        *,
        config: Config | None = None,
    ):
        world.require_usable()
        self.world, self.shape, self.config = world, shape, config or Config()
        world.agree_on(**_agreed_fields(shape, self.config, w_gate_up is None))
        experts = shape.experts_per_rank(world.size)
        if world.backend is None:
            world.backend = create_backend(world)
        self._backend: Backend = world.backend
        self._weights = self._load_weights(experts, w_gate_up, w_down)
        self._check_config()
        self.engine = Engine(
            world, shape, self.config, self._backend, operator_only=w_gate_up is None
        )

    def __call__(
        self,
        x: Any,
        topk_ids: Any,
        topk_weights: Any,
        *,
        out: Any = None,
        mode: str = "overlap",
        stream: Any = None,
    ) -> Any:
        """Run the layer (collective).

        Args:
            x: [T, hidden], the layer's dtype; T may differ per rank and per call, 0 to max_tokens.
            topk_ids: [T, k] int32 or int64 global experts; -1 masks a slot.
            topk_weights: [T, k] float32.
            out: [T, hidden_out] to write into; None makes a fresh array.
            mode: ``"overlap"`` or ``"serial"``; both give the same bits.
            stream: GPU stream that the inputs are ready on and the result is ordered by; None
                takes CuPy's current stream.

        Returns:
            y [T, hidden_out] in the layer's dtype: `out`, or an array that the caller owns.

        Raises:
            InputError: an array is refused (on all ranks, before any launch).
            CapacityError: a rank would receive more rows than its capacity (on all ranks).
            ProtocolTimeout: a wait of this or an earlier call ended without its event.
            WorldBroken: an earlier failure; see :meth:`World.reset`.
        """
        return self.forward(x, topk_ids, topk_weights, out=out, mode=mode, stream=stream)

    def forward(
        self,
        x: Any,
        topk_ids: Any,
        topk_weights: Any,
        *,
        out: Any = None,
        mode: str = "overlap",
        stream: Any = None,
        timings: dict[str, float] | None = None,
    ) -> Any:
        """Run the layer as calling it does; `timings` receives milliseconds per stage."""
        call, error = None, None
        with ExitStack() as scope:
            try:
                current = scope.enter_context(self._backend.on_stream(stream))
                self._require_layer()
                _check_mode(mode)
                call = self._check_call(x, topk_ids, topk_weights, out)
                call.stream = current
            except TileflowError as refused:
                error = refused
            return self.engine.layer(self._weights, call, error, mode, timings).out

    def operator(
        self,
        activated: Any,
        counts: np.ndarray,
        *,
        mode: str = "overlap",
        stream: Any = None,
        timings: dict[str, float] | None = None,
    ) -> Any:
        """Run the last expert GEMM and the return of its rows alone (collective).

        This is the operator that the published method measures.

        Args:
            activated: [rows, ffn] in the layer's dtype, rows in the receive layout of
                ``plan(counts)``.
            counts: int [W, E], rows that each source rank has for each expert; equal on all ranks.
            mode: ``"overlap"`` or ``"serial"``.
            stream: as in :meth:`__call__`.
            timings: receives milliseconds per stage.

        Returns:
            Own rows as they came home, [sum(counts[rank]), hidden_out], sorted by expert.
        """
        counts, error = np.ascontiguousarray(counts, np.int32), None
        current = None
        with ExitStack() as scope:
            try:
                current = scope.enter_context(self._backend.on_stream(stream))
                _check_mode(mode)
                rows = int(self.plan(counts).recv_rows[self.world.rank])
                activated = self._array("activated", activated, (rows, self.shape.ffn))
            except TileflowError as refused:
                error = refused
            forward = self.engine.operator(
                self._weights, activated, counts, mode, error, current, timings
            )
            return self._backend.returned(forward)

    def plan(self, counts: np.ndarray) -> Plan:
        """Return this rank's plan for `counts` [W, E]; CapacityError, InputError as in a call."""
        return self.engine.plan(np.ascontiguousarray(counts, np.int32))

    def warmup(self, tune: bool = False) -> None:
        """Compile, load and allocate everything a call needs (collective).

        Args:
            tune: time the allowed choices on the last counts; not in this version.
        """
        if tune:
            raise ConfigError("tune", tune, "False; choices are not tuned in this version")
        error = None
        try:
            self._backend.warmup(self.shape, self.config)
        except TileflowError as failed:
            error = failed
        self.world.agree(error)

    def check(self) -> None:
        """Wait for this rank's work and raise what failed, if anything did."""
        self._backend.drain()
        self.engine.check()

    def _check_config(self) -> None:
        error = None
        try:
            self._backend.check_config(self.config)
        except ConfigError as refused:
            error = refused
        self.world.agree(error)

    # -- checks ----------------------------------------------------------------------------------

    def _require_layer(self) -> None:
        if self._weights.gate_up is None:
            raise InputError("w_gate_up", None, "an array; this layer was made for operator() only")

    def _load_weights(self, experts: int, w_gate_up: Any, w_down: Any) -> ExpertWeights:
        shape, error = self.shape, None
        weights = ExpertWeights(None, None)
        try:
            if w_gate_up is not None:
                size = (experts, 2 * shape.ffn, shape.hidden)
                w_gate_up = self._array("w_gate_up", w_gate_up, size)
            w_down = self._array("w_down", w_down, (experts, shape.hidden_out, shape.ffn))
            weights = self._backend.load_weights(shape, w_gate_up, w_down)
        except TileflowError as refused:
            error = refused
        self.world.agree(error)
        return weights

    def _check_call(self, x: Any, topk_ids: Any, topk_weights: Any, out: Any) -> Call:
        shape, backend = self.shape, self._backend
        x = self._array("x", x, (None, shape.hidden))
        tokens = x.shape[0]
        if tokens > shape.max_tokens:
            raise InputError("x.shape[0]", tokens, f"at most max_tokens = {shape.max_tokens}")
        ids = self._array("topk_ids", topk_ids, (tokens, shape.top_k), "int32", "int64")
        weights = self._array("topk_weights", topk_weights, (tokens, shape.top_k), "float32")
        if out is None:
            out = backend.empty((tokens, shape.hidden_out), shape.dtype)  # type: ignore[arg-type]
        else:
            out = self._array("out", out, (tokens, shape.hidden_out))
            if not getattr(out.flags, "writeable", True):
                raise InputError("out.flags.writeable", False, "an array that can be written")
        host_ids = backend.to_host(ids)
        return Call(x, ids, weights, host_ids, out)

    def _array(self, name: str, array: Any, size: tuple[int | None, ...], *dtypes: str) -> Any:
        """Return the backend's view of `array`; InputError unless dtype, shape, order agree."""
        array, dtypes = self._backend.asarray(name, array), dtypes or (self.shape.dtype,)
        seen = self._backend.dtype_name(array)
        if seen not in dtypes:
            raise InputError(f"{name}.dtype", seen, " or ".join(dtypes))
        fits = len(array.shape) == len(size) and all(
            want is None or have == want for have, want in zip(array.shape, size, strict=True)
        )
        if not fits:
            allowed = str(tuple("T" if want is None else want for want in size))
            raise InputError(f"{name}.shape", tuple(array.shape), allowed)
        if not array.flags.c_contiguous:
            raise InputError(f"{name}.strides", array.strides, "a C-contiguous array")
        return array


def _check_mode(mode: str) -> None:
    if mode not in _PUBLIC_MODES:
        raise InputError("mode", mode, "one of " + ", ".join(_PUBLIC_MODES))


def _agreed_fields(shape: MoEShape, config: Config, operator_only: bool) -> dict[str, object]:
    fields: dict[str, object] = {"tileflow.__version__": __version__}
    fields |= {f"MoEShape.{name}": value for name, value in asdict(shape).items()}
    fields |= {f"Config.{name}": value for name, value in asdict(config).items()}
    fields["w_gate_up is None"] = operator_only
    return fields

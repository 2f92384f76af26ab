"""Launches: which variant, which grid, which parameters; not what a forward is for."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import jit
from ...config import Config
from ...protocol import ControlLayout
from ..base import Forward
from . import params, variants
from .tensor_map import tensor_map

__all__ = ["Launcher"]

PART_BYTES = 128 << 10  # a segment is cut in parts of about this size, so that no CTA has the tail
MOST_PARTS = 256
_WARP = 32
_DISPATCH_CHUNK = 2048  # bytes that a warp of `dispatch` moves at a time


class Launcher:
    """Launches kernels on one GPU.

    Args:
        cc: compute capability as CuPy spells it, for example ``"90"``.
        num_sms: SMs that this rank sees.
    """

    def __init__(self, cc: str, num_sms: int):
        self._cc, self._num_sms = cc, num_sms

    def arrivals_per_tile(self, dtype: str, config: Config) -> int:
        return variants.arrivals_per_tile(self._producer(dtype, config))

    def fuses_activation(self, config: Config) -> bool:
        """Tell whether the configured producer has the activation in its epilogue."""
        return variants.producer_family(self._cc, _family(config)) == variants.SM90

    def _producer(self, dtype: str, config: Config, *, gated: bool = False) -> jit.KernelVariant:
        shape = config.tile_m, config.tile_n
        return variants.producer(self._cc, dtype, *shape, family=_family(config), gated=gated)

    def check(self, config: Config) -> None:
        """Raise ConfigError where this GPU cannot run the configured producer."""
        self._producer("float16", config)

    def load_all(self, dtype: str, config: Config) -> None:
        """Compile and load every kernel of a layer."""
        cc = self._cc
        loaded = [
            jit.load(variant)
            for variant in (
                self._producer(dtype, config),
                variants.consumer(cc),
                variants.dispatch(cc),
                variants.post_signals(cc),
                variants.wait_signals(cc),
                variants.combine(cc, dtype),
                self._activation(dtype, config),
            )
        ]
        for kernel in loaded:
            kernel.num_regs  # noqa: B018  (asking forces the driver's lazy load)

    def _activation(self, dtype: str, config: Config) -> jit.KernelVariant:
        """Return the kernel that holds the activation."""
        if self.fuses_activation(config):
            return self._producer(dtype, config, gated=True)
        return variants.swiglu(self._cc, dtype)

    def producer(
        self,
        forward: Forward,
        *,
        sms: int,
        a: int,
        b: int,
        staging: int,
        local: int,
        a_rows: int,
        local_rows: int,
        n: int,
        k: int,
        control: int,
        flags: bool,
        all_to_staging: bool,
        gated: bool = False,
    ) -> None:
        """Launch the grouped GEMM of all bands of the forward's plan on `sms` CTAs.

        `n` counts output columns; a gated GEMM has `n` gate rows and `n` up rows of weights.
        """
        plan, dtype = forward.plan, forward.shape.dtype
        variant = self._producer(dtype, forward.config, gated=gated)
        factors = 2 if gated else 1  # weight rows per output column
        layout = ControlLayout(
            plan.config.ranks, plan.config.experts_per_rank, plan.config.max_bands
        )
        b_rows = plan.config.experts_per_rank * factors * n
        columns = plan.config.tile_n // factors
        tiles_n = -(-n // columns)
        maps = (
            tensor_map(a, a_rows, k, plan.config.tile_m, dtype),
            tensor_map(b, b_rows, k, columns, dtype),
            tensor_map(staging, plan.config.max_layout_rows, n, 64, dtype),
            tensor_map(local, local_rows, n, 64, dtype),
        )
        args = params.pack(
            params.PRODUCER,
            map_a=maps[0],
            map_b=maps[1],
            map_staging=maps[2],
            map_local=maps[3],
            a=a,
            b=b,
            staging=staging,
            local=local,
            bands=forward.state["tables"]["bands"],
            schedule=forward.state["tables"]["schedule"],
            ticket=control + 4 * layout.producer_ticket,
            band_flags=control + 4 * layout.band_counters if flags else 0,
            num_tiles=plan.num_bands * tiles_n,
            tiles_n=tiles_n,
            n=n,
            k=k,
            a_rows=a_rows,
            all_to_staging=int(all_to_staging),
        )
        grid = min(sms, plan.num_bands * tiles_n)
        self._run(variant, grid, args, forward.stream)

    def consumer(self, stream: Any, *, sms: int, mean_segment_bytes: int, **values: Any) -> None:
        """Launch the consumer on `sms` CTAs."""
        parts = max(1, min(MOST_PARTS, round(mean_segment_bytes / PART_BYTES)))
        self._run(variants.consumer(self._cc), sms, _args("CONSUMER", values, parts=parts), stream)

    def dispatch(self, stream: Any, **values: Any) -> None:
        """Launch the gather and put of token rows."""
        variant = variants.dispatch(self._cc)
        warps = variant.threads // _WARP
        units = values["tokens"] * -(-values["row_bytes"] // _DISPATCH_CHUNK)
        grid = min(-(-units // warps), 16 * self._num_sms)
        self._run(variant, grid, _args("DISPATCH", values), stream)

    def post_signals(self, stream: Any, **values: Any) -> None:
        """Launch the warp that sets one word at every peer."""
        self._run(variants.post_signals(self._cc), 1, _args("SIGNAL", values), stream)

    def wait_signals(self, stream: Any, **values: Any) -> None:
        """Launch the warp that waits for every peer."""
        self._run(variants.wait_signals(self._cc), 1, _args("WAIT", values), stream)

    def swiglu(self, stream: Any, dtype: str, **values: Any) -> None:
        """Launch the activation between the two expert GEMMs."""
        variant = variants.swiglu(self._cc, dtype)
        vectors = values["rows"] * values["ffn"] // 8
        grid = max(1, min(-(-vectors // variant.threads), 16 * self._num_sms))
        self._run(variant, grid, _args("ACTIVATION", values), stream)

    def combine(self, stream: Any, dtype: str, **values: Any) -> None:
        """Launch the weighted sum over top-k."""
        variant = variants.combine(self._cc, dtype)
        vectors = values["tokens"] * values["n"] // 8
        grid = max(1, min(-(-vectors // variant.threads), 16 * self._num_sms))
        self._run(variant, grid, _args("COMBINE", values), stream)

    def delay(self, stream: Any, seconds: float) -> None:
        """Hold `stream` for a while."""
        args = params.pack(params.DELAY, nanoseconds=round(seconds * 1e9))
        self._run(variants.delay(self._cc), 1, args, stream)

    def _run(self, variant: jit.KernelVariant, grid: int, args: np.ndarray, stream: Any) -> None:
        kernel = jit.load(variant)
        with stream:
            kernel((grid,), (variant.threads,), (args,), shared_mem=variant.shared_bytes)


def _family(config: Config) -> str | None:
    return None if config.producer == "auto" else f"producer_{config.producer}"


def _args(struct: str, values: dict[str, Any], **more: Any) -> np.ndarray:
    return params.pack(getattr(params, struct), **values, **more)

"""MoELayer on the CPU loopback: any routing and shape against the reference, refusals, reuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import tileflow
from tileflow import CapacityError, Config, ConfigError, InputError, MoELayer, MoEShape
from tileflow.routing import make_routing

RNG = np.random.default_rng
Tokens = Sequence[int]


@dataclass
class Problem:
    """A layer's global weights and every rank's tokens and routing."""

    shape: MoEShape
    gate_up: np.ndarray  # [E, 2 * ffn, hidden]
    down: np.ndarray  # [E, hidden_out, ffn]
    x: list[np.ndarray]  # per rank [T, hidden]
    ids: list[np.ndarray]  # per rank int32 [T, k]
    shares: list[np.ndarray]  # per rank float32 [T, k]

    @property
    def ranks(self) -> int:
        return len(self.x)

    def layer(self, world: Any, config: Config | None = None, **changes: Any) -> MoELayer:
        local = self.shape.experts_per_rank(self.ranks)
        mine = slice(world.rank * local, (world.rank + 1) * local)
        shape = replace(self.shape, **changes) if changes else self.shape
        return MoELayer(world, shape, self.gate_up[mine], self.down[mine], config=config)

    def arguments(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.x[rank], self.ids[rank], self.shares[rank]


def problem(
    *,
    ranks: int = 4,
    tokens: int | Tokens = 24,
    hidden: int = 64,
    ffn: int = 48,
    e_local: int = 2,
    top_k: int = 2,
    mode: str = "uniform",
    hidden_out: int | None = None,
    dtype: Any = np.float16,
    seed: int = 0,
) -> Problem:
    """Make a random problem; `tokens` may differ per rank."""
    rng = RNG(seed)
    experts = ranks * e_local
    tokens = [tokens] * ranks if isinstance(tokens, int) else list(tokens)
    name = "float16" if dtype is np.float16 else "bfloat16"
    top = max(tokens)
    shape = MoEShape(hidden, ffn, experts, top_k, top, dtype=name, hidden_out=hidden_out)

    def normal(*size: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(size, np.float32) * np.float32(scale)).astype(dtype)

    routed = [
        make_routing(
            mode, tokens=t, num_experts=experts, top_k=top_k, ranks=ranks, rank=r, seed=seed
        )
        for r, t in enumerate(tokens)
    ]
    return Problem(
        shape,
        normal(experts, 2 * ffn, hidden, scale=hidden**-0.5),
        normal(experts, shape.hidden_out, ffn, scale=ffn**-0.5),
        [normal(t, hidden) for t in tokens],
        [ids for ids, _ in routed],
        [shares for _, shares in routed],
    )

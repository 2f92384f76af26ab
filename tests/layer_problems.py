"""Random layer problems for any world, and the reference's answer to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import tileflow
from tileflow import Config, MoELayer, MoEShape, reference
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
        weights = place(world, self.gate_up[mine]), place(world, self.down[mine])
        return MoELayer(world, shape, *weights, config=config)

    def arguments(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.x[rank], self.ids[rank], self.shares[rank]

    def placed(self, world: Any) -> tuple[Any, Any, Any]:
        """Return the rank's arguments where the world's backend wants them."""
        x, ids, shares = (place(world, array) for array in self.arguments(world.rank))
        return x, ids, shares


def place(world: Any, array: np.ndarray) -> Any:
    """Return `array` on the world's device."""
    if world.device == "cpu":
        return array
    import cupy

    return cupy.asarray(array)


def to_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


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
            mode, tokens=tokens, num_experts=experts, top_k=top_k, ranks=ranks, rank=r, seed=seed
        )
        for r in range(ranks)
    ]
    return Problem(
        shape,
        normal(experts, 2 * ffn, hidden, scale=hidden**-0.5),
        normal(experts, shape.hidden_out, ffn, scale=ffn**-0.5),
        [normal(t, hidden) for t in tokens],
        [ids for ids, _ in routed],
        [shares for _, shares in routed],
    )


def run_ranks(
    ranks: int,
    main: Callable[[Any], Any],
    *,
    backend: str = "cpu",
    link: str = "hbm",
    timeout_s: float = 20.0,
) -> list[Any]:
    """Call `main` on every rank of a loopback; return the results by rank."""
    with tileflow.init(
        "loopback", ranks=ranks, backend=backend, link=link, timeout_s=timeout_s
    ) as world:
        return world.run(main)


def forward(case: Problem, config: Config | None = None, mode: str = "overlap") -> list[np.ndarray]:
    """Run the layer once on every rank."""
    return run_ranks(
        case.ranks,
        lambda world: case.layer(world, config)(*case.arguments(world.rank), mode=mode),
    )


def expected(case: Problem) -> list[reference.Reference]:
    return reference.moe_reference(
        case.x, case.ids, case.shares, case.gate_up, case.down, accumulate=np.float32
    )


def assert_right(case: Problem, results: Sequence[np.ndarray]) -> None:
    """Every token of every rank is within the tolerance of its dtype."""
    for rank, (y, want) in enumerate(zip(results, expected(case), strict=True)):
        fits, error = reference.check_tokens(to_host(y), want.y, want.row_norms, case.shape.dtype)
        assert fits, f"rank {rank}: relative error {error}"


def refusals(case: Problem, call: Callable[[Any, MoELayer], Any]) -> list[Exception]:
    """Return what each rank raises in `call`; the layer works afterwards."""

    def main(world: Any) -> Exception:
        layer = case.layer(world)
        with pytest.raises(tileflow.TileflowError) as refused:
            call(world, layer)
        assert not world.broken
        y = layer(*case.arguments(world.rank))
        want = expected(case)[world.rank]
        assert reference.check_tokens(y, want.y, want.row_norms, case.shape.dtype)[0]
        return refused.value

    return run_ranks(case.ranks, main)


def poison(world: Any) -> None:
    """Fill everything that rows pass through with NaN bits, on all ranks."""
    workspace = world.backend.workspace
    world.barrier()
    for region in (workspace.recv.local, workspace.returned.local):
        region[:] = 0xFF
    for name in ("activated", "staging"):
        workspace.local[name][:] = 0xFF
    world.barrier()

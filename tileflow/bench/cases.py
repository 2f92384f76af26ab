"""What the bench runs: suites of named cases, sized for the device, changed by the flags.

A case is plain data. Its name says what varies inside a run, its :meth:`Case.key` covers every
setting, so that a finished case can be recognised in a file of rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from ..config import LAYOUTS, Config
from .options import Options

__all__ = ["Case", "LayerCase", "OperatorCase", "select"]


@dataclass(frozen=True)
class Case:
    """Settings that every case has.

    Attributes:
        suite: ``"operator"`` or ``"layer"``.
        name: unique inside a run.
        e_local: experts per rank.
        routing: router mode.
        dtype: of weights and rows.
        config: how the layer runs.
        repeats: samples per time.
        seed: of routing and data.
    """

    suite: ClassVar[str]

    name: str
    e_local: int
    routing: str
    dtype: str
    config: Config
    repeats: int
    seed: int

    def key(self, *place: object) -> str:
        """Return a digest of all settings and of `place` (world, device, version)."""
        settings = [self.suite, asdict(self), [str(part) for part in place]]
        text = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class OperatorCase(Case):
    """The last expert GEMM and the return of its rows: rows x N x K on every rank."""

    suite = "operator"

    rows: int
    n: int
    k: int


@dataclass(frozen=True)
class LayerCase(Case):
    """A whole layer: `tokens` per rank, `hidden` -> `ffn` -> `hidden`."""

    suite = "layer"

    tokens: int
    hidden: int
    ffn: int
    top_k: int


# Sizes per (device, effort); a tuple lists what a suite varies.
_OPERATOR = {
    ("cpu", "quick"): {"rows": 512, "n": 256, "k": 128, "e_local": (4,)},
    ("cpu", "normal"): {"rows": 1024, "n": 512, "k": 512, "e_local": (4,)},
    ("cpu", "full"): {"rows": 2048, "n": 1024, "k": 512, "e_local": (4, 16)},
    ("cuda", "quick"): {"rows": 4096, "n": 4096, "k": 2048, "e_local": (4,)},
    ("cuda", "normal"): {"rows": 16384, "n": 8192, "k": 2048, "e_local": (4, 64)},
    ("cuda", "full"): {"rows": 16384, "n": 8192, "k": 2048, "e_local": (4, 8, 16, 32, 64)},
}
_LAYER = {
    ("cpu", "quick"): {"tokens": 64, "hidden": 128, "ffn": 128, "top_k": 2, "e_local": (2,)},
    ("cpu", "normal"): {"tokens": 256, "hidden": 256, "ffn": 256, "top_k": 2, "e_local": (4,)},
    ("cpu", "full"): {"tokens": 256, "hidden": 256, "ffn": 256, "top_k": 4, "e_local": (4, 16)},
    ("cuda", "quick"): {"tokens": 1024, "hidden": 1024, "ffn": 512, "top_k": 2, "e_local": (4,)},
    ("cuda", "normal"): {"tokens": 4096, "hidden": 2048, "ffn": 768, "top_k": 8, "e_local": (16,)},
    ("cuda", "full"): {"tokens": 8192, "hidden": 2048, "ffn": 768, "top_k": 8, "e_local": (16, 32)},
}
_REPEATS = {
    ("cpu", "quick"): 3,
    ("cpu", "normal"): 5,
    ("cpu", "full"): 11,
    ("cuda", "quick"): 5,
    ("cuda", "normal"): 20,
    ("cuda", "full"): 50,
}
_FULL_ROUTINGS = ("balanced", "moderate_skew", "stress_skew")


def select(options: Options, device: str, *, most_repeats: int | None = None) -> list[Case]:
    """Return the cases to run, in order; empty where ``--only`` matches none.

    Args:
        options: the command line.
        device: ``"cpu"`` or ``"cuda"``.
        most_repeats: caps the repeats of every case.

    Raises:
        ConfigError: a flag's value is not allowed.
    """
    cases: list[Case] = []
    if options.suite in ("default", "operator"):
        cases += _operator_cases(options, device, most_repeats)
    if options.suite in ("default", "layer"):
        cases += _layer_cases(options, device, most_repeats)
    return [case for case in cases if _matches(case.name, options.only)]


def _matches(name: str, expression: str | None) -> bool:
    return expression is None or expression in name or fnmatchcase(name, expression)


def _operator_cases(options: Options, device: str, most: int | None) -> Iterator[Case]:
    sizes = dict(_OPERATOR[device, options.effort])
    experts = _varied(options.experts_per_rank, sizes.pop("e_local"))
    sizes |= _given(options, "rows", "n", "k")
    for shared in _variants("operator", options, device, experts, most):
        yield OperatorCase(**shared, **sizes)  # type: ignore[arg-type]


def _layer_cases(options: Options, device: str, most: int | None) -> Iterator[Case]:
    sizes = dict(_LAYER[device, options.effort])
    experts = _varied(options.experts_per_rank, sizes.pop("e_local"))
    sizes |= _given(options, "tokens", "hidden", "ffn", "top_k")
    for shared in _variants("layer", options, device, experts, most):
        yield LayerCase(**shared, **sizes)  # type: ignore[arg-type]


def _variants(
    suite: str, options: Options, device: str, experts: tuple[int, ...], most: int | None
) -> Iterator[dict[str, object]]:
    """Yield the settings that operator and layer cases share, a case each."""
    repeats = options.repeats or _REPEATS[device, options.effort]
    for routing in _routings(options):
        for e_local in experts:
            for layout in (options.layout,) if options.layout else LAYOUTS:
                yield {
                    "name": f"{suite}/{routing}/e{e_local}/{layout}",
                    "e_local": e_local,
                    "routing": routing,
                    "dtype": options.dtype,
                    "config": _config(options, layout),
                    "repeats": min(repeats, most or repeats),
                    "seed": options.seed,
                }


def _config(options: Options, layout: str) -> Config:
    given = _given(options, "put_path", "tile_m", "consumer_sms", "mgb")
    return Config(layout=layout, **given)  # type: ignore[arg-type]


def _routings(options: Options) -> tuple[str, ...]:
    if options.routing is not None:
        return (options.routing,)
    return _FULL_ROUTINGS if options.effort == "full" else ("balanced",)


def _given(options: Options, *names: str) -> dict[str, object]:
    found = {name: getattr(options, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _varied(given: int | None, default: object) -> tuple[int, ...]:
    return default if given is None else (given,)  # type: ignore[return-value]

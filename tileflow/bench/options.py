"""The command line of the bench; a flag that is not given is None and takes the case's default."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import DTYPES, LAYOUTS, PUT_PATHS
from ..routing import MODES as ROUTINGS

__all__ = ["BACKENDS", "LINKS", "SUITES", "WORLDS", "Options", "parse"]

SUITES = ("default", "operator", "layer")
BACKENDS = ("auto", "cpu", "cuda")
WORLDS = ("auto", "loopback", "mpi_shm", "nvshmem")
LINKS = ("hbm", "host")
DESCRIPTION = """Check, then time, the last expert GEMM with the return of its rows (operator cases)
and whole MoE layers (layer cases). What a flag leaves open takes a default for the device."""
EPILOG = """exit codes: 0 all checks passed, 1 a check failed, 2 usage or impossible choice, 3 a
wait timed out. On a CPU the bench shows that everything functions, not how fast it is."""


@dataclass(frozen=True)
class Options:
    """What the command line asked for; None where it was silent (see ``docs/bench.md``)."""

    suite: str = "default"
    effort: str = "normal"
    only: str | None = None
    backend: str = "auto"
    world: str = "auto"
    ranks: int | None = None
    link: str = "hbm"
    layout: str | None = None
    put_path: str = "auto"
    rows: int | None = None
    n: int | None = None
    k: int | None = None
    tokens: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    experts_per_rank: int | None = None
    top_k: int | None = None
    routing: str | None = None
    dtype: str = "float16"
    tile_m: int | None = None
    consumer_sms: int | None = None
    mgb: int | None = None
    repeats: int | None = None
    seed: int = 0
    json: Path | None = None
    trace: Path | None = None


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options; prints usage and exits with 2 where they are wrong (argparse)."""
    parser = argparse.ArgumentParser(
        prog="python -m tileflow.bench", description=DESCRIPTION, epilog=EPILOG
    )
    _add_selection(parser.add_argument_group("what to run"))
    _add_place(parser.add_argument_group("where"))
    _add_sizes(parser.add_argument_group("sizes"))
    _add_tuning(parser.add_argument_group("how"))
    _add_output(parser.add_argument_group("output"))
    return Options(**vars(parser.parse_args(arguments)))


def _add_selection(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--suite", choices=SUITES, default="default", help="group of cases")
    effort = group.add_mutually_exclusive_group()
    for name, text in (("quick", "small, few repeats"), ("full", "more cases and repeats")):
        effort.add_argument(
            f"--{name}",
            dest="effort",
            action="store_const",
            const=name,
            help=text,
            default="normal",
        )
    group.add_argument(
        "--only", metavar="EXPR", help="cases whose name contains EXPR or matches it as a glob"
    )


def _add_place(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backend", choices=BACKENDS, default="auto", help="where to compute")
    group.add_argument("--world", choices=WORLDS, default="auto", help="who the ranks are")
    group.add_argument("--ranks", type=_positive, metavar="W", help="virtual ranks of a loopback")
    group.add_argument(
        "--link", choices=LINKS, default="hbm", help="where a loopback peer's memory lies (GPU)"
    )


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rows", type=_positive, metavar="R", help="operator: rows received per rank"
    )
    group.add_argument("--n", type=_positive, metavar="N", help="operator: columns of the result")
    group.add_argument("--k", type=_positive, metavar="K", help="operator: columns of the input")
    group.add_argument("--tokens", type=_natural, metavar="T", help="layer: tokens per rank")
    group.add_argument(
        "--hidden", type=_positive, metavar="H", help="layer: columns of tokens and results"
    )
    group.add_argument(
        "--ffn", type=_positive, metavar="F", help="layer: columns between the expert GEMMs"
    )
    group.add_argument("--top-k", type=_positive, metavar="K", help="layer: experts per token")
    group.add_argument("--experts-per-rank", type=_positive, metavar="E", help="of all cases")
    group.add_argument(
        "--routing",
        choices=ROUTINGS,
        metavar="MODE",
        help=f"{', '.join(ROUTINGS)} (default: balanced)",
    )
    group.add_argument("--dtype", choices=DTYPES, default="float16", help="of rows and weights")


def _add_tuning(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--layout", choices=LAYOUTS, help="default: a case per layout")
    group.add_argument(
        "--put-path", choices=PUT_PATHS, default="auto", help="who moves remote rows"
    )
    group.add_argument("--tile-m", type=_positive, metavar="M", help="rows of a GEMM tile")
    group.add_argument(
        "--consumer-sms", type=_positive, metavar="S", help="SMs of the consumer (GPU)"
    )
    group.add_argument("--mgb", type=_positive, metavar="B", help="most bands of one segment")
    group.add_argument("--repeats", type=_positive, metavar="N", help="samples per time")
    group.add_argument("--seed", type=_natural, metavar="S", default=0, help="of routing and data")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json", type=Path, metavar="FILE", help="append rows; skip cases finished in FILE"
    )
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="timeline of one overlapped operator (CPU)"
    )


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(low: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < low:
        raise argparse.ArgumentTypeError(f"{value} is below {low}")
    return value

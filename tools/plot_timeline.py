"""Draw a timeline that ``python -m tileflow.bench --trace FILE`` has saved.

One row per rank and lane: output tiles of the GEMM above, waits and sends of the consumer below, on
one clock. The pale field behind a rank's rows is its GEMM's window: sends inside it are hidden.

    python -m tools.plot_timeline trace.json -o timeline.svg [--ranks 0,1] [--stages]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Bar", "hidden_share", "load", "main", "plot"]


@dataclass(frozen=True)
class Look:
    """How bars of one name are drawn: colours of Okabe and Ito, told apart in grey as well."""

    label: str
    color: str
    edge: str = "white"
    height: float = 0.72


_LOOKS = {
    "tile": Look("GEMM tile", "#0072B2"),
    "wait": Look("consumer waits for a band", "#CFCFCF", height=0.26),
    "send": Look("send to the owner", "#E69F00", edge="#E69F00"),  # visible however short
}
_OTHERS = ("#009E73", "#CC79A7", "#56B4E9", "#F0E442")
_LANE_ORDER = ("producer", "consumer")


@dataclass(frozen=True)
class Bar:
    """One span: who, in which lane, what, and when (milliseconds)."""

    rank: int
    lane: str
    name: str
    start: float
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length


def load(path: Path, ranks: Sequence[int] | None = None, *, stages: bool = False) -> list[Bar]:
    """Return the bars of a Chrome trace; None takes all ranks, `stages` the lane of stages as well.

    Raises:
        ValueError: the file is not a trace, or holds nothing of these ranks.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a Chrome trace") from error
    bars = [_bar(event) for event in events if event["ph"] == "X"]
    bars = [bar for bar in bars if ranks is None or bar.rank in ranks]
    bars = [bar for bar in bars if stages or bar.lane != "stage"]
    if not bars:
        raise ValueError(f"{path} holds no spans of the ranks asked for")
    return sorted(bars, key=lambda bar: bar.start)


def _bar(event: dict[str, Any]) -> Bar:
    lane, name = str(event["cat"]), str(event["name"])
    return Bar(int(event["pid"]), lane, name, event["ts"] / 1e3, event["dur"] / 1e3)


def hidden_share(bars: Iterable[Bar]) -> float | None:
    """Return the share of send time inside the GEMM of the sending rank; None without sends."""
    windows = _gemm_windows(bars := list(bars))
    sends = [bar for bar in bars if bar.name == "send"]
    total = sum(bar.length for bar in sends)
    if total <= 0.0:
        return None
    hidden = 0.0
    for bar in sends:
        first, last = windows.get(bar.rank, (0.0, 0.0))
        hidden += max(0.0, min(bar.end, last) - max(bar.start, first))
    return hidden / total


def _gemm_windows(bars: Iterable[Bar]) -> dict[int, tuple[float, float]]:
    windows: dict[int, tuple[float, float]] = {}
    for bar in bars:
        if bar.name == "tile":
            first, last = windows.get(bar.rank, (bar.start, bar.end))
            windows[bar.rank] = (min(first, bar.start), max(last, bar.end))
    return windows


def plot(bars: Sequence[Bar]) -> Any:
    """Return a matplotlib figure of the bars."""
    from matplotlib.figure import Figure

    rows = _rows(bars)
    height = max(rows.values()) + 1.0
    figure = Figure(figsize=(11, 1.9 + 0.42 * height), layout="constrained")
    axes = figure.add_subplot()
    _draw_windows(axes, bars, rows)
    _draw_bars(axes, bars, rows)
    _label(figure, axes, bars, rows)
    return figure


def _rows(bars: Iterable[Bar]) -> dict[tuple[int, str], float]:
    """Return (rank, lane) -> vertical position; a gap between ranks."""

    def order(entry: tuple[int, str]) -> tuple[int, int, str]:
        rank, lane = entry
        known = _LANE_ORDER.index(lane) if lane in _LANE_ORDER else len(_LANE_ORDER)
        return rank, known, lane

    rows: dict[tuple[int, str], float] = {}
    position, last_rank = 0.0, None
    for rank, lane in sorted({(bar.rank, bar.lane) for bar in bars}, key=order):
        position += 0.5 if last_rank not in (None, rank) else 0.0
        rows[rank, lane] = position
        position, last_rank = position + 1.0, rank
    return rows


def _draw_windows(axes: Any, bars: Sequence[Bar], rows: dict[tuple[int, str], float]) -> None:
    for number, (rank, (first, last)) in enumerate(sorted(_gemm_windows(bars).items())):
        places = [place for (owner, _), place in rows.items() if owner == rank]
        low, tall = min(places) - 0.5, max(places) - min(places) + 1.0
        label = "window of the GEMM" if number == 0 else None
        axes.broken_barh(
            [(first, last - first)], (low, tall), color="#0072B2", alpha=0.1, lw=0, label=label
        )


def _draw_bars(axes: Any, bars: Sequence[Bar], rows: dict[tuple[int, str], float]) -> None:
    for name, look in _looks(bars).items():
        label: str | None = look.label
        for row, place in rows.items():
            spans = [
                (b.start, b.length) for b in bars if b.name == name and (b.rank, b.lane) == row
            ]
            if spans:
                box = (place - look.height / 2, look.height)
                axes.broken_barh(spans, box, fc=look.color, ec=look.edge, lw=0.7, label=label)
                label = None


def _looks(bars: Iterable[Bar]) -> dict[str, Look]:
    names = {bar.name for bar in bars}
    looks = {name: look for name, look in _LOOKS.items() if name in names}
    for number, name in enumerate(sorted(names - set(_LOOKS))):
        looks[name] = Look(name, _OTHERS[number % len(_OTHERS)])
    return looks


def _label(figure: Any, axes: Any, bars: Sequence[Bar], rows: dict[tuple[int, str], float]) -> None:
    axes.set_yticks(list(rows.values()), [f"rank {rank}  {lane}" for rank, lane in rows])
    axes.set_ylim(max(rows.values()) + 0.6, min(rows.values()) - 0.6)
    axes.set_xlim(0.0, max(bar.end for bar in bars) * 1.005)
    axes.set_xlabel("time since the first span [ms]")
    axes.set_ylabel("rank and lane")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.set_title(_title(bars), loc="left", fontsize=12)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)


def _title(bars: Sequence[Bar]) -> str:
    share = hidden_share(bars)
    if share is None:
        return "Last expert GEMM without remote rows: nothing to send"
    return f"Rows go home under the last expert GEMM: {share:.0%} of the send time lies inside it"


def _ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,1") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the file; return 0, or 2 where it cannot be drawn."""
    parser = argparse.ArgumentParser(prog="python -m tools.plot_timeline", description=__doc__)
    parser.add_argument("trace", type=Path, help="Chrome JSON of tileflow.bench --trace")
    parser.add_argument("-o", "--output", type=Path, default=Path("timeline.svg"))
    parser.add_argument("--ranks", type=_ranks, help="comma-separated; default: all")
    parser.add_argument("--stages", action="store_true", help="draw the stages of a forward too")
    options = parser.parse_args(arguments)
    try:
        bars = load(options.trace, options.ranks, stages=options.stages)
        plot(bars).savefig(options.output, dpi=150)
    except (OSError, ValueError) as error:
        print(f"plot_timeline: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"plot_timeline: {error}; pip install 'tileflow[plot]'", file=sys.stderr)
        return 2
    print(f"{options.output}: {len(bars)} spans")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Timelines: spans with a rank and a lane, saved as Chrome/Perfetto JSON.

Open a file in https://ui.perfetto.dev or draw it with ``tools/plot_timeline.py``. Ranks are
processes, lanes (``"producer"``, ``"consumer"``, ...) threads.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Span", "Trace", "now_ns"]

now_ns = time.perf_counter_ns  # one clock for all processes of a host


@dataclass(frozen=True)
class Span:
    """What one lane of one rank did from `start_ns` to `end_ns`.

    Attributes:
        rank: the rank.
        lane: ``"producer"``, ``"consumer"``, ``"stage"``, ...
        name: what was done, for example ``"tile"`` or ``"send"``.
        start_ns, end_ns: on the clock of :func:`now_ns`.
        args: details, JSON-able.
    """

    rank: int
    lane: str
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any] = field(default_factory=dict)


class Trace:
    """Spans of one rank, or of several after :meth:`extend`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(
        self, rank: int, lane: str, name: str, start_ns: int, end_ns: int, **args: object
    ) -> None:
        """Append one span (safe from any thread)."""
        self.spans.append(Span(rank, lane, name, start_ns, end_ns, args))

    def extend(self, spans: list[Span]) -> None:
        """Append spans, for example those gathered from other ranks."""
        self.spans.extend(spans)

    def events(self) -> list[dict[str, Any]]:
        """Return Chrome trace events, time in microseconds from the first span."""
        lanes = sorted({(s.rank, s.lane) for s in self.spans})
        thread = {lane: number for number, lane in enumerate(lanes)}
        origin = min((s.start_ns for s in self.spans), default=0)
        names = [
            _metadata("process_name", rank, 0, f"rank {rank}")
            for rank in sorted({rank for rank, _ in lanes})
        ]
        names += [_metadata("thread_name", r, thread[r, lane], lane) for r, lane in lanes]
        return names + [
            {
                "name": s.name,
                "cat": s.lane,
                "ph": "X",
                "pid": s.rank,
                "tid": thread[s.rank, s.lane],
                "ts": (s.start_ns - origin) / 1e3,
                "dur": (s.end_ns - s.start_ns) / 1e3,
                "args": s.args,
            }
            for s in self.spans
        ]

    def save(self, path: str | Path) -> None:
        """Write the events as a Chrome/Perfetto JSON file."""
        Path(path).write_text(json.dumps({"traceEvents": self.events()}))


def _metadata(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}

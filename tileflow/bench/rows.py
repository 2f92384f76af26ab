"""Rows of results: their fields, one JSON line each, and the file that makes a run resumable."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["FIELDS", "Row", "RowFile", "make_row"]

Row = dict[str, Any]

# Units and formulas: docs/bench.md. Fields behind "device" are this bench's own additions.
FIELDS = (
    *("suite", "case", "backend", "world", "link", "ranks", "dtype", "layout", "routing"),
    *("e_local", "rows", "n", "k", "put_path", "tile_m", "consumer_sms", "mgb", "mode"),
    *("check", "max_rel_err", "t_gemm_ms", "t_send_ms", "t_serial_ms", "t_overlap_ms"),
    *("t_plan_ms", "overlap_ratio", "overlap_ceiling", "bound_ratio", "useful_rows"),
    *("computed_rows", "tflops", "gbps", "repeats", "p10_ms", "p90_ms", "target", "version"),
    *("device", "tflops_cublas_dense", "tokens", "top_k", "stages_ms", "seed", "key"),
)


def make_row(values: Mapping[str, Any]) -> Row:
    """Return a row with every field, in order; what is not given, or not finite, is None."""
    unknown = set(values) - set(FIELDS)
    if unknown:
        raise KeyError(f"not fields of a row: {', '.join(sorted(unknown))}")
    return {name: _jsonable(values.get(name)) for name in FIELDS}


def _jsonable(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _jsonable(entry) for name, entry in value.items()}
    return value


class RowFile:
    """A JSON lines file that only grows; without a path it holds nothing."""

    def __init__(self, path: Path | None):
        self.path = path

    def finished(self) -> set[str]:
        """Return the keys of the cases that have passed."""
        passed = (row for row in self.read() if row.get("check") == "pass")
        return {row["key"] for row in passed if row.get("key")}

    def read(self) -> list[Row]:
        """Return the rows; a line cut short by a killed run is left out."""
        if self.path is None or not self.path.exists():
            return []
        return list(_parsed(self.path.read_text(encoding="utf-8").splitlines()))

    def append(self, row: Row) -> None:
        """Add a row and flush it, so that a run that is killed later keeps it."""
        if self.path is None:
            return
        start = "\n" if self._cut_short() else ""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(start + json.dumps(row, allow_nan=False) + "\n")

    def _cut_short(self) -> bool:
        assert self.path is not None
        text = self.path.read_bytes() if self.path.exists() else b""
        return bool(text) and not text.endswith(b"\n")


def _parsed(lines: Iterable[str]) -> Iterable[Row]:
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            yield row

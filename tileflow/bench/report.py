"""What the bench prints, and ``python -m tileflow.bench.report FILE``: JSON lines to a table.

Tables are rich ones where rich is installed and the output is a terminal, else plain text with the
same content.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..timing import Spread
from .rows import Row, RowFile

__all__ = ["Printer", "main", "milliseconds", "number"]

_SUMMARY = (
    *("case", "check", "t_gemm_ms", "t_send_ms", "t_serial_ms", "t_overlap_ms", "tflops", "gbps"),
    *("overlap_ratio", "overlap_ceiling", "bound_ratio", "useful_rows", "computed_rows"),
)


class Printer:
    """Print lines and tables on one rank; silent on the others.

    Args:
        enabled: whether this rank prints.
        plain: never use rich; a launcher's pseudo-terminal is nobody's screen.
    """

    def __init__(self, enabled: bool = True, *, plain: bool = False):
        self._enabled = enabled
        self._console = None if plain or not enabled else _rich_console()

    def line(self, text: str = "") -> None:
        """Print one line."""
        if not self._enabled:
            return
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; the first column is left-aligned, the others right-aligned."""
        if self._console is not None:
            self._console.print(_rich_table(headers, rows))
            return
        for text in _plain_table(headers, rows):
            self.line(text)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show on a terminal that something runs."""
        if self._console is None:
            yield
            return
        with self._console.status(f"{text} ..."):
            yield


def _rich_console() -> Any:
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console()


def _rich_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for column, header in enumerate(headers):
        table.add_column(header, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    for line in lines:
        first, *others = [
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(["  " + first, *others]).rstrip()


def number(value: object) -> str:
    """Return a table cell: four digits for floats, a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def milliseconds(spread: Spread) -> list[str]:
    """Return the cells median, p10, p90 of a time."""
    return [f"{value:.3f}" for value in (spread.median_ms, spread.p10_ms, spread.p90_ms)]


def summary(rows: Sequence[Row], printer: Printer) -> None:
    """Print one line per row, columns without a value left out."""
    fields = [name for name in _SUMMARY if any(row.get(name) is not None for row in rows)]
    printer.table(fields, [_cells(row, fields) for row in rows])


def _cells(row: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    return [number(row.get(name)) for name in fields]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows of a JSON lines file; return 0, or 2 where there are none."""
    parser = argparse.ArgumentParser(prog="python -m tileflow.bench.report", description=__doc__)
    parser.add_argument("file", type=Path, help="written by python -m tileflow.bench --json")
    path = parser.parse_args(arguments).file
    rows = RowFile(path).read()
    if not rows:
        print(f"{path} holds no rows", file=sys.stderr)
        return 2
    for setting, group in _by_setting(rows).items():
        Printer().line(setting)
        summary(group, Printer())
    return 0


def _by_setting(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        link = f", link {row['link']}" if row.get("link") else ""
        title = f"{row.get('device')}: {row.get('ranks')} ranks, {row.get('world')}{link}"
        groups.setdefault(f"{title}, tileflow {row.get('version')}", []).append(row)
    return groups


if __name__ == "__main__":
    sys.exit(main())

"""A finding, and the two ways to get one safely: a guard and a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Finding", "ProbeError", "guard", "run_json"]

CHILD_TIMEOUT_S = 60.0  # the driver may take ten seconds to wake eight GPUs


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what, in a word or two.
        ok: True: usable. False: missing or wrong. None: usable with a remark, or not known.
        text: what was seen, in plain words.
        hint: what would help, a command where there is one; "" where nothing is needed.
        failed: the probe itself failed, so nothing is known.
    """

    name: str
    ok: bool | None
    text: str
    hint: str = ""
    failed: bool = False


class ProbeError(Exception):
    """A child process gave no answer; the text says why."""


def guard(name: str, probe: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the probe's findings; one that says what was thrown where it failed."""
    try:
        return list(probe())
    except Exception as error:
        text = f"could not be looked at ({type(error).__name__}: {error})"
        return [Finding(name, None, text, failed=True)]


def run_json(arguments: Sequence[str], timeout: float = CHILD_TIMEOUT_S) -> dict[str, Any]:
    """Run Python with these arguments and return the JSON object that it prints.

    Raises:
        ProbeError: it ended by a signal, with an error, too late or without an answer.
    """
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {timeout:g} s") from None
    if done.returncode < 0:
        raise ProbeError(f"the child process died of signal {-done.returncode}")
    if done.returncode:
        raise ProbeError(_last_line(done.stderr) or f"exit code {done.returncode}")
    try:
        return dict(json.loads(_last_line(done.stdout)))
    except ValueError:
        raise ProbeError(f"unreadable answer {done.stdout[-200:]!r}") from None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()

"""Compile kernel variants, as ``make compile-all`` does: needs NVRTC and headers, no GPU.

    python -m tools.compile_all [--named] [--jobs N] [--match TEXT]

Ends with 1 if any variant fails; then its compiler log is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tileflow.backends.cuda import variants
from tileflow.errors import CompileError
from tileflow.jit import KernelVariant, compile_variant


def label(variant: KernelVariant) -> str:
    """Return a variant's name in one line."""
    constants = " ".join(f"{name}={value}" for name, value in variant.constants)
    return f"{variant.entry} {variant.arch} {variant.dtype or '-'} {constants}".rstrip()


def compile_one(variant: KernelVariant) -> tuple[float, str]:
    """Return (seconds, what went wrong or "")."""
    start = time.monotonic()
    try:
        compile_variant(variant)
    except CompileError as error:
        return time.monotonic() - start, str(error)
    return time.monotonic() - start, ""


def compile_all(chosen: list[KernelVariant], jobs: int) -> list[str]:
    """Compile in `jobs` processes, print a line for each; return the labels that failed."""
    failed = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for variant, (seconds, log) in zip(chosen, pool.map(compile_one, chosen), strict=True):
            print(f"{'FAIL' if log else 'ok':4} {seconds:6.1f} s  {label(variant)}", flush=True)
            if log:
                failed.append(label(variant))
                print(log, file=sys.stderr, flush=True)
    return failed


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--named", action="store_true", help="only those compiled in CI")
    parser.add_argument("--match", default="", help="only those whose line holds this text")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    args = parser.parse_args(argv)
    listed = variants.NAMED if args.named else variants.ALL
    chosen = [variant for variant in listed if args.match in label(variant)]
    failed = compile_all(chosen, args.jobs)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} kernel variants compile")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())

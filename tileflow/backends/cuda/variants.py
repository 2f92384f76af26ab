"""Which kernels exist: every compilation that is used, and what a launch of it needs.

A variant is a value; making one compiles nothing. `NAMED` is what continuous integration
compiles, `ALL` is everything that a configuration can ask for.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...config import DTYPES
from ...errors import ConfigError
from ...jit import KernelVariant
from ...plan.schedule import SCHEDULE_DTYPE
from ...plan.segments import SEGMENT_DTYPE
from ...plan.tiles import BAND_DTYPE
from ...protocol import ERROR_RECORD
from .params import STRUCTS, layout_checks

__all__ = [
    "ALL",
    "NAMED",
    "arch_for",
    "arrivals_per_tile",
    "combine",
    "consumer",
    "declarations",
    "delay",
    "dispatch",
    "post_signals",
    "producer",
    "producer_family",
    "swiglu",
    "wait_signals",
]

RECORDS: dict[str, np.dtype] = {
    "Band": BAND_DTYPE,
    "ScheduleEntry": SCHEDULE_DTYPE,
    "Segment": SEGMENT_DTYPE,
    "ErrorRecord": ERROR_RECORD,
}
TILE_SHAPES = ((128, 256), (128, 128), (64, 256), (64, 128))
MIN_ARCH = 80  # mma.sync on bf16 and cp.async
SM90 = "producer_sm90"
GENERIC = "producer_generic"

# (tile_m, tile_n) -> (columns of K per stage, stages). At most 96 KB of shared memory, so that
# GPUs with 99 KB per CTA (8.6, 8.9, 12.0) run every shape.
_GENERIC_PIPELINE = {
    (128, 256): (32, 4),
    (128, 128): (64, 3),
    (64, 256): (32, 4),
    (64, 128): (64, 4),
}
# (tile_m, tile_n) -> stages of 64 columns of K, as many as fit beside the store buffers.
_SM90_STAGES = {(128, 256): 4, (128, 128): 6, (64, 256): 5, (64, 128): 8}
_ITEMSIZE = 2


def declarations(structs: Mapping[str, np.dtype]) -> str:
    """Return the layout checks of the given structs, prologue text for a variant."""
    return "\n".join(layout_checks(name, dtype) for name, dtype in structs.items())


_DECLARATIONS = declarations({**RECORDS, **STRUCTS})


def _variant(
    source: str, entry: str, cc: str, threads: int, dtype: str | None = None, **facts: int
) -> KernelVariant:
    shared_bytes = facts.get("kSharedBytes", 0)
    constants = tuple(sorted(facts.items()))
    arch = arch_for(cc, entry)
    return KernelVariant(
        source, entry, constants, dtype, arch, threads, shared_bytes, _DECLARATIONS
    )


def arch_for(cc: str, family: str) -> str:
    """Return what NVRTC compiles a kernel family for.

    Args:
        cc: compute capability without a dot, as CuPy spells it: ``"90"``.
        family: the kernel's entry name.

    Raises:
        ConfigError: the GPU is too old, or the family is not for it.
    """
    if not cc.isdigit() or int(cc) < MIN_ARCH:
        raise ConfigError("compute capability", cc, f"{MIN_ARCH} or higher")
    if family != SM90:
        return f"sm_{cc}"
    if cc != "90":
        raise ConfigError("compute capability", cc, f"90 for {SM90}")
    return "sm_90a"  # wgmma and setmaxnreg exist in this target only


def producer_family(cc: str, family: str | None = None) -> str:
    """Return the producer's entry name for a GPU; `family` asks for one that is not its default."""
    return family or (SM90 if cc == "90" else GENERIC)


def producer(
    cc: str,
    dtype: str,
    tile_m: int,
    tile_n: int,
    *,
    family: str | None = None,
    gated: bool = False,
) -> KernelVariant:
    """Return the grouped GEMM for a GPU.

    Args:
        cc: compute capability.
        dtype: of the matrices.
        tile_m, tile_n: tile shape.
        family: one that is not the GPU's default.
        gated: silu(gate) * up in the epilogue; producer_sm90 only.
    """
    if producer_family(cc, family) == SM90:
        return _producer_sm90(cc, dtype, tile_m, tile_n, gated)
    if gated:
        raise ConfigError("gated", gated, f"False for {GENERIC}")
    return _producer_generic(cc, dtype, tile_m, tile_n)


def _producer_sm90(cc: str, dtype: str, tile_m: int, tile_n: int, gated: bool) -> KernelVariant:
    stages = _SM90_STAGES[tile_m, tile_n]
    loads = stages * (tile_m + tile_n) * 64 * _ITEMSIZE
    stores = (tile_m // 64) * 2 * 64 * 64 * _ITEMSIZE  # two boxes per 64 rows
    return _variant(
        f"{SM90}.cu",
        SM90,
        cc,
        128 + 2 * tile_m,  # one loading warpgroup, one of MMA per 64 rows
        dtype,
        kTileM=tile_m,
        kTileN=tile_n,
        kStages=stages,
        kGated=int(gated),
        kSharedBytes=loads + stores + 2048,  # barriers, and alignment to 1024 bytes
    )


def _producer_generic(cc: str, dtype: str, tile_m: int, tile_n: int) -> KernelVariant:
    tile_k, stages = _GENERIC_PIPELINE[tile_m, tile_n]
    return _variant(
        f"{GENERIC}.cu",
        GENERIC,
        cc,
        256,
        dtype,
        kTileM=tile_m,
        kTileN=tile_n,
        kTileK=tile_k,
        kStages=stages,
        kSharedBytes=stages * (tile_m + tile_n) * tile_k * _ITEMSIZE,
    )


def arrivals_per_tile(variant: KernelVariant) -> int:
    """Return how often a finished tile raises its band's counter."""
    return dict(variant.constants)["kTileM"] // 64 if variant.entry == SM90 else 1


def _small(
    source: str, entry: str, cc: str, threads: int, dtype: str | None = None
) -> KernelVariant:
    return _variant(f"{source}.cu", entry, cc, threads, dtype, kThreads=threads)


def consumer(cc: str) -> KernelVariant:
    """Return the kernel that sends finished segments."""
    return _small("consumer", "consumer", cc, 1024)


def dispatch(cc: str) -> KernelVariant:
    """Return the kernel that stores tokens at the ranks of their experts."""
    return _small("dispatch", "dispatch", cc, 256)


def combine(cc: str, dtype: str) -> KernelVariant:
    """Return the weighted sum over top-k."""
    return _small("combine", "combine", cc, 256, dtype)


def post_signals(cc: str) -> KernelVariant:
    """Return the kernel that sets one word at every peer."""
    return _small("signals", "post_signals", cc, 32)


def wait_signals(cc: str) -> KernelVariant:
    """Return the one-warp kernel that waits for every peer."""
    return _small("signals", "wait_signals", cc, 32)


def swiglu(cc: str, dtype: str) -> KernelVariant:
    """Return the activation between the two expert GEMMs."""
    return _small("activation", "swiglu", cc, 256, dtype)


def delay(cc: str) -> KernelVariant:
    """Return the kernel that holds its stream for a while."""
    return _variant("delay.cu", "delay", cc, 1)


def _others(cc: str, dtype: str) -> list[KernelVariant]:
    small = [consumer(cc), dispatch(cc), post_signals(cc), wait_signals(cc), delay(cc)]
    return [*small, combine(cc, dtype), swiglu(cc, dtype)]


def _named() -> list[KernelVariant]:
    named = [producer("90", "float16", m, n) for m, n in TILE_SHAPES[:3]]
    named += [producer("90", "float16", 128, n, gated=True) for n in (256, 128)]
    named += [producer("90", "bfloat16", 128, 256), producer("80", "bfloat16", 128, 256)]
    for cc in ("80", "90", "100", "120"):
        named.append(producer(cc, "float16", 128, 256, family=GENERIC))
    named += [producer("80", "float16", m, n) for m, n in TILE_SHAPES[1:]]
    return named + _others("80", "bfloat16") + _others("90", "float16")


def _all() -> list[KernelVariant]:
    found: list[KernelVariant] = []
    for cc in ("80", "86", "89", "90", "100", "120"):
        for dtype in DTYPES:
            found += [producer(cc, dtype, m, n, family=GENERIC) for m, n in TILE_SHAPES]
            found += _others(cc, dtype)
    found += [
        producer("90", dtype, m, n, gated=gated)
        for dtype in DTYPES
        for m, n in TILE_SHAPES
        for gated in (False, True)
    ]
    return list(dict.fromkeys(found))


NAMED: tuple[KernelVariant, ...] = tuple(_named())
ALL: tuple[KernelVariant, ...] = tuple(_all())

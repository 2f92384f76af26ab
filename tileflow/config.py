"""Configuration: frozen dataclasses validated when made, and every environment variable.

Nothing else in tileflow reads ``os.environ``; a value that is accepted here needs no second check
further in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from .errors import ConfigError

__all__ = ["ACTIVATIONS", "DTYPES", "LAYOUTS", "PUT_PATHS", "Config", "Environment", "MoEShape"]

DTYPES = ("float16", "bfloat16")
ACTIVATIONS = ("swiglu",)
LAYOUTS = ("packed", "aligned")
PUT_PATHS = ("auto", "sm", "serial")
PRODUCERS = ("auto", "sm90", "generic")
ITEMSIZE = 2  # bytes of either dtype
ROW_MULTIPLE = 8  # elements: 16-byte accesses of 2-byte elements
MAX_TOP_K = 16


def _check_int(
    owner: str, name: str, value: object, low: int, high: int, multiple: int = 1
) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not low <= value <= high or value % multiple:  # type: ignore[operator]
        of = f", a multiple of {multiple}" if multiple > 1 else ""
        raise ConfigError(f"{owner}.{name}", value, f"an int from {low} to {high}{of}")


def _check_choice(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{owner}.{name}", value, "one of " + ", ".join(choices))


@dataclass(frozen=True)
class MoEShape:
    """The sizes of one MoE layer, the same on every rank.

    Attributes:
        hidden: columns of the input rows, a multiple of 8.
        ffn: columns between the two expert GEMMs, a multiple of 8.
        num_experts: experts over all ranks; expert e lives on rank ``e // (num_experts / W)``.
        top_k: (token, slot) pairs per token, 1 to 16.
        max_tokens: the most tokens any rank passes in one call.
        dtype: ``"float16"`` or ``"bfloat16"``; products are accumulated in fp32.
        activation: ``"swiglu"``.
        hidden_out: columns of the output rows; None means `hidden`.

    Raises:
        ConfigError: a value is not allowed.
    """

    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    max_tokens: int
    dtype: str = "float16"
    activation: str = "swiglu"
    hidden_out: int | None = None

    def __post_init__(self) -> None:
        if self.hidden_out is None:
            object.__setattr__(self, "hidden_out", self.hidden)
        for name in ("hidden", "ffn", "hidden_out"):
            _check_int("MoEShape", name, getattr(self, name), 8, 1 << 20, ROW_MULTIPLE)
        _check_int("MoEShape", "num_experts", self.num_experts, 1, 1 << 16)
        _check_int("MoEShape", "top_k", self.top_k, 1, MAX_TOP_K)
        _check_int("MoEShape", "max_tokens", self.max_tokens, 0, 1 << 24)
        _check_choice("MoEShape", "dtype", self.dtype, DTYPES)
        _check_choice("MoEShape", "activation", self.activation, ACTIVATIONS)

    def experts_per_rank(self, ranks: int) -> int:
        """Return E_local; raise ConfigError where the experts do not divide by the ranks."""
        if self.num_experts % ranks:
            raise ConfigError(
                "MoEShape.num_experts", self.num_experts, f"a multiple of the {ranks} ranks"
            )
        return self.num_experts // ranks


@dataclass(frozen=True)
class Config:
    """How a layer runs; the same on every rank (compared when the layer is made).

    Attributes:
        layout: ``"packed"`` (runs follow each other) or ``"aligned"`` (runs padded to `tile_m`).
        put_path: ``"auto"``, ``"sm"`` or ``"serial"``.
        producer: GEMM kernel family on a GPU: ``"sm90"`` (wgmma), ``"generic"`` (mma.sync), or
            ``"auto"``: the best for the GPU. Families differ in rounding.
        tile_m: rows of one GEMM tile, 64 or 128.
        tile_n: columns of one GEMM tile, 128 or 256.
        mgb: most bands that one interior segment carries.
        group_bands: bands that are rasterised together so that weights stay in L2.
        consumer_sms: SMs (CPU: ignored) of the consumer; None takes the documented default.
        max_recv_rows: routed rows that a rank can receive; None takes the worst case
            ``W * max_tokens * top_k``, which no routing exceeds.

    Raises:
        ConfigError: a value is not allowed.
    """

    layout: str = "packed"
    put_path: str = "auto"
    producer: str = "auto"
    tile_m: int = 128
    tile_n: int = 256
    mgb: int = 2
    group_bands: int = 8
    consumer_sms: int | None = None
    max_recv_rows: int | None = None

    def __post_init__(self) -> None:
        _check_choice("Config", "layout", self.layout, LAYOUTS)
        _check_choice("Config", "put_path", self.put_path, PUT_PATHS)
        _check_choice("Config", "producer", self.producer, PRODUCERS)
        if self.tile_m not in (64, 128):
            raise ConfigError("Config.tile_m", self.tile_m, "64 or 128")
        if self.tile_n not in (128, 256):
            raise ConfigError("Config.tile_n", self.tile_n, "128 or 256")
        _check_int("Config", "mgb", self.mgb, 1, 64)
        _check_int("Config", "group_bands", self.group_bands, 1, 64)
        if self.consumer_sms is not None:
            _check_int("Config", "consumer_sms", self.consumer_sms, 1, 1024)
        if self.max_recv_rows is not None:
            _check_int("Config", "max_recv_rows", self.max_recv_rows, 0, (1 << 31) - 1)


@dataclass(frozen=True)
class Environment:
    """Every environment variable that tileflow reads.

    Attributes:
        cuda_include: ``TILEFLOW_CUDA_INCLUDE``, include folders searched first (os.pathsep list).
        cuda_src: ``TILEFLOW_CUDA_SRC``, a folder that replaces the packaged kernel sources.
        cache: ``TILEFLOW_CACHE``, folder of compiled kernels and tuned choices.
        cutlass_path: ``CUTLASS_PATH``, a CUTLASS checkout (its ``include`` is used).
        cuda_home: ``CUDA_HOME`` (or ``CUDA_PATH``).
        launcher_size: ranks that a launcher says it started (1 where there is no launcher).
        launcher_name: the variable that said so, or "".
        launch_blocking: ``CUDA_LAUNCH_BLOCKING`` is set to something but 0.
        mps_pipe: ``CUDA_MPS_PIPE_DIRECTORY``.
        mps_percentage: ``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE``.
        troublesome: variables that are set and known to cause trouble, with their values.
    """

    cuda_include: tuple[Path, ...] = ()
    cuda_src: Path | None = None
    cache: Path = field(default_factory=lambda: Path.home() / ".cache" / "tileflow")
    cutlass_path: Path | None = None
    cuda_home: Path | None = None
    launcher_size: int = 1
    launcher_name: str = ""
    launch_blocking: bool = False
    mps_pipe: str | None = None
    mps_percentage: str | None = None
    troublesome: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """Read the process environment (or the given mapping)."""
        env = os.environ if environ is None else environ

        def path(name: str) -> Path | None:
            return Path(env[name]) if env.get(name) else None

        includes = env.get("TILEFLOW_CUDA_INCLUDE", "")
        launcher_name = next((n for n in _LAUNCHER_SIZES if env.get(n, "").isdigit()), "")
        found: dict[str, object] = {
            "cuda_include": tuple(Path(p) for p in includes.split(os.pathsep) if p),
            "cuda_src": path("TILEFLOW_CUDA_SRC"),
            "cutlass_path": path("CUTLASS_PATH"),
            "cuda_home": path("CUDA_HOME") or path("CUDA_PATH"),
            "launcher_size": int(env[launcher_name]) if launcher_name else 1,
            "launcher_name": launcher_name,
            "launch_blocking": env.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
            "mps_pipe": env.get("CUDA_MPS_PIPE_DIRECTORY"),
            "mps_percentage": env.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
            "troublesome": {n: env[n] for n in _TROUBLESOME if env.get(n) not in (None, "", "0")},
        }
        cache = path("TILEFLOW_CACHE")
        if cache is None and env.get("XDG_CACHE_HOME"):
            cache = Path(env["XDG_CACHE_HOME"]) / "tileflow"
        if cache is not None:
            found["cache"] = cache
        assert set(found) <= {f.name for f in fields(cls)}
        return cls(**found)  # type: ignore[arg-type]


_LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_TROUBLESOME = ("CUDA_LAUNCH_BLOCKING", "NVSHMEM_ENABLE_NIC_PE_MAPPING", "NCCL_NVLS_ENABLE")

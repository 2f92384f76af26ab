"""TMA descriptors: boxes of 64 columns (128 bytes, swizzled) of row-major 2-byte matrices."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from ...errors import TileflowError

__all__ = ["tensor_map"]

_BOX_COLUMNS = 64
_WORDS = 16  # a CUtensorMap is 16 uint64


@lru_cache(maxsize=512)
def tensor_map(pointer: int, rows: int, columns: int, box_rows: int, dtype: str) -> np.ndarray:
    """Return the descriptor of a [rows, columns] matrix as uint64 [16].

    Boxes beyond the matrix read zeros and write nothing.

    Args:
        pointer: device address, a multiple of 16.
        rows, columns: size; `columns` is a multiple of 8.
        box_rows: rows of one box, at most 256.
        dtype: ``"float16"`` or ``"bfloat16"``.
    """
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    names = {
        "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }
    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    status, encoded = driver.cuTensorMapEncodeTiled(
        names[dtype],
        2,
        pointer,
        [u64(columns), u64(max(1, rows))],
        [u64(2 * columns)],
        [u32(_BOX_COLUMNS), u32(box_rows)],
        [u32(1), u32(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    _require_success(status, pointer, rows, columns)
    return _words(encoded)


def _require_success(status: Any, pointer: int, rows: int, columns: int) -> None:
    if int(status) != 0:
        matrix = f"[{rows}, {columns}] at {pointer:#x}"
        raise TileflowError(f"cuTensorMapEncodeTiled refused the matrix {matrix}: {status}")


def _words(encoded: Any) -> np.ndarray:
    words = (ctypes.c_uint64 * _WORDS).from_address(int(encoded.getPtr()))
    return np.array(words[:], np.uint64)

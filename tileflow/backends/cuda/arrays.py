"""Arrays from outside: CuPy, DLPack or ``__cuda_array_interface__``, never a copy."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from ...errors import InputError

__all__ = ["as_device_array", "numpy_dtype"]

_ALLOWED = "a GPU array: CuPy, DLPack or __cuda_array_interface__"


def as_device_array(name: str, array: Any) -> cupy.ndarray:
    """Return `array` as a CuPy array over the same memory.

    Raises:
        InputError: it is no GPU array, or lies on another GPU than this rank's.
    """
    if not isinstance(array, cupy.ndarray):
        array = _imported(name, array)
    here = cupy.cuda.Device().id
    if array.device.id != here:
        raise InputError(f"{name}.device", array.device.id, f"device {here} of this rank")
    return array


def _imported(name: str, array: Any) -> cupy.ndarray:
    try:
        # DLPack first: it alone can say bfloat16.
        if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
            return cupy.from_dlpack(array)
        if hasattr(array, "__cuda_array_interface__"):
            return cupy.asarray(array)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(name, type(array).__name__, f"{_ALLOWED} ({error})") from error
    raise InputError(name, type(array).__name__, _ALLOWED)


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of a tileflow dtype name."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)

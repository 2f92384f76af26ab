"""DLPack tensors in host memory as NumPy arrays, bfloat16 included, which NumPy does not know."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ..errors import InputError
from .cpu_kernels import numpy_dtype

__all__ = ["from_dlpack"]

_CPU_DEVICES = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost: memory that the CPU reads
_BFLOAT16 = (4, 16, 1)  # kDLBfloat, bits, lanes


class _Tensor(ctypes.Structure):
    """``DLTensor`` of DLPack's C header, the first member of ``DLManagedTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements, null where compact
        ("byte_offset", ctypes.c_uint64),
    )


class _Holder:
    """Keeps the exporter's capsule alive as long as the array that views its memory."""

    def __init__(self, capsule: Any, interface: dict[str, Any]):
        self.capsule, self.__array_interface__ = capsule, interface


def from_dlpack(name: str, tensor: Any) -> np.ndarray:
    """Return `tensor` as an array without a copy.

    Args:
        name: of the argument, for errors.
        tensor: an object with ``__dlpack__`` and ``__dlpack_device__``.

    Raises:
        InputError: it does not lie in host memory, or NumPy cannot represent it.
    """
    device_type = int(tensor.__dlpack_device__()[0])
    if device_type not in _CPU_DEVICES:
        seen = f"{type(tensor).__name__} on DLPack device {device_type}"
        raise InputError(name, seen, "an array in host memory (backend cpu)")
    try:
        return np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError) as error:
        array = _bfloat16(tensor.__dlpack__())
        if array is None:
            raise InputError(name, type(tensor).__name__, f"an array for NumPy ({error})") from None
        return array


def _bfloat16(capsule: Any) -> np.ndarray | None:
    """Return the array in an unversioned capsule, or None where it is not bfloat16."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    seen = _Tensor.from_address(get_pointer(capsule, b"dltensor"))
    if (seen.code, seen.bits, seen.lanes) != _BFLOAT16:
        return None
    strides = [2 * seen.strides[i] for i in range(seen.ndim)] if seen.strides else None
    interface = {
        "version": 3,
        "typestr": "<u2",
        "shape": tuple(seen.shape[i] for i in range(seen.ndim)),
        "strides": None if strides is None else tuple(strides),
        "data": ((seen.data or 0) + seen.byte_offset, True),  # such a capsule may forbid writing
    }
    return np.asarray(_Holder(capsule, interface)).view(numpy_dtype("bfloat16"))

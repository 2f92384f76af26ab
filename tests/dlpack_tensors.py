"""Stand-ins for other libraries' tensors: objects that export memory by DLPack."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tileflow.backends.dlpack import _Tensor

CPU, CUDA = 1, 2
_NEW = ctypes.pythonapi.PyCapsule_New
_NEW.restype, _NEW.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class BfloatTensor:
    """A bfloat16 tensor as a library without NumPy arrays has it, of the bits given as uint16."""

    def __init__(self, bits: np.ndarray, device: int = CPU, code: int = 4):
        self.bits, self.device = bits, device
        size, steps = bits.shape, [stride // 2 for stride in bits.strides]
        self._shape = (ctypes.c_int64 * bits.ndim)(*size)
        self._strides = (ctypes.c_int64 * bits.ndim)(*steps)
        self._managed = _Managed()
        tensor = self._managed.tensor
        tensor.data, tensor.ndim, tensor.device_type = bits.ctypes.data, bits.ndim, device
        tensor.code, tensor.bits, tensor.lanes = code, 16, 1
        tensor.shape, tensor.strides = self._shape, self._strides

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **_: Any) -> Any:
        return _NEW(ctypes.addressof(self._managed), b"dltensor", None)

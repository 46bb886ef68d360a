"""Arrays on the bytes of torch's tensors, and tensors on the bytes of arrays: nothing is copied.

NumPy has no bfloat16 that torch knows: its bits pass as int16. Importing this module needs the
package torch (an optional extra).
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import torch

from stitch.errors import InternalError
from stitch.program import Array, DataType

_BFLOAT16 = DataType.BFLOAT16.dtype


def array_on(tensor: Any) -> Array:
    """An array on a tensor's bytes, wherever and however they lie."""
    plain = tensor.detach()
    if plain.dtype is torch.bfloat16:
        bits: Array = plain.view(torch.int16).numpy()
        return bits.view(_BFLOAT16)
    array: Array = plain.numpy()
    return array


def array_at(address: int, shape: tuple[int, ...], kind: np.dtype[Any]) -> Array:
    """An array on the dense bytes at an address, which it does not keep: `tensor.numpy()` would, in
    every plan, and make torch's storage one that cannot be resized."""
    if not math.prod(shape):
        return np.empty(shape, kind)
    buffer: Any = (ctypes.c_char * (math.prod(shape) * kind.itemsize)).from_address(address)
    array: Array = np.frombuffer(buffer, kind).reshape(shape)
    return array


def tensor_on(array: Array, dtype: Any) -> Any:
    """A tensor on the bytes of an array, which has this dtype of torch's already, or its bits.

    Raises `InternalError` for an array of any other type.
    """
    if dtype is torch.bfloat16:
        bits = array.view(np.int16) if array.dtype == _BFLOAT16 else array
        tensor = torch.from_numpy(bits)
        if tensor.dtype is torch.int16:
            return tensor.view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    if tensor.dtype is not dtype:
        raise InternalError(
            "internal error: an array has another type than torch was promised",
            expected=str(dtype), got=str(array.dtype), remedy="please report it",
        )  # fmt: skip
    return tensor

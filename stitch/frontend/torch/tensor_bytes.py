"""Arrays that share memory with torch tensors, and tensors that share memory with arrays.

torch does not know NumPy's bfloat16, so its bits are passed as int16.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import torch

from stitch.errors import InternalError
from stitch.frontend.torch.torch_internals import disable_current_modes
from stitch.program import Array, DataType

_BFLOAT16 = DataType.BFLOAT16.dtype


def array_on(tensor: Any) -> Array:
    """Return an array that shares memory with a CPU tensor, with its strides."""
    plain = tensor.detach()
    if plain.dtype is torch.bfloat16:
        bits: Array = plain.view(torch.int16).numpy()
        return bits.view(_BFLOAT16)
    array: Array = plain.numpy()
    return array


def array_at(address: int, shape: tuple[int, ...], kind: np.dtype[Any]) -> Array:
    """Return a dense array at an address, without a reference to its owner: `tensor.numpy()` would
    keep the tensor alive in every plan and prevent torch from resizing its storage."""
    if not math.prod(shape):
        return np.empty(shape, kind)
    buffer: Any = (ctypes.c_char * (math.prod(shape) * kind.itemsize)).from_address(address)
    array: Array = np.frombuffer(buffer, kind).reshape(shape)
    return array


def tensor_on(array: Array, dtype: Any = None) -> Any:
    """Return a tensor of this torch dtype that shares memory with an array of the same type (or,
    for bfloat16, of int16 bits), by default that of the array; raises `InternalError` for another
    type."""
    if isinstance(array, torch.Tensor):
        # Of a device whose memory PyTorch allocates: with a storage of its own, whose end is seen.
        return torch.from_dlpack(array).view(dtype)
    if dtype is torch.bfloat16 or (dtype is None and array.dtype == _BFLOAT16):
        bits = array.view(np.int16) if array.dtype == _BFLOAT16 else array
        tensor = torch.from_numpy(bits)
        if tensor.dtype is torch.int16:
            return tensor.view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    if dtype not in (None, tensor.dtype):
        raise InternalError(
            "internal error: an array has another type than its tensor in torch",
            expected=str(dtype), got=str(array.dtype), remedy="please report it",
        )  # fmt: skip
    return tensor


def untraced_tensor_on(array: Array, dtype: Any) -> Any:
    """As `tensor_on`, also while torch traces other code."""
    with disable_current_modes():
        return tensor_on(array, dtype)

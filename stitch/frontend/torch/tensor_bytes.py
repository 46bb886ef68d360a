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
from torch.utils._python_dispatch import _disable_current_modes

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


# --------------------------------------------------------------------------------------------------
# Parameters on a device


class ParameterHomes:
    """The places of some parameters before they were moved, by the identity of torch's object."""

    __slots__ = ("_homes",)

    def __init__(self) -> None:
        self._homes: dict[int, tuple[Any, Any]] = {}

    def move(self, parameter: Any, tensor: Any) -> None:
        """A parameter lies where this tensor does: whatever it had before is another tensor's."""
        self._homes.setdefault(id(parameter), (parameter, parameter.data))
        parameter.data = tensor
        torch.autograd.graph.increment_version(parameter)

    def bring_back(self) -> None:
        """Parameters lie where they lay, with the values that they have now; twice does no harm.

        The end may come in the middle of torch's tracing of something else.
        """
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            while self._homes:
                number, (parameter, home) = next(iter(self._homes.items()))
                if home.shape == parameter.shape:
                    home.copy_(parameter.data)
                else:  # It was given another shape meanwhile.
                    home = parameter.data.clone()
                parameter.data = home
                del self._homes[number]

"""Parameters and buffers of a module that torch runs, by name, whole and in parts.

Needs the package torch (an optional extra).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch.errors import CompileError, UsageError, closest
from stitch.program import Array
from stitch.training import part_of, with_part

try:
    import torch
except ModuleNotFoundError as error:
    raise CompileError(
        "stitch.torch needs the package torch", remedy="pip install 'stitch-runtime[torch]'"
    ) from error

__all__ = ["set_tensor_of", "tensor_of", "torch"]


def tensor_of(module: Any, name: str, index: Any = ...) -> Array:
    """A parameter or buffer of a module, or a part of it, as an array of its own.

    `fc.weight.grad` is a gradient. Raises `UsageError` for what it has not.
    """
    tensor = _found(module, name).detach()
    array = tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
    return np.array(part_of(name, array, index))


def set_tensor_of(module: Any, name: str, array: Any, index: Any = ...) -> None:
    """Overwrite a parameter or buffer of a module, or a part of it; raises `UsageError`."""
    tensor = _found(module, name)
    whole = with_part(name, tensor_of(module, name), array, index)
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(whole))


def _found(module: Any, name: str) -> Any:
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    stem = name.removesuffix(".grad")
    if name not in tensors and stem in tensors and stem != name:
        if tensors[stem].grad is None:
            raise UsageError(f"tensor {name!r} is not there just now",
                             remedy="gradients live from backward to zero_grad")  # fmt: skip
        return tensors[stem].grad
    if name not in tensors:
        raise UsageError(f"the module has no tensor {name!r}",
                         remedy=closest(name, tensors) or None)  # fmt: skip
    return tensors[name]

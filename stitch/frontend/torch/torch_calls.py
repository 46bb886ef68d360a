"""Calls of torch's functions over tensors that are not there yet, as computation graphs.

Importing this module needs the package torch (an optional extra).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stitch.frontend.torch.aten_call import torch_type_of
from stitch.frontend.torch.fx import from_fx
from stitch.graph import ComputationGraph
from stitch.program import DataType


def graph_of_call(
    function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]
) -> ComputationGraph:
    """The graph of a call; raises `CompileError` as `from_fx`."""
    call = _Call(function, arguments, named)
    return from_fx(call, tuple(call.examples), getattr(function, "__name__", "call"))


class _Call(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """A call as a module whose arguments are the tensors alone."""

    def __init__(
        self, function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._function = function
        self.examples: list[Any] = []
        self._arguments = self._marked(list(arguments))
        self._named = {name: self._marked(value) for name, value in named.items()}

    def _marked(self, value: Any) -> Any:
        """The value with a place for each tensor in it."""
        if isinstance(value, list | tuple):
            return type(value)([self._marked(item) for item in value])
        if not hasattr(value, "__torch_function__"):
            return value
        if isinstance(value, torch.Tensor):
            self.examples.append(value.detach())
        else:
            dtype = torch_type_of(DataType.from_dtype(value.dtype))
            self.examples.append(torch.zeros(value.shape, dtype=dtype))
        return _Place(len(self.examples) - 1)

    def forward(self, *tensors: Any) -> Any:
        arguments = [_filled(value, tensors) for value in self._arguments]
        named = {name: _filled(value, tensors) for name, value in self._named.items()}
        return self._function(*arguments, **named)


class _Place:
    """Where a tensor goes, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


def _filled(value: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_filled(item, tensors) for item in value])
    return tensors[value.number] if isinstance(value, _Place) else value

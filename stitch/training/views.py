"""Views: shape operations between a prediction and its loss, as `pred.view(-1, classes)`.

A view is a sequence of steps, each a list of a name and its arguments: the methods of torch that
change shapes. It is a part of the loss: of its graph, and as JSON of its configuration.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import numpy as np

from stitch.errors import CompileError, UsageError
from stitch.program import ValueType

#: `["reshape", [-1, 10]]`; an index has for each axis a number, "..." or the numbers of a slice.
Step = list[Any]
View = tuple[Step, ...]


def reshape(*shape: Any) -> Step:
    sizes = [int(size) for size in _joined(shape)]
    # The first axis has the batch, whose size may change.
    return ["reshape", sizes if -1 in sizes or not sizes else [-1, *sizes[1:]]]


def flatten(start_dim: int = 0, end_dim: int = -1) -> Step:
    return ["flatten", int(start_dim), int(end_dim)]


def transpose(dim0: int, dim1: int) -> Step:
    return ["transpose", int(dim0), int(dim1)]


def permute(*dims: Any) -> Step:
    return ["permute", [int(dim) for dim in _joined(dims)]]


def squeeze(dim: int | None = None) -> Step:
    return ["squeeze", None if dim is None else int(dim)]


def unsqueeze(dim: int) -> Step:
    return ["unsqueeze", int(dim)]


def _joined(sizes: Sequence[Any]) -> Sequence[Any]:
    return sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes


_METHODS: dict[str, Callable[..., Step]] = {
    "flatten": flatten, "permute": permute, "reshape": reshape, "squeeze": squeeze,
    "swapaxes": transpose, "transpose": transpose, "unsqueeze": unsqueeze, "view": reshape,
}  # fmt: skip


#: Names of methods of torch that return a view of a prediction.
VIEWS = frozenset({*_METHODS, "contiguous"})


def step_of_call(name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Step | None:
    """Return the step of a call of a method of torch; None for others, as `view(torch.int32)`, and
    methods of NumPy with other arguments."""
    method = _METHODS.get(name)
    is_numpy = "torch" not in sys.modules and (named or name != "reshape")
    if (
        method is None
        or is_numpy
        or not all(hasattr(each, "__index__") for each in _joined(arguments))
    ):
        return None
    return method(*arguments, **named)


def step_of_index(index: Any) -> Step | None:
    """Return the step of an index as `[..., :-1, :]`; None if it takes one example, or has other
    parts than slices and numbers."""
    parts = index if isinstance(index, tuple) else (index,)
    if not parts or not isinstance(parts[0], slice | EllipsisType):
        return None
    step: Step = ["index"]
    for part in parts:
        if isinstance(part, slice):
            step.append([part.start, part.stop, part.step])
        elif part is not ... and type(part) is not int:
            return None
        else:
            step.append("..." if part is ... else part)
    return step


def viewed(value: Any, view: View) -> Any:
    """Return an array, a tensor of torch or a tensor of a graph after the steps of a view."""
    for name, *arguments in view:
        shape = list(value.shape)
        if name == "index":
            value = value[tuple([
                slice(*part) if isinstance(part, list) else ... if part == "..." else part
                for part in arguments
            ])]  # fmt: skip
        elif name in ("permute", "transpose"):
            move = getattr(value, "permute", None) or value.transpose
            value = move(_order(len(shape), name, arguments))
        else:
            value = value.reshape(_shape(shape, name, arguments))
    return value


def _order(rank: int, name: str, arguments: Sequence[Any]) -> list[int]:
    axes = range(rank)
    if name == "permute":
        return [axes[dim] for dim in arguments[0]]
    order, (first, second) = list(axes), arguments
    order[first], order[second] = order[second], order[first]
    return order


def _shape(shape: list[int], name: str, arguments: Sequence[Any]) -> list[int]:
    axes = range(len(shape))
    if name == "reshape":
        known = -math.prod(arguments[0])
        return [math.prod(shape) // known if n == -1 and known > 0 else n for n in arguments[0]]
    if name == "flatten":
        start, end = (axes[dim] for dim in arguments)
        return [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]]
    if name == "squeeze":
        dropped = axes if arguments[0] is None else (axes[arguments[0]],)
        return [size for axis, size in enumerate(shape) if size != 1 or axis not in dropped]
    if name == "unsqueeze":
        at = range(len(shape) + 1)[arguments[0]]
        return [*shape[:at], 1, *shape[at:]]
    raise ValueError(f"unknown step {name!r}")


def viewed_type(kind: ValueType, view: View) -> ValueType:
    """Return the type of a prediction after a view; raise `CompileError` if it has none."""
    if not view:
        return kind
    try:
        # The elements are never touched, so that the array takes no memory.
        return ValueType(viewed(np.empty(kind.shape, np.bool_), view).shape, kind.data_type)
    except (ArithmeticError, IndexError, TypeError, ValueError) as error:
        raise CompileError(
            f"the prediction cannot be reshaped for its loss: {error}", where=view_text(view),
            got=kind.text(), remedy="compare the shapes of the prediction and of the labels",
        ) from error  # fmt: skip


def keeps_examples(shape: tuple[int, ...], view: View) -> bool:
    """Whether a view of a prediction has all examples in their order along its first axis.

    >>> keeps_examples((4, 3, 5), (transpose(1, 2), reshape(-1, 3)))
    True
    >>> keeps_examples((4, 3, 5), (transpose(-3, 1),))
    False
    """
    value = np.empty(shape, np.bool_)
    for step in view:
        name, *arguments = step
        if name in ("permute", "transpose"):
            if _order(value.ndim, name, arguments)[0] != 0:
                return False
        elif name == "index" and arguments[0] not in ("...", [None, None, None]):
            return False
        value = viewed(value, (step,))
    return True


def view_text(view: View) -> str:
    """Return a view as Python.

    >>> view_text((["index", "...", [None, -1, None], [None, None, None]], reshape(-1, 5)))
    'pred[..., :-1, :].reshape(-1, 5)'
    """
    text = "pred"
    for name, *arguments in view:
        if name == "index":
            parts = [
                ":".join(["" if n is None else str(n) for n in part]).removesuffix(":")
                if isinstance(part, list) else str(part)
                for part in arguments
            ]  # fmt: skip
            text += f"[{', '.join([part or ':' for part in parts])}]"
        else:
            listed = [n for each in arguments for n in (each if isinstance(each, list) else [each])]
            text += f".{name}({', '.join(map(str, listed))})"
    return text


def view_from_config(config: Any) -> View:
    """Return the view of a loss's configuration; raise `UsageError` if it has no steps."""
    if isinstance(config, list | tuple) and all(
        isinstance(step, list) and step and isinstance(step[0], str) for step in config
    ):
        return tuple(config)
    raise UsageError(
        "the view of a loss is a list of shape operations", got=repr(config)[:100],
        expected='such as [["reshape", [-1, 10]]]',
    )  # fmt: skip

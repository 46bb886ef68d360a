"""Views: shape operations between a prediction and its loss, as `pred.view(-1, classes)`.

A view is a sequence of steps: `("reshape", sizes)`, `("permute", axes)` or `("index", parts)`; a
part is a number, or the three of a slice. It is a part of the loss: of its graph, and as JSON of
its configuration. A step is made where the shape is known, for batches of any length: as long as
the first axis has the examples in their order, a reshape infers it.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any

import numpy as np

from stitch.errors import CompileError, UsageError
from stitch.program import ValueType

Shape = tuple[int, ...]
Step = tuple[str, tuple[Any, ...]]
View = tuple[Step, ...]

_RESHAPING = frozenset({
    "flatten", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view", "view_as",
})  # fmt: skip
_MOVING = frozenset({"moveaxis", "movedim", "permute", "swapaxes", "swapdims", "transpose"})
#: Names of methods that make a view of a prediction.
VIEWS = _RESHAPING | _MOVING
_WHOLE = (None, None, None)


def step_of_call(
    shape: Shape, view: View, name: str, arguments: Sequence[Any], named: Mapping[str, Any]
) -> Step | None:
    """Return the step of a call of a method of torch or NumPy, which checks the arguments; None if
    it does more than change the shape, as `view(torch.int32)`.

    Args:
        shape: The shape of the prediction.
        view: The steps before.
        name: One of `VIEWS`.
        arguments: Its arguments.
        named: Those that are given by name.
    """
    if any(isinstance(each, str) for each in (*arguments, *named.values())):
        return None  # An order of NumPy, or names of axes.
    now = shape_after(shape, view)
    if name in _MOVING:
        order = getattr(_empty(range(len(now))), name)(*arguments, **named).shape
        return "permute", tuple(order)
    before = _empty(now)
    after = getattr(before, name)(*arguments, **named)
    if after.dtype != before.dtype:
        return None
    sizes = tuple(after.shape)
    if keeps_examples(shape, (*view, ("reshape", sizes))) and math.prod(sizes[1:]):
        return "reshape", (-1, *sizes[1:])
    return "reshape", sizes


def step_of_index(shape: Callable[[], Shape], view: View, index: Any) -> Step | None:
    """Return the step of an index as `[..., :-1, :]`; None if it takes one example, or has other
    parts than slices and numbers."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not parts or not isinstance(parts[0], slice | EllipsisType):
        return None
    if not all(isinstance(p, slice | EllipsisType) or _is_whole(p) for p in parts):
        return None
    now = shape_after(shape(), view)
    _empty(now)[index]  # Raises what torch or NumPy raises.
    for at, part in enumerate(parts):
        if part is ...:
            parts[at : at + 1] = [slice(None)] * (len(now) - len(parts) + 1)
            break
    found: list[Any] = []
    for part, size in zip(parts, now, strict=False):
        if isinstance(part, slice):
            bounds = [n if n is None else operator.index(n) for n in _bounds(part)]
            found.append(_WHOLE if slice(*bounds).indices(size) == (0, size, 1) else tuple(bounds))
        else:
            found.append(operator.index(part))
    return "index", tuple(found)


def _bounds(part: slice) -> tuple[Any, Any, Any]:
    return part.start, part.stop, part.step


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _empty(shape: Sequence[int]) -> Any:
    """Return a tensor of torch without memory, if it is loaded, else an array."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.empty(tuple(shape), device="meta")
    return np.empty(tuple(shape), np.bool_)


def viewed(value: Any, view: View) -> Any:
    """Return an array, a tensor of torch or a tensor of a graph after the steps of a view."""
    for name, arguments in view:
        if name == "index":
            value = value[_index_of(arguments)]
        elif name == "permute":
            value = (getattr(value, "permute", None) or value.transpose)(arguments)
        else:
            value = value.reshape(arguments)
    return value


def _index_of(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([slice(*part) if isinstance(part, tuple) else part for part in parts])


def shape_after(shape: Shape, view: View) -> Shape:
    """Return the shape after a view; raise `ValueError` or `IndexError` if there is none."""
    for name, arguments in view:
        if name == "index":
            shape = np.broadcast_to(np.False_, shape)[_index_of(arguments)].shape
        elif name == "permute":
            if sorted(arguments) != list(range(len(shape))):
                raise ValueError(f"permute{arguments} of {len(shape)} axes")
            shape = tuple([shape[axis] for axis in arguments])
        else:
            known, count = math.prod([n for n in arguments if n != -1]), math.prod(shape)
            if -1 in arguments:
                found = tuple([count // known if n == -1 and known else n for n in arguments])
            else:
                found = arguments
            if math.prod(found) != count:
                raise ValueError(f"{list(shape)} has no shape {list(arguments)}")
            shape = found
    return shape


def viewed_type(kind: ValueType, view: View) -> ValueType:
    """Return the type of a prediction after a view; raise `CompileError` if it has none."""
    try:
        return ValueType(shape_after(kind.shape, view), kind.data_type) if view else kind
    except (IndexError, ValueError) as error:
        raise CompileError(
            f"the prediction cannot be reshaped for its loss: {error}", where=view_text(view),
            got=kind.text(), remedy="compare the shapes of the prediction and of the labels",
        ) from error  # fmt: skip


def keeps_examples(shape: Shape, view: View) -> bool:
    """Whether the first axis after a view of a prediction has all examples in their order, each
    with as many entries.

    >>> keeps_examples((4, 3, 5), (("permute", (0, 2, 1)), ("reshape", (-1, 3))))
    True
    >>> keeps_examples((4, 3, 5), (("permute", (1, 0, 2)),))
    False
    >>> keeps_examples((4, 3, 5), (("reshape", (1, 60)),))
    False
    """
    if not shape:
        return not view
    for done, (name, arguments) in enumerate(view):
        kept = {"permute": (0,), "index": (_WHOLE,)}.get(name)
        if kept is not None and arguments[:1] != kept:
            return False
        after = shape_after(shape, view[: done + 1])
        # The elements of an example are whole entries of the first axis.
        if name == "reshape" and (not after or after[0] % max(1, shape[0])):
            return False
    return True


def view_text(view: View) -> str:
    """Return a view as Python.

    >>> view_text((("index", ((None, None, None), (None, -1, None), 0)), ("reshape", (-1, 5))))
    'pred[:, :-1, 0].reshape(-1, 5)'
    """
    text = "pred"
    for name, arguments in view:
        if name == "index":
            parts = [_slice_text(part) if isinstance(part, tuple) else part for part in arguments]
            text += f"[{', '.join(map(str, parts))}]"
        else:
            text += f".{name}({', '.join(map(str, arguments))})"
    return text


def _slice_text(part: tuple[Any, Any, Any]) -> str:
    start, stop, step = ["" if n is None else str(n) for n in part]
    return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"


def view_config(view: View) -> list[Any]:
    """Return a view for a configuration, as lists."""
    return [[name, [list(a) if isinstance(a, tuple) else a for a in given]] for name, given in view]


def view_from_config(config: Any) -> View:
    """Return the view of a configuration; raise `UsageError` if it is none."""

    def step_of(step: Any) -> Step:
        name, given = step
        if not isinstance(given, list):
            raise TypeError(name)
        if name == "index":
            parts = [tuple(part) if isinstance(part, list) else part for part in given]
            if all(_is_slice(part) or type(part) is int for part in parts):
                return name, tuple(parts)
        least = {"reshape": -1, "permute": 0}[name]
        if all(type(n) is int and n >= least for n in given) and given.count(-1) < 2:
            return name, tuple(given)
        raise ValueError(name)

    try:
        return tuple([step_of(step) for step in config])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            "the view of a loss is not a list of shape operations", got=repr(config)[:100],
            expected='such as [["reshape", [-1, 10]]]',
        ) from error  # fmt: skip


def _is_slice(part: Any) -> bool:
    return (
        isinstance(part, tuple) and len(part) == 3 and part[2] != 0
        and all(n is None or (type(n) is int and abs(n) < 1 << 62) for n in part)
    )  # fmt: skip

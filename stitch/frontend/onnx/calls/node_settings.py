"""What one ONNX node was given: operands that it needs, attributes of the types that it needs.

Comes in: a `NodeCall`. Goes out: tensors, numbers, words and lists, or a `FormatError` that names
what does not fit. Must not know: what an operator means.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import numpy as np

from stitch.errors import FormatError
from stitch.frontend.onnx.calls.upgrades import NodeCall
from stitch.graph import SymbolicTensor
from stitch.program import Array

T = TypeVar("T")


def operand(call: NodeCall, index: int) -> SymbolicTensor:
    """An operand that must be there."""
    tensor = call.operand(index)
    if tensor is None:
        raise call.malformed(f"{call.op} needs its operand {index}")
    return tensor


def whole(call: NodeCall, name: str, default: int = 0) -> int:
    """An attribute that is one whole number."""
    value = call.attributes.get(name, default)
    if not isinstance(value, int):
        raise unfit(call, name, "one whole number", value)
    return value


def real(call: NodeCall, name: str, default: float = 0.0) -> float:
    """An attribute that is one number."""
    value = call.attributes.get(name, default)
    if not isinstance(value, int | float):
        raise unfit(call, name, "one number", value)
    return float(value)


def word(call: NodeCall, name: str, default: str, allowed: Collection[str]) -> str:
    """An attribute that is one of some words."""
    value = call.attributes.get(name, default)
    if value not in allowed:
        raise unfit(call, name, f"one of {', '.join(allowed)}", value)
    return str(value)


def wholes(call: NodeCall, name: str, count: int | None = None) -> tuple[int, ...]:
    """An attribute that is a list of whole numbers, empty where it is absent."""
    values = call.attributes.get(name, ())
    if not isinstance(values, tuple) or not all(isinstance(one, int) for one in values):
        raise unfit(call, name, "a list of whole numbers", values)
    return _counted(call, name, values, count)


def words(call: NodeCall, name: str, count: int | None = None) -> tuple[str, ...]:
    """An attribute that is a list of words, empty where it is absent."""
    values = call.attributes.get(name, ())
    if not isinstance(values, tuple) or not all(isinstance(one, str) for one in values):
        raise unfit(call, name, "a list of words", values)
    return _counted(call, name, values, count)


def reals(call: NodeCall, name: str, count: int | None = None) -> Array:
    """An attribute that is a list of float32 numbers, empty where it is absent."""
    values = call.attributes.get(name, ())
    if not isinstance(values, tuple) or not all(isinstance(one, int | float) for one in values):
        raise unfit(call, name, "a list of numbers", values)
    return np.array(_counted(call, name, values, count), np.float32)


def unfit(call: NodeCall, name: str, expected: str, got: object) -> FormatError:
    """What is said about an attribute that does not fit."""
    return call.malformed(
        f"attribute {name!r} of {call.op} does not fit", expected=expected, got=str(got)[:80]
    )


def _counted(call: NodeCall, name: str, values: tuple[T, ...], count: int | None) -> tuple[T, ...]:
    if count is not None and len(values) != count:
        raise unfit(call, name, f"{count} elements", len(values))
    return values

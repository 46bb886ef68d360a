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
    found = call.operand(index)
    if found is None:
        raise FormatError(f"{call.op} needs its operand {index}", where=call.where)
    return found


def whole(call: NodeCall, name: str, default: int = 0) -> int:
    """An attribute that is one whole number."""
    found = call.attributes.get(name, default)
    if not isinstance(found, int):
        raise unfit(call, name, "one whole number", found)
    return found


def real(call: NodeCall, name: str, default: float = 0.0) -> float:
    """An attribute that is one number."""
    found = call.attributes.get(name, default)
    if not isinstance(found, int | float):
        raise unfit(call, name, "one number", found)
    return float(found)


def word(call: NodeCall, name: str, default: str, allowed: Collection[str]) -> str:
    """An attribute that is one of some words."""
    found = call.attributes.get(name, default)
    if found not in allowed:
        raise unfit(call, name, f"one of {', '.join(allowed)}", found)
    return str(found)


def wholes(call: NodeCall, name: str, count: int | None = None) -> tuple[int, ...]:
    """An attribute that is a list of whole numbers, empty where it is absent."""
    found = call.attributes.get(name, ())
    if not isinstance(found, tuple) or not all(isinstance(one, int) for one in found):
        raise unfit(call, name, "a list of whole numbers", found)
    return _counted(call, name, found, count)


def words(call: NodeCall, name: str, count: int | None = None) -> tuple[str, ...]:
    """An attribute that is a list of words, empty where it is absent."""
    found = call.attributes.get(name, ())
    if not isinstance(found, tuple) or not all(isinstance(one, str) for one in found):
        raise unfit(call, name, "a list of words", found)
    return _counted(call, name, found, count)


def reals(call: NodeCall, name: str, count: int | None = None) -> Array:
    """An attribute that is a list of float32 numbers, empty where it is absent."""
    found = call.attributes.get(name, ())
    if not isinstance(found, tuple) or not all(isinstance(one, int | float) for one in found):
        raise unfit(call, name, "a list of numbers", found)
    return np.array(_counted(call, name, found, count), np.float32)


def unfit(call: NodeCall, name: str, expected: str, got: object) -> FormatError:
    """What is said about an attribute that does not fit."""
    return FormatError(
        f"attribute {name!r} of {call.op} does not fit", where=call.where, expected=expected,
        got=str(got)[:80],
    )  # fmt: skip


def _counted(call: NodeCall, name: str, found: tuple[T, ...], count: int | None) -> tuple[T, ...]:
    if count is not None and len(found) != count:
        raise unfit(call, name, f"{count} elements", len(found))
    return found

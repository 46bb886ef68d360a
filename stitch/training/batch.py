"""Batches: what the loop passes to a model becomes arrays that its input slots can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.program import Array
from stitch.runtime import InputPort, Tensor


def fitted(ports: Sequence[InputPort], batch: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Arrays and tensors in the order of the ports, by position or name; floats in their type.

    Raises `UsageError` for missing or surplus arrays, and for one of another shape.
    """
    later = [port.name for port in ports[len(batch) :]]
    if len(batch) > len(ports) or named.keys() != set(later):
        raise UsageError(
            "a batch has one array for each input of the model",
            expected=", ".join([port.name for port in ports]),
            got=f"{len(batch)} by position; by name: {', '.join(named) or 'none'}",
        )
    given = (*batch, *[named[name] for name in later])
    return [
        value if isinstance(value, Tensor) else _array(port, value)
        for port, value in zip(ports, given, strict=True)
    ]


def _array(port: InputPort, value: Any) -> Array:
    array = np.asarray(value)
    if array.shape != port.shape:
        raise UsageError(
            f"input {port.name!r} has another shape",
            expected=port.type.text(),
            got=str(list(array.shape)),
            remedy="programs have fixed shapes: pad the batch, or compile for its size",
        )
    if array.dtype.kind == port.dtype.kind or (
        array.dtype.kind == "f" and port.type.data_type.is_floating
    ):
        return array.astype(port.dtype, copy=False)
    return array

"""Operands of an operation from texts: the words in which tables of cases are written.

`f32[2,3]` is drawn with a fixed seed; a suffix narrows it: `+` positive, `1` inside (-1, 1), `<5`
an index in -5..4. A list is a constant int64 operand, None an absent one, an array stands for
itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.program import Array, DataType

_SPEC = re.compile(r"(\w+)\[([\d,]*)\](\+|1|<\d+)?$")


def drawn(spec: str, rng: np.random.Generator) -> Array:
    found = _SPEC.match(spec)
    assert found, spec
    data_type, suffix = DataType.parse(found[1]), found[3] or ""
    shape = tuple(int(size) for size in found[2].split(",") if size)
    if suffix.startswith("<"):
        limit = int(suffix[1:])
        return np.asarray(rng.integers(-limit, limit, shape)).astype(data_type.dtype)
    if data_type is DataType.BOOL:
        return np.asarray(rng.integers(0, 2, shape)).astype(np.bool_)
    if not data_type.is_floating:
        low = 0 if data_type.value.startswith("u") else -5
        values = np.asarray(rng.integers(low, 6, shape))
        return (abs(values) + 1 if suffix == "+" else values).astype(data_type.dtype)
    values = np.asarray(rng.uniform(-1, 1, shape) if suffix == "1" else rng.normal(0, 2, shape))
    return (abs(values) + 0.1 if suffix == "+" else values).astype(data_type.dtype)


def operands_of(specs: Sequence[Any], seed: int = 7) -> list[Array | None]:
    rng = np.random.default_rng(seed)
    found: list[Array | None] = []
    for spec in specs:
        if isinstance(spec, str):
            found.append(drawn(spec, rng))
        elif isinstance(spec, list):
            found.append(np.array(spec, np.int64))
        else:
            found.append(spec)
    return found


def in_compute_type(array: Array | None) -> Array | None:
    if array is None:
        return None
    return np.array(array, DataType.from_dtype(array.dtype).compute_dtype, order="C")

"""Plain arguments of host functions, and places, as JSON, in both directions.

None, truth values, numbers that JSON has and texts stand for themselves; all else is an object with
one field that says what it is: `input` and `output` (a place), `float` ("nan", "inf", "-inf"),
`path`, `list`, `tuple`, `dict` (with texts as keys).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.graph import JsonObject
from stitch.tasks.host_calls import InputPlace, OutputPlace

_TAGS = ("input", "output", "float", "path", "list", "tuple", "dict")
#: Arguments inside arguments; more are written by nobody.
MAX_DEPTH = 32


def argument_out(value: object, where: str, depth: int = 0) -> Any:
    """An argument as JSON data; raises `UsageError` for what the form cannot hold."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, InputPlace):
        return {"input": value.index}
    if isinstance(value, OutputPlace):
        return {"output": value.index}
    if isinstance(value, Path):
        return {"path": str(value)}
    if depth < MAX_DEPTH:
        if type(value) in (list, tuple):
            assert isinstance(value, Sequence)
            parts = [argument_out(part, where, depth + 1) for part in value]
            return {type(value).__name__: parts}
        if isinstance(value, dict) and all(type(key) is str for key in value):
            return {"dict": {k: argument_out(v, where, depth + 1) for k, v in value.items()}}
    remedy = "give arrays as inputs of the graph; let the function find other objects by name"
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, str):
        remedy = f"it holds Python's numbers and texts: try {type(value.item()).__name__}(x)"
    raise UsageError(
        "a task graph's JSON holds no such argument",
        where=where,
        expected="None, truth values, numbers, texts, paths; lists, tuples and dicts of them",
        got=f"{type(value).__name__}: {' '.join(repr(value).split())[:60]}",
        remedy=remedy,
    )


def argument_in(data: object, record: JsonObject, key: str, depth: int = 0) -> Any:
    """What `argument_out` gave; notes a problem for anything else."""
    if data is None or isinstance(data, bool | int | float | str):
        return data
    tag = next(iter(data)) if isinstance(data, dict) and len(data) == 1 else None
    if tag not in _TAGS or depth > MAX_DEPTH:
        record.problem("bad_value", key, "an argument is a plain value, or an object with one of "
                       f"{', '.join(_TAGS)}")  # fmt: skip
        return None
    assert isinstance(data, dict)
    inside = data[tag]
    if tag in ("input", "output") and type(inside) is int and inside >= 0:
        return InputPlace(inside) if tag == "input" else OutputPlace(inside)
    if tag == "float" and inside in ("nan", "inf", "-inf"):
        return float(inside)
    if tag == "path" and isinstance(inside, str):
        return Path(inside)
    if tag in ("list", "tuple") and isinstance(inside, list):
        parts = [argument_in(part, record, key, depth + 1) for part in inside]
        return parts if tag == "list" else tuple(parts)
    if tag == "dict" and isinstance(inside, dict):
        return {str(k): argument_in(v, record, key, depth + 1) for k, v in inside.items()}
    record.problem("bad_value", key, f"{str(inside)[:40]!r} is no {tag}")
    return None

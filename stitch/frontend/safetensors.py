"""Weights in `.safetensors` files, read with the library of that name (an optional extra).

Comes in: a path. Goes out: one array. Importing this module fails where the library is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import safe_open

from stitch.program import Array


def read(path: Path, choose: Callable[[Iterable[str]], str]) -> Array:
    """The array whose name `choose` picks from the file's; raises what the library raises."""
    with safe_open(str(path), framework="numpy") as arrays:
        found: Array = arrays.get_tensor(choose(arrays.keys()))
    return found

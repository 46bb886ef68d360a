"""Read `.safetensors` files; importing this module requires the package `safetensors`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import safe_open

from stitch.budget import claim, keep
from stitch.program import Array

#: Bits of an element by the format's names of types.
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
         "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}  # fmt: skip


def read(path: Path, choose: Callable[[Iterable[str]], str]) -> Array:
    """Read the array that `choose` selects by name; raise the errors of the library."""
    with safe_open(str(path), framework="numpy") as arrays:
        name = choose(arrays.keys())
        # The library has checked that the file has as many bytes.
        part = arrays.get_slice(name)
        nbytes = math.prod(part.get_shape()) * _BITS.get(part.get_dtype(), 64) // 8
        taken = claim(nbytes, f"reading array {name!r} of {str(path)!r}")
        array: Array = arrays.get_tensor(name)
    keep(array, taken)
    return array

"""Arrays as words, in iree-run-module's form: `2x2xf32=1 2 3 4`, `f32=7`, `2x2xf32=@raw.bin`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from stitch.budget import claim, claimed_array, keep
from stitch.errors import FormatError, UsageError
from stitch.files import read_bytes, unreadable
from stitch.program import Array, DataType, ValueType
from stitch.report import counted

_TYPES = {t.short: t for t in DataType} | {t.value: t for t in DataType}
_SPELLED = re.compile(r"((?:\d+x)*)([a-z]+\d*)(?:=(.*))?", re.DOTALL)
_FORM = "such as 2x2xf32=1 2 3 4, 2x2xf32=7 (all alike) or 2x2xf32=@raw.bin"
#: More digits than this are no number that a command line means.
_MAX_ELEMENTS = 1 << 40


def looks_like_array(text: str) -> bool:
    """Whether a text begins like `2x2xf32` (a slot cannot be mistaken for it unless so named).

    >>> looks_like_array("2x2xf32=1 2 3 4"), looks_like_array("x=@x.npy")
    (True, False)
    """
    spelled = _SPELLED.fullmatch(text)
    return spelled is not None and spelled.group(2) in _TYPES


def array_of_text(text: str) -> Array:
    """The array that a text spells, row-major; without values, zeros.

    Raises `UsageError` for a wrong form or count, `FormatError` for a raw file of another size.

    >>> array_of_text("2x2xi32=1 2 3 4").tolist()
    [[1, 2], [3, 4]]
    """
    spelled = _SPELLED.fullmatch(text)
    if spelled is None or spelled.group(2) not in _TYPES:
        raise UsageError(f"{text[:60]!r} is no array", expected=f"SHAPExTYPE=VALUES, {_FORM}")
    data_type = _TYPES[spelled.group(2)]
    if data_type.is_block:
        raise UsageError(
            f"{data_type.value} is a way to store tensors, not to write them",
            remedy="write f32; the device converts",
        )
    shape = tuple(int(d) for d in spelled.group(1).split("x") if d)
    kind = ValueType(shape, data_type)
    count = 1
    for dimension in shape:
        count *= dimension
    if count > _MAX_ELEMENTS:
        raise UsageError(
            f"{text[:60]!r} is too large", expected=f"at most {_MAX_ELEMENTS} elements"
        )
    values = (spelled.group(3) or "").strip()
    if values.startswith("@"):
        return _raw(Path(values[1:]), kind, count)
    return _parsed(values, kind, count)


def _raw(path: Path, kind: ValueType, count: int) -> Array:
    dtype = kind.data_type.dtype
    try:
        size = path.stat().st_size if path.is_file() else count * dtype.itemsize
        fits = size == count * dtype.itemsize
        taken = claim(size if fits else 0, f"reading {str(path)!r}")
        data = read_bytes(path) if fits else b""
    except OSError as error:
        raise unreadable(path, error) from error
    if fits:
        size = len(data)
    if size != count * dtype.itemsize:
        raise FormatError(
            "a raw file holds exactly the bytes of its array",
            where=str(path),
            expected=f"{count * dtype.itemsize} bytes for {kind.text()}",
            got=f"{size} bytes",
        )
    array: Array = np.frombuffer(data, dtype)
    keep(array, taken)
    return array.reshape(kind.shape)


def _parsed(values: str, kind: ValueType, count: int) -> Array:
    words = re.sub(r"[\[\](),]", " ", values).split()
    dtype = kind.data_type.dtype
    if not words:
        words = ["0"]
    if len(words) not in (1, count):
        raise UsageError(
            f"{kind.text()} has {counted(count, 'element')}, {len(words)} are given",
            expected=f"{count} values, or one for all",
        )
    numbers = [_number(word, kind) for word in words]
    array = claimed_array(kind.shape, dtype, f"the array {kind.text()}")
    flat = array.reshape(-1)
    try:
        with np.errstate(over="ignore"):
            flat[...] = numbers
    except (OverflowError, ValueError) as error:
        raise UsageError(f"a value does not fit {kind.data_type.value}: {error}") from error
    return array


def _number(word: str, kind: ValueType) -> int | float | bool:
    lower = word.lower()
    try:
        if kind.data_type is DataType.BOOL:
            return {"true": True, "false": False, "1": True, "0": False}[lower]
        if kind.data_type.is_floating:
            return float.fromhex(word) if "0x" in lower else float(word)
        return int(word, 0)
    except (ValueError, KeyError, OverflowError) as error:
        raise UsageError(f"{word[:40]!r} is no value of {kind.data_type.value}") from error


def text_of_array(array: Array, *, whole: bool) -> str:
    """`2x2xf32=[1 2][3 4]`; without `whole`, long arrays are cut short with `...`."""
    kind = ValueType(array.shape, DataType.from_dtype(array.dtype))
    shown = array
    if kind.data_type.is_narrow or array.dtype.kind == "V":
        shown = array.astype(np.float32 if kind.data_type.is_floating else np.int8)
    limit = max(array.size, 1) if whole else 16
    with np.printoptions(threshold=limit, edgeitems=2, linewidth=10**9):
        body = np.array2string(shown, separator=" ") if array.ndim else str(shown.item())
    inner = body[1:-1] if body.startswith("[") else body
    return f"{kind.text()}=" + re.sub(r"\s+", " ", inner).replace("] [", "][").strip()

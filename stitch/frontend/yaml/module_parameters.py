"""The parameters of a YAML module: weights out of files, made up from a seed, or written inline.

Comes in: one parameter's fields. Goes out: its array, or noted defects. Must not know: graphs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from stitch.budget import claim, claim_for
from stitch.errors import FormatError, OutOfMemoryError, StitchError, closest
from stitch.forms import Fields, Node, read_array
from stitch.program import Array, DataType

_SOURCES = ("file", "init", "values")
_KEYS = (*_SOURCES, "name", "shape", "type")
#: What each way of making numbers up takes beside `kind`.
_INITS: Mapping[str, tuple[str, ...]] = {
    "randn": ("seed", "mean", "scale"),
    "uniform": ("seed", "low", "high"),
    "zeros": (),
    "ones": (),
    "arange": ("start", "step"),
    "constant": ("value",),
}
#: A made-up parameter beyond this belongs into a file.
MAX_MADE_NBYTES = 1 << 32


def parameter_array(name: str, fields: Fields, folder: Path) -> Array | None:
    """The array of a parameter, or None after noting what is wrong with it."""
    before = len(fields.log.problems)
    fields.only(_KEYS)
    sources = [key for key in _SOURCES if fields.get(key) is not None]
    if len(sources) != 1:
        got = " and ".join(sources) or "none of them"
        fields.log.note(
            "bad_value", fields.line, f"{fields.what} has one of file, init, values; not {got}"
        )
        return None
    shape, data_type = fields.shape("shape"), fields.data_type("type")
    if data_type is not None and data_type.is_block:
        fields.wrong("type", "a type to compute in, not a way to store")
    if len(fields.log.problems) > before:
        return None
    if sources == ["file"]:
        return _checked(_from_file(fields, folder, data_type), shape, data_type, fields)
    if sources == ["values"]:
        return _checked(_inline(fields, data_type), shape, data_type, fields)
    return _made(name, fields, shape, data_type or DataType.FLOAT32)


def _from_file(fields: Fields, folder: Path, kind: DataType | None) -> Array | None:
    file, name = fields.text("file"), fields.text("name")
    if file is None:
        return None
    try:
        return read_array(folder / file, name, kind)
    except FormatError as error:
        fields.log.note_error("bad_weights", fields.line_of("file"), error)
    except (OSError, ValueError) as error:
        fields.log.note("bad_weights", fields.line_of("file"), f"{file}: {error}")
    return None


def _checked(
    array: Array | None, shape: tuple[int, ...] | None, kind: DataType | None, fields: Fields
) -> Array | None:
    """The array, if it is what the module declares."""
    if array is None:
        return None
    source = fields.text("file") or "values"
    title = f"{fields.what} ({' '.join(filter(None, (source, fields.text('name'))))})"
    found = DataType.from_dtype(array.dtype)
    if shape is not None and array.shape != shape:
        detail = f"{title} has the shape {list(array.shape)}, declared is {list(shape)}"
        fields.log.note("wrong_shape", fields.line_of("shape"), detail)
        return None
    if kind is not None and found is not kind:
        detail = (
            f"{title} holds {found.value}, declared is {kind.value}; "
            f"convert the file, or leave out type and add a Cast"
        )
        fields.log.note("wrong_type", fields.line_of("type"), detail)
        return None
    return array


def _inline(fields: Fields, kind: DataType | None) -> Array | None:
    node = fields.get("values")
    assert node is not None
    try:
        written = plain(node)
        _rectangle(written, "values")
        array: Array = np.asarray(written)
        if array.dtype.kind not in "biuf":
            raise ValueError("not numbers")
        if kind is None:
            kind = {"b": DataType.BOOL, "f": DataType.FLOAT32}.get(array.dtype.kind, DataType.INT64)
        if array.size and array.dtype.kind == "f" and not kind.is_floating:
            raise ValueError(f"not whole numbers, for {kind.value}")
        with np.errstate(all="ignore"):
            made: Array = array.astype(kind.dtype)
        if kind.is_floating:
            lost = np.isinf(made.astype(np.float64)) & np.isfinite(array.astype(np.float64))
        else:
            lost = np.asarray(made != array)
        if lost.any():
            raise ValueError(f"numbers that do not fit {kind.value}")
    except (ValueError, OverflowError) as error:
        fields.wrong("values", f"a rectangular list of numbers ({error})")
        return None
    return made


def _rectangle(written: object, place: str) -> tuple[int, ...]:
    """The shape of nested lists; raises `ValueError` naming the first that is unlike the others."""
    if not isinstance(written, list):
        return ()
    shapes = [_rectangle(item, f"{place}[{at}]") for at, item in enumerate(written)]
    for at, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"{place}[{at}] is {_extent(shape)}, {place}[0] is {_extent(shapes[0])}"
            )
    return (len(written), *(shapes[0] if shapes else ()))


def _extent(shape: tuple[int, ...]) -> str:
    return f"a list of {'x'.join(map(str, shape))}" if shape else "one number"


def plain(node: Node) -> object:
    """A node as nested lists and scalars; mappings are a `ValueError`."""
    if isinstance(node.data, tuple):
        return [plain(item) for item in node.data]
    if isinstance(node.data, Mapping):
        raise ValueError("a mapping among the numbers")
    return node.data


def _made(
    name: str, fields: Fields, shape: tuple[int, ...] | None, data_type: DataType
) -> Array | None:
    init = fields.get("init")
    assert init is not None
    what = f"init of {fields.what}"
    if not isinstance(init.data, Mapping):
        init = Node(init.line, {"kind": init})
    options = Fields(init, what, fields.log)
    kind = options.text("kind")
    if kind is None or kind not in _INITS:
        near = closest(kind or "", _INITS)
        options.wrong("kind", f"one of {', '.join(_INITS)}" + (f" ({near})" if near else ""))
        return None
    before = len(fields.log.problems)
    options.only(("kind", *_INITS[kind]))
    numbers = {key: options.number(key) for key in _INITS[kind]}
    if shape is None:
        fields.wrong("shape", "a list of dimensions: init needs one")
    elif math.prod(shape) * data_type.itemsize > MAX_MADE_NBYTES:
        fields.wrong("shape", f"at most {MAX_MADE_NBYTES} bytes in all; put more into a file")
    if kind == "constant" and numbers["value"] is None:
        options.wrong("value", "a number")
    seed = numbers.get("seed")
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        options.wrong("seed", "a whole number that is not negative")
    if shape is None or len(fields.log.problems) > before:
        return None
    given = {key: value for key, value in numbers.items() if value is not None}
    return _numbers(name, kind, shape, given, data_type, options)


def _numbers(
    name: str,
    kind: str,
    shape: tuple[int, ...],
    given: Mapping[str, int | float],
    data_type: DataType,
    options: Fields,
) -> Array | None:
    count = math.prod(shape)
    try:
        # Numbers are made in a wide type, compared, and narrowed.
        taken = claim(
            count * (3 * np.dtype(np.float64).itemsize + data_type.itemsize), f"parameter {name!r}"
        )
        array = _generate(kind, shape, given, int(given.get("seed", zlib.crc32(name.encode()))))
        if not data_type.is_floating and kind in ("randn", "uniform"):
            options.wrong("kind", f"arange, zeros, ones or constant for {data_type.value}")
            return None
        with np.errstate(all="ignore"):
            made: Array = array.astype(data_type.dtype)
        if not data_type.is_floating and (made != array).any():
            options.wrong("kind", f"a way to numbers that {data_type.value} can hold")
            return None
    except OutOfMemoryError:
        raise
    except (MemoryError, ValueError, OverflowError, StitchError) as error:
        options.wrong("kind", f"possible ({error})")
        return None
    taken.let_go()
    claim_for(made, made.nbytes, f"for parameter {name!r}")
    return made


def _generate(
    kind: str, shape: tuple[int, ...], given: Mapping[str, int | float], seed: int
) -> Array:
    random = np.random.Generator(np.random.Philox(seed))
    if kind == "randn":
        return given.get("mean", 0) + given.get("scale", 1) * random.standard_normal(shape)
    if kind == "uniform":
        low, high = float(given.get("low", 0.0)), float(given.get("high", 1.0))
        return low + (high - low) * random.random(shape)
    if kind == "arange":
        steps = np.arange(math.prod(shape)).reshape(shape)
        return np.asarray(given.get("start", 0) + given.get("step", 1) * steps)
    value = {"zeros": 0, "ones": 1}.get(kind, given.get("value", 0))
    return np.full(shape, value)

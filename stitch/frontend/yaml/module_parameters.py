"""The parameters of a YAML module: weights out of files, made up from a seed, or written inline."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from stitch.budget import claim, claim_for
from stitch.errors import FormatError, OutOfMemoryError, StitchError
from stitch.forms import (
    AsWritten,
    ElementType,
    Field,
    FormValues,
    Node,
    Number,
    Schema,
    Shape,
    SourceLocation,
    Tagged,
    Whole,
    Word,
    as_written,
    read_array,
)
from stitch.program import Array, DataType

_SOURCES = ("file", "init", "values")

#: A made-up parameter beyond this belongs into a file.
MAX_MADE_NBYTES = 1 << 32


def _numbers_form(*rows: Field) -> Schema[dict[str, Any]]:
    """A way of making numbers up: what it takes beside its name."""
    return Schema("init of {}", as_written, Field("kind", Word(), needed=True), *rows)


_NUMBER = Number(is_finite=False)
_SEED = Field("seed", Whole(0, most=None))
_INITS = {
    "randn": _numbers_form(_SEED, Field("mean", _NUMBER), Field("scale", _NUMBER)),
    "uniform": _numbers_form(_SEED, Field("low", _NUMBER), Field("high", _NUMBER)),
    "zeros": _numbers_form(),
    "ones": _numbers_form(),
    "arange": _numbers_form(Field("start", _NUMBER), Field("step", _NUMBER)),
    "constant": _numbers_form(Field("value", _NUMBER, needed=True)),
}
_PARAMETER = Schema(
    "parameter",
    as_written,
    Field("file", Word()),
    Field("init", Tagged("a way of making numbers up", "kind", lambda: _INITS)),
    Field("values", AsWritten()),
    Field("name", Word()),
    Field("shape", Shape()),
    Field("type", ElementType()),
)


def parameter_array(node: Node, place: SourceLocation) -> Array | None:
    """The array of a parameter, or None after noting what is wrong with it."""
    fields = _PARAMETER.fields(node, place)
    place, values = fields.place, fields.values
    sources = [key for key in _SOURCES if key in place.nodes and place.nodes[key].data is not None]
    if len(sources) != 1:
        got = " and ".join(sources) or "none of them"
        detail = f"{place.what} has one of file, init, values; not {got}"
        place.reading.log.note("bad_value", node.line, detail)
        return None
    if not fields.sound:
        return None
    if sources == ["file"]:
        return _checked(_from_file(fields), fields)
    if sources == ["values"]:
        return _checked(_inline(values["values"], values["type"], place), fields)
    return _made(fields)


def _from_file(fields: FormValues) -> Array | None:
    values, place = fields.values, fields.place
    log, line = place.reading.log, place.at("file").line
    try:
        file = place.reading.folder / values["file"]
        return read_array(file, values["name"], values["type"], values["shape"])
    except FormatError as error:
        log.note_error("bad_weights", line, error)
    except (OSError, ValueError) as error:
        log.note("bad_weights", line, f"{values['file']}: {error}")
    return None


def _checked(array: Array | None, fields: FormValues) -> Array | None:
    """The array, if it is what the module declares."""
    if array is None:
        return None
    values, place = fields.values, fields.place
    shape, declared = values["shape"], values["type"]
    source = values["file"] or "values"
    title = f"{place.what} ({' '.join(filter(None, (source, values['name'])))})"
    data_type = DataType.from_dtype(array.dtype)
    if shape is not None and array.shape != shape:
        detail = f"{title} has the shape {list(array.shape)}, declared is {list(shape)}"
        place.reading.log.note("wrong_shape", place.at("shape").line, detail)
        return None
    if declared is not None and data_type is not declared:
        detail = (
            f"{title} holds {data_type.value}, declared is {declared.value}; "
            f"convert the file, or leave out type and add a Cast"
        )
        place.reading.log.note("wrong_type", place.at("type").line, detail)
        return None
    return array


def _inline(node: Node, kind: DataType | None, place: SourceLocation) -> Array | None:
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
            narrowed: Array = array.astype(kind.dtype)
        if kind.is_floating:
            lost = np.isinf(narrowed.astype(np.float64)) & np.isfinite(array.astype(np.float64))
        else:
            lost = np.asarray(narrowed != array)
        if lost.any():
            raise ValueError(f"numbers that do not fit {kind.value}")
    except (ValueError, OverflowError) as error:
        place.at("values").wrong(node, f"a rectangular list of numbers ({error})")
        return None
    return narrowed


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


def _made(fields: FormValues) -> Array | None:
    values, place = fields.values, fields.place
    init, shape, data_type = values["init"], values["shape"], values["type"] or DataType.FLOAT32
    at = place.at("shape")
    if shape is None:
        at.wrong(None, "a list of dimensions: init needs one")
    elif math.prod(shape) * data_type.itemsize > MAX_MADE_NBYTES:
        wanted = f"at most {MAX_MADE_NBYTES} bytes in all; put more into a file"
        at.wrong(place.nodes["shape"], wanted, "out_of_range")
    else:
        return _numbers(init, shape, data_type, place)
    return None


def _numbers(
    init: Mapping[str, Any], shape: tuple[int, ...], data_type: DataType, place: SourceLocation
) -> Array | None:
    count, what = math.prod(shape), f"parameter {place.name!r}"
    kind, given = init["kind"], {key: v for key, v in init.items() if v is not None}
    try:
        # Numbers are made in a wide type, compared, and narrowed.
        taken = claim(count * (3 * np.dtype(np.float64).itemsize + data_type.itemsize), what)
        array = _generate(kind, shape, given, given.get("seed", zlib.crc32(place.name.encode())))
        wanted = ""
        with np.errstate(all="ignore"):
            narrowed: Array = array.astype(data_type.dtype)
        if not data_type.is_floating and kind in ("randn", "uniform"):
            wanted = f"arange, zeros, ones or constant for {data_type.value}"
        elif not data_type.is_floating and (narrowed != array).any():
            wanted = f"a way to numbers that {data_type.value} can hold"
    except OutOfMemoryError:
        raise
    except (MemoryError, ValueError, OverflowError, StitchError) as error:
        wanted = f"possible ({error})"
    if wanted:
        node = place.nodes["init"]
        inner = _INITS[kind].place(node, place.at("init"))
        inner.at("kind").wrong(inner.nodes.get("kind", node), wanted, "refused")
        return None
    taken.dispose()
    claim_for(narrowed, narrowed.nbytes, f"for {what}")
    return narrowed


def _generate(kind: str, shape: tuple[int, ...], given: Mapping[str, Any], seed: int) -> Array:
    random = np.random.Generator(np.random.Philox(seed))
    if kind == "randn":
        return np.asarray(
            given.get("mean", 0) + given.get("scale", 1) * random.standard_normal(shape)
        )
    if kind == "uniform":
        low, high = float(given.get("low", 0.0)), float(given.get("high", 1.0))
        return low + (high - low) * random.random(shape)
    if kind == "arange":
        steps = np.arange(math.prod(shape)).reshape(shape)
        return np.asarray(given.get("start", 0) + given.get("step", 1) * steps)
    value = {"zeros": 0, "ones": 1}.get(kind, given.get("value", 0))
    return np.full(shape, value)

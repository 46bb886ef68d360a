"""What an ONNX file holds, checked before it is believed: models, tensors, attributes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from stitch import ops
from stitch.budget import claimed_array
from stitch.errors import CompileError, FormatError, IncompatibleError
from stitch.files import nearest_file, open_file
from stitch.program import MAX_RANK, Array, DataType
from stitch.ttb import recognize

# --------------------------------------------------------------------------------------------------
# Model files

#: ONNX's operators are taken as of this opset; nodes of older ones are rewritten (`upgrades`).
NEWEST_OPSET = 26
NEWEST_IR = 13
#: What these added are operators, attributes and types: expanded where ONNX writes them out as
#: functions, else refused by name. What else a model says means in them what it meant before.
READABLE_OPSET, READABLE_IR = 28, 14
#: Up to this IR version models import no opsets: their operators are of the first.
_IR_WITHOUT_OPSETS = 2
#: protobuf reads no message of this many bytes.
MESSAGE_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """A model to import; `title` is how messages call it, `folder` where its external data lies."""

    proto: Any
    title: str
    folder: Path | None

    @property
    def graph(self) -> Any:
        """The `GraphProto`."""
        return self.proto.graph

    @property
    def opsets(self) -> Mapping[str, int]:
        """The version of each imported domain; ONNX's own domain is the empty one."""
        first = {"": 1} if self.proto.ir_version <= _IR_WITHOUT_OPSETS else {}
        return first | opsets_of(self.proto.opset_import)


def opsets_of(imports: Any) -> dict[str, int]:
    """Domains and their versions, from the imports of a model or function."""
    return {plain_domain(entry.domain): int(entry.version) for entry in imports}


def plain_domain(domain: str) -> str:
    """The domain, where `ai.onnx` is spelt as the empty one."""
    return "" if domain == "ai.onnx" else domain


def read_model(source: Any) -> OnnxModel:
    """The model of a path or a `ModelProto`; raises `FormatError`, `IncompatibleError`."""
    if isinstance(source, onnx.ModelProto):
        title = source.graph.name or "model"
        return _checked(OnnxModel(source, title, None))
    path = Path(source)
    return _checked(OnnxModel(_parsed(path), path.name, path.parent))


def _parsed(path: Path) -> Any:
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read() if size < MESSAGE_LIMIT else b""
        if size >= MESSAGE_LIMIT:
            raise FormatError(
                "an ONNX file of 2 GB or more cannot be read", where=path.name,
                got=f"{size} bytes",
                remedy="save it with its weights beside it: "
                "onnx.save(model, path, save_as_external_data=True)",
            )  # fmt: skip
    except OSError as error:
        raise FormatError(
            f"cannot read the model: {error.strerror}", where=str(path),
            remedy=nearest_file(path, (".onnx",)) or "check the path and its permissions",
        ) from error  # fmt: skip
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:
        # protobuf's own errors; their classes differ between its implementations.
        raise FormatError(
            "this file is no ONNX model, or it was cut off or damaged", where=path.name,
            expected="a serialized ModelProto",
            got=f"{len(data)} bytes that begin like {recognize(data[:64])[0]}",
            remedy="export or copy it again",
        ) from error  # fmt: skip
    if not proto.HasField("graph"):
        raise FormatError(
            "this file holds no ONNX graph", where=path.name,
            expected="a ModelProto with a graph", got=recognize(data[:64])[0],
        )  # fmt: skip
    return proto


def _checked(model: OnnxModel) -> OnnxModel:
    proto = model.proto
    if not proto.HasField("graph"):
        raise FormatError("the model has no graph", where=model.title)
    _check_texts(proto, model.title)
    opset = model.opsets.get("", 0)
    defects = [] if opset <= READABLE_OPSET else [f"ONNX opset {opset} is newer than Stitch"]
    if not 1 <= proto.ir_version <= READABLE_IR:
        defects.append(f"IR version {proto.ir_version} is not supported")
    if defects:
        raise IncompatibleError(
            ", and ".join(defects), where=model.title,
            expected=f"opset 1 to {READABLE_OPSET}, IR version 1 to {READABLE_IR}",
            remedy=f"export with opset_version={NEWEST_OPSET}, or convert: "
            f"model = onnx.version_converter.convert_version(model, {NEWEST_OPSET}); "
            f"model.ir_version = {NEWEST_IR}",
        )  # fmt: skip
    return model


def _check_texts(message: Any, title: str) -> None:
    """Raises `FormatError` for a name that is no UTF-8: protobuf hands it out as bytes."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in value if hasattr(value, "__len__") else (value,):
                _check_texts(inner, title)
        elif field.type == field.TYPE_STRING:
            for text in (value,) if isinstance(value, str | bytes) else value:
                if not isinstance(text, str):
                    raise FormatError(
                        f"the model is damaged: its {field.name} is no UTF-8 text",
                        where=title, got=repr(text[:40]),
                    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Tensors

#: The field that holds a tensor's elements where they are not raw bytes.
_FIELDS = {
    DataType.FLOAT32: "float_data",
    DataType.FLOAT64: "double_data",
    DataType.INT64: "int64_data",
    DataType.UINT32: "uint64_data",
    DataType.UINT64: "uint64_data",
}
#: Narrow floats lie in int32_data as bits.
_BITS = (DataType.FLOAT16, DataType.BFLOAT16)


def element_type(code: int, where: str) -> DataType:
    """The data type of an ONNX number; raises `CompileError` that names one Stitch lacks."""
    try:
        return ops.data_type_of_code(code)
    except CompileError as error:
        known = code in TensorProto.DataType.values()
        name = TensorProto.DataType.Name(code).lower() if known else f"number {code}"
        raise CompileError(
            f"tensors of type {name} are not supported", where=where,
            expected=", ".join(t.value for t in DataType if not t.is_block),
        ) from error  # fmt: skip


def tensor_array(tensor: Any, folder: Path | None, where: str) -> Array:
    """The elements of a tensor, read-only; raises `FormatError` for one that is not sound."""
    kind = element_type(tensor.data_type, where)
    shape = tuple(int(size) for size in tensor.dims)
    if any(size < 0 for size in shape):
        raise FormatError("a tensor has a negative dimension", where=where, got=str(list(shape)))
    if tensor.HasField("segment"):
        raise FormatError("a tensor in segments is not supported", where=where)
    count = math.prod(shape)
    if tensor.data_location == TensorProto.EXTERNAL:
        return _external(tensor, kind, count, folder, where).reshape(shape)
    if tensor.HasField("raw_data"):
        raw = tensor.raw_data
        _check_count(len(raw), _stored_nbytes(kind, count), "bytes", where)
        if kind.is_narrow:
            return _locked(_unpacked(np.frombuffer(raw, np.uint8), kind, count).reshape(shape))
        little = np.frombuffer(raw, kind.dtype.newbyteorder("<"))
        return _locked(little.astype(kind.dtype, copy=False).reshape(shape))
    return _locked(_listed(tensor, kind, count, where).reshape(shape))


def dense_array(sparse: Any, folder: Path | None, where: str) -> Array:
    """The elements of a sparse tensor, all of them, read-only; raises `FormatError` for one that is
    not sound, `OutOfMemoryError` where it does not fit the memory limit."""
    shape = tuple(int(size) for size in sparse.dims)
    if len(shape) > MAX_RANK or any(size < 0 for size in shape):
        raise FormatError(
            "a sparse tensor has an impossible shape", where=where, got=str(list(shape[:64]))
        )
    values = tensor_array(sparse.values, folder, where)
    indices = tensor_array(sparse.indices, folder, where)
    forms = ((values.size,), (values.size, len(shape)))
    if values.ndim != 1 or indices.dtype != np.int64 or indices.shape not in forms:
        raise FormatError(
            "a sparse tensor's indices do not fit its values", where=where,
            expected=f"int64 {list(forms[0])} or {list(forms[1])}",
            got=f"{indices.dtype} {list(indices.shape)} for values {list(values.shape)}",
        )  # fmt: skip
    # Claimed before it is made: a few bytes of a file can describe any number of elements.
    dense = claimed_array(shape, values.dtype, f"the {where}, which is stored sparse")
    limits = np.array([math.prod(shape)] if indices.ndim == 1 else shape, np.int64)
    columns = indices.reshape(values.size, limits.size)
    if bool((columns < 0).any()) or bool((columns >= limits).any()):
        raise FormatError("a sparse tensor has an index beyond its shape", where=where)
    dense[...] = 0
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    elif values.size:
        dense[tuple(indices.T)] = values
    return _locked(dense)


def _stored_nbytes(kind: DataType, count: int) -> int:
    """Bytes of a tensor's data in a model: types of four and two bits are packed."""
    return -(-count * kind.bits // 8)


def _unpacked(packed: Array, kind: DataType, count: int) -> Array:
    """One element a byte; the first element of a byte lies in its lowest bits."""
    shifts = np.arange(0, 8, kind.bits, dtype=np.uint8)
    parts = (packed[:, np.newaxis] >> shifts) & np.uint8((1 << kind.bits) - 1)
    return parts.reshape(-1)[:count].copy().view(kind.dtype)


def _listed(tensor: Any, kind: DataType, count: int, where: str) -> Array:
    data = getattr(tensor, _FIELDS.get(kind, "int32_data"))
    if kind.is_narrow:
        # One byte in each number, as raw data has them.
        _check_count(len(data), _stored_nbytes(kind, count), "numbers", where)
        packed = (np.fromiter(data, np.int64, len(data)) & 0xFF).astype(np.uint8)
        return _unpacked(packed, kind, count)
    _check_count(len(data), count, "elements", where)
    if kind in _BITS:
        bits = np.fromiter(data, np.int64, len(data)) & 0xFFFF
        return bits.astype(np.uint16).view(kind.dtype)
    wide = {"float_data": np.float32, "double_data": np.float64, "uint64_data": np.uint64}
    source = np.fromiter(data, wide.get(_FIELDS.get(kind, ""), np.int64), len(data))
    return source.astype(kind.dtype)


def _check_count(count: int, wanted: int, unit: str, where: str) -> None:
    if count != wanted:
        raise FormatError(
            "a tensor's data does not fit its shape", where=where,
            expected=f"{wanted} {unit}", got=str(count),
        )  # fmt: skip


def _locked(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _external(tensor: Any, kind: DataType, count: int, folder: Path | None, where: str) -> Array:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = _inside(entries.get("location", ""), folder, where)
    offset, length = (_number(entries, key, where) for key in ("offset", "length"))
    nbytes = _stored_nbytes(kind, count)
    if length is not None:
        _check_count(length, nbytes, "bytes", where)
    start = offset or 0
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if start + nbytes > size:
                raise FormatError(
                    f"the external data file {path.name} is too short", where=where,
                    expected=f"{nbytes} bytes at offset {start}", got=f"a file of {size} bytes",
                )  # fmt: skip
            if count == 0:
                return np.empty(0, kind.dtype)
            stored = np.memmap(file, np.uint8, "r", start, (nbytes,))
    except OSError as error:
        near = nearest_file(path, ("",))
        raise FormatError(
            f"the external data file {path.name} cannot be read: {error.strerror}",
            where=where,
            remedy="put it beside the model" + (f"; {near}" if near else ""),
        ) from error
    array: Array = stored.view(np.ndarray)
    if kind.is_narrow and kind.bits < 8:
        return _locked(_unpacked(array, kind, count))
    if array.ctypes.data % kind.itemsize:
        array = array.copy()
    return _locked(array.view(kind.dtype.newbyteorder("<")).astype(kind.dtype, copy=False))


def _inside(location: str, folder: Path | None, where: str) -> Path:
    """The file that a location names: never one outside the model's folder."""
    if folder is None:
        raise FormatError(
            "the model's external data has no folder", where=where,
            remedy="pass the model's path, or load it with onnx.load(path)",
        )  # fmt: skip
    root = folder.resolve()
    if not location or "\0" in location:
        raise FormatError("external data without a location", where=where, got=repr(location))
    try:
        path = (root / location).resolve()
    except (OSError, RuntimeError) as error:
        raise FormatError(f"no usable location: {error}", where=where, got=location) from error
    if not path.is_relative_to(root) or path == root:
        raise FormatError(
            "external data must lie in the model's folder", where=where,
            expected="a path relative to it, without ..", got=location,
        )  # fmt: skip
    return path


def _number(entries: dict[str, str], key: str, where: str) -> int | None:
    text = entries.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise FormatError(f"external data: {key} is no number of bytes", where=where, got=text)
    return int(text)


Attributes = dict[str, Any]


def text_of(raw: bytes, where: str) -> str:
    """A string of a model; raises `FormatError` where it is no UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError("a string is no UTF-8 text", where=where, got=repr(raw[:40])) from error


def attribute_value(attribute: Any, where: str) -> Any:
    """The value of one attribute; raises for the kinds that Stitch does not take."""
    kind, at = attribute.type, f"{where}, attribute {attribute.name!r}"
    plain = {
        AttributeProto.FLOAT: "f", AttributeProto.INT: "i", AttributeProto.TENSOR: "t",
        AttributeProto.GRAPH: "g", AttributeProto.TYPE_PROTO: "tp",
        AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    }  # fmt: skip
    if kind in plain:
        return getattr(attribute, plain[kind])
    if kind == AttributeProto.STRING:
        return text_of(attribute.s, at)
    if kind == AttributeProto.FLOATS:
        return tuple(float(value) for value in attribute.floats)
    if kind == AttributeProto.INTS:
        return tuple(int(value) for value in attribute.ints)
    if kind == AttributeProto.STRINGS:
        return tuple(text_of(value, at) for value in attribute.strings)
    known = kind in AttributeProto.AttributeType.values()
    name = AttributeProto.AttributeType.Name(kind).lower() if known else str(kind)
    raise CompileError(f"attributes of kind {name} are not supported", where=at)


def attributes_of(
    written: Iterable[Any], called_with: Mapping[str, Any] | None, where: str
) -> Attributes:
    """The attributes of a node by name.

    Inside a function an attribute may refer to one of the call's, and is absent where that is.
    """
    attributes: Attributes = {}
    for attribute in written:
        if attribute.name in attributes:
            raise FormatError(f"the attribute {attribute.name!r} is given twice", where=where)
        if not attribute.ref_attr_name:
            attributes[attribute.name] = attribute_value(attribute, where)
        elif called_with is None:
            raise FormatError(
                f"the attribute {attribute.name!r} refers to a function's attribute "
                f"{attribute.ref_attr_name!r}, but stands in no function",
                where=where,
            )
        elif attribute.ref_attr_name in called_with:
            attributes[attribute.name] = called_with[attribute.ref_attr_name]
    return attributes

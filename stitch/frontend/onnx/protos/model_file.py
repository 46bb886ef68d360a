"""ONNX files: from a path or a `ModelProto` to a model whose versions Stitch understands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from stitch.errors import FormatError, IncompatibleError
from stitch.files import nearest_file, open_file
from stitch.ttb import recognize

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
            got=f"{len(data)} bytes that begin like {recognize(data[:64], len(data))[0]}",
            remedy="export or copy it again",
        ) from error  # fmt: skip
    if not proto.HasField("graph"):
        raise FormatError(
            "this file holds no ONNX graph", where=path.name,
            expected="a ModelProto with a graph", got=recognize(data[:64], len(data))[0],
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

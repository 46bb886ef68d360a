"""The data of a training in YAML: which arrays of which files, which rows for what.

Comes in: the fields of a training. Goes out: a `DataEntry`, or None where a defect was noted.
Nothing is opened here. Must not know: models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stitch.forms import Fields, Node

_DATA = ("file", "inputs", "labels", "train", "validation", "held_out")
_ARRAY = ("array", "file", "scale", "shift")


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """An array of a file, and what is done with its elements: times `scale`, plus `shift`."""

    file: Path
    array: str
    line: int
    scale: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """Arrays for the inputs of the model by name (None: its only one), and for the labels."""

    inputs: tuple[tuple[str | None, ArrayEntry], ...]
    labels: ArrayEntry


@dataclass(frozen=True, slots=True)
class PartEntry:
    """Part of the data: rows by number, a share of the rows for training, or other arrays."""

    line: int
    rows: ArrayEntry | None = None
    share: float | None = None
    source: SourceEntry | None = None


@dataclass(frozen=True, slots=True)
class DataEntry:
    """All data: the arrays, and the rows to train on, to watch, and to judge by at the end."""

    source: SourceEntry
    line: int
    train: PartEntry | None = None
    validation: PartEntry | None = None
    held_out: PartEntry | None = None


def files_of(entry: DataEntry) -> tuple[Path, ...]:
    """The files that all of these arrays are in, each once."""
    sources, arrays = [entry.source], []
    for part in (entry.train, entry.validation, entry.held_out):
        if part is not None and part.source is not None:
            sources.append(part.source)
        if part is not None and part.rows is not None:
            arrays.append(part.rows)
    for source in sources:
        arrays += [source.labels, *(array for _, array in source.inputs)]
    return tuple(dict.fromkeys(array.file for array in arrays))


def data_of(top: Fields, folder: Path) -> DataEntry | None:
    """The `data` of a training; None where a defect was noted."""
    node = top.get("data")
    if node is None:
        return None
    fields = Fields(node, "data", top.log)
    fields.only(_DATA)
    before = len(top.log.problems)
    source = _source(fields, folder, None)
    file = fields.text("file")
    default = None if file is None else folder / file
    parts = {key: _part(fields, key, folder, default) for key in _DATA[3:]}
    if source is None or len(top.log.problems) > before:
        return None
    return DataEntry(source, node.line, parts["train"], parts["validation"], parts["held_out"])


def _source(fields: Fields, folder: Path, default: Path | None) -> SourceEntry | None:
    file = fields.text("file")
    place = default if file is None else folder / file
    inputs = fields.get("inputs")
    if inputs is None:
        fields.wrong("inputs", "a mapping from the model's inputs to arrays")
    pairs: list[tuple[str | None, Node]] = []
    if inputs is not None and isinstance(inputs.data, Mapping):
        single = set(inputs.data) <= set(_ARRAY) and "array" in inputs.data
        pairs = [(None, inputs)] if single else list(inputs.data.items())
    elif inputs is not None and not isinstance(inputs.data, tuple):
        pairs = [(None, inputs)]
    elif inputs is not None:
        fields.wrong("inputs", "a mapping from the model's inputs to arrays, or one array")
    found = [(name, _array(item, f"input {name}", fields, folder, place)) for name, item in pairs]
    labels = fields.get("labels")
    if labels is None:
        fields.wrong("labels", "the name of an array")
        return None
    target = _array(labels, "labels", fields, folder, place)
    if target is None or not found or any(entry is None for _, entry in found):
        return None
    return SourceEntry(tuple((name, entry) for name, entry in found if entry), target)


def _array(
    node: Node, what: str, parent: Fields, folder: Path, default: Path | None
) -> ArrayEntry | None:
    """`images`, `images.npy`, or `{array: images, file: ..., scale: ..., shift: ...}`."""
    if isinstance(node.data, Mapping):
        fields = Fields(node, what, parent.log)
        fields.only(_ARRAY)
        name, file = fields.text("array"), fields.text("file")
        scale, shift = _finite(fields, "scale", 1.0), _finite(fields, "shift", 0.0)
        if name is None:
            fields.wrong("array", "the name of an array")
            return None
    else:
        name, file, scale, shift = node.raw, None, 1.0, 0.0
        if isinstance(node.data, tuple) or not node.raw:
            parent.log.note("bad_value", node.line, f"{what} is an array's name, or a mapping")
            return None
    place = default if file is None else folder / file
    if file is None and name.endswith(".npy"):
        place = folder / name
    if place is None:
        detail = f"{what}: nobody says in which file the array {name!r} is; add file: data.npz"
        parent.log.note("missing_key", node.line, detail)
        return None
    return ArrayEntry(place, name, node.line, scale, shift)


def _finite(fields: Fields, key: str, otherwise: float) -> float:
    found = fields.number(key)
    if found is not None and not math.isfinite(found):
        fields.wrong(key, "a finite number")
        return otherwise
    return otherwise if found is None else float(found)


def _part(fields: Fields, key: str, folder: Path, default: Path | None) -> PartEntry | None:
    node = fields.get(key)
    if node is None:
        return None
    if isinstance(node.data, Mapping) and key != "train":
        inner = Fields(node, key, fields.log)
        inner.only(("file", "inputs", "labels"))
        source = _source(inner, folder, default)
        return None if source is None else PartEntry(node.line, source=source)
    if isinstance(node.data, int | float):
        share = float(node.data)
        if isinstance(node.data, bool) or key == "train" or not 0 < share < 1:
            fields.wrong(key, "an array of row numbers" if key == "train" else
                         "an array of row numbers, or a share between 0 and 1")  # fmt: skip
            return None
        return PartEntry(node.line, share=share)
    rows = _array(node, key, fields, folder, default)
    return None if rows is None else PartEntry(node.line, rows=rows)

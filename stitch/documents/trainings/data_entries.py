"""The data of a training in YAML: which arrays of which files, which rows for what.

Comes in: what stands at `data`. Goes out: a `DataEntry`, or None where a defect was noted. Nothing
is opened here. Must not know: models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stitch.forms import (
    Either,
    Form,
    Kind,
    Node,
    Number,
    Pairs,
    Place,
    RelativePath,
    Row,
    Word,
    as_written,
)


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


@dataclass(eq=False, repr=False)
class _Array:
    """An array as it is written: its file may be that of all data."""

    array: str
    line: int
    file: Path | None
    scale: float
    shift: float


def _array_form(what: str) -> Form[_Array]:
    """`images`, `images.npy`, or `{array: images, file: ..., scale: ..., shift: ...}`."""
    return Form(
        what,
        _Array,
        Row("array", Word("the name of an array"), needed=True),
        Row("file", RelativePath()),
        Row("scale", Number(), default=1.0),
        Row("shift", Number(), default=0.0),
        word="array",
        wanted="an array's name, or a mapping",
    )


_ARRAY = _array_form("")
_INPUT = _array_form("input")


class _Inputs(Kind[tuple[tuple[str | None, _Array], ...]]):
    """The model's inputs by name, each an array; or the array of its only one."""

    wanted = "a mapping from the model's inputs to arrays, or one array"

    def value(self, node: Node, place: Place) -> tuple[tuple[str | None, _Array], ...] | None:
        keys = set(node.data) if isinstance(node.data, Mapping) else {"array"}
        if isinstance(node.data, tuple) or ("array" in keys and keys <= {*_ARRAY.keys}):
            array = _ARRAY.read(node, place)
            return None if array is None else ((None, array),)
        return Pairs(_INPUT, self.wanted, least=1, by_position=False).read(node, place)


_SOURCE_ROWS = (
    Row("file", RelativePath()),
    Row("inputs", _Inputs(), needed=True),
    Row("labels", _ARRAY, needed=True),
)
_SOURCE = Form("", as_written, *_SOURCE_ROWS)
_ROWS = "an array of row numbers"
_PART: Kind[float | _Array | dict[str, Any]] = Either(
    f"{_ROWS}, or a share between 0 and 1",
    number=Number(above=0, below=1, wanted=f"{_ROWS}, or a share between 0 and 1"),
    word=_ARRAY,
    mapping=_SOURCE,
)


_DATA = Form(
    "data",
    as_written,
    *_SOURCE_ROWS,
    Row("train", Either(_ROWS, word=_ARRAY, mapping=_ARRAY)),
    Row("validation", _PART),
    Row("held_out", _PART),
)


class DataKind(Kind[DataEntry]):
    """The `data` of a training."""

    wanted = "a mapping"

    def value(self, node: Node, place: Place) -> DataEntry | None:
        data, log = _DATA.read(node, place), place.reading.log
        if data is None:
            return None
        noted, files = log.noted, _Files(place, data["file"])
        source = files.source(data)
        parts = (files.part(key, node, data[key]) for key in ("train", "validation", "held_out"))
        entry = DataEntry(source, node.line, *parts)
        return entry if log.noted == noted else None


@dataclass(eq=False, repr=False)
class _Files:
    """In which file each array is; notes those of which the training does not say it."""

    place: Place
    default: Path | None

    def array(self, what: str, array: _Array, default: Path | None) -> ArrayEntry:
        file, reading = array.file or default, self.place.reading
        if array.file is None and array.array.endswith(".npy"):
            file = reading.folder / array.array
        if file is None:
            detail = f"{what}: nobody says in which file the array {array.array!r} is"
            reading.log.note("missing_key", array.line, f"{detail}; add file: data.npz")
        scale, shift = float(array.scale), float(array.shift)
        return ArrayEntry(file or Path(), array.array, array.line, scale, shift)

    def source(self, source: Mapping[str, Any]) -> SourceEntry:
        file = source["file"] or self.default
        inputs = [(name, self.array(f"input {name}", a, file)) for name, a in source["inputs"]]
        return SourceEntry(tuple(inputs), self.array("labels", source["labels"], file))

    def part(self, key: str, data: Node, part: Any) -> PartEntry | None:
        if part is None:
            return None
        assert isinstance(data.data, Mapping), "it was read"
        line = data.data[key].line
        if isinstance(part, dict):
            return PartEntry(line, source=self.source(part))
        if isinstance(part, _Array):
            return PartEntry(line, rows=self.array(key, part, self.default))
        return PartEntry(line, share=float(part))

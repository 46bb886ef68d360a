"""The data of a training: arrays read, checked against the model, parted, put into an order.

Comes in: a `DataEntry`, what the model takes (if it is known). Goes out: `TrainData`, or one
`FormatError` that lists every defect with file and line: what is not there, does not fit, is NaN,
or is counted twice.
The order of an epoch is a function of seed and epoch. Must not know: optimizers, devices.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stitch.documents.trainings.data_entries import ArrayEntry, DataEntry, PartEntry, SourceEntry
from stitch.errors import FormatError, UsageError, closest
from stitch.forms import ProblemLog, read_array
from stitch.program import Array, ValueType
from stitch.report import counted
from stitch.training import Loss

#: What tells the draws of shares from those of epochs.
_SHARES = 2**32


@dataclass(frozen=True, slots=True, eq=False)
class DataPart:
    """Arrays of one length: inputs by name, and labels."""

    inputs: Mapping[str, Array]
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, which: Array) -> DataPart:
        """Some of the rows, copied."""
        return DataPart({n: a[which] for n, a in self.inputs.items()}, self.labels[which])

    def checksum(self) -> int:
        """A number that other data hardly have."""
        sum_so_far = 0
        for name in (*sorted(self.inputs), None):
            array = self.labels if name is None else self.inputs[name]
            dense = np.ascontiguousarray(array).reshape(-1)
            sum_so_far = zlib.crc32(dense.view(np.uint8).data, sum_so_far)
        return sum_so_far


@dataclass(frozen=True, slots=True, eq=False)
class TrainData:
    """What a training learns from, and what it is watched and judged by (None: nothing)."""

    train: DataPart
    validation: DataPart | None
    held_out: DataPart | None


@dataclass(frozen=True, slots=True)
class ModelTypes:
    """What a model takes and gives, for one batch; the first dimension counts its rows."""

    inputs: Mapping[str, ValueType]
    prediction: ValueType
    loss: Loss


def shuffled(count: int, seed: int, draw: int) -> Array:
    """The numbers below `count` in an order that depends on `seed` and `draw` alone (Philox).

    >>> shuffled(5, 0, 1).tolist()
    [3, 2, 4, 1, 0]
    """
    # The raw words of a bit generator are the same in every version of NumPy.
    words = np.random.Philox(key=[seed, draw]).random_raw(count)
    return np.argsort(words, kind="stable")


def read_data(entry: DataEntry, model: ModelTypes, file: str, seed: int) -> TrainData:
    """Read, check and part the data; raises `FormatError` listing every defect."""
    reader = _Reader(model, ProblemLog(file), seed)
    data = reader.data(entry)
    reader.log.raise_any("training")
    assert data is not None, "what is missing has been noted"
    return data


def data_defects(entry: DataEntry, model: ModelTypes | None, log: ProblemLog, seed: int) -> None:
    """Note every defect of the data; without a model, those that need none to be seen."""
    _Reader(model, log, seed).data(entry)


class _Reader:
    """Reads the data of one training."""

    def __init__(self, model: ModelTypes | None, log: ProblemLog, seed: int) -> None:
        self.model = model
        self.log = log
        self.seed = seed
        self._refused: set[tuple[Path, str]] = set()

    def data(self, entry: DataEntry) -> TrainData | None:
        whole = self._source(entry.source)
        others = {
            key: None if part is None or part.source is None else self._source(part.source)
            for key, part in (("validation", entry.validation), ("held_out", entry.held_out))
        }
        rows = self._rows(entry, None if whole is None else len(whole))
        if whole is None or rows is None or self.log.problems:
            return None
        parts = {
            key: whole.rows(rows[key]) if key in rows else others[key]
            for key in ("validation", "held_out")
        }
        if not len(rows["train"]):
            self.log.note("no_rows", entry.line, "no rows are left to train on")
            return None
        return TrainData(whole.rows(rows["train"]), parts["validation"], parts["held_out"])

    # -- arrays ------------------------------------------------------------------------------------

    def _source(self, entry: SourceEntry) -> DataPart | None:
        named = self._named(entry)
        inputs = {name: self._input(name, array) for name, array in named.items()}
        labels = self._labels(entry.labels)
        if labels is None or any(array is None for array in inputs.values()) or not named:
            return None
        kept = {name: array for name, array in inputs.items() if array is not None}
        for name, array in kept.items():
            if len(array) != len(labels):
                detail = f"input {name} has {counted(len(array), 'row')}, labels have {len(labels)}"
                self.log.note("wrong_length", named[name].line, detail)
                return None
        return DataPart(kept, labels)

    def _named(self, entry: SourceEntry) -> dict[str, ArrayEntry]:
        if self.model is None:
            return {name or "of the model": array for name, array in entry.inputs}
        wanted = tuple(self.model.inputs)
        if len(entry.inputs) == 1 and entry.inputs[0][0] is None:
            if len(wanted) == 1:
                return {wanted[0]: entry.inputs[0][1]}
            detail = f"the model has the inputs {', '.join(wanted)}: name an array for each"
            self.log.note("missing_input", entry.inputs[0][1].line, detail)
            return {}
        named = {name: array for name, array in entry.inputs if name is not None}
        for name, array in named.items():
            if name not in wanted:
                detail = f"the model has no input {name!r}; it has {', '.join(wanted)}"
                self.log.note("unknown_input", array.line, detail + closest(name, wanted, "; "))
        missing = [name for name in wanted if name not in named]
        if missing:
            detail = f"the model also needs {', '.join(missing)}"
            self.log.note("missing_input", entry.labels.line, detail)
        return {name: named[name] for name in wanted if name in named}

    def _read(self, entry: ArrayEntry) -> Array | None:
        try:
            return read_array(entry.file, entry.array if entry.file.suffix != ".npy" else None)
        except FormatError as error:
            # A file that is not there is one defect, however many arrays are sought in it.
            if (entry.file, str(error)) not in self._refused:
                self.log.note_error("no_array", entry.line, error)
            self._refused.add((entry.file, str(error)))
            return None

    def _input(self, name: str, entry: ArrayEntry) -> Array | None:
        array = self._read(entry)
        if array is None or not self._fits(name, entry, array):
            return None
        if array.dtype.kind not in "iub" and np.isnan(array.astype(np.float64)).any():
            row = int(np.argwhere(np.isnan(array.astype(np.float64)))[0][0])
            detail = f"array {entry.array!r} holds NaN, first in row {row}"
            self.log.note("not_a_number", entry.line, detail)
            return None
        if (entry.scale, entry.shift) != (1.0, 0.0):
            array = array.astype(np.float64) * entry.scale + entry.shift
        return (
            array if self.model is None else array.astype(self.model.inputs[name].data_type.dtype)
        )

    def _fits(self, name: str, entry: ArrayEntry, array: Array) -> bool:
        """Whether an array has rows, of the shape and type that the model takes."""
        if self.model is None:
            return self._has_rows(f"input {name}", entry, array)
        kind = self.model.inputs[name]
        if array.shape[1:] != kind.shape[1:] or not array.ndim:
            detail = (
                f"input {name} takes rows of {list(kind.shape[1:])}, "
                f"array {entry.array!r} is {list(array.shape)}"
            )
            self.log.note("wrong_shape", entry.line, detail)
            return False
        scaled = (entry.scale, entry.shift) != (1.0, 0.0)
        if not kind.data_type.is_floating and (scaled or array.dtype.kind not in "iub"):
            what = "scale and shift" if scaled else f"{array.dtype}"
            detail = f"input {name} takes {kind.data_type.value}: {what} cannot be"
            self.log.note("wrong_type", entry.line, detail)
            return False
        return True

    def _has_rows(self, what: str, entry: ArrayEntry, array: Array) -> bool:
        if not array.ndim:
            detail = f"{what}: array {entry.array!r} is one number, without rows"
            self.log.note("wrong_shape", entry.line, detail)
        return bool(array.ndim)

    def _labels(self, entry: ArrayEntry) -> Array | None:
        array = self._read(entry)
        if array is None or not self._has_rows("labels", entry, array):
            return None
        if self.model is None:
            return array
        if (entry.scale, entry.shift) != (1.0, 0.0):
            array = array.astype(np.float64) * entry.scale + entry.shift
        loss, pred = self.model.loss, self.model.prediction
        if not loss.label_type(pred).shape:  # A loss that does not look at its label.
            return array
        try:
            rows = ValueType((len(array) if array.ndim else 0, *pred.shape[1:]), pred.data_type)
            loss.check_label(array, rows)
        except UsageError as error:
            self.log.note_error("bad_labels", entry.line, error)
            return None
        if array.dtype.kind not in "iub" and not np.isfinite(array.astype(np.float64)).all():
            self.log.note("not_a_number", entry.line, "labels hold NaN or Inf")
            return None
        return array.astype(loss.label_type(pred).data_type.dtype)

    # -- rows --------------------------------------------------------------------------------------

    def _rows(self, entry: DataEntry, count: int | None) -> dict[str, Array] | None:
        """The rows of each part that takes its rows from the whole; `count`: None if unknown."""
        parts: dict[str, Array] = {}
        sound = count is not None
        for key in ("held_out", "validation", "train"):
            part: PartEntry | None = getattr(entry, key)
            if part is not None and part.rows is not None:
                rows = self._numbers(part.rows, key, count)
                if rows is None:
                    sound = False
                else:
                    parts[key] = rows
        if count is None or not sound:
            return None
        taken = np.zeros(count, bool)
        for key, rows in parts.items():
            if taken[rows].any():
                row = int(rows[taken[rows]][0])
                line = getattr(entry, key).line
                detail = f"row {row} belongs to {key} and to another part as well"
                self.log.note("row_twice", line, detail)
                return None
            taken[rows] = True
        parts.setdefault("train", np.flatnonzero(~taken))
        for draw, key in enumerate(("held_out", "validation")):
            part = getattr(entry, key)
            if part is not None and part.share is not None:
                self._draw(parts, key, part.share, draw)
                if not len(parts[key]):
                    whole = counted(len(parts["train"]), "row")
                    detail = f"{key}: this share of {whole} is no row at all"
                    self.log.note("no_rows", part.line, detail)
                    return None
        return parts

    def _draw(self, parts: dict[str, Array], key: str, share: float, draw: int) -> None:
        """A share of the rows for training, drawn by the seed, in the order that they had."""
        rows = parts["train"]
        order = shuffled(len(rows), self.seed, _SHARES + draw)
        size = round(share * len(rows))
        parts[key] = rows[np.sort(order[:size])]
        parts["train"] = rows[np.sort(order[size:])]

    def _numbers(self, entry: ArrayEntry, key: str, count: int | None) -> Array | None:
        array = self._read(entry)
        if array is None:
            return None
        if array.ndim != 1 or array.dtype.kind not in "iu":
            detail = f"{key} is {array.dtype}{list(array.shape)}, not a list of row numbers"
            self.log.note("bad_rows", entry.line, detail)
            return None
        rows = array.astype(np.int64)
        if count is not None and rows.size and (rows.min() < 0 or rows.max() >= count):
            detail = f"{key} has row {rows.min() if rows.min() < 0 else rows.max()} of {count}"
            self.log.note("bad_rows", entry.line, detail)
            return None
        if len(np.unique(rows)) != len(rows):
            self.log.note("bad_rows", entry.line, f"{key} has a row twice")
            return None
        return rows

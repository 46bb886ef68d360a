"""Trainings in YAML: which model, on which data, towards which loss, by which steps; checked.

Comes in: the path of a YAML file. Goes out: a `TrainFile`, or every defect of the form with file
and line, what is allowed, and the closest match, beside what is sound. Neither model nor data are
opened here. The form::

    name: digits                          # the file's name without suffix, if absent
    model: network.yaml                   # also .onnx, .json (a dumped model), pkg.mod:factory,
                                          # file.py:factory, or a list of the four .ttb files
    weights: start.safetensors            # values to start from, by name (.npz, .safetensors)
    trainable: [w1, b1]                   # all floating parameters, if absent
    data:
      file: digits.npz                    # where arrays are that do not say otherwise
      inputs: {image: {array: images, scale: 0.0625}}     # input: array, or how it is made
      labels: labels
      train: train                        # an array of row numbers; if absent, all other rows
      validation: 0.1                     # looked at after each epoch: rows, or a share of train
      held_out: held_out                  # looked at once, at the end: rows, a share, or
                                          # {file: test.npz, inputs: ..., labels: ...}
    batch_size: 32                        # of the model, if absent
    epochs: 20
    seed: 0                               # of the order of the data and of random operators
    shuffle: true
    loss: sparse_categorical_crossentropy # or {name: mse, reduction: sum}
    optimizer: {name: adamw, lr: 0.002, weight_decay: 1.0e-4}
    schedule: {name: warmup, warmup_steps: 90, then: cosine}      # T_max: all steps, if absent
    metrics: [accuracy, loss]
    target: wormhole_n150                 # a machine, or its .yaml or .ttsys
    executor: numpy                       # or onnxruntime, auto, torch
    algorithm: none                       # or greedy, search: where tensors lie in between
    recompute: none                       # or cheap, all, every 8: what backward computes again
    clip_grad_norm: 1.0
    accumulation_steps: 1                 # batches whose gradients one step takes
    precision: float32                    # what programs compute in; weights stay float32
    checkpoints: {folder: checkpoints, every: 1 epoch, keep: 3}   # every: 50 steps, 2 epochs
    output: [digits.ttb, digits.safetensors]      # the trained model: for inference, or weights

Only `model`, `data`, `loss` and `optimizer` are needed. An array is `{array, file, scale, shift}`
(scale and shift in this order), its name, or a `.npy` file. Paths are relative to the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stitch.documents.trainings.choices import LOSS, METRICS, OPTIMIZER, SCHEDULE, metrics_of
from stitch.documents.trainings.data_entries import DataEntry, DataKind, files_of
from stitch.forms import (
    Choice,
    ElementType,
    Flag,
    Form,
    Kind,
    ListOf,
    NameOrPath,
    Node,
    Number,
    Place,
    ProblemLog,
    Reading,
    RelativePath,
    Row,
    Tried,
    Whole,
    Word,
    form_text,
    read_yaml,
)
from stitch.runtime import EXECUTORS
from stitch.training import ALGORITHMS, TrainingOptions

COMPUTING = tuple(name for name in EXECUTORS if name != "null")
OUTPUTS = (".ttb", ".safetensors")
MAX_COUNT = 10**9
_EVERY = re.compile(r"(\d{1,9})\s*(steps?|epochs?)?")


@dataclass(frozen=True, slots=True)
class Every:
    """How often: after so many steps, or epochs."""

    count: int
    unit: str

    def text(self) -> str:
        """As it is written."""
        return f"{self.count} {self.unit}{'' if self.count == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """Where checkpoints go, how often they are made, how many are kept."""

    folder: Path | None = None
    every: Every = Every(1, "epoch")
    keep: int = 3


@dataclass(frozen=True, slots=True)
class TrainFile:
    """A training as it is written. `loss`, `optimizer`, `schedule`: what `config()` gives."""

    file: str
    folder: Path
    name: str
    model: tuple[str, ...]
    data: DataEntry
    loss: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    schedule: Mapping[str, Any] | None
    options: TrainingOptions
    weights: Path | None = None
    trainable: tuple[str, ...] | None = None
    batch_size: int | None = None
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    metrics: tuple[str, ...] = ()
    target: str | None = None
    executor: str = "numpy"
    algorithm: str = "none"
    checkpoints: CheckpointEntry = CheckpointEntry()
    outputs: tuple[Path, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[Path, ...]:
        """The files that the training names and reads, as far as they have paths."""
        model = (word.partition(".py:")[0] + ".py" if ".py:" in word else word
                 for word in self.model)  # fmt: skip
        weights = () if self.weights is None else (self.weights,)
        return (*(self.folder / word for word in model), *weights, *files_of(self.data))

    def where(self, key: str) -> str:
        """File and line of a key, for errors that are found later."""
        return f"{self.file}:{self.lines.get(key, 1)}"


@dataclass(frozen=True, slots=True)
class TrainDraft:
    """A training as far as its form is sound: `file` where all of it is, else the sound parts."""

    log: ProblemLog
    folder: Path
    lines: Mapping[str, int]
    file: TrainFile | None
    model: tuple[str, ...]
    data: DataEntry | None
    weights: Path | None
    target: str | None
    batch_size: int | None
    seed: int


_DRAFTED = ("folder", "lines", "model", "data", "weights", "target", "batch_size", "seed")


def read_training(path: str | Path) -> TrainDraft:
    """The training of a YAML file, with the defects of its form; raises `FormatError` where there
    is no YAML to be read."""
    place = Path(path)
    return _draft(form_text(place, "training", str(place)), place.parent, place.name)


def _draft(text: str, folder: Path, file: str) -> TrainDraft:
    root, log = read_yaml(text, file)
    noted, fields = log.noted, _TRAINING.fields(root, Reading(log, folder).root)
    fields = replace(fields, values={**fields.values, "metrics": metrics_of(fields)})
    training = _TRAINING.build(fields) if log.noted == noted else None
    return TrainDraft(log, file=training, **{key: fields.values[key] for key in _DRAFTED})


def parse_every(text: str) -> Every | None:
    """`50`, `50 steps`, `2epochs`; None for anything else.

    >>> parse_every("2epochs"), parse_every("50")
    (Every(count=2, unit='epoch'), Every(count=50, unit='step'))
    """
    match = _EVERY.fullmatch(text.strip())
    if match is None or int(match[1]) < 1:
        return None
    return Every(int(match[1]), (match[2] or "step").rstrip("s"))


class _Every(Kind[Every]):
    """How often something is done."""

    wanted = "a number of steps or epochs, as in 50 steps or 2 epochs"

    def value(self, node: Node, place: Place) -> Every | None:
        return parse_every(node.raw)


_CHECKPOINTS = Form(
    "checkpoints",
    CheckpointEntry,
    Row("folder", RelativePath()),
    Row("every", _Every(), default=Every(1, "epoch")),
    Row("keep", Whole(1, MAX_COUNT), default=3),
)


def _option(key: str, kind: Kind[Any]) -> Row:
    """One of the `TrainingOptions`, tried by itself."""

    def attempt(value: Any) -> TrainingOptions:
        return TrainingOptions(**{key: value})

    return Row(key, Tried(kind, attempt))


_OPTIONS = (
    _option("recompute", Word()),
    _option("clip_grad_norm", Number(is_finite=False)),
    _option("accumulation_steps", Whole(1, MAX_COUNT)),
    _option("precision", ElementType()),
)


def _train_file(file: str, folder: Path, lines: Mapping[str, int], **values: Any) -> TrainFile:
    given = {row.key: values.pop(row.key) for row in _OPTIONS}
    options = TrainingOptions(**{key: v for key, v in given.items() if v is not None})
    return TrainFile(file, folder, options=options, lines=lines, **values)


_PATHS = "a path, pkg.mod:factory, or a list of the four .ttb files"
_TRAINING = Form(
    "a training",
    _train_file,
    Row("name", Word(), default=Reading.stem),
    Row("model", ListOf(Word(_PATHS), _PATHS, 1, or_one=True), needed=True, default=()),
    Row("weights", RelativePath()),
    Row("trainable", ListOf(Word(), "a list of names", 1, or_one=True)),
    Row("data", DataKind(), needed=True),
    Row("batch_size", Whole(1, MAX_COUNT)),
    Row("epochs", Whole(1, MAX_COUNT), default=1),
    Row("seed", Whole(0), default=0),
    Row("shuffle", Flag(), default=True),
    Row("loss", LOSS, needed=True),
    Row("optimizer", OPTIMIZER, needed=True),
    Row("schedule", SCHEDULE),
    Row("metrics", ListOf(Choice(METRICS), "a list of metrics", or_one=True)),
    Row("target", NameOrPath("the name of a machine, or the path of its .yaml or .ttsys")),
    Row("executor", Choice(COMPUTING), default="numpy"),
    Row("algorithm", Choice(ALGORITHMS), default="none"),
    *_OPTIONS,
    Row("checkpoints", _CHECKPOINTS, default=CheckpointEntry()),
    Row(
        "output",
        ListOf(RelativePath(endings=OUTPUTS), "a path, or a list of paths", 1, or_one=True),
        into="outputs",
        default=(),
    ),
)
TRAINING_KEYS = _TRAINING.keys

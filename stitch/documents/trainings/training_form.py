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
    target: wormhole_n150                 # a machine, or its .yaml
    executor: numpy                       # or onnxruntime, auto, torch
    algorithm: none                       # or greedy, search: where tensors lie in between
    recompute: none                       # or cheap, all: what backward computes again
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stitch.documents.trainings.choices import loss_of, metrics_of, optimizer_of, schedule_of
from stitch.documents.trainings.data_entries import DataEntry, data_of, files_of
from stitch.errors import FormatError, UsageError, closest
from stitch.files import read_text
from stitch.forms import Fields, Node, ProblemLog, read_yaml
from stitch.runtime import EXECUTORS
from stitch.training import ALGORITHMS, TrainingOptions

TRAINING_KEYS = (
    "name", "model", "weights", "trainable", "data", "batch_size", "epochs", "seed", "shuffle",
    "loss", "optimizer", "schedule", "metrics", "target", "executor", "algorithm", "recompute",
    "clip_grad_norm", "accumulation_steps", "precision", "checkpoints", "output",
)  # fmt: skip
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


def load_training(path: str | Path) -> TrainFile:
    """The training of a YAML file; raises `FormatError` listing every defect of its form."""
    return _whole(read_training(path))


def read_training(path: str | Path) -> TrainDraft:
    """The training of a YAML file, with the defects of its form; raises `FormatError` where there
    is no YAML to be read."""
    place = Path(path)
    try:
        text = read_text(place)
    except OSError as error:
        raise FormatError(
            f"cannot read the training: {error.strerror}", where=str(place)
        ) from error
    except UnicodeDecodeError as error:
        raise FormatError(f"not YAML: it is no UTF-8 text ({error})", where=place.name) from error
    return _draft(text, place.parent, place.name)


def training_from_text(text: str, folder: Path, file: str = "train.yaml") -> TrainFile:
    """The training of a YAML text whose files lie in `folder`; raises `FormatError`."""
    return _whole(_draft(text, folder, file))


def _whole(draft: TrainDraft) -> TrainFile:
    draft.log.raise_any("training")
    assert draft.file is not None, "what is missing has been noted"
    return draft.file


def _draft(text: str, folder: Path, file: str) -> TrainDraft:
    root, log = read_yaml(text, file)
    return _Reader(root, folder, log).draft()


def parse_every(text: str) -> Every | None:
    """`50`, `50 steps`, `2epochs`; None for anything else.

    >>> parse_every("2epochs"), parse_every("50")
    (Every(count=2, unit='epoch'), Every(count=50, unit='step'))
    """
    found = _EVERY.fullmatch(text.strip())
    if found is None or int(found[1]) < 1:
        return None
    return Every(int(found[1]), (found[2] or "step").rstrip("s"))


class _Reader:
    """Reads one document."""

    def __init__(self, root: Node, folder: Path, log: ProblemLog) -> None:
        self.log = log
        self.folder = folder
        self.top = Fields(root, "a training", log)
        self.top.only(TRAINING_KEYS)

    def draft(self) -> TrainDraft:
        top, log = self.top, self.log
        wanted = {"data": "a mapping", "loss": "the name of a loss, or a mapping",
                  "optimizer": "the name of an optimizer, or a mapping",
                  "model": "the path of a model, or pkg.mod:factory"}  # fmt: skip
        for key, what in wanted.items():
            if top.get(key) is None:
                top.wrong(key, what)
        data, model = data_of(top, self.folder), self._model()
        loss, optimizer, schedule = loss_of(top), optimizer_of(top), schedule_of(top)
        metrics, options, made = metrics_of(top, loss), self._options(), self._rest()
        lines = {key: node.key_line or node.line for key, node in top.items()}
        file = None
        if not (log.problems or data is None or loss is None or optimizer is None
                or options is None):  # fmt: skip
            file = TrainFile(
                log.file, self.folder, top.text("name") or Path(log.file).stem, model, data, loss,
                optimizer, schedule, options, metrics=metrics, **made, lines=lines,
            )  # fmt: skip
        return TrainDraft(
            log, self.folder, lines, file, model, data, made["weights"], made["target"],
            made["batch_size"], made["seed"],
        )  # fmt: skip

    def _rest(self) -> dict[str, Any]:
        top = self.top
        weights = top.text("weights")
        made: dict[str, Any] = {
            "weights": None if weights is None else self.folder / weights,
            "trainable": self._words("trainable", "a list of names") if top.get("trainable")
            else None,
            "batch_size": self._count("batch_size", None),
            "epochs": self._count("epochs", 1),
            "seed": self._count("seed", 0, least=0, most=2**63 - 1),
            "shuffle": self._flag("shuffle", True),
            "target": self._target(),
            "executor": self._choice("executor", COMPUTING, "numpy"),
            "algorithm": self._choice("algorithm", tuple(ALGORITHMS), "none"),
            "checkpoints": self._checkpoints(),
            "outputs": self._outputs(),
        }  # fmt: skip
        return made

    def _model(self) -> tuple[str, ...]:
        return self._words("model", "a path, pkg.mod:factory, or a list of the four .ttb files")

    def _words(self, key: str, wanted: str) -> tuple[str, ...]:
        """One word, or a list of them."""
        node = self.top.get(key)
        if node is None:
            return ()
        items = node.data if isinstance(node.data, tuple) else (node,)
        if not items or any(isinstance(i.data, tuple | Mapping) or not i.raw for i in items):
            self.top.wrong(key, wanted)
            return ()
        return tuple(item.raw for item in items)

    def _count(
        self, key: str, otherwise: int | None, least: int = 1, most: int = MAX_COUNT
    ) -> int | None:
        found = self.top.number(key)
        if found is None:
            return otherwise
        if not isinstance(found, int) or not least <= found <= most:
            self.top.wrong(key, f"a whole number from {least} to {most}")
            return otherwise
        return found

    def _flag(self, key: str, otherwise: bool) -> bool:
        node = self.top.get(key)
        if node is None:
            return otherwise
        if not isinstance(node.data, bool):
            self.top.wrong(key, "true or false")
            return otherwise
        return node.data

    def _choice(self, key: str, choices: tuple[str, ...], otherwise: str) -> str:
        word = self.top.text(key)
        if word is not None and word not in choices:
            near = closest(word, choices)
            self.top.wrong(key, f"one of {', '.join(choices)}" + (f" ({near})" if near else ""))
            return otherwise
        return word or otherwise

    def _target(self) -> str | None:
        """A machine's name as it is; a path relative to the file, like all of its paths."""
        word = self.top.text("target")
        if word is not None and word.endswith((".yaml", ".yml")):
            return str(self.folder / word)
        return word

    def _options(self) -> TrainingOptions | None:
        top = self.top
        given: dict[str, Any] = {"recompute": top.text("recompute"),
                                 "clip_grad_norm": top.number("clip_grad_norm"),
                                 "accumulation_steps": self._count("accumulation_steps", None),
                                 "precision": top.data_type("precision")}  # fmt: skip
        whole = True
        for key, value in given.items():
            if value is not None:
                try:
                    TrainingOptions(**{key: value})
                except UsageError as error:
                    self.log.note("bad_value", top.line_of(key), str(error))
                    whole = False
        if not whole:
            return None
        return TrainingOptions(**{key: value for key, value in given.items() if value is not None})

    def _checkpoints(self) -> CheckpointEntry:
        node = self.top.get("checkpoints")
        if node is None:
            return CheckpointEntry()
        fields = Fields(node, "checkpoints", self.log)
        fields.only(("folder", "every", "keep"))
        folder, word = fields.text("folder"), fields.text("every")
        every = parse_every(word) if word is not None else Every(1, "epoch")
        if every is None:
            fields.wrong("every", "a number of steps or epochs, as in 50 steps or 2 epochs")
        keep = fields.number("keep")
        if keep is not None and (not isinstance(keep, int) or not 1 <= keep <= MAX_COUNT):
            fields.wrong("keep", f"a whole number from 1 to {MAX_COUNT}")
            keep = None
        return CheckpointEntry(
            None if folder is None else self.folder / folder,
            every or Every(1, "epoch"),
            int(keep or 3),
        )

    def _outputs(self) -> tuple[Path, ...]:
        words = self._words("output", "a path, or a list of paths")
        if any(Path(word).suffix.lower() not in OUTPUTS for word in words):
            self.top.wrong("output", f"files that end in {' or '.join(OUTPUTS)}")
            return ()
        return tuple(self.folder / word for word in words)

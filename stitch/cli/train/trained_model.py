"""The model of a training file, compiled: from whatever it was written in; and measured (accuracy,
loss) on data that it is not trained on.

Comes in: a `TrainFile`; a part of the data. Goes out: a `CompiledModel` with a training; numbers by
name. Predictions run on the training's own device, from its weights in place; the loss is the
loss's own graph over all predictions at once. Must not know: the order of training, checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from stitch import api
from stitch.cli.compile import from_entry
from stitch.cli.module_files import known_machine
from stitch.compiler import CompileOptions, compile_graph
from stitch.documents import DataPart, TrainFile
from stitch.errors import CompileError, FormatError, StitchError, UsageError
from stitch.files import sweep_folder
from stitch.forms import read_array_file
from stitch.frontend import batched_shapes
from stitch.graph import Wish
from stitch.machine import load_machine
from stitch.model import PRODUCER
from stitch.program import Array, DataType, InputKind, Program, Role, ValueType
from stitch.training import (
    CompiledTraining,
    Optimizer,
    TrainingInstance,
    TrainingPrograms,
    evaluation_form,
    graph_of,
    home_space,
    loss_from_config,
    read_tensors,
    update_graph,
)
from stitch.ttb import Binary

MACHINE = "wormhole_n150"
_WEIGHTS = (InputKind.PARAMETER, InputKind.STATE)


@dataclass(frozen=True, slots=True, eq=False)
class TrainModel:
    """A model ready for training; `target`: how its machine is spelled."""

    compiled: api.CompiledModel
    training: CompiledTraining
    target: str

    @property
    def programs(self) -> TrainingPrograms:
        """The four programs."""
        return self.training.programs

    @property
    def inputs(self) -> dict[str, ValueType]:
        """What one batch consists of."""
        forward = self.programs.forward
        return {
            slot.name: forward.values[slot.value].type
            for slot in forward.inputs
            if slot.kind is InputKind.ACTIVATION
        }

    @property
    def batch_size(self) -> int:
        """Rows of a batch; raises `CompileError` where inputs and prediction disagree."""
        kinds = {**self.inputs, self.programs.prediction: self.programs.prediction_type}
        sizes = {kind.shape[0] if kind.shape else 0 for kind in kinds.values()}
        if len(sizes) != 1 or sizes == {0}:
            listed = ", ".join(f"{name} {kind.text()}" for name, kind in kinds.items())
            raise CompileError(
                "inputs and prediction do not have a first dimension that counts the rows of a "
                "batch", got=listed,
            )  # fmt: skip
        return sizes.pop()


def build_model(file: TrainFile, optimizer: Optimizer, target: str | None) -> TrainModel:
    """Read and compile the model, or load its four programs; errors name the file's line."""
    try:
        built = _built(file, optimizer, target or file.target)
    except StitchError as error:
        named = (error.where or "").startswith(f"{file.file}:")
        if not named and not (isinstance(error, FormatError) and error.problems):
            error.where = ", ".join(filter(None, (file.where("model"), error.where)))
        raise
    if file.batch_size not in (None, built.batch_size):
        raise FormatError(
            "the model is made for batches of another size",
            where=file.where("batch_size"),
            expected=str(built.batch_size), got=str(file.batch_size),
            remedy="programs have fixed shapes: change batch_size, or the model's inputs",
        )  # fmt: skip
    return built


def _built(file: TrainFile, optimizer: Optimizer, target: str | None) -> TrainModel:
    suffixes = {Path(word).suffix.lower() for word in file.model}
    if suffixes == {".ttb"}:
        return _of_programs(file, optimizer, target)
    if len(file.model) != 1:
        raise UsageError(
            "a model is one file, or its four programs", got=", ".join(file.model),
            expected="model: network.yaml, or the .ttb files of forward, loss, backward, update",
        )  # fmt: skip
    module, examples, values = module_of(file.folder, file.model[0])
    given = {**values, **read_weights(file.weights)}
    spelled = target or MACHINE
    options = file.options
    compiled = api.compile(
        module, examples, target=spelled, optimizer=optimizer,
        loss=loss_from_config({**file.loss}),
        weights=given or None, trainable=file.trainable,
        input_shapes=batched_shapes(file.folder / file.model[0], file.batch_size),
        algorithm=file.algorithm, executor=file.executor,
        recompute=options.recompute, accumulation_steps=options.accumulation_steps,
        clip_grad_norm=options.clip_grad_norm, precision=options.precision,
    )  # fmt: skip
    assert compiled.training is not None
    return TrainModel(compiled, compiled.training, spelled)


def module_of(folder: Path, word: str) -> tuple[Any, Any, dict[str, Array]]:
    """What `api.compile` takes: the module, its examples, and values to start from."""
    path = folder / word
    source, colon, factory = word.rpartition(":")
    if colon and factory.isidentifier():
        if source.endswith(".py"):
            return *from_entry(str(folder / source), factory), {}
        return *from_entry(None, word, folder), {}
    if path.suffix.lower() == ".json":
        return _dumped(path)
    return path, (), {}


def _dumped(path: Path) -> tuple[Any, Any, dict[str, Array]]:
    model = api.CompiledModel.load(path)
    graph = model.graph.with_wishes(*model.wishes)
    if model.training is None:
        return graph, (), {}
    wanted = {slot.name for slot in graph.inputs if slot.kind in _WEIGHTS}
    return graph, (), {n: v for n, v in model.training.values.items() if n in wanted}


def read_weights(path: Path | None) -> dict[str, Array]:
    """Arrays by name out of `.safetensors` or `.npz`; raises `FormatError`."""
    if path is None:
        return {}
    if path.suffix.lower() == ".safetensors":
        return dict(read_tensors(path).tensors)
    return {str(name): array for name, array in read_array_file(path).items()}


# -- four files ------------------------------------------------------------------------------------


def _of_programs(file: TrainFile, optimizer: Optimizer, target: str | None) -> TrainModel:
    for folder in {(file.folder / word).parent for word in file.model}:
        sweep_folder(folder)  # A kill may have come amid the saving of these files.
    binaries = [api.load(file.folder / word) for word in file.model]
    spelled = target or known_machine(binaries[0].machine.name, file.model[0])
    programs = _complete([p for binary in binaries for p in binary.programs], spelled)
    if file.weights is None:
        raise UsageError(
            "the four programs of a training hold no weights",
            remedy="add weights: start.safetensors (or .npz) with a value for each parameter",
        )
    loss = loss_from_config({**file.loss})
    _check_update(file, programs, optimizer, spelled)
    label = programs.loss.values[programs.loss.inputs[1].value].type
    if loss.label_type(programs.prediction_type) != label:
        raise UsageError(
            "the loss program was compiled for other labels", expected=label.text(),
            got=loss.label_type(programs.prediction_type).text(), where=file.where("loss"),
        )  # fmt: skip
    values: Mapping[str, Array] = MappingProxyType(read_weights(file.weights))
    training = CompiledTraining(programs, loss, optimizer, file.options, values)
    binary = Binary(programs.all, binaries[0].machine, PRODUCER)
    graph = graph_of(programs.forward)
    return TrainModel(
        api.CompiledModel(graph, binary, spelled, training=training), training, spelled
    )


def _complete(programs: list[Program], target: str) -> TrainingPrograms:
    """The programs of a training; the one for evaluation is made where it was not given."""
    if len(programs) != len(Role):
        return TrainingPrograms.of(tuple(programs))
    forward, loss = programs[:2]
    graph = evaluation_form(graph_of(forward))
    judged = {slot.name for slot in loss.inputs}
    graph = replace(graph, outputs=tuple(s for s in graph.outputs if s.name in judged))
    machine = load_machine(target)
    home = home_space(machine)
    wishes = (
        *(Wish("input", i, "space", home) for i in range(len(graph.inputs))),
        *(Wish("output", i, "space", home) for i in range(len(graph.outputs))),
    )
    evaluation = compile_graph(graph, machine, CompileOptions(wishes=wishes)).program
    return TrainingPrograms.of((*programs, evaluation))


def _check_update(
    file: TrainFile, programs: TrainingPrograms, optimizer: Optimizer, target: str
) -> None:
    """The settings of an optimizer are in its program: it has to be the one that they give."""
    graph = update_graph(
        programs.update.name, programs.parameters, optimizer,
        clip_grad_norm=file.options.clip_grad_norm,
    )  # fmt: skip
    machine = load_machine(target)
    expected = compile_graph(graph, machine, CompileOptions()).program
    if _arithmetic(expected) != _arithmetic(programs.update):
        raise UsageError(
            "the update program was compiled with another optimizer, or other settings of it",
            where=file.where("optimizer"),
            expected="an optimizer and a clip_grad_norm as when the programs were compiled",
            got=f"{optimizer!r}, clip_grad_norm {file.options.clip_grad_norm}",
        )


def _arithmetic(program: Program) -> list[Any]:
    """Operators, attributes and constants in order: what a program computes, wherever it lies."""
    constants = [(c.data.dtype.str, c.data.tobytes()) for c in program.constants]
    operations = [(o.op, o.domain, sorted(o.attributes.items())) for o in program.operations]
    return [[s.name for s in program.inputs], constants, operations]


class Evaluation:
    """Measures a model in training on parts of the data."""

    def __init__(
        self, model: TrainModel, instance: TrainingInstance, metrics: Sequence[str]
    ) -> None:
        self._model = model
        self._instance = instance
        self._metrics = tuple(metrics)
        self._losses: dict[int, api.CompiledModel] = {}

    def measure(self, part: DataPart) -> dict[str, float]:
        """The metrics of one part, by name."""
        if not self._metrics:
            return {}
        predicted = self.predict(part)
        measures = {"accuracy": _accuracy, "loss": self._loss}
        return {name: measures[name](predicted, part.labels) for name in self._metrics}

    def predict(self, part: DataPart) -> Array:
        """The predictions for all rows; the last batch is filled up and cut."""
        size, predictions = self._model.batch_size, []
        for start in range(0, len(part), size):
            which = np.minimum(np.arange(start, start + size), len(part) - 1)
            batch = {name: array[which] for name, array in part.inputs.items()}
            predictions.append(self._instance.predict(**batch).numpy())
        return np.concatenate(predictions)[: len(part)].astype(np.float32)

    def _loss(self, predicted: Array, labels: Array) -> float:
        count = len(predicted)
        if count not in self._losses:
            loss = self._model.training.loss
            graph = loss.graph(ValueType(predicted.shape, DataType.FLOAT32))
            self._losses[count] = api.compile(graph, target=load_machine("host"))
        wanted = self._losses[count].graph.input_type(1)
        if not wanted.shape:  # A loss that does not look at its label.
            labels = np.zeros((), wanted.data_type.dtype)
        return float(np.asarray(self._losses[count](predicted, labels)))


def _accuracy(predicted: Array, labels: Array) -> float:
    """The share of right answers: the largest logit, or the sign of a single one."""
    if labels.shape != predicted.shape:
        return float(np.mean(predicted.argmax(axis=1) == labels))
    if predicted.ndim > 1 and predicted.shape[1] > 1 and labels.dtype.kind == "f":
        return float(np.mean(predicted.argmax(axis=1) == labels.argmax(axis=1)))
    return float(np.mean((predicted > 0) == (labels > 0.5)))

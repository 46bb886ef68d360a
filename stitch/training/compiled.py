"""`CompiledTraining`: a model compiled for training, before it has a device.

Four programs with the values that they start from, as an object, as plain data, and as an instance
on a device; and how the model is read again for batches of another size. No front ends or paths
here.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from stitch.errors import UsageError, closest
from stitch.graph import ComputationGraph, JsonObject, PlacementOption
from stitch.machine import Machine
from stitch.program import Array, DataType, Program, ValueType
from stitch.report import Device
from stitch.training.from_torch import loss_of
from stitch.training.graphs import KEPT_KINDS, Trainable, as_trainable
from stitch.training.instance import NamedShapes, TrainingInstance
from stitch.training.losses import Loss, loss_from_config
from stitch.training.optimizers import Optimizer, optimizer_from_config
from stitch.training.pending_values import CaptureCall
from stitch.training.programs import (
    OPTION_WORDS,
    TrainingGraphs,
    TrainingOptions,
    TrainingPrograms,
    compile_evaluation,
    compile_step,
    compile_training,
    compile_update,
    graphs_of,
    options_from_record,
    training_config,
)
from stitch.training.search import AlgorithmConfig, SearchResult, SimulatedTime, optimize
from stitch.training.tensors import COUNTS, part_of, with_part


class ReadableModel(Protocol):
    """A module that front ends read again, at other shapes of its inputs by name."""

    def read(
        self, shapes: NamedShapes
    ) -> tuple[ComputationGraph, dict[str, Array], ComputationGraph | None]:
        """The graph for training, values of its inputs, the graph for evaluation if it differs."""

    def read_evaluation(self, shapes: NamedShapes) -> ComputationGraph | None:
        """The graph for evaluation alone, where that can be read alone."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelReader:
    """Reads the model of a training again, at other shapes of its inputs by name, with the
    placement options and the trained parameters that it was compiled with.
    """

    source: ReadableModel
    placement: tuple[PlacementOption, ...] = ()
    trainable: frozenset[str] | None = None

    def model(self, shapes: NamedShapes) -> Trainable:
        """The model for a step; raises `CompileError`, `UsageError`."""
        graph, values, twin = self.source.read(shapes)
        return as_trainable(graph.with_placement(*self.placement), values, self.trainable, twin)

    def evaluation(self, shapes: NamedShapes) -> ComputationGraph:
        """The graph for evaluation; raises `CompileError`, `UsageError`."""
        return self.source.read_evaluation(shapes) or self.model(shapes).evaluation


@dataclass(frozen=True, slots=True, eq=False)
class CompiledTraining:
    """The programs of a training, how it is done, and the values that it starts from."""

    programs: TrainingPrograms
    loss: Loss
    optimizer: Optimizer
    options: TrainingOptions
    values: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    #: What `algorithm=` found.
    search_result: SearchResult[TrainingGraphs] | None = None
    #: What the programs were compiled with, by the names that the model has: what is frozen.
    constants: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    #: For batches of other sizes than the programs take; None where nothing can be read again.
    reader: ModelReader | None = field(default=None, repr=False)
    #: By whose rates loops were scheduled.
    executor: str | None = None
    #: Who hears of each instance that is started.
    watchers: tuple[Callable[[TrainingInstance], object], ...] = field(default=(), repr=False)
    #: The instance that the model's first call started.
    _started: list[TrainingInstance] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        words = f"{self.programs.forward.name}: {self.loss!r}, {self.optimizer!r}"
        return f"<CompiledTraining of {words}, {len(self.programs.parameters)} parameters>"

    @property
    def instance(self) -> TrainingInstance | None:
        """The instance that was started last, None before, and after it was closed."""
        return self._started[-1] if self._started and not self._started[-1].is_closed else None

    @property
    def is_over(self) -> bool:
        """Whether the instance that was started last was closed, and no other was started."""
        return bool(self._started) and self._started[-1].is_closed

    def start(
        self, device: Device, *, weights: Mapping[str, Any] | None = None, seed: int = 0,
        owns_device: bool = False, capture_call: CaptureCall | None = None,
    ) -> TrainingInstance:  # fmt: skip
        """Put the model on a device, ready to train; an instance started before is closed.

        `weights` replaces initial values by name; `seed` decides random operators; `capture_call`
        makes graphs of torch's functions over what it predicts. Raises
        `UsageError` for values that are missing, `IncompatibleError`, `OutOfMemoryError`.
        """
        values = {**self.values, **{n: np.asarray(v) for n, v in (weights or {}).items()}}
        slots = self.programs.forward.inputs
        wanted = [s.name for s in slots if s.kind in KEPT_KINDS]
        missing = [name for name in wanted if name not in values]
        if missing:
            raise UsageError(
                f"training cannot start: no values for {', '.join(missing)}",
                remedy="give them: start(device, weights={...}), or dump the model with weights",
            )
        if self.instance is not None:
            self.instance.close()
        reader = self.reader
        instance = TrainingInstance(
            self.programs, device, values,
            loss=self.loss, optimizer=self.optimizer, seed=seed, owns_device=owns_device,
            capture_call=capture_call, constants=self.constants,
            compile_update=partial(
                compile_update, options=self.options, machine=device.machine
            ),
            compile_step=None if reader is None else partial(
                _step_at, reader, self.programs, self.loss, self.optimizer, self.options,
                device.machine, self.executor,
            ),
            compile_evaluation=None if reader is None else partial(
                _evaluation_at, reader, self.programs, self.options, device.machine, self.executor,
            ),
        )  # fmt: skip
        counts = [name for name in values if name.startswith("training.")]
        if counts and not weights:
            instance.load_state_dict(values)
        try:
            for watcher in self.watchers:
                watcher(instance)
        except BaseException:
            instance.close()
            raise
        self._started[:] = [instance]
        return instance

    def get_tensor(self, name: str, index: Any = ...) -> Array:
        """As of the instance; before there is one what training begins with."""
        if self.instance is not None:
            return self.instance.get_tensor(name, index)
        return part_of(name, self._value(name), index).copy()

    def set_tensor(self, name: str, array: Any, index: Any = ...) -> None:
        """As of the instance; before there is one training begins with it."""
        if self.instance is not None:
            self.instance.set_tensor(name, array, index)
            return
        if name in self.constants:
            raise UsageError(
                f"{name} is frozen: the programs of this training have it as a constant",
                remedy="compile the model again with another value",
            )
        value = with_part(name, self._value(name), array, index)
        object.__setattr__(self, "values", MappingProxyType({**self.values, name: value}))

    def _value(self, name: str) -> Array:
        if name in self.constants:
            return self.constants[name]
        if name not in self.values:
            raise UsageError(
                f"training does not begin with a tensor {name!r}",
                remedy=closest(name, self.values) or "it may be there once the model was called",
            )
        return self.values[name]

    def as_data(self, *, weights: bool = True) -> dict[str, Any]:
        """Everything but the programs as plain data; `weights` are those of the instance, if any.

        With an instance the optimizer's state and the counts are part of it: training goes on.
        """
        values = self.values if self.instance is None else self.instance.state_dict()
        body = training_config(self.loss, self.optimizer, self.options)
        if weights:
            body["values"] = {name: _array_data(array) for name, array in values.items()}
        return body

    @staticmethod
    def from_record(
        record: JsonObject, programs: tuple[Program, ...], graph: ComputationGraph,
        search: JsonObject | None = None,
    ) -> CompiledTraining | None:  # fmt: skip
        """What `as_data` wrote, the programs, the model's graph, and what the search found; None
        where a defect was noted. Raises `UsageError` for programs that are those of no training."""
        made = TrainingPrograms.of(programs)
        record.refuse_other_keys(("loss", "optimizer", *OPTION_WORDS, "values"))
        values = {}
        if record.get("values") is not None:
            for name, field_of in record.named_records("values").items():
                values[name] = _array_in(field_of)
            _check_values(record, values, made)
        loss = record.made("loss", loss_from_config)
        optimizer = record.made("optimizer", optimizer_from_config)
        options = options_from_record(record)
        found = None if search is None else SearchResult.from_record(search, graphs_of(made))
        if loss is None or optimizer is None or options is None:
            return None
        arrays = {name: array for name, array in values.items() if array is not None}
        return CompiledTraining(made, loss, optimizer, options, arrays, found, constants_of(graph))


def _step_at(
    reader: ModelReader, programs: TrainingPrograms, loss: Loss, optimizer: Optimizer,
    options: TrainingOptions, machine: Machine, executor: str | None, shapes: NamedShapes,
) -> tuple[Program, Program, Program]:  # fmt: skip
    """Forward, loss and backward for batches of other shapes than the programs take."""
    return compile_step(reader.model(shapes), programs, loss, optimizer, options, machine, executor)


def _evaluation_at(
    reader: ModelReader, programs: TrainingPrograms, options: TrainingOptions, machine: Machine,
    executor: str | None, shapes: NamedShapes,
) -> Program:  # fmt: skip
    """The program for evaluation of batches of other shapes than the programs take."""
    return compile_evaluation(reader.evaluation(shapes), programs, options, machine, executor)


def _array_in(record: JsonObject) -> Array | None:
    """An array that `_array_data` wrote; None where a defect was noted."""
    record.refuse_other_keys(("type", "shape", "base64"))
    kinds = {kind.value: kind for kind in DataType if not kind.is_block}
    kind = record.choice("type", kinds, DataType.FLOAT32)
    shape, raw = record.integers("shape"), record.data("base64")
    if raw is None or kind.value != record.get("type"):
        return None
    wanted = math.prod(shape) * kind.dtype.itemsize
    if min(shape, default=0) < 0 or len(raw) != wanted:
        text = f"{list(shape)} of {kind.value} is {wanted} bytes, not {len(raw)}"
        record.problem("bad_length", "base64", text)
        return None
    return np.frombuffer(raw, kind.dtype).reshape(shape)


def _check_values(
    record: JsonObject, values: Mapping[str, Array | None], programs: TrainingPrograms
) -> None:
    """Note every value that no slot of the programs takes as it is."""
    kinds = {
        slot.name: program.values[slot.value].type
        for program in (programs.forward, programs.update)
        for slot in program.inputs
    }
    kinds |= dict.fromkeys((f"training.{count}" for count in COUNTS), ValueType((), DataType.INT64))
    for name, array in values.items():
        kind = kinds.get(name)
        if kind is None or array is None:
            continue
        is_other = array.dtype != kind.data_type.dtype
        # Until training has begun, weights are those of the source, in its own floating type.
        if is_other and DataType.from_dtype(array.dtype).is_floating and kind.data_type.is_floating:
            is_other = False
        if array.shape != kind.shape or is_other:
            detail = f"{array.dtype}{list(array.shape)}, where the programs take {kind.text()}"
            record.problem("bad_value", f"values.{name}", detail)


def compile_model(
    model: Trainable, loss: Any, optimizer: Any, options: TrainingOptions, machine: Machine,
    algorithm: str = "none", executor: str | None = None, state: Mapping[str, Array] | None = None,
    reader: ModelReader | None = None,
) -> CompiledTraining:  # fmt: skip
    """A trainable graph, compiled: loss and optimizer as objects, names or plain data; `state` is
    what the optimizer has already; `reader` gives the graph for batches of other sizes.

    `algorithm` decides where tensors lie and what is recomputed (`stitch.training.search`),
    `executor` by whose rates loops are scheduled. Raises
    `CompileError` naming operators without a gradient, `UsageError`, `OutOfMemoryError`.
    """
    judged, stepped = loss_of(loss), optimizer_from_config(optimizer)
    config = AlgorithmConfig(algorithm, judged, stepped, options)
    search = optimize(model, machine, SimulatedTime(), config)
    programs = compile_training(search.graph, machine, search.spaces, executor)
    values = {**model.values, **(state or {})}
    chosen = replace(options, recompute=search.solution.recompute)
    return CompiledTraining(
        programs, judged, stepped, chosen, values, search, constants_of(model.graph), reader,
        executor,
    )  # fmt: skip


def constants_of(graph: ComputationGraph) -> Mapping[str, Array]:
    """A graph's constants by name."""
    return MappingProxyType({graph.values[c.value].name: c.data for c in graph.constants})


def _array_data(array: Array) -> dict[str, Any]:
    dense = np.ascontiguousarray(array)
    return {
        "type": DataType.from_dtype(dense.dtype).value,
        "shape": list(array.shape),
        "base64": base64.b64encode(dense.tobytes()).decode("ascii"),
    }

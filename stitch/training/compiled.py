"""`CompiledTraining`: a model compiled for training, before it has a device.

It has the programs and initial values, converts to JSON data, and starts instances on devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from stitch.errors import FormatError, UsageError, unknown
from stitch.frozen_json import from_plain, located, to_plain
from stitch.graph import ComputationGraph, PlacementOption, array_of_bytes
from stitch.machine import Machine
from stitch.program import Array, DataType, Program, Space, ValueType
from stitch.report import Device
from stitch.training.from_torch import loss_of
from stitch.training.graphs import KEPT_KINDS, Trainable, as_trainable
from stitch.training.instance import NamedShapes, TrainingInstance
from stitch.training.losses import Loss, loss_from_config
from stitch.training.optimizers import Optimizer, optimizer_from_config
from stitch.training.programs import (
    TrainingGraphs,
    TrainingOptions,
    TrainingPrograms,
    compile_evaluation,
    compile_step,
    compile_training,
    compile_update,
    graphs_of,
)
from stitch.training.search import AlgorithmConfig, PlacementResult, SimulatedTime, place_training
from stitch.training.tensors import COUNTS, check_weights, part_of, with_part


class ReadableModel(Protocol):
    """A module that a front end can read again with other input shapes."""

    def read(
        self, shapes: NamedShapes
    ) -> tuple[ComputationGraph, dict[str, Array], ComputationGraph | None]:
        """Return the training graph, values of its inputs, and the evaluation graph if it
        differs."""

    def read_evaluation(self, shapes: NamedShapes) -> ComputationGraph | None:
        """Return the evaluation graph if it can be read alone."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelReader:
    """Reads a model again with other input shapes, with the same placement options and
    parameters."""

    source: ReadableModel
    placement: tuple[PlacementOption, ...] = ()
    trainable: frozenset[str] | None = None

    def model(self, shapes: NamedShapes) -> Trainable:
        """Return the model for a training step; raise `CompileError`, `UsageError`."""
        graph, values, twin = self.source.read(shapes)
        return as_trainable(graph.with_placement(*self.placement), values, self.trainable, twin)

    def evaluation(self, shapes: NamedShapes) -> ComputationGraph:
        """Return the graph for evaluation; raise `CompileError`, `UsageError`."""
        return self.source.read_evaluation(shapes) or self.model(shapes).evaluation


@dataclass(frozen=True, slots=True, eq=False)
class CompiledTraining:
    """The programs of a training, its loss, optimizer and options, and its initial values."""

    programs: TrainingPrograms
    loss: Loss
    optimizer: Optimizer
    options: TrainingOptions
    values: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    search_result: PlacementResult[TrainingGraphs] | None = None
    #: Frozen values, which are constants of the programs, by the model's names.
    constants: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    #: Reads the model for batches of other sizes; None for a model that was loaded from a file.
    reader: ModelReader | None = field(default=None, repr=False)
    #: The executor whose rates decided loop schedules.
    executor: str | None = None
    #: Called with each instance that is started.
    watchers: tuple[Callable[[TrainingInstance], object], ...] = field(default=(), repr=False)
    #: The instance that was started last, in a list because this class is frozen.
    _started: list[TrainingInstance] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        words = f"{self.programs.forward.name}: {self.loss!r}, {self.optimizer!r}"
        return f"<CompiledTraining of {words}, {len(self.programs.parameters)} parameters>"

    @property
    def instance(self) -> TrainingInstance | None:
        """The instance that was started last, None if there is none or it is closed."""
        return self._started[-1] if self._started and not self._started[-1].is_closed else None

    @property
    def is_over(self) -> bool:
        """Whether the instance that was started last is closed."""
        return bool(self._started) and self._started[-1].is_closed

    def start(
        self, device: Device, *, weights: Mapping[str, Any] | None = None, seed: int = 0,
        owns_device: bool = False,
    ) -> TrainingInstance:  # fmt: skip
        """Load the programs on a device and return the training instance; close the previous one.

        Args:
            weights: Replace initial values, by name.
            seed: Seed of random operators.
            owns_device: Whether closing the instance closes the device.

        Raises:
            UsageError: Initial values are missing, of unknown names, or a torch module was trained
                since.
            IncompatibleError: The device has another machine.
            OutOfMemoryError: The tensors do not fit.
        """
        if self.watchers and self._started and weights is None:
            raise UsageError(
                "the torch module has the weights of the training before: starting again would set "
                "it back to those that it was compiled with",
                remedy="start(weights=...) with what instance.state_dict() gave before it was "
                "closed, or compile the module again",
            )
        values = {**self.values, **{n: np.asarray(v) for n, v in (weights or {}).items()}}
        slots = self.programs.forward.inputs
        required = [s.name for s in slots if s.kind in KEPT_KINDS]
        states = [s.name for s in self.programs.update.inputs if s.kind in KEPT_KINDS]
        check_weights(weights or (), [*self.values, *required, *states])
        missing = [name for name in required if name not in values]
        if missing:
            raise UsageError(
                f"training cannot start: no initial values for {', '.join(missing)}",
                remedy="pass start(device, weights={...}), or dump the model with weights",
            )
        if self.instance is not None:
            self.instance.close()
        reader, programs, machine = self.reader, self.programs, device.machine
        loss, optimizer, options, executor = self.loss, self.optimizer, self.options, self.executor
        # The functions below must not refer to `self`: it refers to the instance, which would only
        # be released by the garbage collector.
        instance = TrainingInstance(
            programs, device, values,
            loss=loss, optimizer=optimizer, accumulation_steps=options.accumulation_steps,
            seed=seed, owns_device=owns_device, constants=self.constants,
            compile_update=partial(compile_update, options=options, machine=machine),
            compile_step=None if reader is None else lambda shapes: compile_step(
                reader.model(shapes), programs, loss, optimizer, options, machine, executor
            ),
            compile_evaluation=None if reader is None else lambda shapes: compile_evaluation(
                reader.evaluation(shapes), programs, options, machine, executor
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
        """Return a tensor of the instance, or its initial value if there is no instance."""
        if self.instance is not None:
            return self.instance.get_tensor(name, index)
        return part_of(name, self._value(name), index).copy()

    def set_tensor(self, name: str, array: Any, index: Any = ...) -> None:
        """Overwrite a tensor of the instance, or its initial value if there is no instance."""
        if self.instance is not None:
            self.instance.set_tensor(name, array, index)
            return
        if name in self.constants:
            raise UsageError(
                f"{name} is frozen: it is a constant of the training's programs",
                remedy="compile the model again with another value",
            )
        value = with_part(name, self._value(name), array, index)
        object.__setattr__(self, "values", MappingProxyType({**self.values, name: value}))

    def _value(self, name: str) -> Array:
        if name in self.constants:
            return self.constants[name]
        if name not in self.values:
            raise unknown(
                f"the training has no initial value {name!r}", name, self.values, expected=None,
                remedy="call the model first: activations and gradients exist only in a running "
                "training",
            )  # fmt: skip
        return self.values[name]

    def as_data(self, *, weights: bool = True) -> dict[str, Any]:
        """Return everything but the programs as JSON data.

        With `weights` this includes the current values of a running instance: parameters, optimizer
        state and counters.
        """
        values = self.values if self.instance is None else self.instance.state_dict()
        arrays = {
            name: _Array(
                DataType.from_dtype(array.dtype), array.shape, np.ascontiguousarray(array).tobytes()
            )
            for name, array in values.items() if weights
        }  # fmt: skip
        chosen = self.options
        form = _Training(
            self.loss.config(), self.optimizer.config(), chosen.recompute,
            chosen.accumulation_steps, chosen.clip_grad_norm, chosen.precision, chosen.spaces,
            arrays,
        )  # fmt: skip
        data: dict[str, Any] = to_plain(form)
        return data

    @staticmethod
    def from_data(
        data: Any, programs: tuple[Program, ...], graph: ComputationGraph, search: Any = None
    ) -> CompiledTraining:
        """Read what `as_data` returned; raise `FormatError`.

        Raises `UsageError` for programs that are not those of a training.
        """
        where, checked = "model.training", TrainingPrograms.of(programs)
        form = from_plain(_Training, data, where)
        with located(f"{where}.loss"):
            loss = loss_from_config(form.loss)
        with located(f"{where}.optimizer"):
            optimizer = optimizer_from_config(form.optimizer)
        with located(where):
            options = TrainingOptions(
                form.recompute, form.accumulation_steps, form.clip_grad_norm, form.precision,
                form.spaces,
            )  # fmt: skip
        arrays, kinds = {}, _value_types(checked)
        for name, one in form.values.items():
            with located(f"{where}.values.{name}"):
                arrays[name] = array_of_bytes(one.base64, ValueType(one.shape, one.type))
                _check_value(arrays[name], kinds.get(name))
        result = None if search is None else PlacementResult.from_data(search, graphs_of(checked))
        return CompiledTraining(
            checked, loss, optimizer, options, arrays, result, constants_of(graph)
        )


class _Array(NamedTuple):
    type: DataType
    shape: tuple[int, ...]
    base64: bytes


class _Training(NamedTuple):
    loss: Any
    optimizer: Any
    recompute: str
    accumulation_steps: int
    clip_grad_norm: float | None
    precision: DataType
    spaces: Mapping[str, Space]
    values: Mapping[str, _Array] = MappingProxyType({})


def _value_types(programs: TrainingPrograms) -> dict[str, ValueType]:
    """Return the types of the values of a training, by name."""
    kinds = {
        slot.name: program.values[slot.value].type
        for program in (programs.forward, programs.update)
        for slot in program.inputs
    }
    return kinds | {f"training.{count}": ValueType((), DataType.INT64) for count in COUNTS}


def _check_value(array: Array, kind: ValueType | None) -> None:
    """Raise `FormatError` for a value whose shape or type does not match its slot."""
    if kind is None:
        return
    is_other = array.dtype != kind.data_type.dtype
    # Until training starts, weights may have the floating type of the source.
    if is_other and DataType.from_dtype(array.dtype).is_floating and kind.data_type.is_floating:
        is_other = False
    if array.shape != kind.shape or is_other:
        raise FormatError(
            "a value of another type", expected=kind.text(), got=f"{array.dtype}{list(array.shape)}"
        )


def compile_model(
    model: Trainable, loss: Any, optimizer: Any, options: TrainingOptions, machine: Machine,
    algorithm: str = "none", executor: str | None = None, state: Mapping[str, Array] | None = None,
    reader: ModelReader | None = None,
) -> CompiledTraining:  # fmt: skip
    """Compile a trainable graph.

    Args:
        loss: A loss, its name, or its configuration.
        optimizer: An optimizer, its name, or its configuration.
        algorithm: Decides memory spaces and recomputation (`stitch.training.search`).
        executor: The executor whose rates decide loop schedules.
        state: Initial optimizer state.
        reader: Reads the model again for batches of other sizes.

    Raises:
        CompileError: An operator has no gradient; the text names all of them.
        OutOfMemoryError: No placement fits.
    """
    loss, optimizer = loss_of(loss), optimizer_from_config(optimizer)
    config = AlgorithmConfig(algorithm, loss, optimizer, options)
    search = place_training(model, machine, SimulatedTime(), config)
    programs = compile_training(search.graph, machine, search.tensor_mapping, executor)
    values = {**model.values, **(state or {})}
    chosen = replace(options, recompute=search.solution.recompute)
    return CompiledTraining(
        programs, loss, optimizer, chosen, values, search, constants_of(model.graph), reader,
        executor,
    )  # fmt: skip


def constants_of(graph: ComputationGraph) -> Mapping[str, Array]:
    """Return a graph's constants by name."""
    return MappingProxyType({graph.values[c.value].name: c.data for c in graph.constants})

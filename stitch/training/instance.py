"""`TrainingInstance`: a model in training on a device, and the steps of its loop.

Parameters, optimizer state and saved activations stay on the device; a step copies its batch in and
the values that the caller reads out. Programs for other batch sizes are compiled on first use and
share the same tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from stitch.argument_kinds import LIST, takes
from stitch.errors import CompileError, TaskError, UsageError
from stitch.program import Array, InputKind, Program
from stitch.report import Device
from stitch.runtime import LoadedProgram, Tensor, as_array
from stitch.training.graphs import KEPT_KINDS, MASTER, graph_of, rate_name
from stitch.training.losses import Loss
from stitch.training.observing import LayerTime, find_non_finite, profile_operations
from stitch.training.optimizers import Optimizer
from stitch.training.pending_values import LossTensor, TensorFuture
from stitch.training.programs import LABEL, TrainingPrograms, compile_accumulation, prediction_of
from stitch.training.stitching import (
    BoundProgram,
    BoundStep,
    NamedCells,
    Shapes,
    batch_arrays,
    load_program,
    shape_error,
)
from stitch.training.tensors import TrainingTensors, check_gradients, exclusive

#: Text of the error for weights after a failed update.
HALF_UPDATED = "an update failed after it had overwritten a part of the weights"
#: Size of the caches of programs by batch size.
MAX_SIZES = 16
NamedShapes = Mapping[str, tuple[int, ...]]
T = TypeVar("T")


class TrainingInstance(TrainingTensors):
    """A model in training on a device. Use it as a context manager, or call `close`.

    `forward`, `compute_loss`, `backward` and `update` each queue one program. While `profiling` is
    set they run at once and return the times of their operations. A device may have several
    instances.
    """

    device: Device

    def __init__(
        self,
        programs: TrainingPrograms,
        device: Device,
        values: Mapping[str, Array],
        *,
        loss: Loss,
        optimizer: Optimizer,
        accumulation_steps: int,
        seed: int,
        owns_device: bool,
        constants: Mapping[str, Array],
        compile_update: Callable[[TrainingPrograms, Optimizer], Program],
        compile_step: Callable[[NamedShapes], tuple[Program, Program, Program]] | None,
        compile_evaluation: Callable[[NamedShapes], Program] | None,
    ) -> None:
        """Put the programs and initial values on a device; see `CompiledTraining.start`.

        `compile_update` compiles the update again when settings change that are constants of it;
        `compile_step` and `compile_evaluation` compile programs for other input shapes.
        """
        cells = NamedCells(device)
        optimizer.check_free()
        step_programs = (programs.forward, programs.loss, programs.backward)
        step = BoundStep(step_programs, programs.parameters, cells)
        super().__init__(programs, cells, step, seed, constants)
        self._compile_step, self._compile_evaluation = compile_step, compile_evaluation
        #: Programs by the shapes of a batch.
        self._steps: dict[Shapes, BoundStep] = {step.shapes: step}
        self._evaluations: dict[Shapes, tuple[LoadedProgram, int]] = {}
        self.loss_fn = loss
        self.optimizer = optimizer
        #: The micro-batches of a step.
        self.accumulation_steps = accumulation_steps
        self.profiling = False
        self._owns_device = owns_device
        self._compile_update, self._changes = compile_update, optimizer.changes
        self._load()
        self._initialise(values)
        self._rates: tuple[float, ...] = ()
        self._losses: list[LossTensor] = []
        self._last_loss: LossTensor | None = None
        #: States before the last forward pass, which its backward program reads.
        self._previous: list[tuple[int, Any]] = []
        optimizer.bind(self)

    def _load(self) -> None:
        """Load the programs that do not depend on the batch, and the evaluation program."""
        programs = self.programs
        self._update = self._bound_update(programs.update)
        #: The program that adds gradients of micro-batches.
        self._addition: BoundProgram | None = None
        self._evaluations[self._step.shapes] = self._loaded_evaluation(programs.evaluation)
        self._wiring = self._step.wiring
        self.inputs, self._gradient_cells = self._wiring.inputs, self._wiring.gradients

    def _bound_update(self, program: Program) -> BoundProgram:
        return BoundProgram(load_program(self.device, program), self._cells, lost_by=HALF_UPDATED)

    def _initialise(self, values: Mapping[str, Array]) -> None:
        """Allocate every persistent tensor before the first plan."""
        cells = self._cells
        for slot in self.programs.forward.inputs:
            if slot.kind in KEPT_KINDS:
                cells.put(slot.name, values[slot.name])
        self._start_states(values)

    def _start_states(self, values: Mapping[str, Array]) -> None:
        """Allocate the states of the update program that do not exist yet."""
        cells = self._cells
        for slot in self.programs.update.inputs:
            if slot.kind is InputKind.STATE and cells.get(slot.name) is None:
                desc = cells.descs[cells.numbers[slot.name]]
                start = values.get(slot.name)
                if start is None:
                    name, _, state = slot.name.rpartition(".")
                    start = (
                        values[name]
                        if state == MASTER
                        else np.full(desc.shape, self.optimizer.start_of_slot(name, state))
                    )
                kind = desc.layout.data_type.dtype
                cells.put(slot.name, np.asarray(start).astype(kind))

    def __repr__(self) -> str:
        name = self.programs.forward.name
        state = "closed" if self.is_closed else f"on {self.device.machine.name}"
        return f"<TrainingInstance of {name}: step {self.steps}, {self.optimizer!r}, {state}>"

    def __call__(self, *batch: Any, **named: Any) -> TensorFuture:
        """Queue the forward program on a batch (arrays or tensors, by position or name)."""
        self.forward(*batch, **named)
        return self.prediction

    def takes_sizes_of(self, batch: Sequence[Any], named: Mapping[str, Any]) -> bool:
        """Return whether programs exist for the shapes of a batch, or its ranks do not match."""
        names = [port.name for port in self._step.batch]
        arrays = {**dict(zip(names, batch, strict=False)), **named}
        sizes = tuple([tuple(getattr(arrays.get(name), "shape", ())) for name in names])
        axes = list(map(len, sizes))
        return sizes in self._steps or axes != list(map(len, self._step.shapes))

    @exclusive
    def predict(self, *batch: Any, **named: Any) -> Tensor:
        """Queue the evaluation program on a batch and return the pending prediction.

        It has no gradients and no random operators, changes no state, and normalizes by running
        statistics. For a batch of another size it is compiled first.
        """
        self._check_open()
        self._take_writes(runs=True)
        arrays = batch_arrays(self._step.batch, batch, named)
        shapes = tuple([array.shape for array in arrays])
        evaluation = self._evaluations.get(shapes)
        if evaluation is None:
            program = self._compiled(self._compile_evaluation, shapes)
            evaluation = self._loaded_evaluation(program)
            _keep(self._evaluations, shapes, evaluation)
        agent, number = evaluation
        inputs = dict(zip(self.inputs, arrays, strict=True))
        cells = self._cells
        outputs = self.device.submit(agent, [
            inputs[port.name] if port.name in inputs else cells.get(port.name)
            for port in agent.ports
        ])  # fmt: skip
        self._show(())
        return outputs if isinstance(outputs, Tensor) else outputs[number]

    def _loaded_evaluation(self, program: Program) -> tuple[LoadedProgram, int]:
        """Load an evaluation program; return it with the number of the output that is the
        prediction."""
        try:
            prediction = prediction_of(graph_of(program))
        except CompileError:
            return load_program(self.device, program), 0
        names = [slot.name for slot in program.outputs]
        return load_program(self.device, program), names.index(prediction)

    def _compiled(self, compile: Callable[[NamedShapes], T] | None, shapes: Shapes) -> T:
        """Compile programs for other shapes; raise `UsageError` if that is impossible."""
        ports = self._step.batch
        try:
            if compile is None:
                raise UsageError("a model loaded from a file cannot be compiled for other shapes")
            if [*map(len, shapes)] != [len(port.shape) for port in ports]:
                raise UsageError("another number of axes")
            with nullcontext() if self.sharer is None else self.sharer.without_gradients():
                return compile(dict(zip(self.inputs, shapes, strict=True)))
        except (CompileError, UsageError) as error:
            pairs = zip(ports, shapes, strict=True)
            port, shape = next(pair for pair in pairs if pair[0].shape != pair[1])
            raise shape_error(port, shape, error.what) from error

    @property
    def prediction(self) -> TensorFuture:
        """The prediction of the last forward pass; raises `UsageError` before the first."""
        tensor = self._cells.tensor(self._wiring.prediction)
        if tensor is None:
            raise UsageError("no forward pass has run", remedy="call forward(batch) first")
        return TensorFuture(self, tensor, self.forwards)

    @exclusive
    def compute_loss(self, label: Any) -> LossTensor:
        """Queue the loss program on the last prediction; raise `UsageError` for invalid labels."""
        self._check_open()
        if not self._has_forward:
            raise UsageError("compute_loss() was called before a forward pass",
                             remedy="call the model first")  # fmt: skip
        if not isinstance(label, Tensor):
            if getattr(label, "requires_grad", False):
                raise UsageError(
                    "the labels have a gradient, which backward() would not compute",
                    remedy="pass y.detach(), or make what computes them a part of the module",
                )
            if not isinstance(label, np.ndarray):
                label = as_array(label, "the labels")
            self.loss_fn.check_label(label, self._step.prediction_type)
            label = label.astype(self._step.label.dtype, copy=False)
        self._run(self._step.loss, [label])
        loss = self._cells.tensor(self._wiring.loss)
        assert loss is not None
        self._last_loss = LossTensor(self, loss)
        return self._last_loss

    def backward_of(self, loss: LossTensor, by: float) -> None:
        """Queue the backward program of a loss, with its gradients multiplied by `by`."""
        if loss is not self._last_loss:
            raise UsageError(
                "backward() can run once, for the last loss: its activations were released",
                remedy="call the model and the loss again",
            )
        self.backward(by)

    @exclusive
    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._drop_gradients()

    @property
    def _has_gradients(self) -> bool:
        held, gradients = self._cells.held, self._wiring.gradients
        return bool(gradients) and held.keys() >= set(gradients)

    @exclusive
    def forward(self, *batch: Any, **named: Any) -> tuple[LayerTime, ...] | None:
        """Queue the forward program; return operation times while profiling.

        Programs for a batch of another size are compiled first.
        """
        self._check_open()
        self._take_writes(runs=True)
        cells, step = self._cells, self._step
        arrays = batch_arrays(step.batch, batch, named)
        shapes = tuple([array.shape for array in arrays])
        if shapes != step.shapes:
            step = self._change_step(shapes)
        batch_values, wiring = iter(arrays), self._wiring
        cells.drop(wiring.of_a_pass)
        if not self._losses:
            self._before = cells.tensors(wiring.buffers)
        self._previous = cells.tensors(wiring.reread)
        self.forwards += 1
        self._last_loss = None
        entering = [
            self._key(port) if port.name in wiring.keys else next(batch_values)
            for port in step.forward.entering
        ]
        times = self._run(step.forward, entering)
        self._has_forward = True
        self._show(self.changed_buffers)
        return times

    def _change_step(self, shapes: Shapes) -> BoundStep:
        """Switch to the programs for batches of other shapes; release the current activations."""
        step = self._steps.get(shapes)
        if step is None:
            programs = self._compiled(self._compile_step, shapes)
            step = BoundStep(programs, self.programs.parameters, self._cells)
        _keep(self._steps, shapes, step)
        self._cells.drop(self._wiring.of_a_pass)
        self._step, self._wiring = step, step.wiring
        self._has_forward, self._last_loss = False, None
        step.describe_cells()
        return step

    @exclusive
    def backward(self, by: float = 1.0) -> tuple[LayerTime, ...] | None:
        """Queue the backward program of the last loss; add its gradients, times `by`, to existing
        ones."""
        self._check_open()
        loss = self._last_loss
        if loss is None:
            raise UsageError("backward() was called without a loss",
                             remedy="call compute_loss(label) first")  # fmt: skip
        seeds = [] if by == 1.0 else self._cells.tensors(self._wiring.seeds)
        try:
            self._cells.restore(
                (number, self._step.scaling(seed, np.float32(by))) for number, seed in seeds
            )
            if self._has_gradients:
                times = self._add()
            else:
                times = self._run_with_previous(self._step.backward)
        except BaseException:
            self._cells.restore(seeds)
            raise
        del seeds
        self._cells.drop(self._wiring.passing)
        self._losses.append(loss)
        self._last_loss = None
        self._has_forward = False
        self._dropped.clear()
        self._show(self._gradient_names)
        return times

    def _add(self) -> tuple[LayerTime, ...] | None:
        """Run the backward program into separate cells and add its gradients to the sums."""
        if self._addition is None:
            program = compile_accumulation(self.programs, self.device.machine)
            self._addition = BoundProgram(load_program(self.device, program), self._cells)
        backward = self._step.backward_of_more
        times = self._run_with_previous(backward)
        added = self._run(self._addition)
        times = None if times is None or added is None else (*times, *added)
        self._cells.drop(backward.outputs)
        return times

    @exclusive
    def update(self) -> tuple[LayerTime, ...] | None:
        """Run the queue, check the losses, and update parameters and optimizer state.

        Raises:
            TaskError: A loss is NaN or infinite; the text names the step and the first operator
                that made it. Parameters and buffers are then as before the step.
        """
        self._check_open()
        check_gradients(self._has_gradients, self._dropped)
        self._take_writes()
        if self.sharer is not None:
            self.sharer.check_step()
        self.device.flush()
        # The null executor has no numbers to check.
        for loss in self._losses if self.device.computes else ():
            if not math.isfinite(loss.item()):
                self._refuse(loss.item())
        self._cells.drop(self._wiring.momentary)
        if self._changes != self.optimizer.changes:
            self._renew_update()
        rates = self.optimizer.rates(self.steps)
        if rates != self._rates:
            for number, rate in enumerate(rates):
                if rate_name(number) in self._cells.numbers:
                    self._cells.put(rate_name(number), np.float32(rate))
            self._rates = rates
        before = self.steps, self._before, self._losses
        try:
            times = self._run(self._update, then=partial(self._stepped, self.steps + 1))
            self.device.flush()
        except BaseException:
            if self._update.run.take_back():
                self.steps, self._before, self._losses = before
            raise
        self._update.run.replaced = []
        self._show(self.parameter_names)
        return times

    @takes(batches=LIST)
    def step(self, batches: Sequence[tuple[Any, Any]]) -> list[float]:
        """Train on micro-batches with one update for all of them; return their losses.

        Gradients of earlier passes are dropped; those of this step exist until the next one. After
        an error, weights, buffers and counters are as before the step.

        Args:
            batches: Pairs of inputs and target, as many as `accumulation_steps`. Inputs are an
                array, a tuple by position or a mapping by name.

        Raises:
            UsageError: There is another number of micro-batches, or one does not fit the model.
            TaskError: A loss is NaN or infinite.
        """
        pairs = micro_batches_of(batches, self.accumulation_steps)
        self.zero_grad()
        steps, forwards = self.steps, self.forwards
        self._before, self._losses = [], []
        losses = []
        try:
            for inputs, target in pairs:
                if isinstance(inputs, Mapping):
                    self.forward(**inputs)
                else:
                    self.forward(*(inputs if isinstance(inputs, tuple) else (inputs,)))
                losses.append(self.compute_loss(target))
                self.backward()
            self.update()
        except BaseException:
            if self.steps == steps:
                self._undo()
                self.forwards = forwards
            raise
        return [loss.item() for loss in losses]

    def _renew_update(self) -> None:
        """Compile the update program for the current settings; its states are retained."""
        program = self._compile_update(self.programs, self.optimizer)
        self._update = self._bound_update(program)
        self.programs = replace(self.programs, update=program)
        self._start_states({})
        self._rates, self._changes = (), self.optimizer.changes

    def _stepped(self, steps: int) -> None:
        self._before, self._losses = [], []
        self.steps = steps

    def _run_with_previous(self, program: BoundProgram) -> tuple[LayerTime, ...] | None:
        """Run a program with the states from before the last forward pass."""
        after = self._cells.tensors(self._wiring.reread)
        self._cells.restore(self._previous)
        times = self._run(program)
        self._cells.restore(after)
        self._previous = []
        return times

    def _run(
        self, program: BoundProgram, entries: Sequence[Any] = (),
        then: Callable[[], object] | None = None,
    ) -> tuple[LayerTime, ...] | None:  # fmt: skip
        if self.profiling:
            return profile_operations(self.device, lambda: program.run(entries, then))
        program.run(entries, then)
        return None

    def _refuse(self, value: float) -> None:
        """Undo the step, drop the gradients, and raise the error for a non-finite loss."""
        self._cells.restore(self._before)
        slots = (slot.name for slot in self.programs.forward.inputs)
        # Run forward and loss again to find the operation that made NaN or Inf.
        where = find_non_finite(self._cells, (*slots, LABEL), (self._step.forward, self._step.loss))
        self._undo()
        raise TaskError(
            f"the loss of step {self.steps} is {value}",
            where=where,
            remedy="the weights are as before this step: lower the learning rate, clip gradients, "
            "or look at the batch",
        )

    def _undo(self) -> None:
        """Discard the passes since the last update, with their gradients and new buffers."""
        self._cells.restore(self._before)
        self._drop_gradients()
        self._cells.drop(self._wiring.momentary)
        self._before, self._losses, self._has_forward = [], [], False
        self._last_loss, self._previous = None, []
        self._show(self.changed_buffers)

    def close(self) -> None:
        """Stop training and release its tensors; may be called twice."""
        if self._closed:
            return
        self._end_sharing()
        if self.optimizer.bound_to is self:
            self.optimizer.bind(None)
        self._release()

    @exclusive
    def _end_sharing(self) -> None:
        # Check first: a failure later would leave the instance half closed.
        self.device.check_outside()
        if self.sharer is not None:
            self.sharer.end()

    @exclusive
    def _release(self) -> None:
        self._closed = True
        self._before, self._losses, self._last_loss, self._previous = [], [], None, []
        self._cells.close()
        # Unload the programs: they have device memory for their constants.
        self._steps.clear()
        self._evaluations.clear()
        del self._step, self._update, self._addition
        if self._owns_device:
            self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def micro_batches_of(batches: Sequence[Any], count: int) -> list[tuple[Any, Any]]:
    """Return the inputs and target of each micro-batch of a step.

    Raises `UsageError` if there is another number of them, or one is no pair.
    """
    for batch in batches:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UsageError(
                "a step takes a list of micro-batches, each a pair of inputs and target",
                got=" ".join(repr(batch).split())[:60], remedy="step([(inputs, target)])",
            )  # fmt: skip
    if len(batches) != count:
        raise UsageError(
            "a step takes as many micro-batches as the training accumulates",
            expected=str(count), got=str(len(batches)),
            remedy=f"pass {count}" + (
                f", or compile with accumulation_steps={len(batches)}, in stages with "
                f"parallel={{'micro_batches': {len(batches)}}}" if batches else ""
            ),
        )  # fmt: skip
    return [(inputs, target) for inputs, target in batches]


def _keep(programs: dict[Shapes, T], shapes: Shapes, new: T) -> None:
    """Add an entry at the end of a cache of `MAX_SIZES` entries."""
    programs.pop(shapes, None)
    programs[shapes] = new
    while len(programs) > MAX_SIZES:
        del programs[next(iter(programs))]

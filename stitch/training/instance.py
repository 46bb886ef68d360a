"""`TrainingInstance`: a model in training on a device: its tensors, and the steps over them.

Parameters, optimizer state and saved activations stay where the programs left them; a step carries
in its batch, and out what is read. Forward, loss and backward for a batch of another size are
compiled when one comes, and work on the same tensors. No front ends or files here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from stitch.errors import CompileError, TaskError, UsageError
from stitch.program import Array, InputKind, Program
from stitch.report import Device
from stitch.runtime import LoadedProgram, Tensor
from stitch.training.graphs import KEPT_KINDS, MASTER, graph_of, rate_name
from stitch.training.losses import Loss
from stitch.training.observing import LayerTime, culprit, profiled
from stitch.training.optimizers import Optimizer
from stitch.training.pending_values import CaptureCall, LossTensor, PendingValue, TensorFuture
from stitch.training.programs import LABEL, TrainingPrograms, compile_accumulation, prediction_of
from stitch.training.stitching import (
    NamedCells,
    Shapes,
    Stitched,
    StitchedStep,
    fitted,
    loaded,
    other_shape,
)
from stitch.training.tensors import TrainingTensors, alone

#: What is said of tensors that an update has overwritten in part.
HALF_UPDATED = "an update failed after it had overwritten a part of the weights"
#: Sizes of batches whose programs are kept.
MAX_SIZES = 16
NamedShapes = Mapping[str, tuple[int, ...]]
T = TypeVar("T")


class TrainingInstance(TrainingTensors):
    """A model in training. Use it as a context manager, or call `close`; its scope ends it too.

    `forward`, `compute_loss`, `backward` and `update` each queue one program. While
    `profiling` is set each runs at once instead, exactly once, and returns the times of its
    operations. One device may hold several instances.
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
        seed: int = 0,
        owns_device: bool = False,
        compile_update: Callable[[TrainingPrograms, Optimizer], Program] | None = None,
        capture_call: CaptureCall | None = None,
        constants: Mapping[str, Array] | None = None,
        compile_step: Callable[[NamedShapes], tuple[Program, Program, Program]] | None = None,
        compile_evaluation: Callable[[NamedShapes], Program] | None = None,
    ) -> None:
        """`compile_update` makes the update anew where settings of the optimizer change that are
        no inputs of it; `capture_call` makes graphs of torch's functions over predictions;
        `compile_step` (forward, loss, backward) and `compile_evaluation` make the programs for
        other shapes of the inputs."""
        cells = NamedCells(device)
        optimizer.check_free()
        step_programs = (programs.forward, programs.loss, programs.backward)
        step = StitchedStep(step_programs, programs.parameters, cells)
        super().__init__(programs, cells, step, seed, constants or {})
        self._compile_step, self._compile_evaluation = compile_step, compile_evaluation
        #: By the shapes of a batch.
        self._steps: dict[Shapes, StitchedStep] = {step.shapes: step}
        self._evaluations: dict[Shapes, tuple[LoadedProgram, int]] = {}
        self.loss_fn = loss
        self.optimizer = optimizer
        self.capture_call = capture_call
        self.profiling = False
        self._owns_device = owns_device
        self._compile_update, self._changes = compile_update, optimizer.changes
        self._load()
        self._initialise(values)
        self._rates: tuple[float, ...] = ()
        self._losses: list[LossTensor] = []
        self._last_loss: LossTensor | None = None
        #: What the last forward pass replaced, as the backward program of its loss reads it.
        self._previous: list[tuple[int, Any]] = []
        optimizer.bind(self)

    def _load(self) -> None:
        """The programs that know no batch, and the one for evaluation."""
        device, programs = self.device, self.programs
        self._update = Stitched(loaded(device, programs.update), self._cells, lost_by=HALF_UPDATED)
        #: Adds gradients of a micro-batch to those so far.
        self._addition: Stitched | None = None
        self._evaluations[self._step.shapes] = self._loaded_evaluation(programs.evaluation)
        self._wiring = self._step.wiring
        self.inputs, self._gradient_cells = self._wiring.inputs, self._wiring.gradients

    def _initialise(self, values: Mapping[str, Array]) -> None:
        """Every kept tensor gets its place on the device, before any plan is made."""
        cells = self._cells
        for slot in self.programs.forward.inputs:
            if slot.kind in KEPT_KINDS:
                cells.put(slot.name, values[slot.name])
        self._start_states(values)

    def _start_states(self, values: Mapping[str, Array]) -> None:
        """The update's states that are not there yet."""
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

    # -- the loop's face ---------------------------------------------------------------------------

    def __call__(self, *batch: Any, **named: Any) -> TensorFuture:
        """Queue the forward program on a batch (arrays or tensors, by position or name)."""
        self.forward(*batch, **named)
        return self.prediction

    def takes_sizes_of(self, batch: Sequence[Any], named: Mapping[str, Any]) -> bool:
        """Whether there are programs for the shapes of a batch, or it has other axes than they."""
        names = [port.name for port in self._step.batch]
        given = {**dict(zip(names, batch, strict=False)), **named}
        sizes = tuple([tuple(getattr(given.get(name), "shape", ())) for name in names])
        axes = list(map(len, sizes))
        return sizes in self._steps or axes != list(map(len, self._step.shapes))

    @alone
    def predict(self, *batch: Any, **named: Any) -> Tensor:
        """Queue the program for evaluation on a batch: no gradients, nothing random, no changes.

        Normalization goes by the running statistics. Gives the prediction, pending. The program for
        a batch of another size is compiled first.
        """
        self._check_open()
        self._take_writes(runs=True)
        arrays = fitted(self._step.batch, batch, named)
        shapes = tuple([array.shape for array in arrays])
        evaluation = self._evaluations.get(shapes)
        if evaluation is None:
            program = self._compiled(self._compile_evaluation, shapes)
            evaluation = self._loaded_evaluation(program)
            _keep(self._evaluations, shapes, evaluation)
        agent, number = evaluation
        given = dict(zip(self.inputs, arrays, strict=True))
        cells = self._cells
        outputs = self.device.submit(agent, [
            given[port.name] if port.name in given else cells.get(port.name)
            for port in agent.ports
        ])  # fmt: skip
        self._show(())
        return outputs if isinstance(outputs, Tensor) else outputs[number]

    def _loaded_evaluation(self, program: Program) -> tuple[LoadedProgram, int]:
        """A program for evaluation on the device, and which of its outputs is the prediction: as
        for training the first floating one, where there is one."""
        try:
            prediction = prediction_of(graph_of(program))
        except CompileError:
            return loaded(self.device, program), 0
        names = [slot.name for slot in program.outputs]
        return loaded(self.device, program), names.index(prediction)

    def _compiled(self, compile: Callable[[NamedShapes], T] | None, shapes: Shapes) -> T:
        """The programs for other shapes; raises `UsageError` where there are none."""
        ports = self._step.batch
        try:
            if compile is None:
                raise UsageError("a model that was read from a file has no module to compile again")
            if [*map(len, shapes)] != [len(port.shape) for port in ports]:
                raise UsageError("it has another number of axes")
            with nullcontext() if self._sharer is None else self._sharer.without_gradients():
                return compile(dict(zip(self.inputs, shapes, strict=True)))
        except (CompileError, UsageError) as error:
            given = zip(ports, shapes, strict=True)
            port, shape = next(pair for pair in given if pair[0].shape != pair[1])
            raise other_shape(port, shape, error.what) from error

    @property
    def prediction(self) -> TensorFuture:
        """The last forward pass's prediction; raises `UsageError` before the first."""
        tensor = self._cells.tensor(self._wiring.prediction)
        if tensor is None:
            raise UsageError("there is no prediction yet", remedy="call forward(batch) first")
        return TensorFuture(self, tensor, self.forwards)

    @alone
    def compute_loss(self, label: Any) -> LossTensor:
        """Queue the loss program on the last prediction; raises `UsageError` for bad labels."""
        self._check_open()
        if not self._has_forward:
            raise UsageError("there is no prediction to judge", remedy="call the model first")
        if not isinstance(label, Tensor):
            label = np.asarray(label)
            self.loss_fn.check_label(label, self._step.prediction_type)
            label = label.astype(self._step.label.dtype, copy=False)
        self._run(self._step.loss, [label])
        loss = self._cells.tensor(self._wiring.loss)
        assert loss is not None
        self._last_loss = LossTensor(self, loss)
        return self._last_loss

    def backward_of(self, loss: LossTensor, by: float) -> None:
        """`LossTensor.backward`: queue the backward program for this loss, `by` times."""
        if loss is not self._last_loss:
            raise UsageError(
                "backward() goes back once, from the last loss: its activations are gone",
                remedy="call the model and the loss again",
            )
        self.backward(by)

    @alone
    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._drop_gradients()

    @property
    def _has_gradients(self) -> bool:
        held, gradients = self._cells.values, self._wiring.gradients
        return bool(gradients) and None not in [held[number] for number in gradients]

    # -- the lower face ----------------------------------------------------------------------------

    @alone
    def forward(self, *batch: Any, **named: Any) -> tuple[LayerTime, ...] | None:
        """Queue the forward program; times of its operations while profiling.

        Those for a batch of another size are compiled first.
        """
        self._check_open()
        self._take_writes(runs=True)
        cells, step = self._cells, self._step
        arrays = fitted(step.batch, batch, named)
        shapes = tuple([array.shape for array in arrays])
        if shapes != step.shapes:
            step = self._change_step(shapes)
        given, wiring = iter(arrays), self._wiring
        cells.drop(wiring.of_a_pass)
        if not self._losses:
            self._before = cells.tensors(wiring.buffers)
        self._previous = cells.tensors(wiring.reread)
        self.forwards += 1
        self._last_loss = None
        entering = [
            self._key(port) if port.name in wiring.keys else next(given)
            for port in step.forward.entering
        ]
        times = self._run(step.forward, entering)
        self._has_forward = True
        self._show(self._changed_buffers)
        return times

    def _change_step(self, shapes: Shapes) -> StitchedStep:
        """Go on with the programs for batches of other shapes; those of now lose what they made."""
        step = self._steps.get(shapes)
        if step is None:
            programs = self._compiled(self._compile_step, shapes)
            step = StitchedStep(programs, self.programs.parameters, self._cells)
        _keep(self._steps, shapes, step)
        self._cells.drop(self._wiring.of_a_pass)
        self._step, self._wiring = step, step.wiring
        self._has_forward, self._last_loss = False, None
        step.describe_cells()
        return step

    @alone
    def backward(self, by: float = 1.0) -> tuple[LayerTime, ...] | None:
        """Queue the backward program of the last loss; gradients, multiplied by a number, are added
        to those there are."""
        self._check_open()
        loss = self._last_loss
        if loss is None:
            raise UsageError("there is no loss to go back from", remedy="judge(label) first")
        seeds = [] if by == 1.0 else self._cells.tensors(self._wiring.seeds)
        try:
            self._cells.restore((number, _multiplied(seed, by)) for number, seed in seeds)
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
        """Backward of another micro-batch, whose gradients are added to those so far."""
        if self._addition is None:
            program = compile_accumulation(self.programs, self.device.machine)
            self._addition = Stitched(loaded(self.device, program), self._cells)
        backward = self._step.backward_of_more
        times = self._run_with_previous(backward)
        added = self._run(self._addition)
        times = None if times is None or added is None else (*times, *added)
        self._cells.drop(backward.outputs)
        return times

    @alone
    def update(self) -> tuple[LayerTime, ...] | None:
        """Run what is queued, check the losses, and update parameters and optimizer state.

        Raises `TaskError` for a loss that is NaN or infinite, naming the step and the first
        operator that made it; parameters and buffers are then as before the step.
        """
        self._check_open()
        if not self._has_gradients:
            raise UsageError("there are no gradients to step with", remedy="loss.backward() first")
        if self._dropped:
            raise UsageError(
                "the update steps all parameters, and some have no gradient any more",
                got=", ".join(sorted(self._dropped)[:4]),
                remedy="optimizer.zero_grad() drops all; requires_grad_(False) before compile "
                "leaves a parameter out",
            )
        self._take_writes()
        if self._sharer is not None:
            self._sharer.check_step()
        self.device.flush()
        # Without data no loss is a number; all else goes as it does with data.
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
        self._show(self._parameter_names)
        return times

    def _renew_update(self) -> None:
        """The update by the optimizer's settings as they are now; its states stay."""
        if self._compile_update is None:
            raise UsageError(
                "settings of an optimizer other than its rate are part of the update program",
                remedy="compile the model again",
            )
        program = self._compile_update(self.programs, self.optimizer)
        self._update = Stitched(loaded(self.device, program), self._cells, lost_by=HALF_UPDATED)
        self.programs = replace(self.programs, update=program)
        self._start_states({})
        self._rates, self._changes = (), self.optimizer.changes

    def _stepped(self, steps: int) -> None:
        self._before, self._losses = [], []
        self.steps = steps

    def _run_with_previous(self, stitched: Stitched) -> tuple[LayerTime, ...] | None:
        after = self._cells.tensors(self._wiring.reread)
        self._cells.restore(self._previous)
        times = self._run(stitched)
        self._cells.restore(after)
        self._previous = []
        return times

    def _run(
        self, stitched: Stitched, entries: Sequence[Any] = (),
        then: Callable[[], object] | None = None,
    ) -> tuple[LayerTime, ...] | None:  # fmt: skip
        if self.profiling:
            return profiled(self.device, lambda: stitched.run(entries, then))
        stitched.run(entries, then)
        return None

    # -- when it goes wrong ------------------------------------------------------------------------

    def _refuse(self, value: float) -> None:
        """The step has not happened: buffers as before it, gradients gone; then the error."""
        self._cells.restore(self._before)
        slots = (slot.name for slot in self.programs.forward.inputs)
        # Who first made NaN or Inf is found by running forward and loss once more.
        where = culprit(self._cells, (*slots, LABEL), (self._step.forward, self._step.loss))
        self._cells.restore(self._before)
        self._drop_gradients()
        self._cells.drop(self._wiring.momentary)
        self._before, self._losses, self._has_forward = [], [], False
        self._show(self._changed_buffers)
        raise TaskError(
            f"the loss of step {self.steps} is {value}",
            where=where,
            remedy="the weights are as before this step: lower the learning rate, clip gradients, "
            "or look at the batch",
        )

    # -- life --------------------------------------------------------------------------------------

    @alone
    def close(self) -> None:
        """Stop training and free its tensors; closing twice is allowed."""
        if self._closed:
            return
        # Half a close would be worse than none.
        self.device.check_outside()
        if self._sharer is not None:
            self._sharer.end()
        self._closed = True
        if self.optimizer.bound_to is self:
            self.optimizer.bind(None)
        self._before, self._losses, self._last_loss, self._previous = [], [], None, []
        self._cells.close()
        # Loaded programs hold the places of their constants.
        self._steps.clear()
        self._evaluations.clear()
        del self._step, self._update, self._addition
        if self._owns_device:
            self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _keep(programs: dict[Shapes, T], shapes: Shapes, new: T) -> None:
    """Programs for a size of batch come last; the first ones go where there are too many."""
    programs.pop(shapes, None)
    programs[shapes] = new
    while len(programs) > MAX_SIZES:
        del programs[next(iter(programs))]


def _multiplied(tensor: Tensor | None, by: float) -> Tensor:
    assert tensor is not None, "a loss that was judged has a gradient to go back from"
    return PendingValue(tensor).multiplied(by).tensor

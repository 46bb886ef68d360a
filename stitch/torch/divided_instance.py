"""`DividedInstance`: a training on several devices, driven by a torch loop.

Calls and losses queue nothing. `backward()`, or reading the loss, runs the forward and backward
passes of all micro-batches; `optimizer.step()` updates the weights, of which torch gets copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stitch.errors import TaskError, UsageError
from stitch.mesh import CompiledStages
from stitch.program import Array, InputKind, TensorDesc
from stitch.training import (
    MASTER,
    LossTensor,
    Sharer,
    check_gradients,
    constants_of,
    live_training,
)

#: The inputs and the target of a micro-batch.
MicroBatch = tuple[Any, Any]


class Passes:
    """The passes of a batch, forward and backward; `losses`, `values`: empty before they run."""

    def __init__(self, instance: DividedInstance, batches: Sequence[MicroBatch]) -> None:
        self._instance = weakref.ref(instance)
        self.batches, self.losses = batches, list[float]()
        #: The parameters and states that they used: a prediction may be read after the step.
        self.values: Mapping[str, Array] = {}
        self.is_mean = instance.loss_fn.reduction == "mean"

    def numpy(self) -> Array:
        """Return the loss of the batch."""
        if not self.losses:
            live_training(self._instance()).run(self)
        total = np.sum(np.asarray(self.losses, np.float32))
        return np.asarray(total / len(self.losses) if self.is_mean else total, np.float32)


class DividedInstance:
    """What a loop, an optimizer and `SharedModule` need of a training on several devices."""

    #: No device has the memory of torch: the module and the training have copies.
    device = None

    def __init__(self, compiled: CompiledStages) -> None:
        compiled.optimizer.check_free()
        self.loss_fn, self.optimizer = compiled.loss, compiled.optimizer
        self.parameter_names = compiled.model.names(InputKind.PARAMETER)
        self.buffer_names = self.changed_buffers = compiled.model.names(InputKind.STATE)
        #: Frozen values, which are constants of the programs.
        self.constants = constants_of(compiled.model.graph)
        self.training = compiled.start()
        weakref.finalize(self, self.training.close).atexit = False
        self.sharer: Sharer | None = None
        self._closed = False
        #: What the training has, where it was read since it changed; and what it shall have.
        self._values, self._gradients = dict[str, Array](), dict[str, Array]()
        self._writes = dict[str, Array]()
        self._dropped = set[str]()
        self._last: tuple[LossTensor, Passes] | None = None
        #: Whether `backward` was called since the last `zero_grad`, and since the last update.
        self._has_gradients = self._is_ready = False
        #: Whether an update was sent whose weights torch could not get.
        self._has_failed = False
        self.optimizer.bind(self)

    @property
    def steps(self) -> int:
        """The optimizer steps so far."""
        return self.training.steps

    @property
    def is_closed(self) -> bool:
        """Whether training has stopped."""
        return self._closed or self.training.mesh.is_closed

    # -- the loop ----------------------------------------------------------------------------------

    def compute_loss(self, batches: Sequence[MicroBatch]) -> tuple[LossTensor, Passes]:
        """Return the loss of a batch, which is computed when it is read, and its passes."""
        passes = Passes(self, batches)
        self._last = LossTensor(self, passes), passes
        return self._last

    def run(self, of: Passes) -> None:
        """Run the passes of the last batch."""
        if self._last is None or of is not self._last[1]:
            raise UsageError(
                "this is not the last loss: its batch was released",
                remedy="read it before the model is called again",
            )
        if self._is_ready:
            raise UsageError(
                "the passes of this loss would overwrite the gradients of an earlier backward()",
                remedy="call optimizer.step() or optimizer.zero_grad() before it; model.eval() is "
                "for losses without gradients",
            )
        if self._has_gradients and not self._gradients:
            self._gradients = self.training.gradients()
        self._take_writes(runs=True)
        of.losses = self.training.compute_gradients(of.batches)
        of.batches, of.values = (), self._values

    def backward_of(self, loss: LossTensor, by: float) -> None:
        """Run the passes of a loss, whose gradients `update` uses."""
        if self._last is None or loss is not self._last[0]:
            raise UsageError(
                "backward() can run once, for the last loss: its activations were released",
                remedy="call the model and the loss again",
            )
        if by != 1.0:
            raise UsageError(
                "a loss that is computed on several devices is not scaled", got=f"{by} * loss",
                remedy="accumulation_steps=N divides each batch into N micro-batches",
            )  # fmt: skip
        if self._has_gradients:
            raise UsageError(
                "several devices add gradients of the micro-batches of one batch only, and there "
                "are those of an earlier backward()",
                remedy="call optimizer.zero_grad() before it; pass a larger batch, and "
                "accumulation_steps=N",
            )
        passes = self._last[1]
        if not passes.losses:
            self.run(passes)
        self._last, self._has_gradients, self._is_ready = None, True, True
        self._show([f"{name}.grad" for name in self.parameter_names])

    def update(self) -> None:
        """Update the weights; raise as `StagedTraining.update`."""
        check_gradients(self._is_ready, self._dropped)
        self._take_writes(runs=False)
        if self.sharer is not None:
            self.sharer.check_step()
        self._is_ready, steps = False, self.steps
        try:
            self.training.update()
            self._show_updated()
        except BaseException:
            if self.steps > steps:  # An interrupted update was sent.
                self._has_failed = True
                self._show_updated()
                self._has_failed = False
            raise

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._has_gradients = self._is_ready = False
        self._dropped.clear()
        self._gradients.clear()
        if self.sharer is not None:
            self.sharer.gradients_dropped()

    def close(self) -> None:
        """End the training; the module has its weights."""
        if self._closed:
            return
        if self.sharer is not None:
            self.sharer.end()
        if self.optimizer.bound_to is self:
            self.optimizer.bind(None)
        self._closed = True
        self.training.close()

    # -- tensors -----------------------------------------------------------------------------------

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self.parameter_names, *self.buffer_names)

    def desc_of(self, name: str) -> TensorDesc:
        """Return the description of a parameter or state."""
        return self.training.descs[name]

    def current(self, name: str) -> Array:
        """Return the elements; for a parameter with a float32 master, those of the master."""
        if name in self._writes:
            return self._writes[name]
        if name not in self._values:
            self._values = self.training.tensors(self._names)
        return self._values[name]

    def write(self, name: str, array: Array) -> None:
        """Overwrite a tensor before the next passes."""
        if name.endswith(".grad") and name not in self.training.descs:
            raise UsageError(
                f"{name} was changed: the gradients on several devices stay as they are",
                remedy="to clip them, compile with clip_grad_norm=",
            )
        if array.tobytes() != self.current(name).tobytes():
            self._writes[name] = np.array(array)
            self._show([name])

    def gradient(self, name: str) -> Array | None:
        """Return a parameter's gradient, None if there is none."""
        if not self._has_gradients or name in self._dropped:
            return None
        if not self._gradients:
            self._gradients = self.training.gradients()
        return self._gradients[name]

    def set_gradient(self, name: str, array: Array) -> bool:
        """Raise `UsageError`; return False if there is no gradient to overwrite."""
        if self.gradient(name) is None:
            return False
        self.write(f"{name}.grad", array)
        return True

    def drop_gradient(self, name: str) -> None:
        """Drop a parameter's gradient."""
        self._dropped.add(name)
        if self._dropped == {*self.parameter_names}:
            self.zero_grad()

    def optimizer_state(self) -> dict[str, Array]:
        """Return the optimizer state by name: `fc.weight.exp_avg`, `step`."""
        return self.training.tensors(self._optimizer_names)

    @property
    def _optimizer_names(self) -> list[str]:
        return [
            name for name in self.training.descs
            if name not in self._names and not name.endswith(f".{MASTER}")
        ]  # fmt: skip

    def set_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Overwrite the optimizer states in `state`."""
        self.training.set_tensors({n: state[n] for n in self._optimizer_names if n in state})

    def _take_writes(self, *, runs: bool) -> None:
        if self._has_failed:
            raise TaskError(
                "the last update failed on a part of the devices: the module has the weights "
                "before it, and the devices may have others",
                remedy="close() this instance, load a checkpoint into the module and the optimizer "
                "(load_state_dict), and compile the module again",
            )
        if self.sharer is not None:
            self.sharer.take_writes(runs=runs)
        if self._writes:
            self.training.set_tensors(self._writes)
            self._values = self._values | self._writes
            self._writes = {}

    def _show_updated(self) -> None:
        self._values = {}
        self._show(self._names)

    def _show(self, names: Sequence[str]) -> None:
        if self.sharer is not None:
            self.sharer.show(names)

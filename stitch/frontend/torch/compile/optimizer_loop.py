"""Run the step of a torch optimizer as a program on the device of torch.compile's graphs.

The program overwrites parameters and optimizer state. A machine that reads torch's memory in place
overwrites torch's tensors. On other machines, parameters and the tensors in the optimizer's `state`
share the device's memory from the first step on, so torch and programs read the same values. When
the compiled graphs are gone, the optimizer's methods and the parameters' memory are restored.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.compiler import CompileOptions, compile_graph, rated_executor
from stitch.errors import StitchError, UsageError
from stitch.frontend.torch.compile.graph_program import PRODUCER
from stitch.frontend.torch.shared_storage import (
    ArgumentSlot,
    OverwrittenTensor,
    ProgramArguments,
    RelocatedParameters,
    SharedStorage,
)
from stitch.frontend.torch.torch_internals import foreach_add
from stitch.program import DataType, Role, TensorDesc, ValueType
from stitch.runtime import PreparedGraph, chain_graph
from stitch.training import (
    STEP,
    Optimizer,
    Parameter,
    TorchOptimizer,
    is_rate,
    is_torch_optimizer,
    owner_of,
    rate_name,
    replace_methods,
    slot_places,
    update_graph,
)
from stitch.ttb import Binary

# Update programs ----------------------------------------------------------------------------------

_GRADIENT = "grad"

#: A parameter's number in its optimizer, and the name of a state; None for the parameter itself.
StateKey = tuple[int, str | None]


@dataclass(frozen=True, slots=True)
class OverwrittenInput:
    """An input that a program overwrites: a parameter, by its position among the program's
    parameters, or a state of it."""

    position: int
    desc: TensorDesc


def name_of(number: int) -> str:
    """The slot name of an optimizer's parameter: a name of digits would be a position."""
    return f"p{number}"


def _key_of(slot: str) -> StateKey:
    name, _, state = slot.partition(".")
    return int(name[1:]), state or None


def _as_slots(number: int, parameter: Any) -> Parameter:
    name, kind = name_of(number), ValueType(tuple(parameter.shape), DataType.FLOAT32)
    return Parameter(name, kind, f"{name}.{_GRADIENT}")


class UpdateProgram:
    """The program that steps the parameters of these numbers; raises what compiling raises."""

    def __init__(
        self, storage: SharedStorage, native: Optimizer, numbers: tuple[int, ...],
        parameters: Sequence[Any],
    ) -> None:  # fmt: skip
        self._storage, self.changes = storage, native.changes
        device = storage.device
        self._shapes = [p.shape for p in parameters]
        slots = list(map(_as_slots, numbers, parameters))
        graph = update_graph("update", slots, native)
        options = CompileOptions(
            placement=tuple(slot_places(graph, device.machine, {})), role=Role.UPDATE,
            executor=rated_executor(device.executor),
        )  # fmt: skip
        program = compile_graph(graph, device.machine, options).program
        #: In the order of its inputs.
        self.overwrites: dict[StateKey, OverwrittenInput] = {}
        gradients: list[int] = []
        positions = {number: position for position, number in enumerate(numbers)}
        #: For each input its key, the name of a number, or None for a gradient.
        self._inputs: list[StateKey | str | None] = []
        for index, slot in enumerate(program.inputs):
            if is_rate(slot.name) or slot.name == STEP:
                self._inputs.append(slot.name)
                continue
            number, state = key = _key_of(slot.name)
            position = positions[number]
            if state == _GRADIENT:
                self._inputs.append(None)
                gradients.append(position)
            else:
                self._inputs.append(key)
                self.overwrites[key] = OverwrittenInput(position, program.input_desc(index))
        #: The key of each output; None for the step count.
        self._outputs = [
            None if output.name == STEP else _key_of(output.name) for output in program.outputs
        ]
        loaded = device.load(Binary((program,), device.machine.shape, PRODUCER))
        step, _ = chain_graph((loaded,), ({},), "optimizer step")
        self._prepared = PreparedGraph(device, step.table(), title="the optimizer's step")
        #: Positions of the gradients, in the order of the inputs.
        self._gradients = gradients
        arguments = [ArgumentSlot(i, is_static=False) for i in range(len(gradients))]
        self._arguments = ProgramArguments(storage, arguments)

    def fits(self, parameters: Sequence[Any]) -> bool:
        """Whether parameters have the program's shapes."""
        return [p.shape for p in parameters] == self._shapes

    def run(
        self, overwritten: Sequence[OverwrittenTensor], rates: Sequence[float], count: int,
        gradients: Sequence[Any],
    ) -> None:  # fmt: skip
        """Overwrite tensors, which are in the order of `overwrites`; `gradients` are those of the
        program's parameters."""
        numbers: dict[str, Any] = {rate_name(i): np.float32(r) for i, r in enumerate(rates)}
        numbers[STEP] = np.int64(count)
        own = {one.tensor.untyped_storage().data_ptr() for one in overwritten}
        tensors = []
        for position in self._gradients:
            gradient = gradients[position]
            # Copy a gradient that shares a storage with an overwritten tensor.
            if gradient.untyped_storage().data_ptr() in own:
                gradient = gradient.clone()
            tensors.append(gradient)
        held = dict(zip(self.overwrites, overwritten, strict=True))
        device = self._storage.device
        try:
            with device.lock:
                arguments = self._arguments
                rest = iter(arguments.all_of(arguments.arrays(tensors)))
                results: Any = self._prepared.run(tuple([
                    next(rest) if name is None
                    else np.array(numbers[name]) if isinstance(name, str)
                    else held[name].value
                    for name in self._inputs
                ]))  # fmt: skip
                results = results if isinstance(results, tuple) else (results,)
                for key, value in zip(self._outputs, results, strict=True):
                    if key is not None:
                        held[key].replace_value(value)
        except BaseException:
            # An interrupted run may still be queued. Run it now: later it would overwrite what
            # torch has written meanwhile.
            with suppress(StitchError):
                device.flush()
            raise


# Optimizers ---------------------------------------------------------------------------------------

#: Maximum number of sets of parameters with gradients for which programs are cached.
MAX_PROGRAMS = 16


class OptimizerLoop:
    """Runs the steps of a torch optimizer on a device, as long as this object lives.

    Raises `UsageError` for an unsupported optimizer, and for one that steps on another device.
    """

    def __init__(self, theirs: Any, storage: SharedStorage) -> None:
        parameters = [p for group in theirs.param_groups for p in group["params"]]
        names = {id(p): (name_of(i),) for i, p in enumerate(parameters)}
        follower = TorchOptimizer(theirs, names)
        self.theirs, self.storage, self.parameters = theirs, storage, parameters
        self._follower, self._numbers = follower, {id(p): i for i, p in enumerate(parameters)}
        self._programs: dict[tuple[int, ...], UpdateProgram] = {}
        self._overwritten: dict[StateKey, OverwrittenTensor] = {}
        self._relocated = RelocatedParameters()
        #: torch's step without hooks; `step` calls the hooks.
        self._torch_step = partial(type(theirs).step.__wrapped__, theirs)
        methods: dict[str, Callable[..., Any]] = {"step": self.step, "zero_grad": self.zero_grad}
        self._end = replace_methods(theirs, methods, self, [self._relocated.restore])

    def check_free(self) -> None:
        """Raise `UsageError`: the optimizer steps here."""
        raise UsageError(
            "this optimizer already steps the graphs of another torch.compile",
            remedy="create an optimizer for each device, or call torch.compiler.reset() first",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Replaces `zero_grad` of the optimizer."""
        type(self.theirs).zero_grad(self.theirs, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Replaces `step` of the optimizer, and calls its hooks.

        As in torch, parameters without gradients stay. Torch itself steps parameters that are not
        dense float32 tensors on the CPU, row-major if the device reads them in place, and those of
        a fused step with a gradient scaler.
        """
        return _hooked_step(self.theirs, *(() if closure is None else (closure,)))

    def step_now(self, closure: Callable[[], Any] | None) -> Any:
        """Step without hooks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [p for p in self.parameters if p.grad is not None]
        states = [self.theirs.state.get(p, {}) for p in stepped]
        count = _count_of(states)
        is_scaled = getattr(self.theirs, "found_inf", None) is not None
        if count is None or is_scaled or not all(map(self._is_supported, stepped)):
            self._torch_step()
        else:
            self._follower.update_settings()
            new = [p for p, state in zip(stepped, states, strict=True) if not state]
            try:
                with torch.no_grad():
                    self._update(stepped, states, count)
            except BaseException:
                # The first step of these parameters was not taken.
                for parameter in new:
                    self.theirs.state.pop(parameter, None)
                raise
        self.theirs._opt_called = True
        return loss

    def _is_supported(self, parameter: Any) -> bool:
        if not (_is_plain(parameter) and _is_plain(parameter.grad)):
            return False
        # Copies on a device are dense.
        return bool(parameter.is_contiguous() or not self.storage.device.reads_in_place)

    def _update(self, stepped: Sequence[Any], states: list[dict[str, Any]], count: int) -> None:
        native = self._follower.native
        key = tuple([self._numbers[id(p)] for p in stepped])
        program = self._programs.get(key)
        if program is None or program.changes != native.changes:
            program = self._new_program(key, stepped)
        overwritten = self._shared(program, stepped, states)
        if overwritten is None:
            if not all(map(_is_state_of, stepped, states)):
                self._torch_step()
                return
            if not program.fits(stepped):
                program = self._new_program(key, stepped)
            overwritten = self._share(program, stepped)
            states = [self.theirs.state[p] for p in stepped]
        try:
            program.run(overwritten, native.rates(count), count, [p.grad for p in stepped])
        except BaseException:
            for one in overwritten:
                one.invalidate()
            self._overwritten.clear()
            raise
        for parameter in stepped:
            torch.autograd.graph.increment_version(parameter)
        if self._follower.counts:
            foreach_add([state[STEP] for state in states], 1)

    def _new_program(self, key: tuple[int, ...], stepped: Sequence[Any]) -> UpdateProgram:
        native = self._follower.native
        program = self._programs[key] = UpdateProgram(self.storage, native, key, stepped)
        while len(self._programs) > MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return program

    def _shared(
        self, program: UpdateProgram, stepped: Sequence[Any], states: Sequence[dict[str, Any]]
    ) -> list[OverwrittenTensor] | None:  # fmt: skip
        """The tensors that a program overwrites, in its order; None if torch has moved one."""
        shared = []
        for key, slot in program.overwrites.items():
            name, entry = key[1], self._overwritten.get(key)
            tensor = stepped[slot.position] if name is None else states[slot.position].get(name)
            if tensor is None or entry is None or not _fits(entry, tensor, slot):
                return None
            shared.append(entry)
        return shared

    def _share(self, program: UpdateProgram, stepped: Sequence[Any]) -> list[OverwrittenTensor]:
        """Make torch and the device share the tensors that a program overwrites."""
        native, counts = self._follower.native, self._follower.counts
        for key, slot in program.overwrites.items():
            (number, name), parameter = key, stepped[slot.position]
            state = self.theirs.state[parameter]
            group = native.groups[native.group_of(name_of(number))]
            _initialize(state, parameter, group, counts=counts)
            tensor = parameter if name is None else state[name]
            entry = self._overwritten.pop(key, None)
            if entry is None or not _fits(entry, tensor, slot):
                # load_state_dict may give a state other strides.
                entry = OverwrittenTensor(self.storage, tensor, slot.desc)
                if name is not None:
                    state[name] = entry.tensor
                elif not entry.is_at(parameter):
                    self._relocated.relocate(parameter, entry.tensor)
            self._overwritten[key] = entry
        return [self._overwritten[key] for key in program.overwrites]


def _fits(entry: OverwrittenTensor, tensor: Any, slot: OverwrittenInput) -> bool:
    """Whether torch has not moved a tensor, and it has the shape that a program overwrites."""
    return entry.is_at(tensor) and entry.tensor.shape == slot.desc.shape


def _is_plain(tensor: Any) -> bool:
    return bool(tensor.dtype is torch.float32 and tensor.is_cpu and tensor.layout is torch.strided)


def _is_state_of(parameter: Any, state: Mapping[str, Any]) -> bool:
    """Whether the tensors of a state have the parameter's shape and a supported type."""
    tensors = [t for name, t in state.items() if name != STEP and t is not None]
    return all(_is_plain(t) and (not t.dim() or t.shape == parameter.shape) for t in tensors)


def _count_of(states: Sequence[Mapping[str, Any]]) -> int | None:
    """The number of steps that parameters have taken; None if it differs.

    SGD does not count: a parameter without momentum buffer has taken none.
    """
    counts = set()
    for state in states:
        count = state.get(STEP)
        if count is None:
            count = any(value is not None for value in state.values())
        counts.add(int(count))
    return counts.pop() if len(counts) == 1 else None


def _initialize(
    state: dict[str, Any], parameter: Any, optimizer: Optimizer, *, counts: bool
) -> None:
    """Create the missing tensors of a parameter's state, as torch does in the first step."""
    if not state and counts:
        state[STEP] = torch.zeros((), dtype=torch.float32)
    for name in optimizer.states:
        if state.get(name) is None:
            start = optimizer.start_of(name)
            if name in optimizer.scalar_states:
                state[name] = torch.full((), start, dtype=parameter.dtype)
            else:
                state[name] = torch.full_like(parameter, start, requires_grad=False)


_loops: weakref.WeakValueDictionary[int, OptimizerLoop] = weakref.WeakValueDictionary()


def _step(theirs: Any, closure: Callable[[], Any] | None = None) -> Any:
    """`step` for torch's hooks, which may replace its arguments."""
    return _loops[id(theirs)].step_now(closure)


_hooked_step: Callable[..., Any] = torch.optim.Optimizer.profile_hook_step(_step)


def optimizer_loop(optimizer: Any, storage: SharedStorage) -> OptimizerLoop:
    """Return the loop of an optimizer on a device; raises `UsageError` if the object is not an
    optimizer of torch."""
    if not is_torch_optimizer(optimizer):
        raise UsageError(
            "options['optimizer'] is not an optimizer of torch.optim",
            got=type(optimizer).__name__,
            remedy="pass the optimizer that the training loop steps, such as "
            "torch.optim.SGD(model.parameters(), ...)",
        )
    owner = owner_of(optimizer, "step")
    if isinstance(owner, OptimizerLoop) and owner.storage is storage:
        return owner
    loop = OptimizerLoop(optimizer, storage)
    _loops[id(optimizer)] = loop
    return loop


def loop_over(parameters: Sequence[Any]) -> OptimizerLoop | None:
    """Return the loop that steps one of these parameters, or None."""
    wanted = {id(p) for p in parameters}
    for loop in list(_loops.values()):
        if wanted.intersection(map(id, loop.parameters)):
            return loop
    return None

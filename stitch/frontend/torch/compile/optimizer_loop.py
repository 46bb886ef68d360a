"""The update of an optimizer of torch's on the device of torch.compile's graphs.

On a machine that reads torch's bytes in place these are torch's own. Elsewhere a parameter's bytes
are those of the device from its first step on: torch reads and writes them as it does any result,
so whatever it reads is what the next program reads. State is kept the same way, in the object's own
`state`. The object, and where parameters lie, are as they were when the compiled graphs are gone.
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
from stitch.frontend.torch.aten_call import data_type_of
from stitch.frontend.torch.compile.graph_program import PRODUCER, ProgramArguments
from stitch.frontend.torch.compile.shared_storage import ArgumentSlot, SharedStorage, Shown
from stitch.frontend.torch.compile.subgraphs import axes_in_memory
from stitch.frontend.torch.tensor_bytes import ParameterHomes, array_at, tensor_on
from stitch.program import Array, DataType, Role, TensorDesc, ValueType
from stitch.runtime import PreparedGraph, Tensor, chain_graph, lend, share
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

# --------------------------------------------------------------------------------------------------
# Overwritten parameters

#: The order in which a tensor's axes lie; None where that is row-major.
Axes = tuple[int, ...] | None
#: A tensor's shape with its axes in that order, and the order: as what a program sees it.
Form = tuple[tuple[int, ...], Axes]


class Overwritten:
    """A tensor of torch's on bytes that a program overwrites; they are kept while this lives.

    `axes`: the order in which they lie, where they are read in place. Raises what allocating on the
    device raises.
    """

    __slots__ = (
        "__weakref__", "_shape", "_shown", "_strides", "form", "start", "storage_start", "tensor",
        "value",
    )  # fmt: skip

    def __init__(
        self, storage: SharedStorage, tensor: Any, desc: TensorDesc, axes: Axes = None
    ) -> None:
        device = storage.device
        self.form: Form = (desc.shape, axes)
        self._shown: Shown | None = None
        #: Its elements as torch has them: where they lay, or from now on on the device's bytes.
        self.tensor = tensor.detach()
        #: What stands for it now; a run that overwrites it takes this, and gives another.
        self.value: Tensor
        if device.reads_in_place and tensor.numel():
            array = _array(in_order(self.tensor, axes))
            with device.lock:
                self.value = lend(device, array, "a tensor of torch", shared_by=self)
        else:
            self.value = device.empty(desc.without_address())
            dense = self.tensor.contiguous()
            device.write(self.value, _array(dense))
            if tensor.numel():
                self._shown = Shown(self.value, storage.shown)
                with device.lock:
                    shared = share(self.value, self._shown.ended)
                    self.tensor = tensor_on(shared, tensor.dtype)
                    self._shown.begin(self.tensor.data_ptr())
        self.start = self.tensor.data_ptr()
        #: Where the storage begins that it is in.
        self.storage_start = self.tensor.untyped_storage().data_ptr()
        self._shape, self._strides = self.tensor.shape, self.tensor.stride()

    def is_at(self, tensor: Any) -> bool:
        """Whether a tensor of torch's still lies here, in the same order."""
        return bool(
            tensor.data_ptr() == self.start
            and tensor.shape == self._shape
            and tensor.stride() == self._strides
        )

    def become(self, value: Tensor) -> None:
        """A run has overwritten it."""
        self.value = value
        if self._shown is not None:
            self._shown.tensor = value

    def give_up(self) -> None:
        """A run that was to overwrite it has failed: torch has what is there, no device has."""
        if self._shown is not None:
            self._shown.ended()


def axes_of(tensor: Any) -> Axes:
    """The order in which a tensor's axes lie, if it is dense at all."""
    return None if tensor.is_contiguous() else axes_in_memory(tensor.stride())


def in_order(tensor: Any, axes: Axes) -> Any:
    """A tensor with its axes in the order in which they lie."""
    return tensor if axes is None else tensor.permute(axes)


def _array(dense: Any) -> Array:
    """An array on a dense tensor, which it does not keep."""
    kind = data_type_of(dense.dtype).dtype
    return array_at(dense.data_ptr(), tuple(dense.shape), kind)


# --------------------------------------------------------------------------------------------------
# The loop

# --------------------------------------------------------------------------------------------------
# The program that steps some parameters of an optimizer of torch's, and overwrites what it steps.

_GRADIENT = "grad"

#: A parameter's number in its optimizer, and the word of a state of it; None for itself.
StateKey = tuple[int, str | None]


@dataclass(frozen=True, slots=True)
class OverwrittenInput:
    """What a program overwrites: a parameter, by its position among those that the program was made
    for, or a state of it; as what the program sees it, and wants it on the device."""

    position: int
    form: Form
    desc: TensorDesc


def name_of(number: int) -> str:
    """What an optimizer's parameter of this number is called: slots know digits as positions."""
    return f"p{number}"


def _key_of(slot: str) -> StateKey:
    name, _, word = slot.partition(".")
    return int(name[1:]), word or None


def _as_slots(number: int, parameter: Any, axes: Axes) -> Parameter:
    name, shape = name_of(number), tuple(in_order(parameter, axes).shape)
    return Parameter(name, ValueType(shape, DataType.FLOAT32), f"{name}.{_GRADIENT}")


class UpdateProgram:
    """The program that steps the parameters of these numbers.

    Raises what compiling a graph raises.
    """

    def __init__(
        self, storage: SharedStorage, native: Optimizer, numbers: tuple[int, ...],
        parameters: Sequence[Any],
    ) -> None:  # fmt: skip
        self._storage, self.changes = storage, native.changes
        device = storage.device
        self._made_for = [(p.shape, p.stride()) for p in parameters]
        #: The order in which the axes of each parameter lie; on a device they lie row-major.
        self._axes: list[Axes] = [axes_of(p) if device.reads_in_place else None for p in parameters]
        slots = list(map(_as_slots, numbers, parameters, self._axes))
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
        #: Of its other inputs the names of those that are numbers, None for a gradient.
        self._inputs: list[StateKey | str | None] = []
        for index, slot in enumerate(program.inputs):
            if is_rate(slot.name) or slot.name == STEP:
                self._inputs.append(slot.name)
                continue
            number, word = key = _key_of(slot.name)
            position = positions[number]
            if word == _GRADIENT:
                self._inputs.append(None)
                gradients.append(position)
            else:
                self._inputs.append(key)
                desc = program.input_desc(index)
                axes = self._axes[position] if desc.shape else None
                self.overwrites[key] = OverwrittenInput(position, (desc.shape, axes), desc)
        #: What each of its outputs is of these.
        self._outputs = [
            None if output.name == STEP else _key_of(output.name) for output in program.outputs
        ]
        loaded = device.load(Binary((program,), device.machine.shape, PRODUCER))
        table, _ = chain_graph((loaded,), ({},), "optimizer step")
        self._prepared = PreparedGraph(device, table, title="the optimizer's step")
        #: The gradients in the order in which it reads them, and how they are to lie.
        self._gradients = [(position, self._axes[position]) for position in gradients]
        arguments = [ArgumentSlot(i, is_static=False) for i in range(len(gradients))]
        self._arguments = ProgramArguments(storage, arguments)

    def fits(self, parameters: Sequence[Any]) -> bool:
        """Whether parameters have the shapes, and where they are read in place lie in the order,
        that it was made for."""
        in_place = self._storage.device.reads_in_place
        for parameter, (shape, strides) in zip(parameters, self._made_for, strict=True):
            if parameter.shape != shape or (in_place and parameter.stride() != strides):
                return False
        return True

    def run(
        self, overwritten: Sequence[Overwritten], rates: Sequence[float], count: int,
        gradients: Sequence[Any],
    ) -> None:  # fmt: skip
        """Overwrite these, which are in its order.

        Gradients are those of the parameters that it was made for. Raises what a run raises.
        """
        numbers: dict[str, Any] = {rate_name(i): np.float32(r) for i, r in enumerate(rates)}
        numbers[STEP] = np.int64(count)
        own = {one.storage_start for one in overwritten}
        tensors = []
        for position, axes in self._gradients:
            gradient = gradients[position]
            # What is being overwritten, or lies in one storage with it, is read as it was.
            if gradient.untyped_storage().data_ptr() in own:
                gradient = gradient.clone()
            tensors.append(in_order(gradient, axes))
        held = dict(zip(self.overwrites, overwritten, strict=True))
        device = self._storage.device
        try:
            with device.lock:
                arguments = self._arguments
                given = iter(arguments.all_of(arguments.arrays(tensors)))
                results: Any = self._prepared.run(tuple([
                    next(given) if name is None
                    else np.array(numbers[name]) if isinstance(name, str)
                    else held[name].value
                    for name in self._inputs
                ]))  # fmt: skip
                made = results if isinstance(results, tuple) else (results,)
                for key, value in zip(self._outputs, made, strict=True):
                    if key is not None:
                        held[key].become(value)
        except BaseException:
            # What was interrupted before it ran is still queued. It runs now or never: later it
            # would overwrite what torch has written meanwhile.
            with suppress(StitchError):
                device.flush()
            raise


#: Sets of parameters with gradients for which programs are kept; the oldest go first.
MAX_PROGRAMS = 16


class OptimizerLoop:
    """An optimizer of torch's that steps on a device, for as long as somebody holds this.

    Raises `UsageError` for one that we lack, and for one that steps elsewhere.
    """

    def __init__(self, theirs: Any, storage: SharedStorage) -> None:
        parameters = [p for group in theirs.param_groups for p in group["params"]]
        names = {id(p): (name_of(i),) for i, p in enumerate(parameters)}
        follower = TorchOptimizer(theirs, names)
        self.theirs, self.storage, self.parameters = theirs, storage, parameters
        self._follower, self._numbers = follower, {id(p): i for i, p in enumerate(parameters)}
        self._programs: dict[tuple[int, ...], UpdateProgram] = {}
        #: What programs overwrite.
        self._overwritten: dict[StateKey, Overwritten] = {}
        self._homes = ParameterHomes()
        #: Torch's own, without its hooks: `step` calls these.
        self._torch_step = partial(type(theirs).step.__wrapped__, theirs)
        methods: dict[str, Callable[..., Any]] = {"step": self.step, "zero_grad": self.zero_grad}
        self._end = replace_methods(theirs, methods, self, [self._homes.bring_back])

    def check_free(self) -> None:
        """Raise `UsageError`: it steps here."""
        raise UsageError(
            "this optimizer steps the graphs of another torch.compile already",
            remedy="give each device an optimizer of its own, or torch._dynamo.reset() first",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`zero_grad` of torch's object: gradients are torch's tensors, on the device's bytes."""
        type(self.theirs).zero_grad(self.theirs, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """`step` of torch's object, with its hooks. Parameters without a gradient are left alone,
        as in torch; what is no dense float32 on the CPU is stepped by torch itself, and so is what
        a scaler of gradients hands to a fused step."""
        given = () if closure is None else (closure,)
        return _hooked_step(self.theirs, *given)

    def step_now(self, closure: Callable[[], Any] | None) -> Any:
        """`step` between its hooks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [p for p in self.parameters if p.grad is not None]
        states = [self.theirs.state.get(p, {}) for p in stepped]
        count = _count_of(states)
        is_scaled = getattr(self.theirs, "found_inf", None) is not None
        if count is None or is_scaled or not all(map(self._is_ours, stepped)):
            self._torch_step()
        else:
            self._follower.update_settings()
            begun = [p for p, state in zip(stepped, states, strict=True) if not state]
            try:
                with torch.no_grad():
                    self._update(stepped, states, count)
            except BaseException:
                # No step is its first until it has been taken.
                for parameter in begun:
                    self.theirs.state.pop(parameter, None)
                raise
        self.theirs._opt_called = True
        return loss

    def _is_ours(self, parameter: Any) -> bool:
        if not (_is_plain(parameter) and _is_plain(parameter.grad)):
            return False
        # On a device what is not dense becomes so.
        if parameter.is_contiguous() or not self.storage.device.reads_in_place:
            return True
        return bool(in_order(parameter, axes_of(parameter)).is_contiguous())

    def _update(self, stepped: Sequence[Any], states: list[dict[str, Any]], count: int) -> None:
        native = self._follower.native
        key = tuple([self._numbers[id(p)] for p in stepped])
        program = self._programs.get(key)
        if program is None or program.changes != native.changes:
            program = self._made(key, stepped)
        overwritten = self._shared(program, stepped, states)
        if overwritten is None:
            if not all(map(_is_state_of, stepped, states)):
                self._torch_step()
                return
            if not program.fits(stepped):
                program = self._made(key, stepped)
            self._share(program, stepped)
            states = [self.theirs.state[p] for p in stepped]
            overwritten = self._shared(program, stepped, states)
            assert overwritten is not None, "what has just been put there is there"
        try:
            program.run(overwritten, native.rates(count), count, [p.grad for p in stepped])
        except BaseException:
            for one in overwritten:
                one.give_up()
            self._overwritten.clear()
            raise
        for parameter in stepped:
            torch.autograd.graph.increment_version(parameter)
        if self._follower.counts:
            torch._foreach_add_([state[STEP] for state in states], 1)

    def _made(self, key: tuple[int, ...], stepped: Sequence[Any]) -> UpdateProgram:
        """The program for these parameters as they lie, by the settings of now."""
        native = self._follower.native
        program = self._programs[key] = UpdateProgram(self.storage, native, key, stepped)
        while len(self._programs) > MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return program

    def _shared(
        self, program: UpdateProgram, stepped: Sequence[Any], states: Sequence[dict[str, Any]]
    ) -> list[Overwritten] | None:  # fmt: skip
        """What a program overwrites, in its order; None where torch has some of it elsewhere."""
        shared = []
        for key, given in program.overwrites.items():
            word, known = key[1], self._overwritten.get(key)
            tensor = stepped[given.position] if word is None else states[given.position].get(word)
            if tensor is None or known is None or known.form != given.form:
                return None
            if not known.is_at(tensor):
                return None
            shared.append(known)
        return shared

    def _share(self, program: UpdateProgram, stepped: Sequence[Any]) -> None:
        """What a program overwrites is where torch has it now, or torch has it there from now
        on."""
        native, counts = self._follower.native, self._follower.counts
        for key, given in program.overwrites.items():
            (number, word), parameter = key, stepped[given.position]
            state = self.theirs.state[parameter]
            _begin(state, parameter, native.groups[native.group_of(name_of(number))], counts=counts)
            tensor, (_, axes) = parameter if word is None else state[word], given.form
            known = self._overwritten.pop(key, None)
            if known is None or known.form != given.form or not known.is_at(tensor):
                if word is not None and not in_order(tensor, axes).is_contiguous():
                    # Torch has loaded it in another order.
                    tensor = torch.empty_like(parameter).copy_(tensor).detach()
                known = Overwritten(self.storage, tensor, given.desc, axes)
                if word is not None:
                    state[word] = known.tensor
                elif not known.is_at(parameter):
                    self._homes.move(parameter, known.tensor)
            self._overwritten[key] = known


def _is_plain(tensor: Any) -> bool:
    return bool(tensor.dtype is torch.float32 and tensor.is_cpu and tensor.layout is torch.strided)


def _is_state_of(parameter: Any, state: Mapping[str, Any]) -> bool:
    """Whether a state is what a program of ours steps: of its parameter's shape and type."""
    kept = [t for word, t in state.items() if word != STEP and t is not None]
    return all(_is_plain(t) and (not t.dim() or t.shape == parameter.shape) for t in kept)


def _count_of(states: Sequence[Mapping[str, Any]]) -> int | None:
    """How many steps parameters have taken, as one program counts them; None where they differ.

    Torch's word for it is that of the update's slot. SGD counts none: what it has no buffer for has
    taken none.
    """
    counts = set()
    for state in states:
        count = state.get(STEP)
        if count is None:
            count = any(value is not None for value in state.values())
        counts.add(int(count))
    return counts.pop() if len(counts) == 1 else None


def _begin(state: dict[str, Any], parameter: Any, optimizer: Optimizer, *, counts: bool) -> None:
    """What torch's object keeps of a parameter from its first step on."""
    if not state and counts:
        state[STEP] = torch.zeros((), dtype=torch.float32)
    for word in optimizer.states:
        if state.get(word) is None:
            start = optimizer.start_of(word)
            if word in optimizer.scalar_states:
                state[word] = torch.full((), start, dtype=parameter.dtype)
            else:
                state[word] = torch.full_like(parameter, start, requires_grad=False)


_loops: weakref.WeakValueDictionary[int, OptimizerLoop] = weakref.WeakValueDictionary()


def _step(theirs: Any, closure: Callable[[], Any] | None = None) -> Any:
    """`step` as hooks know it: called with torch's object, and with what they put in its place."""
    return _loops[id(theirs)].step_now(closure)


_hooked_step: Callable[..., Any] = torch.optim.Optimizer.profile_hook_step(_step)


def optimizer_loop(optimizer: Any, storage: SharedStorage) -> OptimizerLoop:
    """The loop of an optimizer on a device, a new one where there is none; raises `UsageError` for
    what is no optimizer of torch's."""
    if not is_torch_optimizer(optimizer):
        raise UsageError(
            "options['optimizer'] is an optimizer of torch.optim", got=type(optimizer).__name__,
            remedy="the object that the loop steps with: torch.optim.SGD(model.parameters(), ...)",
        )  # fmt: skip
    owner = owner_of(optimizer, "step")
    if isinstance(owner, OptimizerLoop) and owner.storage is storage:
        return owner
    loop = OptimizerLoop(optimizer, storage)
    _loops[id(optimizer)] = loop
    return loop


def loop_over(parameters: Sequence[Any]) -> OptimizerLoop | None:
    """The loop that steps one of these parameters."""
    wanted = {id(p) for p in parameters}
    for loop in list(_loops.values()):
        if wanted.intersection(map(id, loop.parameters)):
            return loop
    return None

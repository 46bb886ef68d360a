"""The update of an optimizer of torch's on the device of torch.compile's graphs.

Comes in: `options={"optimizer": ...}`, the storage that the device shares with torch. Goes out:
`step` of that object: a program that takes parameters, gradients and state where they lie. On a
machine that reads torch's bytes in place it writes them there too. Elsewhere a parameter's bytes
are those of the device from its first step on: torch reads and writes them as it does any result,
so whatever it reads is what the next program reads. State is kept the same way, in the object's own
`state`. The object, and where parameters lie, are as they were when the compiled graphs are gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stitch.compiler import CompileOptions, compile_graph, rated_executor
from stitch.errors import UsageError
from stitch.frontend.torch.compile.graph_outputs import Result
from stitch.frontend.torch.compile.program_arguments import ProgramArguments
from stitch.frontend.torch.compile.shared_storage import ArgumentSlot, SharedStorage
from stitch.frontend.torch.parameter_homes import ParameterHomes
from stitch.program import DataType, Role, ValueType
from stitch.runtime import PreparedGraph, chain_graph
from stitch.training import (
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

#: Sets of parameters with gradients for which programs are kept; the oldest go first.
MAX_PROGRAMS = 16
_STEP = "step"
_PRODUCER = "stitch torch.compile"


class OptimizerLoop:
    """An optimizer of torch's that steps on a device, for as long as somebody holds this.

    Raises `UsageError` for one that we lack, and for one that steps elsewhere.
    """

    def __init__(self, theirs: Any, storage: SharedStorage) -> None:
        parameters = [p for group in theirs.param_groups for p in group["params"]]
        names = {id(p): (str(i),) for i, p in enumerate(parameters)}
        follower = TorchOptimizer(theirs, names)
        self.theirs, self.storage, self.parameters = theirs, storage, parameters
        self._follower, self._names = follower, {k: name for k, (name,) in names.items()}
        self._programs: dict[tuple[str, ...], _Update] = {}
        self._homes = ParameterHomes()
        self._torch_step = theirs.step
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
        """`step` of torch's object. Parameters without a gradient are left alone, as in torch;
        what is no dense float32 on the CPU is stepped by torch itself."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [p for p in self.parameters if p.grad is not None]
        count = self._count(stepped)
        if count is None or not all(map(_is_ours, stepped)):
            self._torch_step()
        else:
            self._follower.follow()
            with torch.no_grad():
                self._update(stepped, count)
        self.theirs._opt_called = True
        return loss

    def _count(self, stepped: Sequence[Any]) -> int | None:
        """How many steps these have taken, as one program counts them; None where they differ.

        SGD counts none: what it has no buffer for has taken none.
        """
        counts = set()
        for parameter in stepped:
            state = self.theirs.state.get(parameter, {})
            begun = any(value is not None for value in state.values())
            counts.add(int(float(state.get(_STEP, begun))))
        return counts.pop() if len(counts) == 1 else None

    def _update(self, stepped: Sequence[Any], count: int) -> None:
        native, changes = self._follower.native, self._follower.native.changes
        key = tuple([self._names[id(p)] for p in stepped])
        program = self._programs.get(key)
        if program is None or program.changes != changes:
            program = self._programs[key] = _Update(self.storage, native, key, stepped)
            while len(self._programs) > MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        groups = {n: native.groups[native.group_of(n)] for n in key}
        state = self.theirs.state
        for name, parameter in zip(key, stepped, strict=True):
            _begin(state[parameter], parameter, groups[name], counts=self._follower.counts)
        made = program.run(native.rates(count), count, stepped, state)
        for (at, word), tensor in made.items():
            parameter = stepped[at]
            if word is not None:
                state[parameter][word] = tensor
            elif self.storage.device.reads_in_place:
                parameter.copy_(tensor)
            else:
                self._homes.move(parameter, tensor)
        for parameter in stepped:
            if _STEP in state[parameter]:
                state[parameter][_STEP] += 1


def _begin(state: dict[str, Any], parameter: Any, optimizer: Optimizer, *, counts: bool) -> None:
    """What torch's object keeps of a parameter from its first step on."""
    if not state and counts:
        state[_STEP] = torch.zeros((), dtype=torch.float32)
    for word in optimizer.states:
        if state.get(word) is None:
            shape = () if word in optimizer.scalar_states else parameter.shape
            state[word] = torch.full(shape, optimizer.start_of(word), dtype=parameter.dtype)


def _is_ours(parameter: Any) -> bool:
    return all(
        t.dtype is torch.float32 and t.layout is torch.strided and t.device.type == "cpu"
        for t in (parameter, parameter.grad)
    )


@dataclass(slots=True)
class _Slot:
    """An input or output of the program: which parameter, and the state's word (`grad` for the
    gradient, None for itself)."""

    at: int
    word: str | None
    result: Result | None = None


class _Update:
    """The program that steps some parameters, called with torch's tensors."""

    def __init__(
        self, storage: SharedStorage, native: Optimizer, names: tuple[str, ...],
        tensors: Sequence[Any],
    ) -> None:  # fmt: skip
        self.storage, self.names, self.changes = storage, names, native.changes
        device = storage.device
        parameters = [
            Parameter(name, ValueType(tuple(p.shape), DataType.FLOAT32), f"{name}.grad")
            for name, p in zip(names, tensors, strict=True)
        ]
        graph = update_graph("update", parameters, native, in_place=False)
        options = CompileOptions(
            wishes=tuple(slot_places(graph, device.machine, {})), role=Role.UPDATE,
            executor=rated_executor(device.executor),
        )  # fmt: skip
        program = compile_graph(graph, device.machine, options).program
        self.inputs = [self._slot(slot.name) for slot in program.inputs]
        self.outputs: list[_Slot | str] = []
        for i, output in enumerate(program.outputs):
            slot = self._slot(output.name)
            if isinstance(slot, _Slot):
                kind = program.values[output.value].type
                slot.result = Result(i, torch.float32, kind.shape, None, may_be_copied=False)
            self.outputs.append(slot)
        loaded = device.load(Binary((program,), device.machine.shape, _PRODUCER))
        table, _ = chain_graph((loaded,), ({},), "optimizer step")
        self._prepared = PreparedGraph(device, table, title="the optimizer's step")
        slots = [slot for slot in self.inputs if isinstance(slot, _Slot)]
        self._arguments = ProgramArguments(
            storage,
            [
                ArgumentSlot(position, slot.word is None and device.reads_in_place)
                for position, slot in enumerate(slots)
            ],
        )

    def _slot(self, name: str) -> _Slot | str:
        if is_rate(name) or name == _STEP:
            return name
        parameter, _, word = name.partition(".")
        return _Slot(self.names.index(parameter), word or None)

    def run(
        self, rates: Sequence[float], count: int, stepped: Sequence[Any], state: Any
    ) -> dict[tuple[int, str | None], Any]:
        """The new parameters and states, by position and word."""
        tensors = []
        for slot in self.inputs:
            if isinstance(slot, _Slot):
                parameter = stepped[slot.at]
                if slot.word is None:
                    tensors.append(parameter.detach())
                elif slot.word == "grad":
                    tensors.append(parameter.grad)
                else:
                    tensors.append(state[parameter][slot.word])
        numbers: dict[str, Any] = {rate_name(i): np.float32(r) for i, r in enumerate(rates)}
        numbers[_STEP] = np.int64(count)
        with self.storage.device.lock:
            given = iter(self._arguments.all_of(self._arguments.arrays(tensors)))
            arguments = [
                next(given) if isinstance(slot, _Slot) else np.array(numbers[slot])
                for slot in self.inputs
            ]
            results: Any = self._prepared.run(tuple(arguments))
            results = results if isinstance(results, tuple) else (results,)
            return {
                (slot.at, slot.word): self.storage.result(tensor, slot.result)
                for slot, tensor in zip(self.outputs, results, strict=True)
                if isinstance(slot, _Slot) and slot.result is not None
            }


_loops: weakref.WeakValueDictionary[int, OptimizerLoop] = weakref.WeakValueDictionary()


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

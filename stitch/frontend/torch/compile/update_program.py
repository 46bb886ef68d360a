"""The program that steps some parameters of an optimizer of torch's, and overwrites what it steps.

Comes in: an optimizer's settings, parameters, the storage that the device shares with torch. Goes
out: `UpdateProgram`: what it overwrites, and a run of it on that and on torch's gradients. Must not
know: how the optimizer keeps its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.compiler import CompileOptions, compile_graph, rated_executor
from stitch.errors import StitchError
from stitch.frontend.torch.compile.overwritten import Axes, Form, Overwritten, axes_of, in_order
from stitch.frontend.torch.compile.program_arguments import ProgramArguments
from stitch.frontend.torch.compile.program_form import PRODUCER
from stitch.frontend.torch.compile.shared_storage import ArgumentSlot, SharedStorage
from stitch.program import DataType, Role, TensorDesc, ValueType
from stitch.runtime import PreparedGraph, chain_graph
from stitch.training import (
    STEP,
    Optimizer,
    Parameter,
    is_rate,
    rate_name,
    slot_places,
    update_graph,
)
from stitch.ttb import Binary

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
            wishes=tuple(slot_places(graph, device.machine, {})), role=Role.UPDATE,
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

"""Stitching by name: the tensors of a training, and the programs that take and give them.

A program is called once; its inputs are found and its outputs are put where their names say. The
programs of a step for one size of batch are a `StitchedStep`; those for another size work on the
same parameters, states and gradients. Batches become arrays that fit input slots. No losses or
optimizers here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.program import Array, InputKind, Program, TensorDesc, ValueType
from stitch.runtime import (
    InputPort,
    LoadedProgram,
    PersistentBuffers,
    RuntimeDevice,
    StatefulExecutable,
    Tensor,
    capture,
)
from stitch.tasks import Future, TaskGraph
from stitch.training.graphs import GRADIENT_NORM, MORE, Parameter
from stitch.training.programs import LABEL, LOSS
from stitch.ttb import Binary


class NamedCells(PersistentBuffers):
    """PersistentBuffers by name; programs see them by number."""

    def __init__(self, device: RuntimeDevice) -> None:
        super().__init__(device)
        self.numbers: dict[str, int] = {}
        self.descs: list[TensorDesc] = []

    def number(self, name: str, desc: TensorDesc) -> int:
        """The cell of a name; new names get an empty one, described by `desc`."""
        number = self.numbers.get(name)
        if number is None:
            number = self.numbers[name] = len(self.values)
            self.grow(1)
            self.descs.append(desc.without_address())
        return number

    def describe(self, descs: Mapping[int, TensorDesc]) -> None:
        """What is written to these cells from now on is described so."""
        for number, desc in descs.items():
            self.descs[number] = desc

    def get(self, name: str) -> Tensor | None:
        """The tensor of a name, None where there is none now."""
        number = self.numbers.get(name)
        return None if number is None else self.tensor(number)

    def elements(self, name: str) -> Array:
        """The elements of a name's tensor, which is there, without a handle on it."""
        with self.device.lock:
            value = self.values[self.numbers[name]]
            assert value is not None, f"{name} is there"
            array: Array = self.device.elements(value)
            return array

    def put(self, name: str, array: Any) -> None:
        """Write an array into a cell's tensor; a new one, where it has none, or it was lost, or is
        held elsewhere.

        Raises `UsageError` for an unknown name, `LinkError` where shape or kind of number differ.
        """
        number = self.numbers.get(name)
        if number is None:
            raise UsageError(f"training has no tensor {name!r}", expected=", ".join(self.numbers))
        tensor = self.tensor(number) if self.is_alone(number) else None
        if tensor is None:
            tensor = self.device.empty(self.descs[number])
        desc = self.descs[number]
        kind = desc.layout.data_type
        if not kind.is_block:
            array = capture(array, desc.shape, kind, True, f"tensor {name!r}")
        self.device.write(tensor, array)
        self.hold(number, tensor)

    def tensors(self, numbers: Iterable[int]) -> list[tuple[int, Tensor | None]]:
        """What some cells hold, with their numbers."""
        return [(number, self.tensor(number)) for number in numbers]

    def restore(self, tensors: Iterable[tuple[int, Tensor | None]]) -> None:
        """PersistentBuffers hold again what they held."""
        for number, tensor in tensors:
            self.hold(number, tensor)


class Stitched:
    """A loaded program between cells of the same names as its slots."""

    def __init__(
        self, agent: LoadedProgram, cells: NamedCells, prefix: str = "",
        entering: Container[str] = (),
        lost_by: str = "a program failed after it had overwritten a part",
    ) -> None:  # fmt: skip
        """`prefix` stands before the names of the cells that take the outputs; `entering`: inputs
        that a call is given."""
        self.agent = agent
        self.cells = cells
        program = agent.program
        takes = [program.input_desc(i) for i in range(len(program.inputs))]
        gives = [program.output_desc(i) for i in range(len(program.outputs))]
        self.inputs = tuple(
            cells.number(slot.name, desc)
            for slot, desc in zip(program.inputs, takes, strict=True)
        )  # fmt: skip
        self.outputs = tuple(
            cells.number(prefix + slot.name, desc)
            for slot, desc in zip(program.outputs, gives, strict=True)
        )
        #: How the program describes what its cells hold.
        described = zip((*self.inputs, *self.outputs), (*takes, *gives), strict=True)
        self.descs = {cell: desc.without_address() for cell, desc in described}
        #: What enters, in order.
        self.entering = tuple([port for port in agent.ports if port.name in entering])
        #: Runs on arrays or tensors for what enters, in order; once more on what entered last.
        self.run = self._stage(entering, lost_by)
        self.again = self._stage((), lost_by) if self.entering else self.run

    def _stage(self, entering: Container[str], lost_by: str) -> StatefulExecutable:
        """The program as a task graph between cells; what enters comes to its cell first."""
        cells, graph = self.cells, TaskGraph(self.agent.name)
        reads: list[int | None] = []
        writes: list[int] = []
        given: list[Future] = []
        for port, cell in zip(self.agent.ports, self.inputs, strict=True):
            value = graph.input(port.desc, port.name)
            enters = port.name in entering
            reads.append(None if enters else cell)
            if enters:
                value = graph.copy(value, self.descs[cell])
                graph.output(value)
                writes.append(cell)
            given.append(value)
        made = graph.call(self.agent, *given)
        for output in made if isinstance(made, tuple) else (made,):
            graph.output(output)
        return StatefulExecutable(cells, graph.table(), reads, [*writes, *self.outputs], lost_by)


@dataclass(frozen=True, slots=True)
class Wiring:
    """Which cells of a training mean what, by number.

    `inputs` are the batch's names, `keys` those of other inputs of forward.
    """

    inputs: tuple[str, ...]
    keys: tuple[str, ...]
    #: State that forward replaces; that of it whose value before forward is what backward reads.
    buffers: tuple[int, ...]
    reread: tuple[int, ...]
    prediction: int
    loss: int
    #: What a loss gives backward: the gradient of the prediction.
    seeds: tuple[int, ...]
    gradients: tuple[int, ...]
    #: What only backward still needs: gone once it is queued. What only one step needs. The same
    #: with the prediction: gone with the next forward pass.
    passing: tuple[int, ...]
    momentary: tuple[int, ...]
    of_a_pass: tuple[int, ...]


Shapes = tuple[tuple[int, ...], ...]


class StitchedStep:
    """The programs that a step runs on batches of one size, between the cells of a training.

    The update is none of them: it knows no batch.
    """

    def __init__(
        self, programs: tuple[Program, Program, Program], parameters: Sequence[Parameter],
        cells: NamedCells,
    ) -> None:  # fmt: skip
        """`programs`: forward, loss, backward."""
        self.cells = cells
        self._slots = programs[0].inputs
        self._gradients = [parameter.gradient for parameter in parameters]
        forward, loss, backward = (loaded(cells.device, program) for program in programs)
        kinds = (InputKind.ACTIVATION, InputKind.KEY)
        given = {slot.name for slot in self._slots if slot.kind in kinds}
        self.forward = Stitched(forward, cells, entering=given)
        self.loss = Stitched(loss, cells, entering={LABEL})
        self.backward = Stitched(backward, cells)
        self._judged = programs[1].inputs[0]
        #: Shape and type of what the loss judges.
        self.prediction_type: ValueType = programs[1].values[self._judged.value].type
        activations = {slot.name for slot in self._slots if slot.kind is InputKind.ACTIVATION}
        #: The ports that a batch comes in by, and their shapes.
        self.batch = [port for port in self.forward.entering if port.name in activations]
        self.shapes: Shapes = tuple([port.shape for port in self.batch])
        (self.label,) = self.loss.entering

    def describe_cells(self) -> None:
        """What only one pass needs is of the sizes of these programs from now on."""
        descs = self.backward.descs | self.loss.descs | self.forward.descs
        passing = self.wiring.of_a_pass
        self.cells.describe({number: descs[number] for number in passing if number in descs})

    @cached_property
    def backward_of_more(self) -> Stitched:
        """Backward of another micro-batch, beside the gradients that there are."""
        return Stitched(self.backward.agent, self.cells, MORE)

    @cached_property
    def wiring(self) -> Wiring:
        """Which cells mean what, once all programs of the training have theirs."""
        forward, numbers = self.forward, self.cells.numbers
        inputs = tuple(port.name for port in self.batch)
        keys = tuple(slot.name for slot in self._slots if slot.kind is InputKind.KEY)
        buffers = tuple(
            number for number, slot in zip(forward.inputs, self._slots, strict=True)
            if slot.kind is InputKind.STATE and number in forward.outputs
        )  # fmt: skip
        gradients = tuple(numbers[gradient] for gradient in self._gradients)
        prediction, judged = numbers[self._judged.name], numbers[LOSS]
        passing = [n for n in forward.outputs if n not in buffers and n != prediction]
        seeds = tuple(n for n in self.loss.outputs if n != judged)
        passing += seeds
        names = [*inputs, LABEL, LOSS, *({GRADIENT_NORM} & numbers.keys())]
        momentary = (*passing, *[numbers[name] for name in names])
        reread = tuple(n for n in buffers if n in self.backward.inputs)
        return Wiring(
            inputs, keys, buffers, reread, prediction, judged, seeds, gradients, tuple(passing),
            momentary, (*momentary, prediction),
        )  # fmt: skip


def loaded(device: RuntimeDevice, program: Program) -> LoadedProgram:
    """A program on a device, as a binary of its own."""
    return device.load(Binary((program,), device.machine.shape, "stitch training"))


def fitted(ports: Sequence[InputPort], batch: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Arrays and tensors in the order of the ports, by position or name; floats in their type, and
    of whatever shape.

    Raises `UsageError` for missing or surplus arrays.
    """
    if named or len(batch) != len(ports):
        later = [port.name for port in ports[len(batch) :]]
        if len(batch) > len(ports) or named.keys() != set(later):
            raise UsageError(
                "a batch has one array for each input of the model",
                expected=", ".join([port.name for port in ports]),
                got=f"{len(batch)} by position; by name: {', '.join(named) or 'none'}",
            )
        batch = (*batch, *[named[name] for name in later])
    return [_fitted(port, value) for port, value in zip(ports, batch, strict=True)]


def _fitted(port: InputPort, value: Any) -> Any:
    try:
        array = value if isinstance(value, Tensor) else np.asarray(value)
    except ValueError:  # Ragged lists, which it names.
        array = capture(value, port.shape, port.type.data_type, True, port.origin)
    if isinstance(array, Tensor):
        return array
    if array.dtype == port.dtype:
        return array
    return capture(array, array.shape, port.type.data_type, True, port.origin)


def other_shape(port: InputPort, shape: Sequence[int], reason: str) -> UsageError:
    """The error for a batch that a training has no programs for, nor can have."""
    return UsageError(
        f"input {port.name!r} has another shape: {reason}",
        expected=port.type.text(),
        got=str(list(shape)),
        remedy="leave out a smaller last batch (DataLoader(..., drop_last=True)), or pad it",
    )

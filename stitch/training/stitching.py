"""Stitching by name: the tensors of a training, and the programs that take and give them.

Comes in: loaded programs and tensors by name, batches. Goes out: one call per program, whose inputs
are found and whose outputs are put where their names say; which cells mean what; arrays that fit
input slots. Must not know: losses, optimizers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.program import Array, InputKind, TensorDesc
from stitch.runtime import (
    Cells,
    InputPort,
    LoadedProgram,
    LoopStage,
    RuntimeDevice,
    Tensor,
    capture,
)
from stitch.tasks import Future, TaskGraph
from stitch.training.graphs import GRADIENT_NORM
from stitch.training.programs import LABEL, LOSS, TrainingPrograms


class NamedCells(Cells):
    """Cells by name; programs see them by number."""

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
        """Cells hold again what they held."""
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
        self.inputs = tuple(
            cells.number(slot.name, program.input_desc(i)) for i, slot in enumerate(program.inputs)
        )
        self.outputs = tuple(
            cells.number(prefix + slot.name, program.output_desc(i))
            for i, slot in enumerate(program.outputs)
        )
        #: What enters, in order.
        self.entering = tuple([port for port in agent.ports if port.name in entering])
        #: Runs on arrays or tensors for what enters, in order; once more on what entered last.
        self.run = self._stage(entering, lost_by)
        self.again = self._stage((), lost_by) if self.entering else self.run

    def _stage(self, entering: Container[str], lost_by: str) -> LoopStage:
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
                value = graph.copy(value, cells.descs[cell])
                graph.output(value)
                writes.append(cell)
            given.append(value)
        made = graph.call(self.agent, *given)
        for output in made if isinstance(made, tuple) else (made,):
            graph.output(output)
        return LoopStage(cells, graph.table(), reads, [*writes, *self.outputs], lost_by)


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


def wiring_of(
    programs: TrainingPrograms, cells: NamedCells, forward: Stitched, loss: Stitched,
    backward: Stitched,
) -> Wiring:  # fmt: skip
    """The wiring of the stitched programs of a step, found once from the slots of its programs."""
    slots, numbers = programs.forward.inputs, cells.numbers
    inputs = tuple(slot.name for slot in slots if slot.kind is InputKind.ACTIVATION)
    keys = tuple(slot.name for slot in slots if slot.kind is InputKind.KEY)
    buffers = tuple(
        number for number, slot in zip(forward.inputs, slots, strict=True)
        if slot.kind is InputKind.STATE and number in forward.outputs
    )  # fmt: skip
    gradients = tuple(numbers[parameter.gradient] for parameter in programs.parameters)
    prediction, judged = numbers[programs.prediction], numbers[LOSS]
    passing = [n for n in forward.outputs if n not in buffers and n != prediction]
    seeds = tuple(n for n in loss.outputs if n != judged)
    passing += seeds
    names = [*inputs, LABEL, LOSS, *({GRADIENT_NORM} & numbers.keys())]
    momentary = (*passing, *[numbers[name] for name in names])
    return Wiring(
        inputs, keys, buffers, tuple(n for n in buffers if n in backward.inputs), prediction,
        judged, seeds, gradients, tuple(passing), momentary, (*momentary, prediction),
    )  # fmt: skip


def fitted(ports: Sequence[InputPort], batch: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Arrays and tensors in the order of the ports, by position or name; floats in their type.

    Raises `UsageError` for missing or surplus arrays, and for one of another shape.
    """
    later = [port.name for port in ports[len(batch) :]]
    if len(batch) > len(ports) or named.keys() != set(later):
        raise UsageError(
            "a batch has one array for each input of the model",
            expected=", ".join([port.name for port in ports]),
            got=f"{len(batch)} by position; by name: {', '.join(named) or 'none'}",
        )
    given = (*batch, *[named[name] for name in later])
    return [_fitted(port, value) for port, value in zip(ports, given, strict=True)]


def _fitted(port: InputPort, value: Any) -> Any:
    try:
        array = value if isinstance(value, Tensor) else np.asarray(value)
    except ValueError:  # Ragged lists, which it names.
        array = capture(value, port.shape, port.type.data_type, True, port.origin)
    if array.shape != port.shape:
        raise UsageError(
            f"input {port.name!r} has another shape",
            expected=port.type.text(),
            got=str(list(array.shape)),
            remedy="programs have fixed shapes: leave out a smaller last batch "
            "(DataLoader(..., drop_last=True)), pad it, or compile for its size",
        )
    if isinstance(array, Tensor):
        return array
    if array.dtype == port.dtype:
        return array
    return capture(array, port.shape, port.type.data_type, True, port.origin)

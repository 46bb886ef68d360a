"""The programs of a training between named cells: persistent device tensors that programs share.

`BoundProgram` connects a program's slots to the cells of the same names. `BoundStep` has the
programs for one batch size; steps for other sizes share parameters, states and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stitch.compiler import compile_graph
from stitch.errors import UsageError
from stitch.graph import trace
from stitch.program import Array, DataType, InputKind, Program, TensorDesc, ValueType
from stitch.runtime import (
    InputPort,
    LoadedProgram,
    PersistentBuffers,
    RuntimeDevice,
    StatefulExecutable,
    Tensor,
    as_array,
    capture,
)
from stitch.tasks import Future, TaskGraph
from stitch.training.graphs import GRADIENT_NORM, MORE, Parameter
from stitch.training.programs import LABEL, LOSS
from stitch.ttb import Binary


class NamedCells(PersistentBuffers):
    """Persistent buffers by name; programs refer to them by number."""

    def __init__(self, device: RuntimeDevice) -> None:
        super().__init__(device)
        self.numbers: dict[str, int] = {}
        self.descs: list[TensorDesc] = []

    def number(self, name: str, desc: TensorDesc) -> int:
        """Return the number of a cell; create an empty one with the description `desc` if
        needed."""
        number = self.numbers.get(name)
        if number is None:
            number = self.numbers[name] = len(self.descs)
            self.descs.append(desc.without_address())
        return number

    def describe(self, descs: Mapping[int, TensorDesc]) -> None:
        """Change the descriptions by which the cells are allocated."""
        for number, desc in descs.items():
            self.descs[number] = desc

    def get(self, name: str) -> Tensor | None:
        """Return the tensor of a cell, None if it is empty."""
        number = self.numbers.get(name)
        return None if number is None else self.tensor(number)

    def elements(self, name: str) -> Array:
        """Return the elements of a cell's tensor without creating a handle."""
        with self.device.lock:
            value = self.value(self.numbers[name])
            assert value is not None, f"{name} is there"
            array: Array = self.device.read(value, is_inside=True)
            return array

    def put(self, name: str, array: Any) -> None:
        """Write an array into a cell's tensor; allocate a new one if it is empty, lost or shared.

        Raises `UsageError` for an unknown name, `LinkError` for another shape or kind of number.
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
            array = capture(array, desc.shape, kind, True, f"tensor {name!r}", is_input=False)
        self.device.write(tensor, array)
        self.hold(number, tensor)

    def tensors(self, numbers: Iterable[int]) -> list[tuple[int, Tensor | None]]:
        """Return cells with their current tensors."""
        return [(number, self.tensor(number)) for number in numbers]

    def restore(self, tensors: Iterable[tuple[int, Tensor | None]]) -> None:
        """Put tensors that `tensors` returned back into their cells."""
        for number, tensor in tensors:
            self.hold(number, tensor)


class BoundProgram:
    """A loaded program whose slots are the cells of the same names."""

    def __init__(
        self, agent: LoadedProgram, cells: NamedCells, prefix: str = "",
        entering: Container[str] = (),
        lost_by: str = "a program failed after it had overwritten a part",
    ) -> None:  # fmt: skip
        """Bind the slots of a loaded program to cells.

        `prefix` precedes the names of output cells; `entering` are inputs that each call passes;
        `lost_by` is the text of the error for tensors that a failed run has overwritten.
        """
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
        #: The descriptions of the cells' tensors.
        described = zip((*self.inputs, *self.outputs), (*takes, *gives), strict=True)
        self.descs = {cell: desc.without_address() for cell, desc in described}
        self.entering = tuple([port for port in agent.ports if port.name in entering])
        #: `run` takes the entering inputs in order; `again` reads those of the last run.
        self.run = self._stage(entering, lost_by)
        self.again = self._stage((), lost_by) if self.entering else self.run

    def _stage(self, entering: Container[str], lost_by: str) -> StatefulExecutable:
        """Return the program as a task graph between cells; passed inputs are copied to their
        cells."""
        cells, graph = self.cells, TaskGraph(self.agent.name)
        reads: list[int | None] = []
        writes: list[int] = []
        operands: list[Future] = []
        for port, cell in zip(self.agent.ports, self.inputs, strict=True):
            value = graph.input(port.desc, port.name)
            enters = port.name in entering
            reads.append(None if enters else cell)
            if enters:
                value = graph.copy(value, self.descs[cell])
                graph.output(value)
                writes.append(cell)
            operands.append(value)
        results = graph.call(self.agent, *operands)
        for output in results if isinstance(results, tuple) else (results,):
            graph.output(output)
        return StatefulExecutable(cells, graph.table(), reads, [*writes, *self.outputs], lost_by)


@dataclass(frozen=True, slots=True)
class Wiring:
    """Numbers and names of the cells of a training, by role.

    Attributes:
        inputs: Names of the batch's tensors.
        keys: Names of the keys of random operators.
        buffers: States that forward replaces.
        reread: Those whose previous value backward reads.
        seeds: Gradients that the loss program computes for backward.
        passing: Cells that are released once backward is queued.
        momentary: Cells that are released after a step.
        of_a_pass: Cells that are released at the next forward pass.
    """

    inputs: tuple[str, ...]
    keys: tuple[str, ...]
    buffers: tuple[int, ...]
    reread: tuple[int, ...]
    prediction: int
    loss: int
    seeds: tuple[int, ...]
    gradients: tuple[int, ...]
    passing: tuple[int, ...]
    momentary: tuple[int, ...]
    of_a_pass: tuple[int, ...]


Shapes = tuple[tuple[int, ...], ...]


class BoundStep:
    """Forward, loss and backward for batches of one size.

    The update does not depend on the batch and is not part of it.
    """

    def __init__(
        self, programs: tuple[Program, Program, Program], parameters: Sequence[Parameter],
        cells: NamedCells,
    ) -> None:  # fmt: skip
        """`programs`: forward, loss, backward."""
        self.cells = cells
        self._slots = programs[0].inputs
        self._gradients = [parameter.gradient for parameter in parameters]
        forward, loss, backward = (load_program(cells.device, program) for program in programs)
        kinds = (InputKind.ACTIVATION, InputKind.KEY)
        entering = {slot.name for slot in self._slots if slot.kind in kinds}
        self.forward = BoundProgram(forward, cells, entering=entering)
        self.loss = BoundProgram(loss, cells, entering={LABEL})
        self.backward = BoundProgram(backward, cells)
        self._prediction = programs[1].inputs[0]
        self.prediction_type: ValueType = programs[1].values[self._prediction.value].type
        activations = {slot.name for slot in self._slots if slot.kind is InputKind.ACTIVATION}
        #: The input ports of a batch, and their shapes.
        self.batch = [port for port in self.forward.entering if port.name in activations]
        self.shapes: Shapes = tuple([port.shape for port in self.batch])
        (self.label,) = self.loss.entering

    def describe_cells(self) -> None:
        """Describe the temporary cells with the shapes of these programs."""
        descs = self.backward.descs | self.loss.descs | self.forward.descs
        passing = self.wiring.of_a_pass
        self.cells.describe({number: descs[number] for number in passing if number in descs})

    @cached_property
    def backward_of_more(self) -> BoundProgram:
        """Backward of another micro-batch, whose gradients go to separate cells."""
        return BoundProgram(self.backward.agent, self.cells, MORE)

    @cached_property
    def scaling(self) -> Callable[..., Any]:
        """The program that multiplies the prediction's gradient by a number."""
        (number,) = self.wiring.seeds
        desc = self.cells.descs[number]

        def product(gradient: Any, by: Any) -> Any:
            return (gradient.cast(DataType.FLOAT32) * by).cast(desc.layout.data_type)

        types = (desc, ValueType((), DataType.FLOAT32))
        graph = trace(product, *types, name="scaled_gradient")
        device = self.cells.device
        return load_program(device, compile_graph(graph, device.machine).program)

    @cached_property
    def wiring(self) -> Wiring:
        """The cells by role, once all programs of the training are bound."""
        forward, numbers = self.forward, self.cells.numbers
        inputs = tuple(port.name for port in self.batch)
        keys = tuple(slot.name for slot in self._slots if slot.kind is InputKind.KEY)
        buffers = tuple(
            number for number, slot in zip(forward.inputs, self._slots, strict=True)
            if slot.kind is InputKind.STATE and number in forward.outputs
        )  # fmt: skip
        gradients = tuple(numbers[gradient] for gradient in self._gradients)
        prediction, loss = numbers[self._prediction.name], numbers[LOSS]
        passing = [n for n in forward.outputs if n not in buffers and n != prediction]
        seeds = tuple(n for n in self.loss.outputs if n != loss)
        passing += seeds
        names = [*inputs, LABEL, LOSS, *({GRADIENT_NORM} & numbers.keys())]
        momentary = (*passing, *[numbers[name] for name in names])
        reread = tuple(n for n in buffers if n in self.backward.inputs)
        return Wiring(
            inputs, keys, buffers, reread, prediction, loss, seeds, gradients, tuple(passing),
            momentary, (*momentary, prediction),
        )  # fmt: skip


def load_program(device: RuntimeDevice, program: Program) -> LoadedProgram:
    """Load a program on a device, in a binary of its own."""
    return device.load(Binary((program,), device.machine.shape, "stitch training"))


def batch_arrays(
    ports: Sequence[InputPort], batch: Sequence[Any], named: Mapping[str, Any]
) -> list[Any]:
    """Return a batch in the order of the ports, in their data types; shapes may differ.

    Raises `UsageError` for missing or surplus arrays.
    """
    if named or len(batch) != len(ports):
        later = [port.name for port in ports[len(batch) :]]
        if len(batch) > len(ports) or named.keys() != set(later):
            raise UsageError(
                "the batch must have one array for each input of the model",
                expected=", ".join([port.name for port in ports]),
                got=f"{len(batch)} by position; by name: {', '.join(named) or 'none'}",
                remedy=f"model({', '.join([port.name for port in ports])}); "
                "the loss takes the labels: loss_fn(prediction, labels)",
            )
        batch = (*batch, *[named[name] for name in later])
    return [_batch_array(port, value) for port, value in zip(ports, batch, strict=True)]


def _batch_array(port: InputPort, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    if getattr(value, "requires_grad", False):
        raise UsageError(
            f"{port.origin} has a gradient, which backward() would not compute",
            remedy="pass x.detach(), or make what computes it a part of the module",
        )
    array = as_array(value, port.origin)
    if array.dtype == port.dtype:
        return array
    return capture(array, array.shape, port.type.data_type, True, port.origin)


def shape_error(port: InputPort, shape: Sequence[int], reason: str) -> UsageError:
    """Return the error for a batch whose shape cannot be compiled."""
    remedy = "skip a smaller last batch (DataLoader(..., drop_last=True)), or pad it"
    if tuple(shape[1:]) != port.shape[1:]:
        remedy = "pass batches of the expected shape; only the number of rows may differ"
    return UsageError(
        f"input {port.name!r} has another shape: {reason}",
        expected=port.type.text(), got=str(list(shape)), remedy=remedy,
    )  # fmt: skip

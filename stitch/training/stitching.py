"""Stitching by name: the tensors of a training, and the programs that take and give them.

Comes in: loaded programs and tensors by name. Goes out: one call per program, whose inputs are
found and whose outputs are put where their names say. Must not know: losses, optimizers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.program import TensorDesc
from stitch.runtime import (
    Cells,
    Conversion,
    LoadedProgram,
    LoopStage,
    ProgramCall,
    RuntimeDevice,
    Tensor,
)


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
            self.descs.append(TensorDesc(desc.shape, desc.layout.without_address()))
        return number

    def get(self, name: str) -> Tensor | None:
        """The tensor of a name, None where there is none now."""
        number = self.numbers.get(name)
        return None if number is None else self.tensor(number)

    def put(self, name: str, array: Any) -> None:
        """Write an array into a cell's tensor, which is made if there is none.

        Raises `UsageError` for an unknown name, `LinkError` where shape or kind of number differ.
        """
        number = self.numbers.get(name)
        if number is None:
            raise UsageError(f"training has no tensor {name!r}", expected=", ".join(self.numbers))
        tensor = self.tensor(number)
        if tensor is None:
            tensor = self.device.empty(self.descs[number])
        desc = self.descs[number]
        kind = desc.layout.data_type
        if kind.is_floating and not kind.is_block:
            array = np.asarray(array)
            if array.dtype.kind == "f" or array.dtype == kind.dtype:
                array = array.astype(kind.dtype, copy=False)
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
        entering: Container[str] = (), lost_by: str = "a program that was interrupted",
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
        call = ProgramCall(agent, self.inputs, self.outputs)
        conversions = [
            Conversion(port, number, cells.descs[number])
            for port, number in zip(agent.ports, self.inputs, strict=True)
            if port.name in entering
        ]
        #: What enters, in order.
        self.entering = tuple(conversion.port for conversion in conversions)
        #: Runs on arrays or tensors for what enters, in order; once more on what entered last.
        self.run = LoopStage(cells, conversions, [call], lost_by)
        self.again = LoopStage(cells, [], [call], lost_by) if conversions else self.run

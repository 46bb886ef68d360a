"""Stitching by name: the tensors of a training, and the programs that take and give them.

Comes in: loaded programs and tensors by name. Goes out: one call per program, whose inputs are
found and whose outputs are put where their names say. Must not know: losses, optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.program import Array, TensorDesc
from stitch.runtime import LoadedProgram, RuntimeDevice, Tensor


class Cells:
    """Tensors by name; programs see them by number. A cell without a tensor holds None."""

    def __init__(self, device: RuntimeDevice) -> None:
        self.device = device
        self.numbers: dict[str, int] = {}
        self.tensors: list[Any] = []
        self.descs: list[TensorDesc] = []

    def number(self, name: str, desc: TensorDesc) -> int:
        """The cell of a name; new names get an empty one, described by `desc`."""
        found = self.numbers.get(name)
        if found is None:
            found = self.numbers[name] = len(self.tensors)
            self.tensors.append(None)
            self.descs.append(TensorDesc(desc.shape, desc.layout.without_address()))
        return found

    def get(self, name: str) -> Tensor | None:
        """The tensor of a name, None where there is none now."""
        number = self.numbers.get(name)
        found = None if number is None else self.tensors[number]
        return found if isinstance(found, Tensor) else None

    def put(self, name: str, array: Any) -> None:
        """Write an array into a cell's tensor, which is made if there is none.

        Raises `UsageError` for an unknown name, `LinkError` where shape or kind of number differ.
        """
        number = self.numbers.get(name)
        if number is None:
            raise UsageError(f"training has no tensor {name!r}", expected=", ".join(self.numbers))
        tensor = self.tensors[number]
        if not isinstance(tensor, Tensor):
            tensor = self.device.empty(self.descs[number])
        desc = self.descs[number]
        kind = desc.layout.data_type
        if kind.is_floating and not kind.is_block:
            array = np.asarray(array)
            if array.dtype.kind == "f" or array.dtype == kind.dtype:
                array = array.astype(kind.dtype, copy=False)
        self.device.write(tensor, array)
        self.tensors[number] = tensor

    def read(self, name: str) -> Array:
        """The elements of a cell's tensor; raises `UsageError` where there is none."""
        tensor = self.get(name)
        if tensor is None:
            raise UsageError(f"training has no tensor {name!r} just now")
        return tensor.numpy()

    def lose(self, numbers: Iterable[int], by: str) -> None:
        """Free tensors whose elements are half written: whoever uses one is told who did that."""
        for number in numbers:
            tensor = self.tensors[number]
            if isinstance(tensor, Tensor) and tensor.is_allocated:
                tensor.deallocate(by)

    def drop(self, numbers: Iterable[int]) -> None:
        """Empty cells: their tensors are freed once nobody else holds them."""
        tensors = self.tensors
        for number in numbers:
            tensors[number] = None


class Stitched:
    """A loaded program between cells of the same names as its slots."""

    def __init__(self, agent: LoadedProgram, cells: Cells, prefix: str = "") -> None:
        """`prefix` stands before the names of the cells that take the outputs."""
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

    def __call__(self) -> None:
        """Queue one run."""
        tensors = self.cells.tensors
        made = self.agent.device.submit(self.agent, [tensors[i] for i in self.inputs])
        if isinstance(made, Tensor):
            tensors[self.outputs[0]] = made
            return
        for number, tensor in zip(self.outputs, made, strict=True):
            tensors[number] = tensor

    def names_of(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """The names of cells, for messages."""
        by_number = {number: name for name, number in self.cells.numbers.items()}
        return tuple(by_number[number] for number in numbers)

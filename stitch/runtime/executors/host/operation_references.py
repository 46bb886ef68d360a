"""What NumPy's kernels make of one operation's operands: what others' kernels are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import numpy as np

from stitch.linker import expanded
from stitch.machine import MachineShape, footprint
from stitch.memory import prepare_copy
from stitch.ops import bytes_from_a_line
from stitch.program import (
    ABSENT,
    Array,
    MemoryLayout,
    Program,
    Space,
    TensorDesc,
    host_layout,
)
from stitch.runtime.executors.executor import with_fp_errors_ignored
from stitch.runtime.executors.host.numpy_executor import NumpyExecutor
from stitch.runtime.executors.host.program_parts import PartOfProgram, WholeProgram
from stitch.runtime.executors.host.staging import as_bytes, compute_type


@final
class OperationReferences:
    """The operations of one program, each as a program of its own; nothing is kept of a call."""

    def __init__(self, program: Program, machine: MachineShape) -> None:
        self._whole = WholeProgram(expanded(program))
        self._machine = machine

    def results(self, index: int, operands: Sequence[Array | None]) -> tuple[Array, ...]:
        """What the operation makes, but for results that are absent, each as it is kept."""
        program = self._whole.program
        operation = program.operations[index]
        made = [value for value in operation.outputs if value != ABSENT]
        part = PartOfProgram(self._whole, (index,), made)
        given = dict(zip(operation.inputs, operands, strict=True))
        taken = []
        for value in part.inputs:
            array = given[value]
            assert array is not None, "only what is absent has no array"
            taken.append(as_bytes(np.ascontiguousarray(array)))
        kinds = {value: program.values[value].type for value in part.outputs}
        left = {
            value: _empty(kind.shape, kind.data_type.compute_dtype) for value, kind in kinds.items()
        }
        prepared = NumpyExecutor().prepare(part.program_of_part(), self._machine)
        bound = prepared.bind(tuple(taken), tuple(map(as_bytes, left.values())), None)
        for step in bound.steps:
            with_fp_errors_ignored(step)
        return tuple(self.kept(value, left[value]) for value in made)

    def kept(self, value: int, array: Array) -> Array:
        """The array that is computed for a value as whoever reads it gets it: rounded to the type
        of the value, and to that in which it lies."""
        described = self._whole.program.values[value]
        kind, layout = described.type.data_type, described.desc.layout
        computed = compute_type(described.type)
        if kind is not computed:
            array = with_fp_errors_ignored(lambda: array.astype(kind.dtype).astype(array.dtype))
        if layout.data_type in (kind, computed):
            return array
        host = TensorDesc(array.shape, host_layout(computed))
        lying = replace(
            layout, space=Space.HOST, memory_layout=MemoryLayout.INTERLEAVED, shard_spec=None,
            address=None,
        )  # fmt: skip
        desc = TensorDesc(array.shape, lying)
        region = np.zeros(footprint(desc, self._machine).nbytes, np.uint8)
        result = np.empty_like(array)
        prepare_copy(host, desc, self._machine).bind(
            as_bytes(np.ascontiguousarray(array)), region
        )()
        prepare_copy(desc, host, self._machine).bind(region, as_bytes(result))()
        return result


def _empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """An array that begins where the spaces' do, at a line of the cache."""
    count = int(np.prod(shape, dtype=np.int64))
    return bytes_from_a_line(count * dtype.itemsize).view(dtype).reshape(shape)

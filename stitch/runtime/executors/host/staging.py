"""Staging: host arrays for values whose layout or type kernels cannot compute in.

Dense values of the compute type are views of the regions' bytes and need no step.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from stitch.machine import MachineShape
from stitch.memory import prepare_copy
from stitch.program import Array, DataType, Program, TensorDesc, Value, ValueType, host_layout
from stitch.runtime.executors.executor import Thunk


class StagingArrays:
    """The staging arrays of one program, created on first use and shared by its bindings."""

    def __init__(self, program: Program, machine: MachineShape) -> None:
        self.program = program
        self.machine = machine
        self._arrays: dict[int, Array] = {}

    def array(self, value: int) -> Array:
        """Return the staging array of a value, in its compute type."""
        array = self._arrays.get(value)
        if array is None:
            kind = self.program.values[value].type
            array = np.zeros(kind.shape, kind.data_type.compute_dtype)
            self._arrays[value] = array
        return array

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._arrays.values())


class StagedRegions:
    """The memory regions of one binding as arrays of the compute types, with conversion steps."""

    def __init__(
        self,
        staging: StagingArrays,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        scratch: Array | None,
    ) -> None:
        program = staging.program
        self.staging = staging
        self.values = program.values
        self.scratch = scratch
        slots = [*(s.value for s in program.inputs), *(s.value for s in program.outputs)]
        self.regions = dict(zip(slots, (*inputs, *outputs), strict=True))

    def read(self, value: int, steps: list[Thunk]) -> Array:
        """Return the array of an input; append the steps that fill it."""
        described = self.values[value]
        if is_direct(described):
            return dense_view(self.regions[value], described.type)
        array = self.staging.array(value)
        target = TensorDesc(described.type.shape, host_layout(compute_type(described.type)))
        kernel = prepare_copy(described.desc, target, self.staging.machine)
        steps += kernel.calls(self.regions[value], as_bytes(array))
        return array

    def output(self, value: int) -> Array:
        """Return the array that an operation writes a value into."""
        described = self.values[value]
        if value not in self.regions:
            self.regions[value] = self._scratch_region(described)
        if is_direct(described):
            return dense_view(self.regions[value], described.type)
        return self.staging.array(value)

    def _scratch_region(self, value: Value) -> Array:
        desc = value.desc
        start = desc.layout.address
        if not desc.elements:
            return np.empty(0, np.uint8)
        assert self.scratch is not None and start is not None
        return self.scratch[start : start + desc.layout.data_type.nbytes(desc.elements)]

    def write(self, value: int, array: Array, *, read_back: bool) -> list[Thunk]:
        """Return the steps that round an array to the value's type and store it in its layout.

        With `read_back` the array is rounded too, for later reads.
        """
        described, machine = self.values[value], self.staging.machine
        if is_direct(described):
            return []
        steps: list[Thunk] = []
        region = self.regions[value]
        logical, computed = described.type.data_type, compute_type(described.type)
        stored = described.desc.layout.data_type
        source = TensorDesc(described.type.shape, host_layout(computed))
        if logical is not computed and stored is not logical:
            rounded = np.empty(described.type.shape, logical.dtype)
            steps.append(partial(np.copyto, rounded, array, casting="unsafe"))
            steps.append(partial(np.copyto, array, rounded))
        write = prepare_copy(source, described.desc, machine)
        steps += write.calls(as_bytes(array), region)
        if stored is not computed and read_back:
            read = prepare_copy(described.desc, source, machine)
            steps += read.calls(region, as_bytes(array))
        return steps


def is_direct(value: Value) -> bool:
    """Whether kernels can compute in a value's bytes: dense, in the compute type."""
    layout = value.layout or value.desc.layout
    kind = value.type.data_type
    return layout.is_dense and layout.data_type is kind and kind.dtype == kind.compute_dtype


def compute_type(kind: ValueType) -> DataType:
    """Return the data type in which a value is computed."""
    return DataType.from_dtype(kind.data_type.compute_dtype)


def computable(data: Array, kind: ValueType) -> Array:
    """Return a constant in its compute type: the array, or a float32 copy of a narrower one."""
    return data if data.dtype == kind.data_type.compute_dtype else data.astype(np.float32)


def as_bytes(array: Array) -> Array:
    """Return the bytes of a C-contiguous array as a flat uint8 view."""
    return array.reshape(-1).view(np.uint8)


def dense_view(region: Array, kind: ValueType) -> Array:
    """Return the dense value at the start of a region as an array over its bytes."""
    dtype = kind.data_type.dtype
    count = math.prod(kind.shape)
    return region[: count * dtype.itemsize].view(dtype).reshape(kind.shape)

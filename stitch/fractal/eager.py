"""Eager tensors: each operation runs on a device as soon as it is called.

They have the methods, operators and NumPy functions of symbolic tensors, and data. So the same
function runs element by element or is traced, and a debugger shows numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from stitch.compiler import compile_graph
from stitch.fractal.fractal_tensor import Leaf
from stitch.graph import (
    AttributeLike,
    ComputationGraphBuilder,
    LayerMethods,
    OperandLike,
    SymbolicTensor,
    array_of,
    call_function,
    call_ufunc,
)
from stitch.program import Array, DataType, ValueType
from stitch.runtime import LoadedProgram, RuntimeDevice, Tensor
from stitch.ttb import Binary

#: Cached programs of one operation.
MAX_PROGRAMS = 4096
#: Constants up to this size are part of a program, which shapes and axes require.
SMALL_NBYTES = 4096


class EagerTensor(SymbolicTensor):
    """A symbolic tensor with data; created by `EagerBuilder` only."""

    __slots__ = ("_data", "_type", "is_constant")
    __hash__ = SymbolicTensor.__hash__

    def __init__(self, builder: Any, data: Array, *, is_constant: bool = False) -> None:
        """`is_constant`: the user function wrote it, as opposed to computed or passed in."""
        super().__init__(builder, 0)
        self._data, self.is_constant = data, is_constant
        self._type = ValueType(data.shape, DataType.from_dtype(data.dtype))

    @property
    def type(self) -> ValueType:
        return self._type

    @property
    def name(self) -> str:
        """The elements as text, for messages."""
        return np.array2string(self._data, threshold=16)

    def numpy(self) -> Array:  # type: ignore[override]  # here there is data
        return self._data

    @property
    def written(self) -> Array | None:
        """The data, which every graph may use as a constant."""
        return self._data

    def tolist(self) -> Any:  # type: ignore[override]  # here there is data
        return self._data.tolist()

    def item(self, *index: Any) -> Any:
        """Return the only element, or the one at an index, as a Python number."""
        return self._data.item(*index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:  # type: ignore[override]  # here there is data
        array = self._data if dtype is None else self._data.astype(dtype, copy=False)
        return array.copy() if copy else array

    def __bool__(self) -> bool:  # type: ignore[override]  # here there is data
        return bool(self._data)

    def __int__(self) -> int:  # type: ignore[override]  # here there is data
        return int(self._data)

    def __float__(self) -> float:  # type: ignore[override]  # here there is data
        return float(self._data)

    def __complex__(self) -> complex:  # type: ignore[override]  # here there is data
        return complex(self._data)

    def __index__(self) -> int:  # type: ignore[override]  # here there is data
        return int(self._data.__index__())

    def __format__(self, spec: str) -> str:
        return format(self._data, spec) if spec else repr(self)

    def __repr__(self) -> str:
        return f"<{self.type.text()}: {self.name}>"


class EagerBuilder(LayerMethods):
    """Runs each operation on a device when it is applied; raises what compiling it raises."""

    __slots__ = ("_programs", "device")

    def __init__(self, device: RuntimeDevice) -> None:
        super().__init__("sequential")
        self.device = device
        self._programs: dict[Any, LoadedProgram] = {}

    def as_leaf(self, data: Array | Tensor | SymbolicTensor) -> SymbolicTensor:
        """Return a tensor with this data, which is read-only."""
        if isinstance(data, SymbolicTensor):
            return data
        array = data.numpy() if isinstance(data, Tensor) else np.asarray(data)
        read_only = array.view()
        read_only.flags.writeable = False
        return EagerTensor(self, read_only)

    def constant(self, array: object) -> SymbolicTensor:
        """Return a tensor of a value that a user function wrote, or of a leaf that it computed."""
        is_constant = not isinstance(array, Leaf)
        return EagerTensor(self, array_of(array, self._where()), is_constant=is_constant)

    def tensor(self, value: OperandLike, like: SymbolicTensor | None = None) -> SymbolicTensor:
        """Return tensors unchanged; device tensors, arrays and numbers as tensors with data."""
        if isinstance(value, SymbolicTensor):
            return value
        if isinstance(value, Tensor):
            return self.as_leaf(value)
        kind = None if like is None else like.data_type
        if isinstance(value, Leaf):
            return self.constant(value)
        return EagerTensor(self, array_of(value, self._where(), kind), is_constant=True)

    def known_data(self, tensor: SymbolicTensor) -> Array | None:
        eager = self.tensor(tensor)
        assert isinstance(eager, EagerTensor)
        return eager.numpy()

    def apply(
        self,
        op: str,
        operands: Sequence[OperandLike],
        outputs: int | Sequence[str],
        attributes: Mapping[str, AttributeLike],
        domain: str = "",
    ) -> tuple[SymbolicTensor, ...]:
        """Run one operation and return its results."""
        for operand in operands:
            if type(operand) is SymbolicTensor:  # Traced: apply it in that graph.
                builder: Any = operand.builder
                return cast(
                    "tuple[SymbolicTensor, ...]",
                    builder.apply(op, operands, outputs, attributes, domain),
                )
        like = next((o for o in operands if isinstance(o, SymbolicTensor)), None)
        tensors = [None if o is None else self.tensor(o, like) for o in operands]
        names = [f"{op.lower()}{i}" for i in range(outputs)] if isinstance(outputs, int) else (
            list(outputs))  # fmt: skip
        written = {name: value for name, value in attributes.items() if value is not None}
        shown = tuple(sorted((name, repr(value)) for name, value in written.items()))
        key = op, domain, shown, tuple(names), tuple(map(_key, tensors))
        program = self._programs.get(key)
        if program is None:
            program = self._compiled(op, domain, tensors, names, written)
            if len(self._programs) >= MAX_PROGRAMS:
                self._programs.clear()
            self._programs[key] = program
        inputs = [t.numpy() for t in tensors if t is not None and not _is_part(t)]
        return self._results(program(*inputs))

    def _results(self, results: Tensor | tuple[Tensor, ...]) -> tuple[SymbolicTensor, ...]:
        return tuple(
            [self.as_leaf(r) for r in (results if isinstance(results, tuple) else (results,))]
        )

    numpy_ufunc = call_ufunc
    numpy_function = call_function

    def _compiled(
        self, op: str, domain: str, tensors: Sequence[Any], names: Sequence[str],
        attributes: Mapping[str, AttributeLike],
    ) -> LoadedProgram:  # fmt: skip
        """Compile a program of one operation."""
        builder = ComputationGraphBuilder(op.lower())
        operands = [
            None if t is None
            else t.numpy() if _is_part(t)
            else builder.input(f"input{i}", t.shape, t.data_type)
            for i, t in enumerate(tensors)
        ]  # fmt: skip
        with builder.at(self._where()):
            results = builder.apply(op, operands, names, attributes, domain)
        for name, result in zip(names, results, strict=True):
            builder.output(name, result)
        machine = self.device.machine
        program = compile_graph(builder.build(), machine).program
        return self.device.load(Binary((program,), machine.shape, "fractal"))


def _is_part(tensor: Any) -> bool:
    """Return whether a tensor's elements are constants of the program."""
    return bool(tensor.is_constant and tensor.numpy().nbytes <= SMALL_NBYTES)


def _key(tensor: Any) -> Any:
    """Return what a program of one operation depends on."""
    if tensor is None:
        return None
    return (tensor.type, tensor.numpy().tobytes()) if _is_part(tensor) else tensor.type

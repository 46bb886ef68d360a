"""`Emitter`: what a builder must be able to do so that operators can be written down.

Comes in: tensors, arrays and numbers. Goes out: operations in the graph. The method families
(`*_methods.py`) are written against this class alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stitch.argument_kinds import ArgumentKind
from stitch.graph.source_location import mistake
from stitch.graph.symbolic import Operand, SymbolicTensor
from stitch.graph.tensor_operations import Axes
from stitch.program import AttributeValue, DataType, ValueType

#: An attribute as people write it: lists for tuples, booleans for ints, None for absent.
Written = AttributeValue | bool | DataType | Sequence[int] | Sequence[float] | Sequence[str] | None
#: An operand as people write it: a list of ints is an int64 vector, None is absent.
Given = Operand | Sequence[int] | Sequence[float] | None
#: A data type as people write it.
TypeName = DataType | str | np.dtype[Any] | type

TYPE_NAME = ArgumentKind(
    "the name of a data type, a DataType or a NumPy type",
    lambda value: isinstance(value, str | DataType | np.dtype | type),
)


class Emitter(ABC):
    """The least that a graph builder offers; operands may be arrays or numbers throughout."""

    __slots__ = ()

    @property
    @abstractmethod
    def graph_name(self) -> str:
        """The graph's name."""

    @abstractmethod
    def type_of(self, index: int) -> ValueType:
        """The type of a value."""

    @abstractmethod
    def name_of(self, index: int) -> str:
        """The name of a value."""

    @abstractmethod
    def tensor(self, given: Given, like: SymbolicTensor | None = None) -> SymbolicTensor:
        """A tensor as it is; arrays and numbers as constants, numbers of `like`'s data type."""

    @abstractmethod
    def apply(
        self,
        op: str,
        operands: Sequence[Given],
        outputs: int | Sequence[str],
        attributes: Mapping[str, Written],
        domain: str = "",
    ) -> tuple[SymbolicTensor, ...]:
        """Adds one operation and returns its outputs; raises `CompileError` if it does not fit."""

    @abstractmethod
    def numpy_ufunc(
        self, ufunc: np.ufunc, method: str, inputs: tuple[object, ...], arguments: dict[str, object]
    ) -> object:
        """What a NumPy ufunc means on symbolic tensors."""

    @abstractmethod
    def numpy_function(
        self,
        function: Callable[..., object],
        inputs: tuple[object, ...],
        arguments: dict[str, object],
    ) -> object:
        """What a NumPy function means on symbolic tensors."""

    def _one(self, op: str, *operands: Given, **attributes: Written) -> SymbolicTensor:
        return self.apply(op, operands, 1, attributes)[0]

    def _pair(self, name: str, a: Operand, b: Operand) -> tuple[SymbolicTensor, SymbolicTensor]:
        """Two operands as tensors of one data type."""
        like = next((t for t in (a, b) if isinstance(t, SymbolicTensor)), None)
        if like is None:
            like = next((self.tensor(t) for t in (a, b) if isinstance(t, np.ndarray)), None)
        x, y = self.tensor(a, like), self.tensor(b, like)
        self._same_type(name, (x, y))
        return x, y

    def _same_type(self, name: str, tensors: Sequence[SymbolicTensor]) -> None:
        kinds = [t.data_type for t in tensors]
        if len(set(kinds)) > 1:
            raise mistake(
                f"{name} takes tensors of one data type: ONNX has no promotion",
                expected="one data type",
                got=", ".join(t.type.text() for t in tensors),
                remedy=f"cast the others, for instance with .cast({kinds[0].value!r})",
            )


def axis_of(axis: int, rank: int, what: str) -> int:
    """An axis counted from the front; raises `CompileError` if there is no such axis."""
    if not -rank <= axis < rank:
        raise mistake(
            f"{what} has no axis {axis}",
            expected=f"{-rank} to {rank - 1}" if rank else "a tensor with axes",
        )
    return int(axis) % rank


def axes_of(axes: Axes, rank: int, what: str) -> tuple[int, ...]:
    """Distinct axes counted from the front; None stands for all of them."""
    if axes is None:
        return tuple(range(rank))
    given = [axes] if isinstance(axes, int | np.integer) else list(axes)
    counted = tuple(axis_of(int(a), rank, what) for a in given)
    if len(set(counted)) != len(counted):
        raise mistake(f"{what}: an axis is named twice", got=str(axes))
    return counted


def data_type_of(given: TypeName) -> DataType:
    """The data type that a name, a NumPy type or a `DataType` stands for."""
    if isinstance(given, DataType):
        return given
    if isinstance(given, str):
        return DataType.parse(given)
    return DataType.from_dtype(given)

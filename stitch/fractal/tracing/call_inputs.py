"""What a call is given, divided: data, which a program takes as its inputs, and the form of all
else, for which it was made.

Data are nests, arrays and tensors, also in tuples and lists. Of data the form has shapes and types,
of numbers and texts their values, of other objects their identity. Nothing is computed or copied.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np

from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.programs import SameObject
from stitch.fractal.rows import Affine, Indexed, Rows
from stitch.fractal.zipped import Zipped
from stitch.frontend import is_torch
from stitch.graph import SymbolicTensor
from stitch.runtime import Tensor

#: Lists of so few whole numbers are part of a program.
MAX_NUMBERS = 1024
#: Of so many bytes a part of the rows is copied, that parts elsewhere are the same program.
MAX_PART_NBYTES = 1 << 24
_PLAIN = (bool, int, str, bytes, type(None))


class NoFormError(Exception):
    """A value that may change unnoticed, or that is of a graph which is being written."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class RowsPart:
    """Of many rows those from one on, whose number is an input as well."""

    rows: int
    begin: int
    count: int
    first: int


class CallInputs:
    """The data of what was given so far, the same data once.

    `keeps_numbers`: few whole numbers are part of the form, for functions that ask for them.
    """

    def __init__(self, *, keeps_numbers: bool) -> None:
        self.keeps_numbers = keeps_numbers
        #: Whether there were such numbers.
        self.has_numbers = False
        #: What is given for the inputs, in their order.
        self.arguments: list[Any] = []
        self._places: dict[int, int] = {}
        self._parts: dict[tuple[int, int, int], RowsPart] = {}
        #: About what the forms take.
        self.nbytes = 0

    def form(self, value: Any) -> Hashable:
        """All that is not data of a value; raises `NoFormError` for what cannot be told."""
        self.nbytes += 256
        if isinstance(value, FractalTensor):
            if self.is_kept(value):
                return "numbers", self._bytes(value.data), self._index(value.index)
            part = self.part(value)
            if part is None:
                return "nest", self._input_form(value.data), self._index(value.index)
            where = value.index.map
            assert isinstance(where, Affine)
            rows = where.base - part.first, where.strides
            return (
                "part", self._input_form(value.data), part.begin, part.count,
                value.index.tree.lengths, rows,
            )  # fmt: skip
        if isinstance(value, Zipped):
            return "zip", *map(self.form, value.parts)
        if isinstance(value, tuple | list):
            return SameObject(type(value)), *map(self.form, value)
        data = self.data_of(value)
        return self._other(value) if data is None else ("input", self._input_form(data))

    def _other(self, value: Any) -> Hashable:
        """The form of what is no data."""
        if type(value) in _PLAIN:
            return type(value).__name__, value
        if isinstance(value, float | complex):
            return type(value).__name__, repr(value)
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return "number", self._bytes(value)
        if isinstance(value, SymbolicTensor):
            raise NoFormError("it is given a tensor of a graph that is being written")
        if isinstance(value, MethodType):  # It is made anew whenever it is asked for.
            return "method", SameObject(value.__func__), SameObject(value.__self__)
        if is_torch(value):
            raise NoFormError("weights of torch modules may have changed")
        if hasattr(type(value), "__dlpack__") or hasattr(type(value), "__array__"):
            raise NoFormError(f"elements of {type(value).__name__} may have changed")
        if type(value).__hash__ is None:
            raise NoFormError(f"{type(value).__name__} cannot be hashed and may have changed")
        return SameObject(value)

    def _index(self, index: Indexed) -> Hashable:
        """Lengths, and the row of each leaf."""
        lengths = [n if isinstance(n, int) else self._bytes(n) for n in index.tree.lengths]
        rows = index.map
        if isinstance(rows, Affine):
            return tuple(lengths), rows.base, rows.strides
        numbers = rows.starts if isinstance(rows, Rows) else rows.numbers
        return tuple(lengths), type(rows).__name__, self._bytes(numbers)

    def _bytes(self, array: Any) -> Hashable:
        self.nbytes += array.nbytes
        return array.dtype.str, array.shape, array.tobytes()

    def is_kept(self, nest: FractalTensor) -> bool:
        """Whether a nest is part of the form, being few whole numbers that are known."""
        is_known = isinstance(nest.data, np.ndarray) and nest.dtype.kind in "iub"
        are_numbers = is_known and not nest.leaf_shape and nest.numel <= MAX_NUMBERS
        self.has_numbers = self.has_numbers or are_numbers
        return are_numbers and self.keeps_numbers

    def data_of(self, value: Any) -> Any:
        """What is given for an input in place of a value, None for what is no data."""
        if isinstance(value, SymbolicTensor):
            return value.written
        is_data = isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.ndim)
        return value if is_data else None

    def place(self, data: Any) -> int:
        """The number of the input that data is given for."""
        found = self._places.get(id(data))
        if found is None:
            found = self._places[id(data)] = len(self.arguments)
            self.arguments.append(data)
        return found

    def part(self, nest: FractalTensor) -> RowsPart | None:
        """The part of the rows that a nest is made of, where that is some rows of many: parts
        that are alike, `xs[a:b]` for many a, are one graph."""
        data, where, lengths = nest.data, nest.index.map, nest.index.tree.uniform
        if not isinstance(where, Affine) or lengths is None or not nest.numel:
            return None
        first, last = where.reached(lengths)
        count = last - first + 1
        row_nbytes = math.prod(nest.leaf_shape) * nest.dtype.itemsize
        if count == data.shape[0] or count * row_nbytes > MAX_PART_NBYTES:
            return None
        rows = self.place(data)
        key = rows, first, count
        if key not in self._parts:
            begin = self.place(np.array(first, np.int64))
            self._parts[key] = RowsPart(rows, begin, count, first)
        return self._parts[key]

    def _input_form(self, data: Any) -> Hashable:
        return self.place(data), data.shape, type_of_input(data)


def type_of_input(data: Any) -> Any:
    """The type of the input that data is given for."""
    return data.data_type.in_arrays if isinstance(data, Tensor) else data.dtype

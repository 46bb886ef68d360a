"""`FractalTensor`: a nest of lists whose leaves are read-only tensors of one shape and type.

All leaves are rows of one array or tensor; an index on the host (`Indexed`) names the row of each
leaf. So elements, slices and windows are views, and no access copies a leaf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import index as as_index
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from stitch.argument_kinds import WHOLE, optional, several, takes
from stitch.errors import LayoutError, UsageError
from stitch.fractal.nested_lists import Data, Nested, read_nested, type_of
from stitch.fractal.rows import Affine, Indexed, IndexTree, look_up, strides_of
from stitch.graph import SymbolicTensor
from stitch.program import Array
from stitch.runtime import Tensor

#: An element: a nest, a `Leaf`, or a symbolic tensor.
Element: TypeAlias = Any
#: Maximum number of elements in a `repr`.
MAX_SHOWN = 64


class Leaf(np.ndarray[Any, Any]):
    """A read-only NumPy array: a leaf of a nest, without axes if it is a number.

    >>> leaf = FractalTensor([0.5, 2.0])[1]
    >>> f"{leaf:.2f}", (leaf + 1).tolist(), bool(leaf > 1), leaf.numpy().shape
    ('2.00', 3.0, True, ())
    """

    def numpy(self) -> Array:
        """Return the elements as a plain array."""
        return self.view(np.ndarray)


def as_leaves(value: Any) -> Any:
    """Return a result, or a tuple of them, with eager tensors as leaves."""
    if isinstance(value, tuple):
        return tuple([as_leaves(each) for each in value])
    written = value.written if isinstance(value, SymbolicTensor) else None
    return value if written is None else written.view(Leaf)


class FractalTensor:
    """A nest of lists of one depth, of any lengths, over leaves of one shape and type.

    `FractalTensor(nested)` accepts nested lists of numbers, arrays, tensors of one device, or
    FractalTensors; an array or a tensor is a list along axis 0. Python integers become int64,
    floats float32. `leaf_shape` and `dtype` are needed if there is no leaf. A nest over a device's
    tensor shows later writes to it. Raises `UsageError` with the position of a mixed depth, shape
    or type.

    >>> xss = FractalTensor([[0, 1, 2], [3, 4]])
    >>> xss.depth, len(xss), xss.numel, xss[-1].tolist(), xss[0][1:].tolist()
    (2, 2, 5, [3, 4], [1, 2])
    """

    __slots__ = ("_data", "_index")
    _data: Data
    _index: Indexed

    @takes(leaf_shape=optional(several("a shape", WHOLE)))
    def __init__(
        self, nested: Nested, *, leaf_shape: Sequence[int] | None = None, dtype: Any = None
    ) -> None:
        self._data, self._index = read_nested(nested, leaf_shape, dtype, _parts)

    @classmethod
    def of(cls, data: Data, index: Indexed) -> FractalTensor:
        """Return the nest of rows of an array or tensor, which must not be written to
        afterwards."""
        nest = cls.__new__(cls)
        nest._data, nest._index = data, index
        return nest

    @property
    def data(self) -> Data:
        """The array or tensor whose rows are the leaves."""
        return self._data

    @property
    def index(self) -> Indexed:
        """The row of each leaf, and the lengths of the lists."""
        return self._index

    @property
    def depth(self) -> int:
        """The number of lists around a leaf."""
        return self._index.tree.depth

    @property
    def length(self) -> int:
        """The length of the outermost list."""
        return self._index.tree.length

    @property
    def numel(self) -> int:
        """The number of leaves."""
        return self._index.tree.numel

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """The shape of each leaf."""
        return tuple(self._data.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type of the leaves."""
        return type_of(self._data)

    def width_by_depth(self, depth: int) -> list[int]:
        """Return the length of each list at a depth: 1 or -depth innermost, -1 outermost.

        >>> FractalTensor([[0, 1, 2], [3, 4], [5, 6, 7, 8]]).width_by_depth(-2)
        [3, 2, 4]
        """
        WHOLE.check("width_by_depth", "depth", depth)
        counted = self.depth + depth + 1 if depth < 0 else depth
        if not 1 <= counted <= self.depth:
            raise UsageError(
                "the nest has no lists at this depth",
                expected=f"1 (innermost) to {self.depth}, or -1 (outermost) to -{self.depth}",
                got=str(depth),
            )
        return self._index.tree.widths(self.depth - counted)

    def __len__(self) -> int:
        return self.length

    def __getitem__(
        self, chosen: int | slice | Sequence[int] | Array | FractalTensor | SymbolicTensor
    ) -> Element:
        """Return an element by number, or a nest of several by slice or list; nothing is copied.

        A symbolic number is looked up when the graph runs. Raises `IndexError`.
        """
        if isinstance(chosen, SymbolicTensor) and chosen.written is None:
            rows, inside = look_up(self._data, self._index, chosen)
            return rows if inside is None else FractalTensor.of(rows, Indexed.whole(inside))
        if isinstance(chosen, slice):
            try:
                part = range(self.length)[chosen]
            except ValueError:
                raise UsageError("the step of a slice of a FractalTensor is 0") from None
            return FractalTensor.of(self._data, self._index.sliced(part))
        if is_several(chosen):
            return FractalTensor.of(self._data, self._index.taken(self._numbers(chosen)))
        number = self._number(chosen)
        if self.depth > 1:
            return FractalTensor.of(self._data, self._index.element(number))
        row = self._index.row(number)
        return self._data[row] if isinstance(self._data, SymbolicTensor) else self._leaf(row)

    def _leaf(self, row: int) -> Leaf:
        data = self._data
        if isinstance(data, Tensor):
            data.settle()
            try:
                array = data[row].numpy()
            except LayoutError:  # Rows of tiled or sharded tensors are no views.
                array = data.numpy()[row, ...]
            array.flags.writeable = False
            return array.view(Leaf)
        assert isinstance(data, np.ndarray)
        return data[row, ...].view(Leaf)

    def __iter__(self) -> Iterator[Element]:
        if self.depth == 1 and isinstance(self._data, Tensor):  # Read once.
            return (leaf[...].view(Leaf) for leaf in map(np.asarray, self.leaves()))
        return (self[number] for number in range(self.length))

    def numpy(self) -> Array:
        """Return the leaves as one read-only array of the nest's lengths and the leaf's shape.

        Raises `UsageError` for a ragged nest, with the list that differs.

        >>> FractalTensor([[1, 2], [3, 4]]).numpy().tolist()
        [[1, 2], [3, 4]]
        """
        lengths = self._index.tree.uniform
        if lengths is None:
            raise UsageError(
                "a ragged FractalTensor cannot become one array",
                where=_raggedness(self._index.tree),
                remedy="use .tolist(), or .leaves() for all leaves in order",
            )
        return self.leaves().reshape(*lengths, *self.leaf_shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = self.numpy()
        array = array if dtype is None else array.astype(dtype, copy=False)
        return array.copy() if copy else array

    def leaves(self) -> Array:
        """Return the leaves in order as a read-only array `[numel, *leaf_shape]`."""
        data = self._data if isinstance(self._data, np.ndarray) else self._data.numpy()
        where, lengths = self._index.map, self._index.tree.uniform
        if isinstance(where, Affine) and where.strides == strides_of(lengths or ()):
            return data[where.base : where.base + self.numel]  # Already in order.
        copied = data[self._index.rows()]
        copied.flags.writeable = False
        return copied

    def tolist(self) -> list[Any]:
        """Return nested lists of numbers.

        >>> FractalTensor([[0, 1], [], [2]]).tolist()
        [[0, 1], [], [2]]
        """
        elements: list[Any] = self.leaves().tolist()
        for depth in range(self.depth - 1, 0, -1):
            ends = self._index.tree.offsets(depth).tolist()
            elements = [elements[a:b] for a, b in pairwise(ends)]
        return elements

    def __repr__(self) -> str:
        kind = f"{self.dtype}{list(self.leaf_shape)}" if self.leaf_shape else str(self.dtype)
        many = sum(self._index.tree.counts) + self.numel * _size(self.leaf_shape)
        if not isinstance(self._data, np.ndarray) or many > 2 * MAX_SHOWN:
            widths = "; ".join(_shown(self._index.tree, d) for d in range(self.depth))
            return f"<FractalTensor: depth {self.depth}, lengths {widths}; {kind}>"
        return f"FractalTensor({self.tolist()}, {kind})"

    def _number(self, chosen: Any) -> int:
        is_index = hasattr(chosen, "__index__") and not isinstance(chosen, bool | np.bool_)
        if isinstance(chosen, np.ndarray):
            is_index = not chosen.shape and chosen.dtype.kind in "iu"
        if not is_index:
            raise UsageError(
                "a FractalTensor is indexed by a whole number, a slice, or a list of numbers",
                got=f"{type(chosen).__name__}: {' '.join(repr(chosen).split())[:60]}",
            )
        number = as_index(chosen)
        counted = number + self.length if number < 0 else number
        if not 0 <= counted < self.length:
            raise IndexError(f"element {number} of a FractalTensor of length {self.length}")
        return counted

    def _numbers(self, chosen: Sequence[Any] | Array | FractalTensor) -> Any:
        return np.array([self._number(each) for each in chosen], np.int64)


def is_several(chosen: object) -> TypeGuard[Sequence[int] | Array | FractalTensor]:
    """Return whether an index selects several elements by number."""
    return isinstance(chosen, list | FractalTensor) or (
        isinstance(chosen, np.ndarray) and chosen.ndim > 0
    )


def _parts(element: object) -> tuple[Data, Indexed] | None:
    """Return data and index of an element that is a nest, else None."""
    return (element._data, element._index) if type(element) is FractalTensor else None


def _raggedness(tree: IndexTree) -> str:
    """Return which list differs in length from the first one of its depth."""
    for depth in range(1, tree.depth):
        widths = tree.widths(depth)
        other = next((i for i, width in enumerate(widths) if width != widths[0]), None)
        if other is not None:
            at, first = tree.path(other, depth), tree.path(0, depth)
            return f"element {at} has length {widths[other]}, {first} has {widths[0]}"
    raise AssertionError("it is ragged")


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _shown(tree: IndexTree, depth: int) -> str:
    lengths = tree.lengths[depth]
    if isinstance(lengths, int):
        return str(lengths)
    few = ", ".join(map(str, lengths[:6].tolist()))
    return few + (", ..." if len(lengths) > 6 else "")

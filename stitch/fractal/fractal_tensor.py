"""`FractalTensor`: a nest of lists whose leaves are tensors of one shape and type, read-only.

All leaves lie in one array or tensor, a row each; which row is which leaf is said beside it, on the
host (`Indexed`). So elements, slices and windows are views, and no access copies a leaf.
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
from stitch.fractal.rows import Affine, Indexed, IndexTree, looked_up, strides_of
from stitch.graph import SymbolicTensor
from stitch.program import Array
from stitch.runtime import Tensor

#: An element: a nest that is less deep, or a leaf: a `Leaf`, or a value of a graph.
Element: TypeAlias = Any
#: As many numbers as a text of a nest shows.
MAX_SHOWN = 64


class Leaf(np.ndarray[Any, Any]):
    """An element that is no nest: NumPy's array of it, read-only; of a number one without axes.

    It is the same whether its nest was computed in sequence or in parallel.

    >>> leaf = FractalTensor([0.5, 2.0])[1]
    >>> f"{leaf:.2f}", (leaf + 1).tolist(), bool(leaf > 1), leaf.numpy().shape
    ('2.00', 3.0, True, ())
    """

    def numpy(self) -> Array:
        """The elements as a plain array."""
        return self.view(np.ndarray)


def as_leaves(value: Any) -> Any:
    """A result, or several, with tensors that have data as leaves."""
    if isinstance(value, tuple):
        return tuple([as_leaves(each) for each in value])
    written = value.written if isinstance(value, SymbolicTensor) else None
    return value if written is None else written.view(Leaf)


class FractalTensor:
    """A nest of lists of one depth, whose lengths may differ, over leaves of one shape and type.

    `FractalTensor(nested)` takes nested lists of numbers, arrays, tensors of one device, or other
    FractalTensors (one more list around them); an array or a tensor is a list along its first
    axis. Python's whole numbers become int64, others float32. `leaf_shape` and `dtype` are needed
    where there is no leaf to tell. A nest over a device's tensor shows what is written to that.
    Raises `UsageError` for mixed depths, shapes or types, saying where.

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
        """The nest of these rows of an array or tensor, which must not be written to any more."""
        nest = cls.__new__(cls)
        nest._data, nest._index = data, index
        return nest

    @property
    def data(self) -> Data:
        """What the leaves are rows of."""
        return self._data

    @property
    def index(self) -> Indexed:
        """Which row each leaf is, and how long the lists are."""
        return self._index

    @property
    def depth(self) -> int:
        """How many lists stand around a leaf."""
        return self._index.tree.depth

    @property
    def length(self) -> int:
        """How many elements the outermost list has."""
        return self._index.tree.length

    @property
    def numel(self) -> int:
        """How many leaves there are."""
        return self._index.tree.numel

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """The shape of each leaf."""
        return tuple(self._data.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the leaves' elements, as arrays have it."""
        return type_of(self._data)

    def width_by_depth(self, depth: int) -> list[int]:
        """The length of each list at a depth: 1 for the innermost, -1 for the outermost.

        >>> FractalTensor([[0, 1, 2], [3, 4], [5, 6, 7, 8]]).width_by_depth(-2)
        [3, 2, 4]
        """
        WHOLE.check("width_by_depth", "depth", depth)
        counted = self.depth + depth + 1 if depth < 0 else depth
        if not 1 <= counted <= self.depth:
            raise UsageError(
                "there are no lists at that depth",
                expected=f"1 (innermost) to {self.depth}, or -1 (outermost) to -{self.depth}",
                got=str(depth),
            )
        return self._index.tree.widths(self.depth - counted)

    def __len__(self) -> int:
        return self.length

    def __getitem__(
        self, chosen: int | slice | Sequence[int] | Array | FractalTensor | SymbolicTensor
    ) -> Element:
        """An element, some at equal distances, or some by number; nothing is copied.

        A number of a graph that is being written chooses while that runs. Raises `IndexError` for
        an element that is not there.
        """
        if isinstance(chosen, SymbolicTensor) and chosen.written is None:
            found, inside = looked_up(self._data, self._index, chosen)
            return found if inside is None else FractalTensor.of(found, Indexed.whole(inside))
        if isinstance(chosen, slice):
            try:
                part = range(self.length)[chosen]
            except ValueError:
                raise UsageError("the step of a slice of a FractalTensor is not 0") from None
            return FractalTensor.of(self._data, self._index.sliced(part))
        if is_several(chosen):
            return FractalTensor.of(self._data, self._index.taken(self._numbers(chosen)))
        number = self._number(chosen)
        if self.depth > 1:
            return FractalTensor.of(self._data, self._index.element(number))
        row = self._index.row(number)
        return self._data[row] if isinstance(self._data, SymbolicTensor) else self._leaf(row)

    def _leaf(self, row: int) -> Leaf:
        """The leaf in a row of an array or a tensor."""
        data = self._data
        if isinstance(data, Tensor):
            data.settle()
            try:
                array = data[row].numpy()
            except LayoutError:  # Rows of tiles and of shards are no views.
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
        """The leaves in one array of the nest's lengths and the leaf's shape, to read.

        Raises `UsageError` where lists of one depth differ in length, saying which.

        >>> FractalTensor([[1, 2], [3, 4]]).numpy().tolist()
        [[1, 2], [3, 4]]
        """
        lengths = self._index.tree.uniform
        if lengths is None:
            raise UsageError(
                "a ragged FractalTensor is no array",
                where=_raggedness(self._index.tree),
                remedy="take .tolist(), or .leaves() for the leaves one after the other",
            )
        return self.leaves().reshape(*lengths, *self.leaf_shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """As `numpy`."""
        array = self.numpy()
        array = array if dtype is None else array.astype(dtype, copy=False)
        return array.copy() if copy else array

    def leaves(self) -> Array:
        """The leaves one after the other, as an array `[numel, *leaf_shape]`, to read."""
        data = self._data if isinstance(self._data, np.ndarray) else self._data.numpy()
        where, lengths = self._index.map, self._index.tree.uniform
        if isinstance(where, Affine) and where.strides == strides_of(lengths or ()):
            return data[where.base : where.base + self.numel]  # They are so already.
        copied = data[self._index.rows()]
        copied.flags.writeable = False
        return copied

    def tolist(self) -> list[Any]:
        """Nested lists of numbers.

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
                "an element of a FractalTensor is chosen by a whole number, some by a slice or a "
                "list of numbers",
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
    """Whether an index names some elements by number, not one."""
    return isinstance(chosen, list | FractalTensor) or (
        isinstance(chosen, np.ndarray) and chosen.ndim > 0
    )


def _parts(element: object) -> tuple[Data, Indexed] | None:
    """The data and index of an element that is a nest itself."""
    return (element._data, element._index) if type(element) is FractalTensor else None


def _raggedness(tree: IndexTree) -> str:
    """Which list has another length than the first one of its depth."""
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

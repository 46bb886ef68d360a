"""Convert nested Python lists to data and an index, depth by depth without recursion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from stitch.errors import LayoutError, UsageError
from stitch.fractal.rows import Indexed, IndexTree, RowList
from stitch.graph import SymbolicTensor
from stitch.program import Array, DataType
from stitch.runtime import Tensor

#: Lists of lists of leaves, an array or a tensor (a list along its first axis), or a nest.
Nested: TypeAlias = Any
#: The array, device tensor or symbolic tensor whose rows are leaves.
Data: TypeAlias = "Array | Tensor | SymbolicTensor"
PartsOf: TypeAlias = "Callable[[object], tuple[Data, Indexed] | None]"
#: Limits of depth and number of elements.
MAX_DEPTH, MAX_ELEMENTS = 32, 1 << 24


def read_nested(
    nested: Nested, leaf_shape: Sequence[int] | None, dtype: Any, parts_of: PartsOf
) -> tuple[Data, Indexed]:
    """Return an array or tensor with a row per leaf, and the index of the leaves.

    Args:
        leaf_shape: Expected shape of the leaves; required only if there are none.
        dtype: Expected type of the leaves; required only if there are none.
        parts_of: Returns data and index of a FractalTensor, None for other objects.

    Raises:
        UsageError: Depths, shapes or types differ.
    """
    own_parts = parts_of(nested)
    if own_parts is not None:
        return _checked(*own_parts, leaf_shape, dtype)
    if isinstance(nested, np.ndarray | Tensor | SymbolicTensor):
        if not nested.shape:
            raise UsageError(
                "a FractalTensor needs at least one axis", got="one number", remedy="pass a list"
            )
        data: Data = _kept(nested, dtype) if isinstance(nested, np.ndarray) else known_data(nested)
        return _checked(data, Indexed.whole(IndexTree.of([len(nested)])), leaf_shape, dtype)
    if not isinstance(nested, list | tuple):
        raise UsageError(
            "a FractalTensor is made of nested lists, an array, or FractalTensors",
            got=f"{type(nested).__name__}: {' '.join(repr(nested).split())[:60]}",
        )
    lengths, elements = _walked(nested, parts_of)
    tree = IndexTree.of(lengths)
    parts = [parts_of(element) for element in elements]
    if any(part is not None for part in parts):
        data, index = _joined(tree, parts)
    else:
        data = _rows(tree, elements, leaf_shape, dtype)
        index = Indexed.whole(tree)
    return _checked(data, index, leaf_shape, dtype)


def _walked(nested: Sequence[Any], parts_of: PartsOf) -> tuple[list[list[int]], list[Any]]:
    """Return the lengths of all lists by depth, and the innermost elements in order."""
    level = _elements(nested)
    lengths, seen = [[len(level)]], {id(nested)}
    while any(isinstance(element, list | tuple) for element in level):
        other = next((i for i, e in enumerate(level) if not isinstance(e, list | tuple)), None)
        if other is not None:
            listed = next(i for i, e in enumerate(level) if isinstance(e, list | tuple))
            tree, depth = IndexTree.of(lengths), len(lengths)
            raise UsageError(
                "the nested lists have different depths",
                where=f"{tree.path(other, depth)} is a leaf, {tree.path(listed, depth)} a list",
                remedy="put the leaf into lists of its own",
            )
        if len(lengths) == MAX_DEPTH:
            raise UsageError("lists are nested too deeply", expected=f"depth {MAX_DEPTH} or less")
        # The same empty list may occur at several depths.
        full = {id(element) for element in level if _length(element)}
        if not seen.isdisjoint(full):
            raise UsageError("a list contains itself, or occurs at two depths",
                             where=f"depth {len(lengths)}")  # fmt: skip
        seen |= full
        lengths.append([_length(element) for element in level])
        if sum(lengths[-1]) > MAX_ELEMENTS:
            raise UsageError(
                "nested lists have too many elements", expected=f"at most {MAX_ELEMENTS}",
                got=str(sum(lengths[-1])), remedy="use arrays as leaves, or one array",
            )  # fmt: skip
        level = list(chain.from_iterable(map(_elements, level)))
    return lengths, list(level)


def _length(nested: Sequence[Any]) -> int:
    """Return a list's length, ignoring overridden methods of subclasses."""
    if isinstance(nested, list):
        return list.__len__(nested)
    assert isinstance(nested, tuple)
    return tuple.__len__(nested)


def _elements(nested: Sequence[Any]) -> Sequence[Any]:
    """Return a list's elements, ignoring overridden methods of subclasses."""
    if isinstance(nested, list):
        return list.__getitem__(nested, slice(None))
    assert isinstance(nested, tuple)
    return tuple.__getitem__(nested, slice(None))


def known_data(data: Tensor | SymbolicTensor) -> Data:
    """Return the data of an eager tensor; symbolic and device tensors unchanged."""
    written = data.written if isinstance(data, SymbolicTensor) else None
    return data if written is None else written


def _rows(
    tree: IndexTree, leaves: Sequence[Any], leaf_shape: Sequence[int] | None, dtype: Any
) -> Data:
    """Stack leaves into one array, or into one symbolic tensor."""
    traced = [e for e in leaves if isinstance(e, SymbolicTensor) and e.written is None]
    if traced:
        return stacked(tree, leaves, traced[0])
    if not leaves:
        kind, shape = _type(np.float32 if dtype is None else dtype), tuple(leaf_shape or ())
        try:
            return np.empty((0, *shape), kind)
        except ValueError as error:
            raise UsageError("leaf_shape is not a valid shape", got=str(list(shape))) from error
    try:
        arrays = [_array(leaf, is_rounded=dtype is None) for leaf in leaves]
    except Exception as error:  # An object's `__array__` may raise anything.
        raise UsageError("a leaf is not a number, an array or a tensor",
                         got=str(error)) from error  # fmt: skip
    if dtype is None and all(isinstance(leaf, bool | int | float) for leaf in leaves):
        # Python numbers get one common type.
        kinds = {array.dtype.kind for array in arrays}
        dtype = np.float32 if "f" in kinds else np.int64 if "i" in kinds else np.bool_
    for number, array in enumerate(arrays):
        is_alike = dtype is not None or array.dtype == arrays[0].dtype
        if array.shape != arrays[0].shape or not is_alike:
            raise UsageError(
                "the leaves have different shapes or types",
                where=f"leaf {tree.path(number, tree.depth)}",
                expected=f"{arrays[0].dtype}{list(arrays[0].shape)}, as the first one",
                got=f"{array.dtype}{list(array.shape)}",
                remedy="convert the leaves to one shape and type, or pass dtype=",
            )
    return _kept(np.stack(arrays), dtype)


def stacked(tree: IndexTree, leaves: Sequence[Any], first: SymbolicTensor) -> SymbolicTensor:
    """Stack leaves into a symbolic tensor of the graph of `first`."""
    builder: Any = first.builder
    inside = builder.innermost(leaves)
    tensors = [inside.tensor(_host(leaf), first) for leaf in leaves]
    for number, tensor in enumerate(tensors):
        if tensor.type != tensors[0].type:
            raise UsageError(
                "the leaves have different shapes or types",
                where=f"leaf {tree.path(number, tree.depth)}",
                expected=f"{tensors[0].dtype}{list(tensors[0].shape)}, as the first one",
                got=f"{tensor.dtype}{list(tensor.shape)}",
            )
    rows: SymbolicTensor = inside.stack(tensors)
    return rows


def _host(data: Any) -> Any:
    return data.numpy() if isinstance(data, Tensor) else data


def _array(leaf: Any, *, is_rounded: bool) -> Array:
    """Return a leaf as an array; Python integers are int64, floats float32 if `is_rounded`."""
    if isinstance(leaf, Tensor):
        return leaf.numpy()
    array = np.asarray(leaf)
    if array.dtype == object or (array.dtype.kind in "USmMV" and array.dtype.names is not None):
        raise TypeError(f"{type(leaf).__name__}: {' '.join(repr(leaf).split())[:60]}")
    DataType.from_dtype(array.dtype)
    if isinstance(leaf, float) and is_rounded:
        array = array.astype(np.float32)
    return array


def _joined(tree: IndexTree, parts: Sequence[tuple[Data, Indexed] | None]) -> tuple[Data, Indexed]:
    """Return lists of nests as one deeper nest; data is copied unless it is the same."""
    first = parts[0]
    for number, part in enumerate(parts):
        if part is None or first is None:
            raise UsageError(
                "the nested lists have different depths",
                where=f"{tree.path(number if first else 0, tree.depth)} is a leaf, others are "
                "FractalTensors",
                remedy="put the leaf into a FractalTensor of its own",
            )
        (data, index), (data0, index0) = part, first
        if index.tree.depth != index0.tree.depth or data.shape[1:] != data0.shape[1:]:
            raise UsageError(
                "FractalTensors in one list have different depths or leaf shapes",
                where=f"element {tree.path(number, tree.depth)}",
                expected=f"depth {index0.tree.depth}, leaves {list(data0.shape[1:])}",
                got=f"depth {index.tree.depth}, leaves {list(data.shape[1:])}",
            )
    nests = [part for part in parts if part is not None]
    datas = list({id(data): data for data, _ in nests}.values())
    return joined_data(datas), _index_of(tree, nests, datas)


def joined_data(datas: Sequence[Data]) -> Data:
    """Concatenate the rows of several arrays or tensors; a single one is returned itself."""
    if len(datas) == 1:
        return datas[0]
    kinds = {type_of(data) for data in datas}
    if len(kinds) > 1:
        raise UsageError(
            "FractalTensors in one list have leaves of different types",
            got=", ".join(sorted(map(str, kinds))),
            remedy="convert them first",
        )
    traced = [data for data in datas if isinstance(data, SymbolicTensor)]
    if traced:
        builder: Any = traced[0].builder
        joined: SymbolicTensor = builder.innermost(traced).concat(
            [_host(each) for each in datas], 0
        )
        return joined
    arrays = [data.numpy() if isinstance(data, Tensor) else data for data in datas]
    return _kept(np.concatenate(arrays), None)


def _index_of(
    tree: IndexTree, parts: Sequence[tuple[Data, Indexed]], datas: Sequence[Data]
) -> Indexed:
    """Return the row of each leaf in the concatenated data."""
    begins, begin = {}, 0
    for data in datas:
        begins[id(data)] = begin
        begin += len(data)
    depth = parts[0][1].tree.depth
    inner = [
        np.concatenate([np.diff(index.tree.offsets(level)) for _, index in parts])
        for level in range(depth)
    ]
    rows = np.concatenate([begins[id(data)] + index.rows() for data, index in parts])
    whole = IndexTree.of([*tree.lengths, *inner])
    return Indexed(whole, RowList(rows)).simplified()


def _checked(
    data: Data, index: Indexed, leaf_shape: Sequence[int] | None, dtype: Any
) -> tuple[Data, Indexed]:
    if leaf_shape is not None and tuple(data.shape[1:]) != tuple(leaf_shape):
        raise UsageError("leaves have another shape", expected=str(list(leaf_shape)),
                         got=str(list(data.shape[1:])))  # fmt: skip
    kind = type_of(data)
    if dtype is not None and kind != _type(dtype):
        raise UsageError(
            "leaves have another type", expected=str(_type(dtype)), got=str(kind),
            remedy="convert them first: dtype= does not convert nests and tensors",
        )  # fmt: skip
    return data, index


def type_of(data: Data) -> np.dtype[Any]:
    return data.data_type.in_arrays.dtype if isinstance(data, Tensor) else data.dtype


def _kept(array: Array, dtype: Any) -> Array:
    """Return a read-only copy of an array."""
    DataType.from_dtype(array.dtype)
    kind = array.dtype if dtype is None else _type(dtype)
    with np.errstate(all="ignore"):
        copy = np.array(array, kind, order="C")
    if kind.kind in "iub" and not np.array_equal(copy, array):
        raise UsageError(f"some leaves do not fit into {kind}", remedy="pass a wider dtype=")
    copy.flags.writeable = False
    return copy


def _type(dtype: Any) -> np.dtype[Any]:
    if isinstance(dtype, DataType):
        return dtype.dtype
    try:
        kind = DataType.parse(dtype).dtype if isinstance(dtype, str) else np.dtype(dtype)
        return DataType.from_dtype(kind).dtype
    except (LayoutError, TypeError, ValueError) as error:
        raise UsageError(
            "dtype of a FractalTensor must be a storable number type",
            expected=", ".join([each.value for each in DataType if not each.is_block]),
            got=" ".join(repr(dtype).split())[:60],
        ) from error

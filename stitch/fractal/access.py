"""Access functions: elements, windows, pairs. They change index maps and copy no leaf, except where
rows of several arrays are joined (`join`, padding).

For zipped nests they return a tuple with one result per part.
"""

from __future__ import annotations

from operator import index as as_index
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.fractal.fractal_tensor import Element, FractalTensor
from stitch.fractal.rows import check_count
from stitch.fractal.zipped import Nest, as_nest, each_part, zip
from stitch.program import Array

#: Limit of window sizes, strides and counts.
MAX_SIZE = 1 << 40


def head(xs: Nest) -> Element:
    """Return the first element; raise `IndexError` for an empty list."""
    return as_nest("head", xs)[0]


def last(xs: Nest) -> Element:
    """Return the last element; raise `IndexError` for an empty list."""
    return as_nest("last", xs)[-1]


def tail(xs: Nest) -> Element:
    """Return the last element: `fold(f, xs)` is `tail(scan(f, xs))`. Raises `IndexError` if empty.

    >>> int(tail(FractalTensor([1, 2, 3])))
    3
    """
    return as_nest("tail", xs)[-1]


def gather(xs: Nest, numbers: Any) -> Any:
    """Return elements by number, in this order; numbers may repeat.

    >>> gather(FractalTensor([[0], [1, 2]]), [1, 0, 1]).tolist()
    [[1, 2], [0], [1, 2]]
    """
    try:
        chosen = list(numbers)
    except TypeError:
        raise UsageError("numbers of gather must be a list of whole numbers",
                         got=" ".join(repr(numbers).split())[:60]) from None  # fmt: skip
    return each_part("gather", xs, lambda part: part[chosen])


def unbind(xs: Nest) -> list[Element]:
    """Return the elements of the outermost list."""
    return list(as_nest("unbind", xs))


def split(xs: Nest, count: int) -> Any:
    """Split into `count` lists of equal length; the last one also has the remainder.

    >>> split(FractalTensor([0, 1, 2, 3, 4]), 2).tolist()
    [[0, 1], [2, 3, 4]]
    """
    parts = check_count(_at_least("split", "count", count, 1))

    def cut(part: FractalTensor) -> FractalTensor:
        size = part.length // parts
        sizes = [size] * (parts - 1) + [part.length - size * (parts - 1)]
        chosen = np.arange(part.length, dtype=np.int64)
        return FractalTensor.of(part.data, part.index.grouped(chosen, sizes, parts))

    return each_part("split", xs, cut)


def join(xs: Nest, *others: Nest) -> Any:
    """Concatenate lists; rows are copied if the nests have different data.

    >>> join(FractalTensor([1]), FractalTensor([2, 3])).tolist()
    [1, 2, 3]
    """
    nests = [as_nest("join", each) for each in (xs, *others)]
    whole = nests[0]
    if isinstance(whole, FractalTensor):
        listed = FractalTensor(nests)
        return FractalTensor.of(listed.data, listed.index.flattened())
    zipped = [each.parts for each in nests if not isinstance(each, FractalTensor)]
    if len({len(parts) for parts in zipped}) != 1 or len(zipped) < len(nests):
        raise UsageError("join needs zipped nests with the same number of parts",
                         got=", ".join(str(len(parts)) for parts in zipped))  # fmt: skip
    return tuple([join(*parts) for parts in map(list, _transposed(zipped))])


def repeat(xs: Nest, times: int) -> Any:
    """Return a list of `times` references to the nest: one level deeper.

    >>> repeat(FractalTensor([1, 2]), 2).tolist()
    [[1, 2], [1, 2]]
    """
    count = _at_least("repeat", "times", times, 0)
    return each_part("repeat", xs, lambda p: FractalTensor.of(p.data, p.index.repeated(count)))


def enumerate(*nests: Nest) -> Nest:  # as the field calls it
    """Zip the nests with the number of each element.

    >>> enumerate(FractalTensor([7, 8])).tolist()
    [(0, 7), (1, 8)]
    """
    if not nests:
        raise UsageError("enumerate needs at least one FractalTensor")
    first = as_nest("enumerate", nests[0])
    numbers = np.arange(check_count(first.length), dtype=np.int64)
    return zip(FractalTensor(numbers), *nests)


def product(xs: FractalTensor, ys: FractalTensor) -> tuple[FractalTensor, FractalTensor]:
    """Return all pairs as two nests, one level deeper: for each element of ys, all of xs.

    >>> [n.tolist() for n in product(FractalTensor([0, 1, 2]), FractalTensor([0, 1]))]
    [[[0, 1, 2], [0, 1, 2]], [[0, 0, 0], [1, 1, 1]]]
    """
    for each in (xs, ys):
        if not isinstance(each, FractalTensor):
            as_nest("product", each)
            raise UsageError("product needs two FractalTensors", got="zipped nests")
    across = FractalTensor.of(xs.data, xs.index.repeated(ys.length))
    return across, FractalTensor.of(ys.data, ys.index.spread(xs.length))


def slide(
    xs: Nest, window_size: int, stride: int = 1, dilation: int = 1, padding: int = 0,
    padding_value: Element | None = None,
) -> Any:  # fmt: skip
    """Return windows of `window_size` elements: one level deeper.

    There are `(n + 2 * padding - dilation * (window_size - 1) - 1) // stride + 1` windows, `stride`
    apart, with elements `dilation` apart. `padding_value` is repeated `padding` times at both ends.

    >>> slide(FractalTensor([0, 1, 2, 3, 4]), 3, stride=2).tolist()
    [[0, 1, 2], [2, 3, 4]]
    """
    size, step, apart = _window("slide", window_size, stride, dilation)
    before = _at_least("slide", "padding", padding, 0)

    def windows(part: FractalTensor) -> FractalTensor:
        padded = _padded(part, before, before, padding_value)
        count = max(0, (padded.length - apart * (size - 1) - 1) // step + 1)
        return FractalTensor.of(padded.data, padded.index.windows(count, size, step, apart))

    return each_part("slide", xs, windows)


def window(
    index: int, xs: Nest, window_size: int, dilation: int = 1, padding_value: Element | None = None
) -> Any:
    """Return the window around element `index`; elements outside of the list are `padding_value`.

    >>> window(0, FractalTensor([1, 2, 3]), 3, padding_value=0).tolist()
    [0, 1, 2]
    """
    size, _, apart = _odd_window("window", window_size, dilation)

    def around(part: FractalTensor) -> FractalTensor:
        at = _within("window", index, part.length)
        chosen = at + _offsets(size, min(apart, part.length + 1))
        is_outside = (chosen < 0) | (chosen >= part.length)
        if not is_outside.any():
            return FractalTensor.of(part.data, part.index.taken(chosen))
        padded = _padded(part, 1, 0, padding_value)
        chosen = np.where(is_outside, 0, chosen + 1)
        return FractalTensor.of(padded.data, padded.index.taken(chosen))

    return each_part("window", xs, around)


def shifted_slide(xs: Nest, window_size: int, dilation: int = 1) -> Any:
    """Return the cyclic window around each element: one level deeper.

    >>> shifted_slide(FractalTensor([0, 1, 2, 3]), 3).tolist()
    [[3, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 0]]
    """
    size, _, apart = _odd_window("shifted_slide", window_size, dilation)

    def around(part: FractalTensor) -> FractalTensor:
        length = max(1, part.length)
        check_count(part.length * size)
        every = np.arange(part.length, dtype=np.int64)[:, None]
        chosen = ((every + _offsets(size, apart % length)) % length).ravel()
        return FractalTensor.of(part.data, part.index.grouped(chosen, size, part.length))

    return each_part("shifted_slide", xs, around)


def shifted_window(index: int, xs: Nest, window_size: int, dilation: int = 1) -> Any:
    """Return the cyclic window around element `index`.

    >>> shifted_window(0, FractalTensor([1, 2, 3, 4]), 3).tolist()
    [4, 1, 2]
    """
    size, _, apart = _odd_window("shifted_window", window_size, dilation)

    def around(part: FractalTensor) -> FractalTensor:
        at = _within("shifted_window", index, part.length)
        chosen = (at + _offsets(size, apart % part.length)) % part.length
        return FractalTensor.of(part.data, part.index.taken(chosen))

    return each_part("shifted_window", xs, around)


def dilate(xs: Nest, dilation: int) -> Any:
    """Return `dilation` lists of elements that are `dilation` apart: one level deeper.

    >>> dilate(FractalTensor([0, 1, 2, 3, 4]), 2).tolist()
    [[0, 2, 4], [1, 3]]
    """
    apart = _at_least("dilate", "dilation", dilation, 1)

    def strands(part: FractalTensor) -> FractalTensor:
        count = min(apart, part.length)
        if count and part.length % apart == 0:
            index = part.index.windows(count, part.length // apart, 1, apart)
            return FractalTensor.of(part.data, index)
        check_count(part.length)
        lists = [np.arange(n, part.length, apart, dtype=np.int64) for n in range(count)]
        chosen = np.concatenate([np.empty(0, np.int64), *lists])
        sizes = [len(each) for each in lists]
        return FractalTensor.of(part.data, part.index.grouped(chosen, sizes, count))

    return each_part("dilate", xs, strands)


def _padded(xs: FractalTensor, before: int, after: int, value: Element | None) -> FractalTensor:
    """Return a nest with an element repeated before and after it."""
    if not before and not after:
        return xs
    if value is None:
        raise UsageError(
            "a window reaches outside of the list, and there is no padding_value",
            remedy="pass padding_value=, an element of the same depth, shape and type",
        )
    element = value if isinstance(value, FractalTensor) else _padding(xs, value)
    joined: FractalTensor = join(FractalTensor([element]), xs)
    check_count(before + xs.length + after)
    chosen = np.concatenate([
        np.zeros(before, np.int64), np.arange(1, xs.length + 1, dtype=np.int64),
        np.zeros(after, np.int64),
    ])  # fmt: skip
    return FractalTensor.of(joined.data, joined.index.taken(chosen))


def _padding(xs: FractalTensor, value: Element) -> Array:
    """Return a value to pad with, in the type of the leaves."""
    array = np.asarray(value)
    with np.errstate(all="ignore"):
        leaf = array.astype(xs.dtype) if array.dtype.kind in "biuf" else array
    # Floats may be rounded; whole numbers and booleans must stay equal.
    is_held = array.dtype.kind not in "USOmM" and (
        xs.dtype.kind not in "biu" or np.array_equal(leaf, array)
    )
    if xs.depth > 1 or array.shape != xs.leaf_shape or not is_held:
        raise UsageError(
            "padding_value must have depth, shape and type of the list's elements",
            expected=f"a nest of depth {xs.depth - 1}" if xs.depth > 1
            else f"{xs.dtype}{list(xs.leaf_shape)}",
            got=f"{array.dtype}{list(array.shape)}: {' '.join(repr(value).split())[:40]}",
        )  # fmt: skip
    return leaf


def _transposed(parts: Any) -> list[tuple[Any, ...]]:
    return [tuple([each[number] for each in parts]) for number in range(len(parts[0]))]


def _offsets(size: int, apart: int) -> Any:
    """Return the offsets of a window's elements from its middle."""
    return (np.arange(check_count(size), dtype=np.int64) - size // 2) * apart


def _window(call: str, size: int, stride: int, dilation: int) -> tuple[int, int, int]:
    words = (("window_size", size), ("stride", stride), ("dilation", dilation))
    a, b, c = [_at_least(call, name, value, 1) for name, value in words]
    return a, b, c


def _odd_window(call: str, size: int, dilation: int) -> tuple[int, int, int]:
    """Check a window with a middle element."""
    sizes = _window(call, size, 1, dilation)
    if sizes[0] % 2 == 0:
        raise UsageError(f"window_size of {call} must be odd, with one element in the middle",
                         got=str(size))  # fmt: skip
    return sizes


def _at_least(call: str, name: str, value: int, least: int) -> int:
    try:
        number = as_index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= MAX_SIZE or isinstance(value, bool):
        raise UsageError(f"{name} of {call} must be a whole number of at least {least}",
                         expected=f"{least} to {MAX_SIZE}",
                         got=" ".join(repr(value).split())[:60])  # fmt: skip
    return number


def _within(call: str, index: int, length: int) -> int:
    """Return a valid element number; negative ones count from the end."""
    number = _at_least(call, "index", index, -MAX_SIZE)
    if not -length <= number < length:
        raise IndexError(f"{call}: element {number} of a FractalTensor of length {length}")
    return number % length

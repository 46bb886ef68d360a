"""Random operations: for every operator, operands and all of its attributes, on ordinary values.

`draw_row` gives a `Row` that type inference accepts. Lengths are small, and 1 often; with `zeros`
some of them are 0. The same operator and seed give the same row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from stitch.errors import CompileError
from stitch.ops import OpDef, evaluate, operators
from stitch.program import SCAN, Array
from tests.support.operators.one_operation import Row, one_operation

Shape = tuple[int, ...]
#: Operands, attributes, number of outputs.
Drawn = tuple[Sequence[Any], Mapping[str, Any], int]
FLOATS = ("f32", "f32", "f32", "f64", "f16", "bf16")
INTS = ("i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64")
NUMBERS = (*FLOATS, *INTS)
#: Draws of an operator until one is accepted.
MOST_DRAWS = 400


class Draw:
    """Choices of one random operation; `zeros` is the share of lengths that are 0."""

    def __init__(self, random: Random, zeros: float = 0.0) -> None:
        self.random, self.zeros = random, zeros
        self.attributes: dict[str, Any] = {}

    def chance(self, share: float = 0.5) -> bool:
        return self.random.random() < share

    def of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def number(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return self.random.randint(low, high)

    def length(self, most: int = 5) -> int:
        if self.chance(self.zeros):
            return 0
        return 1 if self.chance(0.15) else self.number(1, most)

    def shape(self, low: int = 0, high: int = 4, most: int = 5) -> Shape:
        return tuple(self.length(most) for _ in range(self.number(low, high)))

    def axis(self, rank: int) -> int:
        """An axis, counted from either end."""
        return self.number(-rank, rank - 1) if rank else 0

    def axes(self, rank: int, low: int = 0) -> list[int]:
        """Different axes, each counted from either end."""
        chosen = self.random.sample(range(rank), self.number(min(low, rank), rank))
        return [a - rank if self.chance(0.3) else a for a in chosen]

    def broadcast(self, shape: Shape) -> Shape:
        """A shape that is broadcast to another."""
        if self.chance(0.4):
            return shape
        cut = self.number(0, len(shape))
        return tuple(1 if self.chance(0.3) else size for size in shape[cut:])

    def set(self, share: float = 0.6, /, **choices: Sequence[Any]) -> None:
        """Give each attribute one of its values, or leave it out."""
        for name, values in choices.items():
            if self.chance(share):
                self.attributes[name] = self.random.choice(list(values))

    def flags(self, *names: str) -> None:
        self.set(0.6, **dict.fromkeys(names, (0, 1)))

    def row(self, *specs: Any, outputs: int = 1) -> Drawn:
        return specs, self.attributes, outputs

    def array(self, shape: Shape, low: int, high: int, dtype: Any = np.int64) -> Array:
        """Whole numbers, both ends included."""
        values = [self.number(low, high) if low <= high else 0 for _ in range(math.prod(shape))]
        return np.array(values, dtype).reshape(shape)


def text(kind: str, shape: Shape, suffix: str = "") -> str:
    """An operand in the words of `drawn_operands`."""
    return f"{kind}[{','.join(map(str, shape))}]{suffix}"


Generator = Callable[[Draw], Drawn]

# Elementwise --------------------------------------------------------------------------------------


def unary(*kinds: str, suffix: str = "", **attributes: Sequence[Any]) -> Generator:
    def generate(d: Draw) -> Drawn:
        d.set(0.6, **attributes)
        return d.row(text(d.of(*kinds), d.shape(), suffix))

    return generate


def binary(*kinds: str, second: str = "", **attributes: Sequence[Any]) -> Generator:
    def generate(d: Draw) -> Drawn:
        kind, shape = d.of(*kinds), d.shape()
        d.set(1.0, **attributes)
        return d.row(text(kind, d.broadcast(shape)), text(kind, d.broadcast(shape), second))

    return generate


def variadic(*kinds: str) -> Generator:
    def generate(d: Draw) -> Drawn:
        kind, shape = d.of(*kinds), d.shape()
        return d.row(*(text(kind, d.broadcast(shape)) for _ in range(d.number(1, 4))))

    return generate


def mod(d: Draw) -> Drawn:
    kind, shape = d.of(*NUMBERS), d.shape()
    d.attributes["fmod"] = 1 if kind in FLOATS else d.of(0, 1)
    # Never 0; below 0 as well where the type has such numbers.
    low = 1 if kind in FLOATS or kind.startswith("u") else -4
    divisor = d.array(d.broadcast(shape), low, 4)
    divisor[divisor == 0] = 3
    return d.row(text(kind, d.broadcast(shape)), _typed(divisor, kind))


def div(d: Draw) -> Drawn:
    kind, shape = d.of(*NUMBERS), d.shape()
    divisor = d.array(d.broadcast(shape), 1 if kind.startswith("u") else -4, 4)
    divisor[divisor == 0] = 3
    return d.row(text(kind, d.broadcast(shape)), _typed(divisor, kind))


def _typed(data: Array, kind: str) -> Array:
    from stitch.program import DataType

    return data.astype(DataType.parse(kind).dtype)


def power(d: Draw) -> Drawn:
    base, shape = d.of("f32", "f64", "i32", "i64"), d.shape()
    exponent = d.of("f32", "f64", "i32", "i64", "i8", "ui16")
    whole = _typed(d.array(d.broadcast(shape), 0, 3), exponent)
    if base in FLOATS and d.chance():
        return d.row(text(base, d.broadcast(shape), "+"), text(exponent, d.broadcast(shape)))
    return d.row(text(base, d.broadcast(shape)), whole)


def clip(d: Draw) -> Drawn:
    kind = d.of(*NUMBERS)
    bounds = [text(kind, ()) if d.chance(0.7) else None for _ in range(2)]
    return d.row(text(kind, d.shape()), *bounds)


def where(d: Draw) -> Drawn:
    shape, kind = d.shape(), d.of(*NUMBERS, "bool")
    return d.row(
        text("bool", d.broadcast(shape)), text(kind, d.broadcast(shape)),
        text(kind, d.broadcast(shape)),
    )  # fmt: skip


def shift(d: Draw) -> Drawn:
    kind, shape = d.of("ui8", "ui16", "ui32", "ui64"), d.shape()
    d.attributes["direction"] = d.of("LEFT", "RIGHT")
    by = _typed(d.array(d.broadcast(shape), 0, 7), kind)
    return d.row(text(kind, d.broadcast(shape)), by)


def halves(d: Draw) -> Drawn:
    """Numbers half-way between two whole ones among others."""
    return d.row(_typed(d.array(d.shape(), -9, 9) / 2, d.of(*FLOATS)))


def is_inf(d: Draw) -> Drawn:
    d.flags("detect_negative", "detect_positive")
    return is_nan(d)


def is_nan(d: Draw) -> Drawn:
    values = d.array(d.shape(), 0, 3)
    return d.row(_typed(np.array([0.5, np.inf, -np.inf, np.nan])[values], d.of(*FLOATS)))


# Shapes -------------------------------------------------------------------------------------------


def reshape(d: Draw) -> Drawn:
    shape = d.shape()
    target = list(shape)
    d.random.shuffle(target)
    if len(target) > 1 and d.chance():
        target[:2] = [target[0] * target[1]]
    if d.chance(0.3):
        target.insert(d.number(0, len(target)), 1)
    if 0 in shape:
        d.set(allowzero=(0, 1))
    if target and d.chance():
        target[d.number(0, len(target) - 1)] = d.of(-1, -1, 0)
    return d.row(text(d.of(*NUMBERS, "bool"), shape), target)


def flatten(d: Draw) -> Drawn:
    shape = d.shape()
    d.set(axis=range(-len(shape), len(shape) + 1))
    return d.row(text(d.of(*NUMBERS), shape))


def squeeze(d: Draw) -> Drawn:
    shape = tuple(1 if d.chance() else size for size in d.shape())
    ones = [a for a, size in enumerate(shape) if size == 1]
    axes = [a - len(shape) if d.chance(0.3) else a for a in ones if d.chance()]
    x = text(d.of(*NUMBERS), shape)
    return d.row(x, axes) if d.chance(0.8) else d.row(x)


def unsqueeze(d: Draw) -> Drawn:
    shape, more = d.shape(0, 3), d.number(0, 2)
    rank = len(shape) + more
    axes = d.random.sample(range(rank), more)
    return d.row(text(d.of(*NUMBERS), shape), [a - rank if d.chance(0.3) else a for a in axes])


def dropout(d: Draw) -> Drawn:
    x = text(d.of("f32", "f64"), d.shape())
    ratio = np.array(d.of(0.0, 0.3, 0.9), np.float32)
    given = d.of((), (ratio,), (None, np.array(False)), (ratio, np.array(False)))
    return d.row(x, *given, outputs=d.of(1, 2))


def shape_of(d: Draw) -> Drawn:
    shape = d.shape()
    d.set(start=range(-6, 6), end=range(-6, 6))
    return d.row(text(d.of(*NUMBERS), shape))


def transpose(d: Draw) -> Drawn:
    shape = d.shape(0, 5)
    d.set(0.8, perm=[tuple(d.random.sample(range(len(shape)), len(shape)))])
    return d.row(text(d.of(*NUMBERS, "bool"), shape))


def concat(d: Draw) -> Drawn:
    shape = d.shape(1)
    axis = d.axis(len(shape))
    d.attributes["axis"] = axis
    kind, at = d.of(*NUMBERS, "bool"), axis % len(shape)
    parts = [(*shape[:at], d.length(), *shape[at + 1 :]) for _ in range(d.number(1, 4))]
    return d.row(*(text(kind, part) for part in parts))


def split(d: Draw) -> Drawn:
    shape, parts = d.shape(1, most=7), d.number(1, 4)
    axis = d.axis(len(shape))
    d.attributes["axis"] = axis
    size, x = shape[axis], text(d.of(*NUMBERS), shape)
    if d.chance():
        d.attributes["num_outputs"] = parts
        return d.row(x, outputs=parts)
    cuts = sorted(d.number(0, size) for _ in range(parts - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    return d.row(x, sizes, outputs=parts)


def slice_(d: Draw) -> Drawn:
    shape = d.shape(1)
    axes = d.axes(len(shape), 1)
    bounds = [[d.of(d.number(-7, 7), -1000, 1000, 0) for _ in axes] for _ in range(2)]
    steps = [d.of(1, 1, 2, 3, -1, -1, -2) for _ in axes]
    x = text(d.of(*NUMBERS, "bool"), shape)
    if d.chance(0.2):
        axes = list(range(len(axes)))
        return d.row(x, *bounds) if d.chance() else d.row(x, *bounds, None, steps)
    return d.row(x, *bounds, axes, steps) if d.chance(0.8) else d.row(x, *bounds, axes)


def expand(d: Draw) -> Drawn:
    shape = d.shape()
    target = d.broadcast(shape) if d.chance(0.3) else shape
    return d.row(text(d.of(*NUMBERS, "bool"), d.broadcast(shape)), list(target))


def tile(d: Draw) -> Drawn:
    shape = d.shape()
    return d.row(text(d.of(*NUMBERS, "bool"), shape), [d.length(3) for _ in shape])


def trilu(d: Draw) -> Drawn:
    d.flags("upper")
    x = text(d.of(*NUMBERS, "bool"), d.shape(2))
    return d.row(x, np.array(d.number(-6, 6))) if d.chance(0.7) else d.row(x)


def pad(d: Draw) -> Drawn:
    shape = d.shape(1)
    mode = d.of("constant", "constant", "reflect", "edge", "wrap")
    d.attributes["mode"] = mode
    kind, rank = d.of("f32", "f64", "i32", "i64", "bool", "i8"), len(shape)
    value = text(kind, ()) if mode == "constant" and d.chance() else None
    axes = d.axes(rank, 1) if d.chance(0.4) else None
    low, high = d.of((0, 2), (0, 2), (-2, 4))
    pads = [d.number(low, high) for _ in range(2 * (rank if axes is None else len(axes)))]
    return d.row(text(kind, shape), pads, value, axes)


def constant_of_shape(d: Draw) -> Drawn:
    dtype = d.of(1, 11, 10, 6, 7, 2, 3, 9)
    d.attributes["dtype"] = dtype
    if dtype in (1, 10, 11):
        d.set(value_float=(0.0, 1.5, -2.0))
    elif dtype == 9:
        d.set(value_int=(0, 1))
    else:
        d.set(value_int=(0, 1, 7))
    return d.row(list(d.shape()))


def range_(d: Draw) -> Drawn:
    kind = d.of(np.float32, np.float64, np.int32, np.int64, np.int16)
    step = d.of(1, 2, 3, -1, -2) if kind not in (np.float32, np.float64) else d.of(0.5, 1.25, -0.75)
    return d.row(np.array(d.number(-5, 5), kind), np.array(d.number(-9, 9), kind),
                 np.array(step, kind))  # fmt: skip


def cast(d: Draw) -> Drawn:
    to = d.of(1, 11, 10, 16, 2, 3, 4, 5, 6, 7, 9, 12, 13)
    d.attributes["to"] = to
    d.set(saturate=(0, 1))
    suffix = "+" if to in (2, 4, 12, 13) else ""
    return d.row(text(d.of(*NUMBERS, "bool"), d.shape(), suffix))


def bit_cast(d: Draw) -> Drawn:
    kinds = {1: ("f32", "i32", "ui32"), 2: ("f64", "i64", "ui64"), 3: ("i16", "ui16", "f16")}
    codes = {1: (1, 6, 12), 2: (11, 7, 13), 3: (5, 4, 10)}
    width = d.of(1, 2, 3)
    d.attributes["to"] = d.of(*codes[width])
    return d.row(text(d.of(*kinds[width]), d.shape()))


# Reductions ---------------------------------------------------------------------------------------


def reduction(*kinds: str, suffix: str = "") -> Generator:
    def generate(d: Draw) -> Drawn:
        shape = d.shape()
        d.flags("keepdims", "noop_with_empty_axes")
        x = text(d.of(*kinds), shape, suffix)
        return d.row(x, d.axes(len(shape))) if d.chance(0.8) else d.row(x)

    return generate


def arg(d: Draw) -> Drawn:
    """Among few different numbers, so that several are the largest."""
    shape = d.shape(1)
    d.attributes["axis"] = d.axis(len(shape))
    d.flags("keepdims", "select_last_index")
    kind = d.of("f32", "f64", "i32", "i64", "i8", "ui8")
    return d.row(text(kind, shape) if d.chance() else _typed(d.array(shape, 0, 2), kind))


def cumulative(d: Draw) -> Drawn:
    shape = d.shape(1)
    d.flags("exclusive", "reverse")
    return d.row(text(d.of("f32", "f64", "i32", "i64"), shape), np.array(d.axis(len(shape))))


def tf_idf(d: Draw) -> Drawn:
    weights = tuple(float(d.number(1, 4)) for _ in range(5))
    d.attributes |= {
        "ngram_counts": (0, 2, 6), "ngram_indexes": (0, 1, 2, 4, 3),
        "pool_int64s": (2, 3, 2, 3, 3, 1, 1, 2, 3), "mode": d.of("TF", "IDF", "TFIDF"),
        "min_gram_length": d.of(1, 2),
        "max_gram_length": d.of(2, 3), "max_skip_count": d.number(0, 5),
    }  # fmt: skip
    d.set(weights=[weights])
    return d.row(_typed(d.array(d.shape(1, 2, 9), 1, 3), d.of("i32", "i64")))


# Indices ------------------------------------------------------------------------------------------


def gather(d: Draw) -> Drawn:
    shape = d.shape(1)
    axis = d.axis(len(shape))
    d.attributes["axis"] = axis
    kind = d.of(*NUMBERS, "bool")
    size = shape[axis]
    indices = d.shape(0, 3) if size else (0, *d.shape(0, 2))
    return d.row(text(kind, shape), text(d.of("i32", "i64"), indices, f"<{max(size, 1)}"))


def gather_elements(d: Draw) -> Drawn:
    shape = d.shape(1)
    axis = d.axis(len(shape))
    d.attributes["axis"] = axis
    at, size = axis % len(shape), shape[axis]
    indices = [d.number(min(1, s), s) if s else 0 for s in shape]
    indices[at] = d.length() if size else 0
    return d.row(
        text(d.of(*NUMBERS), shape), text(d.of("i32", "i64"), tuple(indices), f"<{max(size, 1)}")
    )


def gather_nd(d: Draw) -> Drawn:
    shape = d.shape(1)
    batch = d.number(0, len(shape) - 1)
    d.attributes["batch_dims"] = batch
    depth = d.number(1, len(shape) - batch)
    limits = shape[batch : batch + depth]
    lead = (*shape[:batch], *d.shape(0, 2))
    if 0 in limits and 0 not in lead:
        lead = (*shape[:batch], 0)
    return d.row(text(d.of(*NUMBERS), shape), _indices(d, lead, limits))


def _indices(d: Draw, lead: Shape, limits: Shape) -> Array:
    columns = [d.array(lead, -size, size - 1) for size in limits]
    return np.stack(columns, -1) if columns else np.zeros((*lead, 0), np.int64)


def top_k(d: Draw) -> Drawn:
    shape = d.shape(1)
    axis = d.axis(len(shape))
    d.attributes["axis"] = axis
    d.flags("largest")
    kind = d.of("f32", "f64", "i32", "i64")
    x = text(kind, shape) if d.chance() else _typed(d.array(shape, 0, 2), kind)
    return d.row(x, [d.number(0, shape[axis])], outputs=2)


def tensor_scatter(d: Draw) -> Drawn:
    shape = d.shape(2)
    d.attributes["axis"] = axis = d.number(1, len(shape) - 1) - d.of(0, len(shape))
    mode = d.of("linear", "circular")
    d.attributes["mode"] = mode
    update = list(shape)
    update[axis] = d.number(0 if self_zero(d) else 1, shape[axis]) if shape[axis] else 0
    room = shape[axis] - update[axis] if mode == "linear" else shape[axis] - 1
    kind = d.of("f32", "i32")
    starts = d.array(shape[:1], 0, room)
    operands = [text(kind, shape), text(kind, tuple(update))]
    return d.row(*operands, starts) if d.chance(0.8) else d.row(*operands)


def self_zero(d: Draw) -> bool:
    return d.zeros > 0


def scatter_elements(d: Draw) -> Drawn:
    shape = d.shape(1)
    axis = d.axis(len(shape))
    reduction_ = d.of("none", "add", "mul", "max", "min")
    d.attributes |= {"axis": axis, "reduction": reduction_}
    at, size = axis % len(shape), shape[axis]
    lengths = [d.number(min(1, s), s) if s else 0 for s in shape]
    kind = d.of("f32", "f64", "i32", "i64")
    if reduction_ == "none":
        # Each place once: what is written twice is left open.
        lengths[at] = d.number(min(1, size), size)
        order = np.argsort(
            np.random.default_rng(d.number(0, 99)).random(
                (*lengths[:at], size, *lengths[at + 1 :])
            ),
            at,
        )
        indices = np.take(order, range(lengths[at]), at) - d.of(0, size)
    else:
        lengths[at] = d.length() if size else 0
        indices = d.array(tuple(lengths), -size, size - 1)
    return d.row(text(kind, shape), indices, text(kind, tuple(lengths)))


def scatter_nd(d: Draw) -> Drawn:
    shape = d.shape(1)
    reduction_ = d.of("none", "add", "mul", "max", "min")
    d.attributes["reduction"] = reduction_
    depth = d.number(1, len(shape))
    limits, kind = shape[:depth], d.of("f32", "f64", "i32", "i64")
    places = math.prod(limits)
    if reduction_ == "none":
        count = d.number(min(1, places), places)
        chosen = d.random.sample(range(places), count)
        indices = (
            np.stack(np.unravel_index(np.array(chosen, np.int64), limits), -1)
            if count
            else np.zeros((0, depth), np.int64)
        )
        lead: Shape = (count,)
    else:
        lead = d.shape(0, 2) if places else (0,)
        indices = _indices(d, lead, limits)
    return d.row(text(kind, shape), indices, text(kind, (*lead, *shape[depth:])))


def one_hot(d: Draw) -> Drawn:
    shape, depth = d.shape(0, 3), d.length(6)
    d.set(axis=range(-len(shape) - 1, len(shape) + 1))
    kind = d.of("f32", "i64", "i32")
    indices = (
        text(d.of("i64", "i32", "f32"), shape)
        if d.chance()
        else text("i64", shape, f"<{max(depth, 1)}")
    )
    return d.row(indices, np.array(depth) if d.chance() else [depth], text(kind, (2,)))


def window(d: Draw) -> Drawn:
    shape = d.shape(1, 3, 7)
    shape = (max(1, shape[0]), *shape[1:])
    rank = d.number(1, len(shape))
    lengths = tuple(d.number(1, 3) for _ in range(rank))
    d.attributes["lengths"] = lengths
    strides = d.array((rank,), -1, 2)
    if sum((n - 1) * abs(s) for n, s in zip(lengths, strides.tolist(), strict=True)) >= shape[0]:
        strides[...] = 0
    steps = [(n - 1) * s for n, s in zip(lengths, strides.tolist(), strict=True)]
    low, high = -sum(min(s, 0) for s in steps), shape[0] - 1 - sum(max(s, 0) for s in steps)
    return d.row(text(d.of("f32", "i64"), shape), np.array(d.number(low, max(low, high))), strides)


def expect(d: Draw) -> Drawn:
    count = d.length(3)
    d.attributes["name"] = "n"
    wanted = d.array((count,), 0, 4)
    return d.row(text(d.of("f32", "i64"), d.shape()), wanted, wanted)


def sharding(*, joins: bool, has_axis: bool, kinds: Sequence[str]) -> Generator:
    def generate(d: Draw) -> Drawn:
        shape, degree = list(d.shape(2, 4)), d.number(1, 3)
        d.attributes["degree"] = degree
        axis = d.axis(len(shape) - 1)
        if has_axis:
            d.attributes["axis"] = axis
        divided = 0 if joins else 1 + axis % (len(shape) - 1)
        if joins or has_axis:
            shape[divided] *= degree
        return d.row(text(d.of(*kinds), tuple(shape)))

    return generate


# Products -----------------------------------------------------------------------------------------


def matmul_shapes(d: Draw) -> tuple[Shape, Shape]:
    batch, m, k, n = d.shape(0, 2, 3), d.length(), d.length(), d.length()
    a, b = (*d.broadcast(batch), m, k), (*d.broadcast(batch), k, n)
    kind = d.number(0, 5)
    return (a[-1:], b) if kind == 0 else (a, (k,)) if kind == 1 else (a, b)


def matmul(d: Draw) -> Drawn:
    kind = d.of(*FLOATS, "i32", "i64", "ui32")
    return d.row(*(text(kind, shape) for shape in matmul_shapes(d)))


def gemm(d: Draw) -> Drawn:
    m, k, n = (d.length() for _ in range(3))
    d.flags("transA", "transB")
    d.set(alpha=(0.5, 2.0), beta=(0.0, 0.5, 2.0))
    a, b = (m, k), (k, n)
    kind = d.of(*FLOATS)
    operands = [
        text(kind, a[::-1] if d.attributes.get("transA") else a),
        text(kind, b[::-1] if d.attributes.get("transB") else b),
    ]
    if d.chance(0.7):
        operands.append(text(kind, d.broadcast((m, n))))
    return d.row(*operands)


def einsum(d: Draw) -> Drawn:
    sizes = {letter: d.length(4) for letter in "abcd"}
    terms = ["".join(d.random.sample("abcd", d.number(1, 3))) for _ in range(d.number(1, 3))]
    if d.chance(0.15):
        terms[0] = terms[0][0] * 2 + terms[0][1:]
    letters = sorted(set("".join(terms)))
    result = "".join(d.random.sample(letters, d.number(0, len(letters))))
    dots = d.shape(1, 2, 3) if d.chance(0.25) else None
    shapes = [tuple(sizes[letter] for letter in term) for term in terms]
    if dots is not None:
        terms = ["..." + term for term in terms]
        shapes = [(*(1 if d.chance(0.2) else s for s in dots), *shape) for shape in shapes]
        result = "..." + result
    equation = ",".join(terms) + (f"->{result}" if d.chance(0.8) else "")
    d.attributes["equation"] = equation
    kind = d.of("f32", "f64", "i32", "i64")
    return d.row(*(text(kind, shape) for shape in shapes))


def matmul_integer(d: Draw) -> Drawn:
    a, b = matmul_shapes(d)
    kinds = d.of("i8", "ui8"), d.of("i8", "ui8")
    points: list[Any] = []
    if d.chance(0.7):
        points.append(text(kinds[0], ()))
        if d.chance(0.7):
            points.append(text(kinds[1], () if d.chance() or len(b) < 2 else b[-1:]))
    return d.row(text(kinds[0], a), text(kinds[1], b), *points)


def _scale(d: Draw, shape: Shape = ()) -> Array:
    return (d.array(shape, 1, 9) / 16).astype(np.float32)


def qlinear_matmul(d: Draw) -> Drawn:
    a, b = matmul_shapes(d)
    kinds = [d.of("i8", "ui8") for _ in range(2)]
    out = d.of(*kinds)
    columns = () if d.chance() or len(b) < 2 else b[-1:]
    return d.row(
        text(kinds[0], a), _scale(d), text(kinds[0], ()), text(kinds[1], b), _scale(d, columns),
        text(kinds[1], columns), _scale(d), text(out, ()),
    )  # fmt: skip


def dft(d: Draw) -> Drawn:
    shape = (d.length(3), *d.shape(1, 2, 6), d.of(1, 2))
    d.flags("inverse", "onesided")
    axis = d.of(None, np.array(d.number(-len(shape), len(shape) - 2)))
    length = d.of(None, np.array(d.number(1, 9)))
    return d.row(text(d.of("f32", "f64"), shape), length, axis)


def det(d: Draw) -> Drawn:
    n = d.number(1, 4)
    return d.row(text(d.of("f32", "f64"), (*d.shape(0, 2), n, n)))


# Windows ------------------------------------------------------------------------------------------


def _windows(d: Draw, rank: int, kernel: Shape, dilated: bool = True) -> None:
    """Strides, dilations, and pads or a rule for them."""
    d.set(strides=[tuple(d.number(1, 3) for _ in range(rank))])
    if dilated:
        d.set(0.4, dilations=[tuple(d.number(1, 3) for _ in range(rank))])
    rule = d.of("pads", "pads", "SAME_UPPER", "SAME_LOWER", "VALID", "none")
    if rule == "pads":
        d.attributes["pads"] = tuple(d.number(0, k - 1) for k in (*kernel, *kernel))
    elif rule != "none":
        d.attributes["auto_pad"] = rule


def pool(d: Draw) -> Drawn:
    rank = d.of(1, 2, 2, 3)
    kernel = tuple(d.number(1, 3) for _ in range(rank))
    d.attributes["kernel_shape"] = kernel
    _windows(d, rank, kernel)
    d.flags("ceil_mode")
    return d.row(
        text(d.of("f32", "f32", "f64", "f16"), (*d.shape(2, 2, 3), *d.shape(rank, rank, 8)))
    )


def average_pool(d: Draw) -> Drawn:
    d.flags("count_include_pad")
    return pool(d)


def lp_pool(d: Draw) -> Drawn:
    d.set(p=(1, 2, 3))
    return pool(d)


def max_pool(d: Draw) -> Drawn:
    specs, attributes, _ = pool(d)
    d.flags("storage_order")
    if d.chance(0.2):
        specs = [str(specs[0]).replace(str(specs[0]).split("[")[0], d.of("i8", "ui8"))]
    return specs, attributes, d.of(1, 2)


def global_pool(d: Draw) -> Drawn:
    return d.row(text(d.of(*FLOATS), d.shape(3, 5)))


def _conv_shapes(d: Draw, dilated: bool = True) -> tuple[int, int, int, Shape, Shape]:
    """Group, channels in and out of each, kernel, image."""
    rank = d.of(1, 2, 2, 3)
    kernel = tuple(d.number(1, 3) for _ in range(rank))
    group = d.of(1, 1, 2, 3)
    d.set(group=[group])
    group = d.attributes.get("group", 1)
    _windows(d, rank, kernel, dilated)
    d.set(0.3, kernel_shape=[kernel])
    return group, d.number(1, 2), d.number(1, 3), kernel, d.shape(rank, rank, 7)


def conv(d: Draw) -> Drawn:
    group, inner, outer, kernel, image = _conv_shapes(d)
    kind = d.of(*FLOATS)
    operands = [
        text(kind, (d.length(2), group * inner, *image)),
        text(kind, (group * outer, inner, *kernel)),
    ]  # fmt: skip
    return d.row(*operands, *([text(kind, (group * outer,))] if d.chance() else []))


def conv_transpose(d: Draw) -> Drawn:
    group, inner, outer, kernel, image = _conv_shapes(d)
    kind = d.of("f32", "f32", "f64")
    rank = len(kernel)
    strides = d.attributes.get("strides", (1,) * rank)
    if d.chance(0.3):
        d.attributes["output_padding"] = tuple(d.number(0, max(s - 1, 0)) for s in strides)
    if d.chance(0.2) and "pads" not in d.attributes:
        d.attributes["output_shape"] = tuple(
            (size - 1) * s + k + d.number(-1, 1)
            for size, s, k in zip(image, strides, kernel, strict=True)
        )
    operands = [
        text(kind, (d.length(2), group * inner, *image)),
        text(kind, (group * inner, outer, *kernel)),
    ]  # fmt: skip
    return d.row(*operands, *([text(kind, (group * outer,))] if d.chance() else []))


def conv_integer(d: Draw) -> Drawn:
    group, inner, outer, kernel, image = _conv_shapes(d)
    kinds = d.of("ui8", "i8"), d.of("ui8", "i8")
    points: list[Any] = []
    if d.chance():
        points.append(text(kinds[0], ()))
        if d.chance():
            points.append(text(kinds[1], () if d.chance() else (group * outer,)))
    return d.row(
        text(kinds[0], (d.length(2), group * inner, *image)),
        text(kinds[1], (group * outer, inner, *kernel)), *points,
    )  # fmt: skip


def qlinear_conv(d: Draw) -> Drawn:
    group, inner, outer, kernel, image = _conv_shapes(d)
    kinds = d.of("ui8", "i8"), d.of("ui8", "i8")
    filters = () if d.chance() else (group * outer,)
    bias = [text("i32", (group * outer,))] if d.chance() else []
    return d.row(
        text(kinds[0], (d.length(2), group * inner, *image)), _scale(d), text(kinds[0], ()),
        text(kinds[1], (group * outer, inner, *kernel)), _scale(d, filters),
        np.zeros(filters, np.int8 if kinds[1] == "i8" else np.uint8), _scale(d),
        text(kinds[0], ()), *bias,
    )  # fmt: skip


def _results(
    size: Shape, attributes: Mapping[str, Any], kernel: Shape, ceil: bool = False
) -> Shape:
    from stitch.ops import windows_of

    return windows_of(attributes, size, kernel, ceil).output


def conv_weight_gradient(d: Draw) -> Drawn:
    group, inner, outer, kernel, image = _conv_shapes(d)
    d.attributes["kernel_shape"] = kernel
    batch, kind = d.length(2), d.of("f32", "f64")
    results = tuple(max(0, n) for n in _results(image, d.attributes, kernel))
    return d.row(
        text(kind, (batch, group * inner, *image)), text(kind, (batch, group * outer, *results))
    )


def max_pool_gradient(d: Draw) -> Drawn:
    specs, attributes, _ = pool(d)
    kind = d.of("f32", "f64")
    shape = tuple(int(n) for n in str(specs[0]).split("[")[1][:-1].split(","))
    x = _typed(d.array(shape, -99, 99) / 8, kind)
    try:
        (pooled,) = evaluate("MaxPool", [x], attributes=attributes)
    except CompileError:
        pooled = x
    return d.row(text(kind, pooled.shape), x, pooled)


def col2im(d: Draw) -> Drawn:
    rank = d.of(1, 2, 2, 3)
    image, block = d.shape(rank, rank, 6), tuple(d.number(1, 3) for _ in range(rank))
    _windows(d, rank, block)
    d.attributes.pop("auto_pad", None)
    results = _results(image, d.attributes, block)
    columns = math.prod(max(0, n) for n in results)
    channels = d.length(2)
    kind = d.of("f32", "f64", "i32")
    return d.row(
        text(kind, (d.length(2), channels * math.prod(block), columns)), list(image), list(block)
    )


def lrn(d: Draw) -> Drawn:
    d.attributes["size"] = d.number(1, 5)
    d.set(alpha=(0.000244140625, 0.5), beta=(0.5, 0.75), bias=(1.0, 2.0))
    return d.row(text(d.of("f32", "f64"), d.shape(3, 5, 4)))


# Normalizations and activations -------------------------------------------------------------------

EPSILONS = (float(np.float32(1e-5)), 0.125)


def batch_normalization(d: Draw) -> Drawn:
    shape = d.shape(2, 5)
    d.flags("training_mode")
    d.set(epsilon=EPSILONS, momentum=(0.0, 0.25, 1.0))
    kind, c = d.of("f32", "f32", "f64", "f16"), shape[1:2]
    outputs = 3 if d.attributes.get("training_mode") else 1
    return d.row(
        text(kind, shape), *(text(kind, c) for _ in range(3)), text(kind, c, "+"), outputs=outputs
    )


def batch_gradient(d: Draw) -> Drawn:
    shape, kind = d.shape(1, 4), d.of("f32", "f64")
    channels = (shape[1] if len(shape) > 1 else 1,)
    d.set(epsilon=EPSILONS)
    more = [text(kind, channels), text(kind, channels, "+")] if d.chance() else []
    return d.row(text(kind, shape), text(kind, shape), text(kind, channels), *more, outputs=3)


def layer_gradient(d: Draw) -> Drawn:
    shape, kind = d.shape(1, 4), d.of("f32", "f64")
    axis = d.axis(len(shape))
    d.attributes["axis"] = axis
    at = axis % len(shape)
    row = (*shape[:at], *(1,) * (len(shape) - at))
    return d.row(text(kind, shape), text(kind, shape), text(kind, row), text(kind, row, "+"),
                 text(kind, shape[at:]), outputs=3)  # fmt: skip


def layer_normalization(d: Draw) -> Drawn:
    shape = d.shape(1, 4)
    axis = d.axis(len(shape))
    d.set(epsilon=EPSILONS, axis=[axis], stash_type=[1, 1, 11])
    at = d.attributes.get("axis", -1) % len(shape)
    kind = d.of("f32", "f32", "f64", "f16")
    scales = [
        text(kind, d.broadcast(shape[at:]) if d.chance(0.3) else shape[at:])
        for _ in range(d.of(1, 2))
    ]
    return d.row(text(kind, shape), *scales, outputs=d.of(1, 1, 2, 3))


def rms_normalization(d: Draw) -> Drawn:
    (x, scale, *_), attributes, _ = layer_normalization(d)
    return (x, scale), attributes, 1


def instance_normalization(d: Draw) -> Drawn:
    shape = d.shape(3, 5)
    d.set(epsilon=EPSILONS)
    kind = d.of("f32", "f32", "f64", "f16")
    return d.row(text(kind, shape), *(text(kind, shape[1:2]) for _ in range(2)))


def group_normalization(d: Draw) -> Drawn:
    groups = d.number(1, 3)
    n, each, *rest = d.shape(3, 5, 4)
    d.attributes["num_groups"] = groups
    d.set(epsilon=EPSILONS, stash_type=[1])
    kind = d.of("f32", "f32", "f64", "f16")
    c = groups * each
    return d.row(text(kind, (n, c, *rest)), *(text(kind, (c,)) for _ in range(2)))


def along_axis(*kinds: str, operands: int = 1) -> Generator:
    def generate(d: Draw) -> Drawn:
        shape, kind = d.shape(1), d.of(*kinds)
        d.set(axis=[d.axis(len(shape))])
        return d.row(*(text(kind, shape) for _ in range(operands)))

    return generate


def prelu(d: Draw) -> Drawn:
    shape, kind = d.shape(), d.of("f32", "f64", "f16")
    return d.row(text(kind, shape), text(kind, d.broadcast(shape)))


def gelu_gradient(d: Draw) -> Drawn:
    shape, kind = d.shape(), d.of("f32", "f64")
    d.set(approximate=("none", "tanh"))
    return d.row(text(kind, shape), text(kind, shape))


# Recurrent ----------------------------------------------------------------------------------------

GATE_FUNCTIONS = (
    "Tanh", "Sigmoid", "Relu", "HardSigmoid", "Softsign", "Affine", "LeakyRelu", "Elu",
    "ThresholdedRelu", "ScaledTanh", "Softplus",
)  # fmt: skip


def recurrent(gates: int, functions: int, states: int) -> Generator:
    def generate(d: Draw) -> Drawn:
        direction = d.of("forward", "reverse", "bidirectional")
        count = 2 if direction == "bidirectional" else 1
        steps, batch, size, hidden = d.length(4), d.length(3), d.number(1, 4), d.number(1, 4)
        d.attributes["direction"] = direction
        d.flags("layout")
        d.set(0.3, clip=(0.5, 1.0, 3.0), hidden_size=[hidden])
        d.set(0.4, activations=[tuple(d.of(*GATE_FUNCTIONS) for _ in range(functions * count))])
        if "activations" in d.attributes:
            d.set(
                0.4, activation_alpha=[tuple(d.of(0.1, 0.5, 1.5) for _ in range(functions * count))]
            )
        if gates == 3:
            d.flags("linear_before_reset")
        by_batch = d.attributes.get("layout")
        kind = "f32" if d.chance(0.9) else "f64"
        x = (batch, steps, size) if by_batch else (steps, batch, size)
        state = (batch, count, hidden) if by_batch else (count, batch, hidden)
        rows = gates * hidden

        def maybe(spec: Any, share: float = 0.5) -> Any:
            return spec if d.chance(share) else None

        operands = [
            text(kind, x),
            text(kind, (count, rows, size), "1"),
            text(kind, (count, rows, hidden), "1"),
            maybe(text(kind, (count, 2 * rows), "1")),
            maybe(d.array((batch,), min(1, steps), steps, np.int32), 0.4),
            *(maybe(text(kind, state, "1")) for _ in range(states)),
        ]  # fmt: skip
        if states == 2:
            d.set(0.2, input_forget=(0, 1))
            operands.append(maybe(text(kind, (count, 3 * hidden), "1"), 0.3))
        return d.row(*operands, outputs=d.number(1, states + 1))

    return generate


# Sampling -----------------------------------------------------------------------------------------


def resize(d: Draw) -> Drawn:
    rank = d.of(1, 2, 3, 4, 4)
    shape = d.shape(rank, rank)
    mode = d.of("nearest", "linear", "cubic")
    coordinates = d.of(
        "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
        "tf_crop_and_resize",
    )  # fmt: skip
    d.attributes |= {"mode": mode, "coordinate_transformation_mode": coordinates}
    if mode == "nearest":
        d.set(nearest_mode=("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"))
    else:
        d.set(0.3, antialias=(0, 1), exclude_outside=(0, 1))
    if mode == "cubic":
        d.set(0.3, cubic_coeff_a=(-0.5, -0.75))
    axes = sorted(d.random.sample(range(rank), d.number(1, rank))) if d.chance(0.5) else None
    if axes is not None:
        d.attributes["axes"] = tuple(a - rank if d.chance(0.2) else a for a in axes)
    chosen = list(range(rank)) if axes is None else axes
    fixed = rank - 2 if mode != "nearest" and axes is None and rank > 2 else 0
    roi = None
    if coordinates == "tf_crop_and_resize":
        starts = [0.0 if i < fixed else d.of(0.0, 0.1, -0.2) for i in range(len(chosen))]
        ends = [1.0 if i < fixed else d.of(1.0, 0.8, 1.3) for i in range(len(chosen))]
        roi = np.array([*starts, *ends], np.float32)
        d.set(0.4, extrapolation_value=(0.0, 7.5))
    kind = (
        d.of("f32", "f32", "f64", "i32", "ui8") if mode == "nearest" else d.of("f32", "f32", "f64")
    )
    x = text(kind, shape)
    if d.chance():
        scales = [
            1.0 if i < fixed else d.of(0.5, 0.6, 1.0, 1.5, 2.0, 2.5, 3.0)
            for i in range(len(chosen))
        ]
        return d.row(x, roi, np.array(scales, np.float32))
    sizes = [shape[a] if i < fixed else d.length(8) for i, a in enumerate(chosen)]
    d.set(0.3, keep_aspect_ratio_policy=("stretch", "not_larger", "not_smaller"))
    return d.row(x, roi, None, sizes)


def grid_sample(d: Draw) -> Drawn:
    rank = d.of(2, 2, 3)
    n, c = d.length(2), d.length(2)
    mode = d.of("nearest", "linear", "cubic")
    d.attributes["mode"] = mode
    d.set(padding_mode=("zeros", "border", "reflection"), align_corners=(0, 1))
    kind = d.of("f32", "f64")
    image, grid = d.shape(rank, rank), d.shape(rank, rank, 4)
    return d.row(
        text(kind, (n, c, *image)), text(kind, (n, *grid, rank), "" if d.chance() else "1")
    )


def deform_conv(d: Draw) -> Drawn:
    group, inner, outer = d.of(1, 1, 2), d.number(1, 2), d.number(1, 2)
    kernel = (d.number(1, 3), d.number(1, 3))
    _windows(d, 2, kernel)
    d.attributes.pop("auto_pad", None)
    parts = d.of(1, group * inner)
    d.attributes |= {"group": group, "offset_group": parts}
    image, n = d.shape(2, 2, 7), d.length(2)
    results = tuple(max(0, r) for r in _results(image, d.attributes, kernel))
    places, kind = parts * math.prod(kernel), d.of("f32", "f64")
    return d.row(
        text(kind, (n, group * inner, *image)), text(kind, (group * outer, inner, *kernel)),
        text(kind, (n, 2 * places, *results)),
        text(kind, (group * outer,)) if d.chance() else None,
        text(kind, (n, places, *results)) if d.chance() else None,
    )  # fmt: skip


def roi_align(d: Draw) -> Drawn:
    n, c, h, w = d.number(1, 2), d.length(2), d.number(1, 8), d.number(1, 8)
    count = d.length(3)
    corners = np.sort(d.array((count, 2, 2), -2, 2 * max(h, w)) / 2, 1)
    corners = corners.reshape(count, 4).astype(np.float32)
    d.set(
        coordinate_transformation_mode=("half_pixel", "output_half_pixel"), mode=("avg", "max"),
        output_height=(1, 2, 3), output_width=(1, 2, 3), sampling_ratio=(0, 1, 2, 3),
        spatial_scale=(1.0, 0.5, 2.0),
    )  # fmt: skip
    return d.row(text("f32", (n, c, h, w)), corners, d.array((count,), 0, n - 1))


# Quantization and training ------------------------------------------------------------------------


def _quantized_shapes(d: Draw) -> tuple[Shape, Shape]:
    """The shape of the data and that of its scales."""
    shape = d.shape(1)
    how = d.of("tensor", "axis", "block")
    if how == "tensor":
        return shape, ()
    axis = d.axis(len(shape))
    d.attributes["axis"] = axis
    if how == "axis":
        return shape, (shape[axis],)
    block = d.number(1, 3)
    d.attributes["block_size"] = block
    scales = list(shape)
    scales[axis] = -(-shape[axis] // block)
    return shape, tuple(scales)


def quantize(d: Draw) -> Drawn:
    shape, scales = _quantized_shapes(d)
    scale, out = _scale(d, scales), d.of("i8", "ui8", "i16", "ui16")
    if d.chance(0.3):
        d.attributes["output_dtype"] = {"i8": 3, "ui8": 2, "i16": 5, "ui16": 4}[out]
        return d.row(text("f32", shape), scale)
    return d.row(text(d.of("f32", "f32", "i32"), shape), scale, text(out, scales))


def dequantize(d: Draw) -> Drawn:
    shape, scales = _quantized_shapes(d)
    kind = d.of("i8", "ui8", "i16", "ui16", "i32")
    points = [text(kind, scales)] if kind != "i32" and d.chance() else []
    return d.row(text(kind, shape), _scale(d, scales), *points)


_ANY, _BITS = (*NUMBERS, "bool"), INTS
_SIGNED = (*FLOATS, "i8", "i16", "i32", "i64")
_COMPARED = (*NUMBERS,)
#: Numbers that reductions take; integers of up to 5 keep products of 500 in their types.
_REDUCED = (*FLOATS, "i32", "i64")

GENERATORS: Mapping[tuple[str, str], Generator] = {
    **{("", op): binary(*NUMBERS) for op in ("Add", "Sub", "Mul")},
    ("", "Div"): div, ("", "Mod"): mod, ("", "Pow"): power,
    **{("", op): variadic(*NUMBERS) for op in ("Max", "Min")},
    **{("", op): variadic(*FLOATS) for op in ("Sum", "Mean")},
    ("", "Clip"): clip,
    **{("", f"Bitwise{op}"): binary(*_BITS) for op in ("And", "Or", "Xor")},
    ("", "Neg"): unary(*_SIGNED), ("", "Abs"): unary(*NUMBERS), ("", "Sign"): unary(*NUMBERS),
    **{("", op): unary(*FLOATS, suffix="+") for op in ("Sqrt", "Log", "Reciprocal")},
    **{("", op): halves for op in ("Round", "Floor", "Ceil")},
    **{
        ("", op): unary(*FLOATS)
        for op in ("Exp", "Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Asinh", "Tanh", "Erf")
    },
    **{("", op): unary(*FLOATS, suffix="1") for op in ("Asin", "Acos", "Atanh")},
    ("", "Acosh"): lambda d: d.row(_typed(1 + d.array(d.shape(), 0, 40) / 8, d.of("f32", "f64"))),
    ("", "Not"): unary("bool"), ("", "BitwiseNot"): unary(*_BITS),
    ("", "Equal"): binary(*_ANY),
    **{
        ("", op): binary(*NUMBERS)
        for op in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")
    },
    **{("", op): binary("bool") for op in ("And", "Or", "Xor")},
    ("", "IsNaN"): is_nan, ("", "IsInf"): is_inf,
    ("", "Where"): where, ("", "BitShift"): shift, ("", "Identity"): unary(*_ANY),
    ("", "Reshape"): reshape, ("", "Flatten"): flatten, ("", "Squeeze"): squeeze,
    ("", "Unsqueeze"): unsqueeze, ("", "Dropout"): dropout, ("", "Shape"): shape_of,
    ("stitch", "Expect"): expect, ("", "Size"): unary(*_ANY), ("", "Transpose"): transpose,
    ("", "Concat"): concat, ("", "Split"): split, ("", "Slice"): slice_, ("", "Expand"): expand,
    ("", "Tile"): tile,
    ("", "Trilu"): trilu, ("", "Pad"): pad,
    ("", "ConstantOfShape"): constant_of_shape, ("", "Range"): range_,
    **{
        ("", f"Reduce{name}"): reduction(*_REDUCED)
        for name in ("Sum", "Mean", "Prod", "L1", "L2", "SumSquare")
    },
    **{("", f"Reduce{name}"): reduction(*NUMBERS, "bool") for name in ("Max", "Min")},
    **{
        ("", f"Reduce{name}"): reduction(*_REDUCED, suffix="+") for name in ("LogSum", "LogSumExp")
    },
    ("", "ArgMax"): arg, ("", "ArgMin"): arg, ("", "CumSum"): cumulative,
    ("", "CumProd"): cumulative, ("", "TfIdfVectorizer"): tf_idf, ("", "Gather"): gather,
    ("", "GatherElements"): gather_elements, ("", "GatherND"): gather_nd,
    ("", "TopK"): top_k, ("stitch", "Window"): window,
    **{
        ("stitch", name): sharding(joins=joins, has_axis=has_axis, kinds=kinds)
        for name, joins, has_axis, kinds in (
            ("Repartition", False, True, _ANY), ("Combine", True, True, _ANY),
            ("Replicate", False, False, _ANY), ("Reduction", True, False, FLOATS),
        )
    },
    ("", "TensorScatter"): tensor_scatter, ("", "ScatterElements"): scatter_elements,
    ("", "ScatterND"): scatter_nd, ("", "OneHot"): one_hot, ("", "Det"): det,
    ("", "MatMul"): matmul, ("", "Gemm"): gemm, ("", "Einsum"): einsum,
    ("", "MatMulInteger"): matmul_integer, ("", "QLinearMatMul"): qlinear_matmul,
    ("", "ConvInteger"): conv_integer, ("", "QLinearConv"): qlinear_conv, ("", "DFT"): dft,
    ("", "Conv"): conv, ("", "ConvTranspose"): conv_transpose,
    ("stitch", "ConvWeightGradient"): conv_weight_gradient, ("", "AveragePool"): average_pool,
    ("", "MaxPool"): max_pool, ("", "LpPool"): lp_pool, ("", "GlobalAveragePool"): global_pool,
    ("", "GlobalMaxPool"): global_pool, ("stitch", "MaxPoolGradient"): max_pool_gradient,
    ("", "Col2Im"): col2im, ("", "LRN"): lrn,
    ("", "BatchNormalization"): batch_normalization,
    ("stitch", "BatchNormalizationGradient"): batch_gradient,
    ("", "LayerNormalization"): layer_normalization, ("", "RMSNormalization"): rms_normalization,
    ("", "InstanceNormalization"): instance_normalization,
    ("", "GroupNormalization"): group_normalization,
    ("stitch", "LayerNormalizationGradient"): layer_gradient,
    ("", "Relu"): unary(*_SIGNED), ("", "PRelu"): prelu,
    **{
        ("", op): unary(*FLOATS)
        for op in ("Sigmoid", "Softplus", "Softsign", "Mish", "HardSwish")
    },
    **{
        ("", op): unary(*FLOATS, alpha=(0.125, 0.5, 1.5))
        for op in ("Swish", "LeakyRelu", "ThresholdedRelu", "Elu", "Celu")
    },
    ("", "HardSigmoid"): unary(*FLOATS, alpha=(0.125, 0.5), beta=(0.125, 0.625)),
    ("", "Selu"): unary(*FLOATS, alpha=(0.5, 1.5), gamma=(0.5, 2.0)),
    ("", "Gelu"): unary(*FLOATS, approximate=("none", "tanh")),
    ("stitch", "GeluGradient"): gelu_gradient,
    **{("", op): along_axis(*FLOATS) for op in ("Softmax", "LogSoftmax", "Hardmax")},
    ("stitch", "SoftmaxGradient"): along_axis("f32", "f64", operands=2),
    ("", "RNN"): recurrent(1, 1, 1), ("", "GRU"): recurrent(3, 2, 1),
    ("", "LSTM"): recurrent(4, 3, 2), ("", "Resize"): resize, ("", "GridSample"): grid_sample,
    ("", "DeformConv"): deform_conv, ("", "RoiAlign"): roi_align, ("", "Cast"): cast,
    ("", "BitCast"): bit_cast, ("", "QuantizeLinear"): quantize,
    ("", "DequantizeLinear"): dequantize,
}  # fmt: skip


def drawn_operators() -> list[OpDef]:
    """The operators of which operations are drawn: all, but what a scan computes its body does."""
    return [o for o in operators() if (o.domain, o.name) != SCAN]


def draw_row(definition: OpDef, seed: int, zeros: float = 0.0) -> Row:
    """A random operation of an operator that type inference accepts."""
    random = Random(f"{definition.name}/{seed}/{zeros}")
    generate = GENERATORS[definition.domain, definition.name]
    for _ in range(MOST_DRAWS):
        specs, attributes, outputs = generate(Draw(random, zeros))
        row = Row(definition.name, list(specs), dict(attributes), outputs, definition.domain)
        try:
            one_operation(row, seed)
        except CompileError:
            continue
        return row
    raise AssertionError(f"no draw of {definition.name} in {MOST_DRAWS} is an operation")

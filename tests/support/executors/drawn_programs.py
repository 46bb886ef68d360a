"""Random graphs of movements, products, arithmetic and functions, with what may differ of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from stitch import ComputationGraphBuilder
from stitch.compiler import CompileOptions, compile_graph
from stitch.errors import CompileError
from stitch.graph import parse_placement
from stitch.graph.symbolic import SymbolicTensor
from stitch.machine import Machine
from stitch.program import Array, DataType, Ownership, Program

#: What a result may be off by, relative to the largest number in it, per rounding.
ROUNDING = {
    "float64": 1e-13, "float32": 1e-6, "float16": 2.0**-9, "bfloat16": 2.0**-6,
    "int64": 0.0, "bool": 0.0,
}  # fmt: skip
NARROW = ("float16", "bfloat16")
MOST_ELEMENTS = 2_000_000
LONG_SHAPES = ((512, 256), (256, 512), (2, 256, 256), (131_072,), (4, 32_769), (1, 131_073))


@dataclass(frozen=True, slots=True)
class Known:
    """A tensor, the largest number in it, what that may be off by, and whether NumPy is exact."""

    tensor: SymbolicTensor
    most: float
    error: float = 0.0
    exact: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def type(self) -> str:
        return self.tensor.data_type.value

    def moved(self, tensor: SymbolicTensor) -> Known:
        return replace(self, tensor=tensor)


@dataclass(frozen=True, slots=True)
class DrawnProgram:
    """A program, its inputs, and per output what it may be off by, and whether NumPy is exact."""

    program: Program
    machine: Machine
    inputs: tuple[Array, ...]
    errors: tuple[float, ...]
    exact: tuple[bool, ...]


class Unfit(Exception):
    """An operation that does not go with what is there."""


class Drawing:
    """One graph under construction."""

    def __init__(self, random: Random, long: bool) -> None:
        self.random = random
        self.long = long
        #: Whether long elementwise operations follow each other, and little else.
        self.chain = long and random.randrange(3) > 0
        self.builder = ComputationGraphBuilder("drawn")
        self.numbers = np.random.default_rng(random.randrange(1 << 32))
        self.data: list[Array] = []
        self.donated: list[Known] = []
        self.pool: list[Known] = []
        self.outputs: list[Known] = []
        types = ["float32"] * 5 + ["float64", "int64", "bool", *NARROW]
        self.main = random.choice(types)

    # What operations read ----------------------------------------------------------------------

    def chance(self, of_ten: int) -> bool:
        return self.random.randrange(10) < of_ten

    def shape(self) -> tuple[int, ...]:
        if self.long and self.chance(8):
            return self.random.choice(LONG_SHAPES)
        rank = self.random.choice((0, 1, 2, 2, 3, 3, 4))
        sizes = (4,) if self.chance(3) else (1, 2, 2, 3, 4, 4, 5, 8)
        edges = (0, 1) if self.chance(3) else sizes
        return tuple(self.random.choice(sizes if self.chance(9) else edges) for _ in range(rank))

    def array(self, shape: tuple[int, ...], kind: str) -> Array:
        if math.prod(shape) > MOST_ELEMENTS:
            # What goes with a value that is empty need not be.
            raise Unfit
        if kind == "bool":
            return self.numbers.integers(0, 2, shape).astype(np.bool_)
        if kind == "int64":
            return self.numbers.integers(-9, 10, shape)
        values = np.clip(self.numbers.standard_normal(shape), -2, 2)
        return values.astype(DataType(kind).dtype)

    def input(self, shape: tuple[int, ...], kind: str) -> Known:
        donated = self.chance(4)
        self.data.append(np.asarray(self.array(shape, kind)))
        tensor = self.builder.input(
            f"x{len(self.data)}", shape, kind,
            ownership=Ownership.DONATE if donated else Ownership.BORROW,
        )  # fmt: skip
        known = Known(tensor, 9.0 if kind == "int64" else 2.0)
        self.pool.append(known)
        if donated:
            self.donated.append(known)
        return known

    def constant(self, shape: tuple[int, ...], kind: str, positive: bool = False) -> Known:
        array = np.asarray(self.array(shape, kind))
        if positive:
            array = (np.abs(array) + 1).astype(array.dtype)
        return Known(self.builder.parameter(f"c{len(self.builder._values)}", array),
                     10.0 if kind == "int64" else 3.0)  # fmt: skip

    def fresh(self, shape: tuple[int, ...], kind: str) -> Known:
        return self.input(shape, kind) if self.chance(6) else self.constant(shape, kind)

    def any(self, fits: Callable[[Known], bool]) -> Known:
        """A value that fits: mostly a late one."""
        found = [k for k in self.pool if fits(k)]
        if not found:
            raise Unfit
        return self.random.choice(found[-4:] if self.chance(7) else found)

    def number(self) -> Known:
        return self.any(lambda k: k.type != "bool")

    def real(self) -> Known:
        return self.any(lambda k: k.type not in ("bool", "int64"))

    def fitting(self, first: Known, kind: str | None = None) -> Known:
        """A second operand, of the same shape or one that broadcasts."""
        kind = kind or first.type
        if self.chance(1) and kind == first.type:
            return first
        shapes = {first.shape}
        found = [k for k in self.pool if k.type == kind and _broadcasts(k.shape, first.shape)]
        if self.chain:
            found = [k for k in found if k.shape == first.shape or math.prod(k.shape) == 1]
        if found and self.chance(7):
            return self.random.choice(found[-5:])
        cut = first.shape[self.random.randrange(len(first.shape) + 1) :]
        shapes |= {cut, tuple(s if self.chance(5) else 1 for s in cut)}
        return self.fresh(self.random.choice(sorted(shapes)), kind)

    # What operations make ----------------------------------------------------------------------

    def made(self, tensor: SymbolicTensor, most: float, error: float, operands: Sequence[Known],
             *, rounds: bool = False, reorders: bool = False) -> Known:  # fmt: skip
        kind = tensor.data_type.value
        if rounds or kind in NARROW or (error and kind in ROUNDING):
            error += ROUNDING[kind] * max(most, 1.0)
        known = Known(tensor, most, error, all(k.exact for k in operands) and not reorders)
        if most > (1e12 if kind == "int64" else 2e3) or error > (0.6 if kind in NARROW else 0.05):
            raise Unfit
        self.pool.append(known)
        return known

    def sum_(self) -> None:
        a = self.number()
        b = self.fitting(a)
        if self.chance(3):
            a, b = b, a
        op = self.random.choice(("Add", "Sub"))
        most, error = a.most + b.most, a.error + b.error
        self.made(self.builder.op(op, a.tensor, b.tensor), most, error, (a, b))

    def product(self) -> None:
        a = self.number()
        b = self.fitting(a)
        if a.type == "int64" and a.most * b.most > 1e9:
            raise Unfit
        error = a.error * b.most + b.error * a.most + a.error * b.error
        self.made(self.builder.op("Mul", a.tensor, b.tensor), a.most * b.most, error, (a, b))

    def extreme(self) -> None:
        a = self.number()
        operands = [a, *(self.fitting(a) for _ in range(self.random.randrange(1, 3)))]
        self.random.shuffle(operands)
        made = self.builder.op(self.random.choice(("Max", "Min")), *(k.tensor for k in operands))
        most, error = max(k.most for k in operands), max(k.error for k in operands)
        self.made(made, most, error, operands)

    def quotient(self) -> None:
        a = self.number()
        b = self.constant(self.random.choice((a.shape, a.shape[1:], ())), a.type, positive=True)
        self.made(self.builder.op("Div", a.tensor, b.tensor), a.most, a.error, (a, b))

    def choice(self) -> None:
        a = self.any(lambda k: True)
        b, c = self.fitting(a), self.fitting(a, "bool")
        made = self.builder.op("Where", c.tensor, a.tensor, b.tensor)
        self.made(made, max(a.most, b.most), max(a.error, b.error), (a, b, c))

    def comparison(self) -> None:
        a = self.any(lambda k: k.type != "bool" and not k.error and k.exact)
        b = self.fitting(a)
        if b.error or not b.exact:
            raise Unfit
        op = self.random.choice(("Greater", "Less", "Equal"))
        self.made(self.builder.op(op, a.tensor, b.tensor), 1, 0, (a, b))

    def logic(self) -> None:
        a = self.any(lambda k: k.type == "bool")
        b = self.fitting(a)
        op = self.random.choice(("And", "Or", "Not"))
        operands = (a,) if op == "Not" else (a, b)
        self.made(self.builder.op(op, *(k.tensor for k in operands)), 1, 0, operands)

    def function(self) -> None:
        a = self.real()
        op = self.random.choice(("Exp", "Erf", "Gelu", "Neg", "Relu", "Sigmoid", "Sqrt"))
        most, slope, rounds = a.most, 1.0, False
        if op == "Exp":
            if a.most > 5:
                raise Unfit
            most = slope = math.exp(a.most)
            slope *= 1.1
            rounds = True
        elif op == "Sqrt":
            # Of something that is at least one.
            a = self.made(self.builder.op("Mul", a.tensor, a.tensor), a.most**2,
                          2.1 * a.most * a.error, (a,))  # fmt: skip
            one = self.constant((), a.type, positive=True)
            a = self.made(a.tensor + one.tensor, a.most + one.most, a.error, (a,))
            most = a.most
        elif op not in ("Neg", "Relu"):
            most, slope, rounds = a.most + 1.0, 1.2, True
        self.made(self.builder.op(op, a.tensor), most, slope * a.error, (a,), rounds=rounds)

    def softmax(self) -> None:
        a = self.real()
        if not a.shape or a.most > 60:
            raise Unfit
        axis = self.random.randrange(-len(a.shape), len(a.shape))
        made = self.builder.op("Softmax", a.tensor, axis=axis)
        self.made(made, 1, 2 * a.error, (a,), rounds=True)

    def total(self) -> None:
        a = self.real()
        axes = [i for i in range(len(a.shape)) if self.chance(5)]
        keep = self.random.randrange(2)
        made = self.builder.op("ReduceSum", a.tensor, axes or None, keepdims=keep)
        count = math.prod(a.shape[i] for i in axes) if axes else math.prod(a.shape)
        self.made(made, count * a.most, count * a.error, (a,), rounds=True)

    def normalized(self) -> None:
        a = self.real()
        if not a.shape or a.most > 60 or 0 in a.shape:
            raise Unfit
        axis = self.random.randrange(len(a.shape))
        scale = self.constant(a.shape[axis:], a.type)
        made = self.builder.op("LayerNormalization", a.tensor, scale.tensor, axis=axis, epsilon=1.0)
        count = math.prod(a.shape[axis:])
        error = 3 * (2 + count) * a.error + ROUNDING[a.type] * (1 + a.most) ** 2 * 8
        most = min(math.sqrt(count), 2 * a.most) * scale.most
        self.made(made, most, error, (a,), rounds=True)

    def cast(self) -> None:
        a = self.any(lambda k: True)
        wanted = [k for k in ROUNDING if k != a.type]
        if a.error or not a.exact:
            wanted = [k for k in wanted if k not in ("int64", "bool")]
        to = self.random.choice([*wanted, self.main] if self.main in wanted else wanted)
        self.made(self.builder.cast(a.tensor, to), max(a.most, 1.0), a.error, (a,), rounds=True)

    def matmul(self) -> None:
        a = self.number()
        if not a.shape:
            raise Unfit
        inner = a.shape[-1]
        found = [k for k in self.pool if k.type == a.type and _multiplies(a.shape, k.shape)]
        if found and self.chance(7):
            b = self.random.choice(found[-5:])
        else:
            columns = self.random.choice((1, 2, 3, 8))
            batch = tuple(s if self.chance(6) else 1 for s in a.shape[:-2])
            cut = self.random.randrange(len(batch) + 1)
            b = self.fresh((*batch[cut:], inner, columns), a.type)
        if a.type == "int64" and inner * a.most * b.most > 1e9:
            raise Unfit
        made = self.builder.matmul(a.tensor, b.tensor)
        most = max(inner, 1) * a.most * b.most
        error = inner * (a.error * b.most + b.error * a.most)
        self.made(made, most, error, (a, b), rounds=True, reorders=a.type != "int64")

    def gemm(self) -> None:
        a = self.any(lambda k: len(k.shape) == 2 and k.type not in ("bool", "int64"))
        flip_a, flip_b = self.random.randrange(2), self.random.randrange(2)
        rows, inner = a.shape[::-1] if flip_a else a.shape
        columns = self.random.choice((1, 2, 3, 8))
        b = self.fresh((columns, inner) if flip_b else (inner, columns), a.type)
        operands = [a, b]
        if self.chance(6):
            shape = self.random.choice(((rows, columns), (columns,), (1, columns), (rows, 1), ()))
            operands.append(self.fresh(shape, a.type))
        made = self.builder.op(
            "Gemm", *(k.tensor for k in operands), transA=flip_a, transB=flip_b,
            alpha=self.random.choice((1.0, 0.5)), beta=self.random.choice((1.0, 0.5)),
        )  # fmt: skip
        most = inner * a.most * b.most + sum(k.most for k in operands[2:])
        error = inner * a.error * b.most + sum(k.error for k in operands[2:])
        self.made(made, most, error, operands, rounds=True, reorders=True)

    # Movements ---------------------------------------------------------------------------------

    def moved(self, source: Known, *tensors: SymbolicTensor) -> None:
        for tensor in tensors:
            self.pool.append(source.moved(tensor))

    def turned(self) -> None:
        a = self.any(lambda k: len(k.shape) > 0)
        order = list(range(len(a.shape)))
        self.random.shuffle(order)
        self.moved(a, self.builder.transpose(a.tensor, order))

    def reshaped(self) -> None:
        a = self.any(lambda k: True)
        how = self.random.randrange(5)
        b, size = self.builder, math.prod(a.shape)
        if how == 0:
            axis = self.random.randrange(len(a.shape) + 1)
            self.moved(a, b.op("Flatten", a.tensor, axis=axis))
        elif how == 1:
            ones = [i for i, s in enumerate(a.shape) if s == 1 and self.chance(7)]
            self.moved(a, b.op("Squeeze", a.tensor, ones))
        elif how == 2 and len(a.shape) < 4:
            axis = self.random.randrange(len(a.shape) + 1)
            self.moved(a, b.op("Unsqueeze", a.tensor, [axis]))
        elif how == 3 and self.chance(3):
            self.moved(a, b.op("Identity", a.tensor))
        else:
            self.moved(a, b.op("Reshape", a.tensor, list(self._shape_of(size)), allowzero=1))

    def _shape_of(self, size: int) -> tuple[int, ...]:
        if not size:
            return self.random.choice(((0,), (2, 0), (0, 3), (1, 0, 2)))
        shape: list[int] = []
        for _ in range(self.random.randrange(4)):
            factors = [f for f in (1, 2, 3, 4, 5, 8, 256) if size % f == 0]
            shape.append(self.random.choice(factors))
            size //= shape[-1]
        shape.insert(self.random.randrange(len(shape) + 1), size)
        return tuple(shape)

    def parted(self) -> None:
        a = self.any(lambda k: len(k.shape) > 0)
        axis = self.random.randrange(len(a.shape))
        size, parts = a.shape[axis], self.random.randrange(1, 4)
        cuts = sorted(self.random.randrange(size + 1) for _ in range(parts - 1))
        sizes = [e - s for s, e in zip([0, *cuts], [*cuts, size], strict=True)]
        if size % parts == 0 and self.chance(4):
            sizes = [size // parts] * parts
        made = self.builder.op("Split", a.tensor, sizes, axis=axis, outputs=parts)
        tensors = made if isinstance(made, tuple) else (made,)
        self.moved(a, *(t for t in tensors if self.chance(8)))

    def sliced(self) -> None:
        a = self.any(lambda k: len(k.shape) > 0)
        axes = [i for i in range(len(a.shape)) if self.chance(6)] or [0]
        starts: list[int] = []
        ends: list[int] = []
        steps: list[int] = []
        for axis in axes:
            size = a.shape[axis]
            step = self.random.choice((1, 1, 1, 2, 3, 100, -1, -1, -2))
            start, end = (self.random.randrange(size + 2) for _ in range(2))
            if self.long and self.chance(5):
                end = start + 1
            elif self.chance(2):
                start, end = 0, size
            elif self.chance(7):
                start, end = min(start, end), max(start, end)
            if step < 0:
                start, end = max(start, end), min(start, end) - 1
                end = end if end >= 0 else -1000
            starts.append(start)
            ends.append(end)
            steps.append(step)
        self.moved(a, self.builder.op("Slice", a.tensor, starts, ends, axes, steps))

    def expanded(self) -> None:
        a = self.any(lambda k: math.prod(k.shape) < 100)
        if len(a.shape) > 3:
            raise Unfit
        shape = [s if s != 1 or self.chance(4) else self.random.randrange(1, 5) for s in a.shape]
        if self.chance(5):
            shape = [self.random.randrange(1, 4), *shape]
        if self.chance(3):
            shape = shape[self.random.randrange(len(shape) + 1) :]
        self.moved(a, self.builder.op("Expand", a.tensor, shape))

    def joined(self) -> None:
        a = self.any(lambda k: len(k.shape) > 0)
        axis = self.random.randrange(len(a.shape))
        others = [k for k in self.pool if k.type == a.type and _joins(a.shape, k.shape, axis)]
        parts = [a]
        for _ in range(self.random.randrange(1, 4)):
            if self.chance(8):
                parts.append(self.random.choice(others[-5:]))
            else:
                size = self.random.choice((0, 1, 2))
                parts.append(self.fresh((*a.shape[:axis], size, *a.shape[axis + 1 :]), a.type))
        self.random.shuffle(parts)
        if math.prod(a.shape) * len(parts) > MOST_ELEMENTS:
            raise Unfit
        made = self.builder.op("Concat", *(k.tensor for k in parts), axis=axis)
        self.pool.append(Known(made, max(k.most for k in parts), max(k.error for k in parts),
                               all(k.exact for k in parts)))  # fmt: skip

    # Whole graphs ------------------------------------------------------------------------------

    def update(self) -> None:
        """A donated input's next state, where it may lie in its place."""
        state = self.random.choice(self.donated)
        if state.type == "bool":
            other = self.fitting(state)
            op, most, error = self.random.choice(("And", "Or")), 1.0, 0.0
        else:
            other = self.fitting(state)
            op, most = "Sub", state.most + other.most
            error = state.error + other.error
        pair = (state.tensor, other.tensor) if self.chance(8) else (other.tensor, state.tensor)
        made = self.made(self.builder.op(op, *pair), most, error, (state, other))
        self.output(made)

    def output(self, known: Known) -> None:
        self.builder.output(f"y{len(self.outputs)}", known.tensor)
        self.outputs.append(known)

    def grow(self, count: int) -> None:
        moves = [self.turned, self.reshaped, self.parted, self.sliced, self.expanded, self.joined,
                 self.joined, self.turned]  # fmt: skip
        sums = [self.sum_, self.product, self.extreme, self.quotient, self.choice, self.comparison,
                self.function, self.sum_]  # fmt: skip
        others = [self.softmax, self.total, self.normalized, self.cast, self.matmul, self.matmul,
                  self.gemm]  # fmt: skip
        steps = 0
        for _ in range(6 * count):
            kinds = [moves, sums, sums if self.long else moves, others]
            if self.chain:
                kinds = [moves, others] if not self.random.randrange(12) else [sums]
            how = self.random.choice(self.random.choice(kinds))
            try:
                how()
            except (Unfit, CompileError):
                continue
            steps += 1
            if self.random.randrange(25 if self.chain else 10) == 0:
                self.output(self.pool[-1])
            if self.donated and self.chance(1):
                try:
                    self.update()
                except (Unfit, CompileError):
                    continue
            if steps == count:
                break


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return math.prod(np.broadcast_shapes(shape, to)) <= max(1000, math.prod(to))
    except ValueError:
        return False


def _joins(a: tuple[int, ...], b: tuple[int, ...], axis: int) -> bool:
    return len(a) == len(b) and all(x == y or i == axis for i, (x, y) in enumerate(zip(a, b)))  # noqa: B905


def _multiplies(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    if not b or a[-1] != (b[-2] if len(b) > 1 else b[0]):
        return False
    return math.prod(b) * max(a[-2:]) < 1e8 and _broadcasts(b[:-2], a[:-2])


def drawn_program(random: Random, machine: Machine, operations: int, *, long: bool) -> DrawnProgram:
    """A random program of so many operations at most; raises `CompileError` if it does not fit."""
    drawing = Drawing(random, long)
    for _ in range(random.randrange(1, 4)):
        drawing.input(drawing.shape(), drawing.main if drawing.chance(8) else "float32")
    drawing.grow(random.randrange(2, operations + 1))
    drawing.output(drawing.pool[-1])
    if drawing.chance(5):
        drawing.output(random.choice(drawing.pool))
    graph = drawing.builder.build()
    placement: list[str] = []
    errors = [k.error for k in drawing.outputs]
    if machine.name != "host":
        read = {v for o in graph.operations for v in o.inputs}
        placement += [f"input.{s.name}.layout=tile" for s in graph.inputs if drawing.chance(3)]
        for index, output in enumerate(graph.outputs):
            if drawing.chance(3) and output.value not in read:
                placement.append(f"output.{output.name}.layout=tile")
                if drawing.outputs[index].type == "float32" and drawing.chance(5):
                    placement.append(f"output.{output.name}.data_type=bfloat16")
                    errors[index] += (errors[index] > 0) * drawing.outputs[index].most / 64
    options = CompileOptions(
        placement=tuple(map(parse_placement, placement)), optimize=drawing.chance(6)
    )  # fmt: skip
    program = compile_graph(graph, machine, options).program
    assert len(program.inputs) == len(drawing.data)
    return DrawnProgram(
        program, machine, tuple(drawing.data), tuple(errors),
        tuple(k.exact for k in drawing.outputs),
    )  # fmt: skip

"""Random functions over random nests, for these in Stitch and for plain lists alike.

A program takes the functions over nests (`stitch.fractal` or `plain_nests`), what it closes over,
and a nest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stitch.fractal import FractalTensor

#: The functions over nests, what is closed over, a nest or a leaf.
Program = Callable[[Any, Mapping[str, Any], Any], Any]
KINDS = ("int64", "float32", "float64", "bool", "rows")


@dataclass
class Case:
    """A program, its nest as lists, and how near its results are."""

    program: Program
    nest: Any
    closed: Mapping[str, Any]
    tolerance: float
    words: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return " ".join(self.words)


def nests_of(case: Case) -> tuple[Any, dict[str, Any]]:
    """The nest, and what is closed over, as functions over nests in Stitch take them."""
    leaf = case.closed["array"]
    whole = _fractal(case.nest, leaf)
    closed = {**case.closed, "nest": _fractal(case.closed["nest"], leaf)}
    return whole, closed


def _fractal(nest: Any, leaf: Any) -> FractalTensor:
    def listed(part: Any) -> Any:
        return [listed(p) for p in part] if isinstance(part, list) else part.tolist()

    if not leaf.shape:
        return FractalTensor(listed(nest), dtype=leaf.dtype)

    def nested(part: Any) -> FractalTensor:
        if not isinstance(part[0], list):
            return FractalTensor(np.stack(part))
        return FractalTensor([nested(p) for p in part])

    return nested(nest)


def _has_leaf(nest: Any) -> bool:
    return any(map(_has_leaf, nest)) if isinstance(nest, list) else True


def random_case(seed: int) -> Case:
    """Of depth 1 to 3, uniform or ragged, with leaves of one kind."""
    choice = random.Random(seed)
    return _Maker(choice, KINDS[seed % len(KINDS)]).case(choice.randint(1, 3))


class _Maker:
    def __init__(self, choice: random.Random, kind: str) -> None:
        self.choice, self.kind = choice, kind
        self.numbers = np.random.default_rng(choice.randrange(1 << 30))
        self.dtype = np.dtype("float32" if kind == "rows" else kind)
        self.is_uniform = choice.random() < 0.5
        # Stacked rows need one in each list; several results need an element to be told by.
        self.least = 1 if kind == "rows" or self.is_uniform or choice.random() < 0.5 else 0
        self.words = [kind, "uniform" if self.is_uniform else "ragged"]
        self.is_exact = kind != "rows"

    def case(self, depth: int) -> Case:
        lengths = [self.choice.randint(1, 4) for _ in range(depth)]
        nest: Any = []
        while not _has_leaf(nest):  # Else its depth cannot be told.
            nest = self.nest(lengths)
        closed = {
            "array": self.leaf(), "nest": [self.leaf() for _ in range(16)],
            "w": self.weights(), "u": self.weights(),
        }  # fmt: skip
        program = self.program(depth, 3, self.least > 0)
        return Case(program, nest, closed, 0.0 if self.is_exact else 1e-5, self.words)

    def weights(self) -> Any:
        return (self.numbers.normal(size=(3, 3)) * 0.5).astype(np.float32)

    def leaf(self) -> Any:
        if self.kind == "rows":
            return self.numbers.normal(size=(1, 3)).astype(np.float32)
        if self.dtype.kind == "f":
            return np.array(self.numbers.normal(), self.dtype)
        return np.array(self.numbers.integers(0, 2 if self.kind == "bool" else 90), self.dtype)

    def nest(self, lengths: list[int]) -> Any:
        if not lengths:
            return self.leaf()
        length = lengths[0]
        if not self.is_uniform and self.choice.random() < 0.6:
            length = self.choice.randint(self.least, 4)
        return [self.nest(lengths[1:]) for _ in range(length)]

    # Leaves -----------------------------------------------------------------------------------

    def cell(self) -> Program:
        """A leaf from a leaf."""
        k = self.choice.randint(1, 5)
        if self.kind == "bool":
            return self.choice.choice([
                lambda o, c, x: np.logical_not(x), lambda o, c, x: np.not_equal(x, c["array"]),
            ])  # fmt: skip
        if self.kind == "rows" and self.choice.random() < 0.6:
            return lambda o, c, x: np.tanh(x @ c["w"] + c["array"])
        if self.dtype.kind == "f":
            return self.choice.choice([
                lambda o, c, x: x * 0.5 + k, lambda o, c, x: np.where(x > 0, x, x * 0.25),
                lambda o, c, x: np.maximum(x, c["array"]) - x,
            ])  # fmt: skip
        return self.choice.choice([
            lambda o, c, x: x * k - 1, lambda o, c, x: np.where(x > 40, x, -x),
            lambda o, c, x: (x + c["array"]) % 7,
        ])  # fmt: skip

    def step(self) -> Program:
        """A leaf from two, as one tuple; not associative."""
        if self.kind == "bool":
            return lambda o, c, p: np.logical_and(np.not_equal(p[0], p[1]), np.logical_not(p[0]))
        if self.kind == "rows":
            return self.choice.choice([
                lambda o, c, p: np.tanh(p[1] @ c["w"] + p[0] @ c["u"] + c["array"]),
                lambda o, c, p: np.tanh(p[0] @ c["u"]) + p[1],
                lambda o, c, p: p[0] * 0.5 + p[1],
            ])  # fmt: skip
        if self.dtype.kind == "f":
            return lambda o, c, p: p[0] * 0.5 + p[1]
        return lambda o, c, p: (p[0] * 3 + p[1]) % 101

    def joining(self) -> Program:
        """As `step`, but associative."""
        if self.kind == "bool":
            return lambda o, c, p: np.logical_or(p[0], p[1])
        if self.kind == "int64":
            return lambda o, c, p: (p[0] + p[1]) % 101
        return lambda o, c, p: np.maximum(p[0], p[1])

    # Nests ------------------------------------------------------------------------------------

    def program(self, depth: int, fuel: int, is_full: bool) -> Program:
        """A function of a nest of this depth; `is_full`: none of its lists is empty."""
        if not depth:
            return self.cell()
        ways: list[Callable[[int, int, bool], Program]] = [self.mapped, self.scanned, self.folded]
        if fuel > 0:
            ways += [self.slid, self.dilated, self.zipped, self.closing, self.spread]
            if is_full:
                ways += [self.several, self.two_states]
        if depth > 1 and self.is_uniform and is_full:
            ways += [self.nest_states] * 2
        way = self.choice.choice(ways)
        self.words.append(way.__name__)
        return way(depth, fuel - 1, is_full)

    def mapped(self, depth: int, fuel: int, is_full: bool) -> Program:
        inner = self.program(depth - 1, fuel, is_full)
        return lambda o, c, xs: o.map(lambda x, k=None: inner(o, c, x), xs, k=3)

    def one(self, depth: int) -> Program:
        """A leaf from a nest, or from a leaf."""
        if not depth:
            return self.cell()
        inner, step = self.one(depth - 1), self.step()
        name = self.choice.choice(["foldl", "foldr"])
        return lambda o, c, xs: getattr(o, name)(
            lambda s, x: step(o, c, (s, inner(o, c, x))), xs, c["array"]
        )

    def scanned(self, depth: int, fuel: int, is_full: bool) -> Program:
        inner, step = self.one(depth - 1), self.step()
        name = self.choice.choice(["scanl", "scanr"])
        if depth == 1 and is_full and self.choice.random() < 0.5:
            return lambda o, c, xs: getattr(o, name)(lambda s, x: step(o, c, (s, x)), xs)
        return lambda o, c, xs: getattr(o, name)(
            lambda s, x, k: step(o, c, (s, inner(o, c, x))), xs, c["array"], k=2
        )

    def folded(self, depth: int, fuel: int, is_full: bool) -> Program:
        if self.choice.random() < 0.5:
            return self.one(depth)
        inner, join = self.one(depth - 1), self.joining()
        return lambda o, c, xs: o.reduce(
            lambda a, b: join(o, c, (a, b)), o.map(lambda x: inner(o, c, x), xs), c["array"]
        )

    def slid(self, depth: int, fuel: int, is_full: bool) -> Program:
        size, stride = self.choice.randint(1, 3), self.choice.randint(1, 2)
        inner = self.program(depth, fuel, is_full)
        if size > 1 and is_full:  # Else there may be no windows, of which forms cannot be told.
            inner = self.one(depth)
        return lambda o, c, xs: o.map(lambda x: inner(o, c, x), o.slide(xs, size, stride))

    def dilated(self, depth: int, fuel: int, is_full: bool) -> Program:
        apart, inner = self.choice.randint(1, 3), self.program(depth, fuel, is_full)
        return lambda o, c, xs: o.map(lambda x: inner(o, c, x), o.dilate(xs, apart))

    def zipped(self, depth: int, fuel: int, is_full: bool) -> Program:
        cell, step, inner = self.cell(), self.step(), self.program(depth, fuel, is_full)

        def program(o: Any, c: Any, xs: Any) -> Any:
            other = o.forall(lambda x: cell(o, c, x), xs)
            return inner(o, c, o.forall(lambda p: step(o, c, p), o.zip(other, xs)))

        return program

    def closing(self, depth: int, fuel: int, is_full: bool) -> Program:
        step, inner = self.step(), self.one(depth - 1)
        return lambda o, c, xs: o.map(
            lambda p: step(o, c, (inner(o, c, p[0]), p[1])), o.zip(xs, c["nest"][: len(xs)])
        )

    def spread(self, depth: int, fuel: int, is_full: bool) -> Program:
        step, inner = self.step(), self.one(depth - 1)

        def program(o: Any, c: Any, xs: Any) -> Any:
            across = o.product(o.map(lambda x: inner(o, c, x), xs), c["nest"][:2])
            return o.map(lambda p: o.map(lambda q: step(o, c, q), o.zip(*p)), o.zip(*across))

        return program

    def several(self, depth: int, fuel: int, is_full: bool) -> Program:
        first, second = self.program(depth - 1, fuel, is_full), self.one(depth - 1)
        third = self.cell()
        return lambda o, c, xs: o.map(
            lambda x: (first(o, c, x), (second(o, c, x), third(o, c, second(o, c, x)))), xs
        )

    def two_states(self, depth: int, fuel: int, is_full: bool) -> Program:
        inner, step, other = self.one(depth - 1), self.step(), self.step()
        name = self.choice.choice(["scanl", "scanr", "foldl", "foldr"])

        def program(o: Any, c: Any, xs: Any) -> Any:
            def round_(s: Any, x: Any) -> Any:
                after = step(o, c, (s[0], inner(o, c, x)))
                return after, other(o, c, (s[1], after))

            return getattr(o, name)(round_, xs, (c["array"], c["array"]))

        return program

    def nest_states(self, depth: int, fuel: int, is_full: bool) -> Program:
        step, name = self.step(), self.choice.choice(["scanl", "scanr", "foldl", "foldr"])
        return lambda o, c, xs: getattr(o, name)(
            lambda s, x: o.forall(lambda p: step(o, c, p), o.zip(s, x)), xs
        )

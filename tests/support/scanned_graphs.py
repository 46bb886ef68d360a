"""Graphs with scans of every form, by the size of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stitch.graph import ComputationGraph, ComputationGraphBuilder, scan

Build = Callable[[ComputationGraphBuilder, int], Sequence[Any]]


def cell(b: ComputationGraphBuilder, width: int) -> Sequence[Any]:
    """A recurrent cell: states, sequences, and weights that all rounds share."""
    xs, h = b.input("xs", (6, 4, width), "float32"), b.input("h", (4, width), "float32")
    w = b.parameter("w", np.full((width, width), 0.5 / width, np.float32))

    def step(states: Any, elements: Any) -> Any:
        after = b.op("Tanh", b.matmul(states[0], w) + elements[0])
        return [after], [after * 2.0]

    (last,), (given,) = scan(b, step, [h], [xs])
    return last, given


def narrow(b: ComputationGraphBuilder, width: int) -> Sequence[Any]:
    """States and elements in a type that kernels do not compute in."""
    xs, h = b.input("xs", (5, width), "bfloat16"), b.input("h", (width,), "bfloat16")

    def step(states: Any, elements: Any) -> Any:
        after = b.op("Sigmoid", states[0] * elements[0] + elements[0])
        return [after], [b.softmax(after)]

    (last,), (given,) = scan(b, step, [h], [xs], taken_backward=[True])
    return last, given


def mapped(b: ComputationGraphBuilder, width: int) -> Sequence[Any]:
    """Rounds that have nothing to do with each other."""
    xs, ys = b.input("xs", (7, width), "float32"), b.input("ys", (7, width), "float32")
    _, (given,) = scan(
        b, lambda _, e: ([], [b.gelu(e[0] * e[1])]), [], [xs, ys], given_backward=[True]
    )
    return (given,)


def nested(b: ComputationGraphBuilder, width: int) -> Sequence[Any]:
    """Scans within a scan, one after the other."""
    xs, h = b.input("xs", (3, 4, width), "float32"), b.input("h", (width,), "float32")

    def outer(states: Any, elements: Any) -> Any:
        (first,), (rows,) = scan(
            b, lambda s, e: ([b.op("Tanh", s[0] + e[0])], [s[0] * e[0]]), states, elements
        )
        (second,), _ = scan(b, lambda s, e: ([b.op("Sin", s[0]) + e[0]], []), [first], [rows])
        return [second], [rows]

    (last,), (given,) = scan(b, outer, [h], [xs])
    return last, given


def counted(b: ComputationGraphBuilder, width: int) -> Sequence[Any]:
    """A count, no sequences, several states, one round of another scan."""
    x, y = b.input("x", (width,), "float32"), b.input("y", (width,), "float32")

    def step(states: Any, _: Any) -> Any:
        (one,), _ = scan(b, lambda s, e: ([b.op("Exp", s[0] * -0.5)], []), states[:1], [], count=1)
        return [states[1], one], []

    (x, y), _ = scan(b, step, [x, y], [], count=4)
    return x, y


def sorting(b: ComputationGraphBuilder, width: int) -> Sequence[Any]:
    """A round with a kernel that keeps memory from its binding on."""
    xs = b.input("xs", (4, width), "float32")
    _, (given,) = scan(b, lambda _, e: ([], [b.topk(e[0], 16)[0]]), [], [xs])
    return (given,)


FORMS: dict[str, Build] = {
    "cell": cell, "narrow": narrow, "mapped": mapped, "nested": nested, "counted": counted,
    "sorting": sorting,
}  # fmt: skip


def scanned_graph(form: str, width: int = 32) -> ComputationGraph:
    """The graph of one of the forms."""
    b = ComputationGraphBuilder(form)
    for number, output in enumerate(FORMS[form](b, width)):
        b.output(f"y{number}", output)
    return b.build()

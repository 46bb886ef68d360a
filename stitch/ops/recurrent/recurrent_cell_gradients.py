"""Backpropagation through the cells of RNN, GRU and LSTM, one direction at a time, unrolled.

The hidden states are known, so that every gate is computed again for all steps at once. What is
per step is one product and a few elementwise operations. Arrays over time are
[steps * batch, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stitch.ops.gradient import GradientContext


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction in the order in which it runs; gradients of last states may be None."""

    context: GradientContext
    steps: int
    batch: int
    hidden: int
    activation: str
    x: Any
    before: Any
    after: Any
    weights: Any
    recurrent: Any
    input_bias: Any
    recurrent_bias: Any
    initial_cell: Any
    gradient: Any
    last: Any
    last_cell: Any

    def apply(self, op: str, *operands: Any, **attributes: Any) -> Any:
        return self.context.apply(op, *operands, **attributes)

    def columns(self, value: Any, first: int, end: int) -> Any:
        """Gates `first` to `end` of a value with all gates in axis 1."""
        return self.apply("Slice", value, [first * self.hidden], [end * self.hidden], [1])

    def rows(self, value: Any, first: int, end: int) -> Any:
        """Gates `first` to `end` of weights or of a bias."""
        if value is None:
            return None
        return self.apply("Slice", value, [first * self.hidden], [end * self.hidden], [0])

    def product(self, x: Any, weights: Any, bias: Any = None) -> Any:
        """x weights' + bias."""
        return self.apply("Gemm", x, weights, bias, transB=1)

    def each(self, value: Any) -> Sequence[Any]:
        """A value's steps, [batch, width] each."""
        if self.steps == 1:
            return (value,)
        return self.context.apply_many("Split", self.steps, value, [self.batch] * self.steps)

    def joined(self, parts: Sequence[Any]) -> Any:
        """Steps as one value."""
        return parts[0] if len(parts) == 1 else self.apply("Concat", *parts, axis=0)

    def total(self, arriving: Any, flowing: Any) -> Any:
        """What flows into one hidden state; zeros where that is nothing."""
        total = plus(arriving, flowing)
        if total is None:
            total = self.context.zeros((self.batch, self.hidden), self.after.data_type)
        return total

    def arriving(self) -> list[Any]:
        """What flows into every hidden state from outside."""
        none = [None] * self.steps
        parts = none if self.gradient is None else list(self.each(self.gradient))
        parts[-1] = plus(parts[-1], self.last)
        return parts


@dataclass(frozen=True, slots=True)
class Flow:
    """What flows back: into the gates from the input, into those from the state; first states.

    `recurrent_weights` is given where it is not the product of `recurrent` and the states.
    """

    gates: Any
    recurrent: Any
    state: Any
    cell: Any = None
    recurrent_weights: Any = None


def plus(a: Any, b: Any) -> Any:
    """The sum of what is there."""
    if a is None or b is None:
        return a if b is None else b
    return a + b


def _slope(y: Any) -> Any:
    """Of a sigmoid, by its result."""
    return y - y * y


def rnn_flow(d: Direction) -> Flow:
    """h = tanh(gate), or its positive part."""
    c, y = d.context, d.after
    slope = None if d.activation == "relu" else 1.0 - y * y
    hit = d.each(d.apply("Greater", y, 0.0)) if slope is None else ()
    slopes = () if slope is None else d.each(slope)
    arriving, flowing = d.arriving(), None
    parts: list[Any] = [None] * d.steps
    for at in reversed(range(d.steps)):
        total = d.total(arriving[at], flowing)
        parts[at] = total * slopes[at] if slopes else c.kept(hit[at], total)
        flowing = d.apply("Gemm", parts[at], d.recurrent)
    gates = d.joined(parts)
    return Flow(gates, gates, flowing)


def gru_flow(d: Direction) -> Flow:
    """Gates z, r, n; h = (1 - z) n + z h'."""
    c, before = d.context, d.before
    linear = bool(c.int_of("linear_before_reset"))
    share = d.product(d.x, d.weights, d.input_bias)
    first, last = d.rows(d.recurrent, 0, 2), d.rows(d.recurrent, 2, 3)
    both = d.columns(share, 0, 2) + d.product(before, first, d.rows(d.recurrent_bias, 0, 2))
    both = d.apply("Sigmoid", both)
    z, r = d.columns(both, 0, 1), d.columns(both, 1, 2)
    reset = before if linear else r * before
    inner = d.product(reset, last, d.rows(d.recurrent_bias, 2, 3))
    n = d.apply("Tanh", d.columns(share, 2, 3) + (r * inner if linear else inner))
    to_n, to_z = d.each((1.0 - z) * (1.0 - n * n)), d.each((before - n) * _slope(z))
    to_r = d.each((inner if linear else before) * _slope(r))
    stays, resets = d.each(z), d.each(r)
    arriving, flowing = d.arriving(), None
    parts: list[Any] = [None] * d.steps
    inners: list[Any] = [None] * d.steps
    for at in reversed(range(d.steps)):
        total = d.total(arriving[at], flowing)
        dn, dz = total * to_n[at], total * to_z[at]
        if linear:
            back = dn * resets[at]
            pair = d.apply("Concat", dz, dn * to_r[at], axis=1)
            inners[at] = d.apply("Concat", pair, back, axis=1)
            flowing = total * stays[at] + d.apply("Gemm", inners[at], d.recurrent)
        else:
            back = d.apply("Gemm", dn, last)
            pair = d.apply("Concat", dz, back * to_r[at], axis=1)
            flowing = total * stays[at] + back * resets[at] + d.apply("Gemm", pair, first)
        parts[at] = d.apply("Concat", pair, dn, axis=1)
    gates = d.joined(parts)
    if linear:
        return Flow(gates, d.joined(inners), flowing)
    weights = [
        d.apply("Gemm", d.columns(gates, 0, 2), before, transA=1),
        d.apply("Gemm", d.columns(gates, 2, 3), reset, transA=1),
    ]
    return Flow(gates, gates, flowing, None, d.apply("Concat", *weights, axis=0))


def lstm_flow(d: Direction) -> Flow:
    """Gates i, o, f, g; c = f c' + i g; h = o tanh(c)."""
    share = d.product(d.x, d.weights, d.input_bias)
    gates = share + d.product(d.before, d.recurrent, d.recurrent_bias)
    three = d.apply("Sigmoid", d.columns(gates, 0, 3))
    i, o, f = (d.columns(three, gate, gate + 1) for gate in range(3))
    g = d.apply("Tanh", d.columns(gates, 3, 4))
    cell, cells = d.initial_cell, []
    forgets = d.each(f)
    for forget, fresh in zip(forgets, d.each(i * g), strict=True):
        cell = forget * cell + fresh
        cells.append(cell)
    was = d.joined([d.initial_cell, *cells[:-1]])
    seen = d.apply("Tanh", d.joined(cells))
    of_gates = (g * _slope(i), seen * _slope(o), was * _slope(f), i * (1.0 - g * g))
    slopes = d.each(d.apply("Concat", *of_gates, axis=1))
    to_cell = d.each(o * (1.0 - seen * seen))
    arriving, flowing, in_cell = d.arriving(), None, d.last_cell
    parts: list[Any] = [None] * d.steps
    for at in reversed(range(d.steps)):
        total = d.total(arriving[at], flowing)
        in_cell = plus(total * to_cell[at], in_cell)
        spread = d.apply("Concat", in_cell, total, in_cell, in_cell, axis=1)
        parts[at] = spread * slopes[at]
        flowing = d.apply("Gemm", parts[at], d.recurrent)
        in_cell = in_cell * forgets[at]
    of_steps = d.joined(parts)
    return Flow(of_steps, of_steps, flowing, in_cell)

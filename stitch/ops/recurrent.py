"""Recurrent layers RNN, GRU and LSTM: one or both directions, sequences of any length.

The product with the input weights is computed for all steps at once. Rows beyond a sequence's
length are 0 in Y; Y_h and Y_c hold the state after its last element. `activation_alpha` and
`activation_beta` are consumed in order by the functions that have such a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import Attributes, InferenceContext, int_of, string_of
from stitch.ops.steps import check_range
from stitch.program import Array, DataType, ValueType

# Activation functions -----------------------------------------------------------------------------

#: An activation function with its parameters.
Gate = Callable[[Array], Array]
#: An activation's name in lower case, its alpha and its beta.
Activation = tuple[str, float, float]


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, small).astype(x.dtype) / (1 + small))


#: Functions of x, alpha and beta, and the defaults of the parameters that they have.
_FUNCTIONS: dict[str, tuple[Callable[[Array, Any, Any], Array], *tuple[float, ...]]] = {
    "relu": (lambda x, a, b: np.maximum(x, 0),),
    "tanh": (lambda x, a, b: np.tanh(x),),
    "sigmoid": (lambda x, a, b: sigmoid(x),),
    "softsign": (lambda x, a, b: x / (1 + np.abs(x)),),
    "softplus": (lambda x, a, b: np.logaddexp(x, x.dtype.type(0)),),
    "affine": (lambda x, a, b: a * x + b, 1.0, 0.0),
    "leakyrelu": (lambda x, a, b: np.where(x >= 0, x, a * x), 0.01),
    "thresholdedrelu": (lambda x, a, b: np.where(x > a, x, 0 * x), 1.0),
    "scaledtanh": (lambda x, a, b: a * np.tanh(b * x), 1.0, 1.0),
    "hardsigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), 0.2, 0.5),
    "elu": (lambda x, a, b: np.where(x >= 0, x, a * np.expm1(np.minimum(x, 0))), 1.0),
}


def names_of(attributes: Attributes, defaults: tuple[str, ...], directions: int) -> tuple[str, ...]:
    """Return the names of the activations of all directions, in lower case."""
    listed = attributes.get("activations")
    names = tuple(str(name) for name in listed) if isinstance(listed, tuple) else ()
    wanted = defaults * directions
    # ONNX's default of RNN has two names, also for one direction.
    return tuple(name.lower() for name in (names[: len(wanted)] if names else wanted))


def activations_of(attributes: Attributes, names: tuple[str, ...]) -> list[Activation]:
    """Return each function's name, alpha and beta; 0 for a parameter that it does not have."""
    listed = [_numbers(attributes, f"activation_{name}") for name in ("alpha", "beta")]
    activations = []
    for name in names:
        parameters = list(_FUNCTIONS[name][1:])
        for index, numbers in enumerate(listed[: len(parameters)]):
            if numbers:
                parameters[index] = numbers.pop(0)
        alpha, beta = (*parameters, 0.0, 0.0)[:2]
        activations.append((name, alpha, beta))
    return activations


def gates_of(attributes: Attributes, names: tuple[str, ...], dtype: np.dtype[Any]) -> list[Gate]:
    """Return the functions with their parameters and the clip of their operand."""
    clip = attributes.get("clip")
    limit = dtype.type(clip) if isinstance(clip, float) and clip > 0 else None

    def gate(name: str, alpha: Any, beta: Any, x: Array) -> Array:
        clipped = x if limit is None else np.clip(x, -limit, limit)
        return _FUNCTIONS[name][0](clipped, alpha, beta)

    return [
        partial(gate, name, dtype.type(alpha), dtype.type(beta))
        for name, alpha, beta in activations_of(attributes, names)
    ]


def _numbers(attributes: Attributes, name: str) -> list[float]:
    listed = attributes.get(name)
    return [float(value) for value in listed] if isinstance(listed, tuple) else []


# Batching -----------------------------------------------------------------------------------------

#: Indices of W, R, B and P.
_WEIGHTS = (1, 2, 3, 7)


def batch_recurrent(c: BatchingContext) -> Sequence[Any] | None:
    if c.varies(*_WEIGHTS):
        return None
    by_batch = bool(c.int_of("layout"))
    operands = [
        c.operands[i]
        if i in _WEIGHTS
        # Lengths have the batch axis only; X and states have it first or second.
        else c.fold(i, 0 if by_batch or i == 4 else 1)
        for i in range(len(c.operands))
    ]
    results = c.emit(*operands)
    # Y is [steps, directions, batch, hidden], Y_h and Y_c are [directions, batch, hidden].
    axes = (0, 0, 0) if by_batch else (2, 1, 1)
    return tuple(c.split(r, axis) for r, axis in zip(results, axes, strict=False))


# Backpropagation through the cells ----------------------------------------------------------------


class _Direction:
    """The backward pass of one direction of a layer, in the order in which the direction runs.

    Values over time are [steps * batch, width]; `gradient`, `last` and `last_cell`, the gradients
    of Y, Y_h and Y_c, are None if nothing flows back.
    """

    def __init__(self, context: GradientContext, activation: str, d: int, is_reverse: bool) -> None:
        c = self.context = context
        self.activation, self.d, self.is_reverse = activation, d, is_reverse
        self.by_batch = bool(c.int_of("layout"))
        shape = c.type_of(0).shape
        self.batch, self.steps = shape[:2] if self.by_batch else shape[1::-1]
        self.hidden = c.type_of(2).shape[2]
        self.before = self._state(c.input(5) if c.has(5) else None)
        self.after = self._over_time(c.output(0))
        if self.steps > 1:
            until = (self.steps - 1) * self.batch
            earlier = c.apply("Slice", self.after, [0], [until], [0])
            self.before = c.apply("Concat", self.before, earlier, axis=0)
        self.weights, self.recurrent = self._weights(1), self._weights(2)
        self.input_bias = self.recurrent_bias = None
        if c.has(3):
            self.input_bias, self.recurrent_bias = c.apply_many(
                "Split", 2, self._weights(3), num_outputs=2
            )
        self.x = self._input()
        self.initial_cell = None
        if c.op == "LSTM":
            self.initial_cell = self._state(c.input(6) if c.has(6) else None)
        y, *last = (*c.gradients, None, None)[:3]
        self.gradient = None if y is None else self._over_time(y)
        self.last, self.last_cell = (None if g is None else self._state(g) for g in last)

    def apply(self, op: str, *operands: Any, **attributes: Any) -> Any:
        return self.context.apply(op, *operands, **attributes)

    def columns(self, value: Any, first: int, end: int) -> Any:
        """Return gates `first` to `end` of a value with all gates in axis 1."""
        return self.apply("Slice", value, [first * self.hidden], [end * self.hidden], [1])

    def rows(self, value: Any, first: int, end: int) -> Any:
        """Return gates `first` to `end` of weights or of a bias, None if it is absent."""
        if value is None:
            return None
        return self.apply("Slice", value, [first * self.hidden], [end * self.hidden], [0])

    def product(self, x: Any, weights: Any, bias: Any = None) -> Any:
        """Return x weights' + bias."""
        return self.apply("Gemm", x, weights, bias, transB=1)

    def each(self, value: Any) -> Sequence[Any]:
        """Split a value over time into its steps, [batch, width] each."""
        if self.steps == 1:
            return (value,)
        return self.context.apply_many("Split", self.steps, value, [self.batch] * self.steps)

    def joined(self, parts: Sequence[Any]) -> Any:
        """Concatenate steps to one value over time."""
        return parts[0] if len(parts) == 1 else self.apply("Concat", *parts, axis=0)

    def total(self, arriving: Any, flowing: Any) -> Any:
        """Return the gradient of one hidden state, zeros if nothing flows back."""
        total = plus(arriving, flowing)
        if total is None:
            total = self.context.fill(0, (self.batch, self.hidden), self.after.data_type)
        return total

    def arriving(self) -> list[Any]:
        """Return each hidden state's gradient from outside of the layer."""
        parts = [None] * self.steps if self.gradient is None else list(self.each(self.gradient))
        parts[-1] = plus(parts[-1], self.last)
        return parts

    def operand_gradients(self) -> list[Any]:
        """Return the gradients of all operands; that of x in the order of the operand."""
        c, gradients = self.context, [None] * 8
        flow = _BACKWARD[c.op](self)
        if c.wants(0):
            x = c.reshape(c.apply("Gemm", flow.gates, self.weights), (self.steps, self.batch, -1))
            gradients[0] = self._reversed(x)
        if c.wants(1):
            gradients[1] = c.apply("Gemm", flow.gates, self.x, transA=1)
        if c.wants(2):
            gradients[2] = flow.recurrent_weights
            if gradients[2] is None:
                gradients[2] = c.apply("Gemm", flow.recurrent, self.before, transA=1)
        if c.wants(3):
            sums = [c.apply("ReduceSum", v, [0], keepdims=0) for v in (flow.gates, flow.recurrent)]
            gradients[3] = c.apply("Concat", *sums, axis=0)
        gradients[5], gradients[6] = flow.state, flow.cell
        return gradients

    def _reversed(self, value: Any) -> Any:
        """Reverse the steps if the direction runs backward."""
        if not self.is_reverse:
            return value
        return self.apply("Slice", value, [-1], [-self.steps - 1], [0], [-1])

    def _input(self) -> Any:
        x = self.context.input(0)
        x = self._reversed(self.apply("Transpose", x, perm=[1, 0, 2]) if self.by_batch else x)
        return self.context.reshape(x, (self.steps * self.batch, x.shape[2]))

    def _over_time(self, y: Any) -> Any:
        """Return this direction of Y, [steps, directions, batch, hidden] unless `layout`."""
        y = self.apply("Transpose", y, perm=[1, 2, 0, 3]) if self.by_batch else y
        y = y if y.shape[1] == 1 else self.apply("Slice", y, [self.d], [self.d + 1], [1])
        return self.context.reshape(self._reversed(y), (self.steps * self.batch, self.hidden))

    def _state(self, state: Any) -> Any:
        c, shape = self.context, (self.batch, self.hidden)
        if state is None:
            return c.fill(0, shape, c.type_of(0).data_type)
        axis = 1 if self.by_batch else 0
        if state.shape[axis] > 1:
            state = c.apply("Slice", state, [self.d], [self.d + 1], [axis])
        return c.reshape(state, shape)

    def _weights(self, index: int) -> Any:
        weights = self.context.input(index)
        if weights.shape[0] > 1:
            weights = self.apply("Slice", weights, [self.d], [self.d + 1], [0])
        return self.context.reshape(weights, weights.shape[1:])


@dataclass(frozen=True, slots=True)
class Flow:
    """Gradients of the gates (their part from the input, and from the state) and initial states.

    `recurrent_weights` is set if it is not the product of `recurrent` and the states.
    """

    gates: Any
    recurrent: Any
    state: Any
    cell: Any = None
    recurrent_weights: Any = None


def plus(a: Any, b: Any) -> Any:
    """Return the sum of two gradients, of which any may be None."""
    if a is None or b is None:
        return a if b is None else b
    return a + b


def _slope(y: Any) -> Any:
    """Return the slope of a sigmoid from its result."""
    return y - y * y


def rnn_flow(d: _Direction) -> Flow:
    """h = tanh(gate) or relu(gate)."""
    c, y = d.context, d.after
    slope = None if d.activation == "relu" else 1.0 - y * y
    hit = d.each(d.apply("Greater", y, 0.0)) if slope is None else ()
    slopes = () if slope is None else d.each(slope)
    arriving, flowing = d.arriving(), None
    parts: list[Any] = [None] * d.steps
    for at in reversed(range(d.steps)):
        total = d.total(arriving[at], flowing)
        parts[at] = total * slopes[at] if slopes else c.where(hit[at], total)
        flowing = d.apply("Gemm", parts[at], d.recurrent)
    gates = d.joined(parts)
    return Flow(gates, gates, flowing)


def gru_flow(d: _Direction) -> Flow:
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


def lstm_flow(d: _Direction) -> Flow:
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


_BACKWARD = {"RNN": rnn_flow, "GRU": gru_flow, "LSTM": lstm_flow}


def recurrent_gradient(context: GradientContext) -> Sequence[Any]:
    """Return the gradients of X, W, R, B and the initial states, over all directions."""
    count = context.type_of(1).shape[0]
    layer = _LAYERS[context.op]
    names = names_of(context.attributes, layer.activations, count)
    _check_differentiable(context, names, layer.activations * count)
    by_direction = [
        _Direction(context, names[d * len(layer.activations)], d, is_reverse).operand_gradients()
        for d, is_reverse in enumerate(_DIRECTIONS[context.string_of("direction")])
    ]
    results: list[Any] = [None] * len(context.input_types)
    for index in range(len(results)):
        parts = [gradients[index] for gradients in by_direction]
        if context.wants(index) and parts[0] is not None:
            results[index] = _join_directions(context, index, parts)
    return results


def _check_differentiable(
    context: GradientContext, names: tuple[str, ...], defaults: tuple[str, ...]
) -> None:
    is_default = names == tuple(name.lower() for name in defaults)
    is_plain = context.op == "RNN" and set(names) <= {"tanh", "relu"}
    features = {
        "activations " + ", ".join(names): not is_default and not is_plain,
        "clip": context.attributes.get("clip") is not None,
        "sequence_lens": context.has(4),
        "peepholes": context.has(7),
        "input_forget": bool(context.attributes.get("input_forget", 0)),
    }
    unsupported = [name for name, is_used in features.items() if is_used]
    if unsupported:
        raise context.fail(
            " and ".join(unsupported) + " not supported",
            "remove them from the layer, or do not train it",
        )


def _join_directions(context: GradientContext, index: int, parts: list[Any]) -> Any:
    """Combine one operand's gradients of all directions."""
    by_batch = bool(context.int_of("layout"))
    if index == 0:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return context.apply("Transpose", total, perm=[1, 0, 2]) if by_batch else total
    axis = 1 if index > 3 and by_batch else 0
    wide = [context.apply("Unsqueeze", part, [axis]) for part in parts]
    return wide[0] if len(wide) == 1 else context.apply("Concat", *wide, axis=axis)


# Kernels ------------------------------------------------------------------------------------------

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
State = tuple[Array, ...]
#: Returns the state after a step from the input's part of the gates, the state and the weights.
Step = Callable[[Array, State, "_Weights"], State]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One of the three operators: gates, default activations, states and the step."""

    name: str
    gates: int
    activations: tuple[str, ...]
    states: int
    step: Step


@dataclass(frozen=True, slots=True)
class _Weights:
    """The arrays of one direction; `recurrent` is transposed: [hidden, gates * hidden]."""

    recurrent: Array
    recurrent_bias: Array
    peepholes: tuple[Array, Array, Array] | None
    functions: tuple[Gate, ...]
    hidden: int
    linear_before_reset: bool
    input_forget: bool

    def part(self, array: Array, gate: int) -> Array:
        """Return the columns of one gate."""
        return array[..., gate * self.hidden : (gate + 1) * self.hidden]


def _rnn_step(share: Array, state: State, weights: _Weights) -> State:
    (h,) = state
    (f,) = weights.functions
    return (f(share + h @ weights.recurrent + weights.recurrent_bias),)


def _gru_step(share: Array, state: State, weights: _Weights) -> State:
    (h,) = state
    f, g = weights.functions
    part, bias = weights.part, weights.recurrent_bias
    both = slice(0, 2 * weights.hidden)
    first = share[:, both] + h @ weights.recurrent[:, both] + bias[both]
    z, r = f(part(first, 0)), f(part(first, 1))
    last = part(weights.recurrent, 2)
    if weights.linear_before_reset:
        inner = r * (h @ last + part(bias, 2))
    else:
        inner = (r * h) @ last + part(bias, 2)
    return ((1 - z) * g(part(share, 2) + inner) + z * h,)


def _lstm_step(share: Array, state: State, weights: _Weights) -> State:
    h, c = state
    f, g, last = weights.functions
    gates = share + h @ weights.recurrent + weights.recurrent_bias
    i, o, forget, cell = (weights.part(gates, gate) for gate in range(4))
    peep = weights.peepholes
    if peep is not None:
        i, forget = i + peep[0] * c, forget + peep[2] * c
    i = f(i)
    forget = 1 - i if weights.input_forget else f(forget)
    c = forget * c + i * g(cell)
    o = f(o if peep is None else o + peep[1] * c)
    return (o * last(c), c)


_RNN = _Layer("RNN", 1, ("Tanh",), 1, _rnn_step)
_GRU = _Layer("GRU", 3, ("Sigmoid", "Tanh"), 1, _gru_step)
_LSTM = _Layer("LSTM", 4, ("Sigmoid", "Tanh", "Tanh"), 2, _lstm_step)


_LAYERS = {layer.name: layer for layer in (_RNN, _GRU, _LSTM)}


def recurrent_activations(
    op: str, attributes: Attributes, directions: int
) -> list[list[Activation]]:
    """Return the activations of each direction of a layer."""
    layer = _LAYERS[op]
    names = names_of(attributes, layer.activations, directions)
    activations, each = activations_of(attributes, names), len(layer.activations)
    return [activations[d * each : (d + 1) * each] for d in range(directions)]


def _infer(layer: _Layer, context: InferenceContext) -> tuple[ValueType, ...]:
    x, w, r = (context.require_type(index, FLOATS) for index in range(3))
    context.require_same_type((0, 1, 2, 3, 5, 6, 7))
    for index in range(3):
        context.require_rank(index, 3, 3)
    direction = context.require_word("direction", _DIRECTIONS)
    count, hidden = len(_DIRECTIONS[direction]), r.shape[2]
    if context.attributes.get("hidden_size", hidden) != hidden:
        raise context.fail(
            f"hidden_size of {context.op} does not match the recurrent weights", expected=hidden,
            got=context.attributes["hidden_size"],
        )  # fmt: skip
    by_batch = bool(context.int_of("layout"))
    batch, length = x.shape[:2] if by_batch else x.shape[1::-1]
    rows = layer.gates * hidden
    context.require_shape(1, (count, rows, x.shape[2]))
    context.require_shape(2, (count, rows, hidden))
    state = (batch, count, hidden) if by_batch else (count, batch, hidden)
    shapes = {3: (count, 2 * rows), 4: (batch,), 5: state, 6: state, 7: (count, 3 * hidden)}
    for index, shape in shapes.items():
        context.require_shape(index, shape)
    if context.present(4) is not None:
        context.require_type(4, frozenset({DataType.INT32}))
    names, wanted = (
        names_of(context.attributes, layer.activations, count),
        layer.activations * count,
    )
    if len(names) != len(wanted) or not set(names) <= set(_FUNCTIONS):
        raise context.fail(
            f"activations of {context.op} are unknown or of the wrong number",
            expected=f"{len(wanted)} of {', '.join(_FUNCTIONS)}", got=", ".join(names),
        )  # fmt: skip
    whole = (batch, length, count, hidden) if by_batch else (length, count, batch, hidden)
    shown = (whole, state, state)[: context.outputs]
    return tuple(ValueType(shape, w.data_type) for shape in shown)


def _run_direction(
    x: Array,
    w: Array,
    b: Array | None,
    weights: Callable[[], _Weights],
    step: Step,
    backward: bool,
    lengths: Array | None,
    initial: Sequence[Array | None],
    outputs: Sequence[Array],
) -> None:
    """Run all steps of one direction.

    Args:
        x: [length, batch, input].
        outputs: Y [length, batch, hidden] and the last states [batch, hidden], if requested.
    """
    direction = weights()
    length, batch = x.shape[:2]
    share = x.reshape(-1, x.shape[2]) @ w.T
    if b is not None:
        share += b[: w.shape[0]]
    shares = share.reshape(length, batch, w.shape[0])
    empty = np.zeros((batch, direction.hidden), x.dtype)
    state: State = tuple(empty if one is None else one for one in initial)
    if outputs:
        outputs[0][...] = 0
    for at in range(length - 1, -1, -1) if backward else range(length):
        following = step(shares[at], state, direction)
        if lengths is None:
            state = following
            current = following[0]
        else:
            alive = (at < lengths)[:, None]
            state = tuple(np.where(alive, n, o) for n, o in zip(following, state, strict=True))
            current = np.where(alive, following[0], empty)
        if outputs:
            outputs[0][at] = current
    for target, value in zip(outputs[1:], state, strict=False):
        target[...] = value


def _kernel(layer: _Layer, arguments: KernelArguments) -> Sequence[Thunk]:
    attributes = arguments.attributes
    x, w = arguments.operand(0), arguments.operand(1)
    bias, lengths = arguments.optional(3), arguments.optional(4)
    by_batch = bool(int_of(attributes, "layout"))
    directions = _DIRECTIONS[string_of(attributes, "direction")]
    names = names_of(attributes, layer.activations, len(directions))
    functions = gates_of(attributes, names, x.dtype)
    each = len(layer.activations)
    if by_batch:
        x = x.transpose(1, 0, 2)
    steps: list[Thunk] = []
    if lengths is not None:
        steps.append(partial(check_range, layer.name, "a length", lengths, x.shape[0]))
    for d, backward in enumerate(directions):
        ours = tuple(functions[d * each : (d + 1) * each])
        weights = partial(_weights_of, arguments, ours, d)
        initial = [_one(arguments.optional(5 + s), d, by_batch) for s in range(layer.states)]
        outputs = _of_direction(arguments.outputs, d, by_batch)
        b = None if bias is None else bias[d]
        run = partial(_run_direction, x, w[d], b, weights, layer.step, backward, lengths)
        steps.append(partial(run, initial, outputs))
    return steps


def _weights_of(arguments: KernelArguments, gates: tuple[Gate, ...], d: int) -> _Weights:
    """Return the weights of direction `d`, read again in every run."""
    attributes, r = arguments.attributes, arguments.operand(2)
    bias, peepholes = arguments.optional(3), arguments.optional(7)
    rows, hidden = arguments.operand(1).shape[1], r.shape[2]
    recurrent_bias = np.zeros(rows, arguments.operand(0).dtype) if bias is None else bias[d, rows:]
    peep = None
    if peepholes is not None:
        i, o, f = peepholes[d].reshape(3, hidden)
        peep = (i, o, f)
    return _Weights(
        r[d].T, recurrent_bias, peep, gates, hidden,
        bool(attributes.get("linear_before_reset", 0)), bool(attributes.get("input_forget", 0)),
    )  # fmt: skip


def _one(states: Array | None, direction: int, by_batch: bool) -> Array | None:
    """Return the state of one direction, [batch, hidden]."""
    if states is None:
        return None
    return states[:, direction] if by_batch else states[direction]


def _of_direction(outputs: Sequence[Array], d: int, by_batch: bool) -> list[Array]:
    """Return Y of one direction as [length, batch, hidden], its states as [batch, hidden]."""
    whole = [y[:, :, d].transpose(1, 0, 2) if by_batch else y[:, d] for y in outputs[:1]]
    return whole + [state[:, d] if by_batch else state[d] for state in outputs[1:]]


_ATTRIBUTES = declared(
    activation_alpha=Attribute("floats"), activation_beta=Attribute("floats"),
    activations=Attribute("strings"), clip=Attribute("float"), direction="forward",
    hidden_size=Attribute("int"), layout=0,
)  # fmt: skip


def _operator(layer: _Layer, most: int, **more: Attribute) -> OpDef:
    return OpDef(
        layer.name, (3, most), partial(_infer, layer), partial(_kernel, layer),
        outputs=(1, layer.states + 1), attributes={**_ATTRIBUTES, **more},
        gradient=recurrent_gradient, batching=batch_recurrent, checks=True,
    )  # fmt: skip


OPERATORS: tuple[OpDef, ...] = (
    _operator(_RNN, 6, activations=Attribute("strings", ("Tanh", "Tanh"))),
    _operator(_GRU, 6, linear_before_reset=Attribute("int", 0)),
    _operator(_LSTM, 8, input_forget=Attribute("int", 0)),
)

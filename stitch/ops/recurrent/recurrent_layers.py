"""Recurrent layers: RNN, GRU and LSTM, in one or both directions, with sequences of any length.

What all steps share (the product with the input weights) is computed for all of them at once.
Rows beyond a sequence's length are 0 in Y; Y_h and Y_c hold the state after its last element, and
the reverse direction begins at that element. A length that is less than 0 or more than the steps
raises `TaskError`. Source: ONNX's RNN, GRU, LSTM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from stitch.ops.attributes import Attributes, int_of, string_of
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import InferenceContext
from stitch.ops.recurrent.gate_functions import (
    Activation,
    Gate,
    activations_of,
    check_names,
    gates_of,
    names_of,
)
from stitch.ops.recurrent.recurrent_batching import recurrent
from stitch.ops.recurrent.recurrent_gradients import recurrent_gradient
from stitch.ops.steps import check_range
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule
from stitch.program import Array, DataType, ValueType

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
#: The state after a step, from the input's share of the gates, the state and the weights.
State = tuple[Array, ...]
Step = Callable[[Array, State, "_Weights"], State]


@dataclass(frozen=True, slots=True)
class _Layer:
    """What tells the three operators apart: gates, default activations, states, their step."""

    name: str
    gates: int
    activations: tuple[str, ...]
    states: int
    step: Step


@dataclass(frozen=True, slots=True)
class _Weights:
    """The arrays of one direction; `recurrent` is transposed: (hidden, gates * hidden)."""

    recurrent: Array
    recurrent_bias: Array
    peepholes: tuple[Array, Array, Array] | None
    functions: tuple[Gate, ...]
    hidden: int
    linear_before_reset: bool
    input_forget: bool

    def part(self, array: Array, gate: int) -> Array:
        """The columns of one gate."""
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
    """The activations of each direction of a layer."""
    layer = _LAYERS[op]
    names = names_of(attributes, layer.activations, directions)
    found, each = activations_of(attributes, names), len(layer.activations)
    return [found[d * each : (d + 1) * each] for d in range(directions)]


def _infer(layer: _Layer, context: InferenceContext) -> tuple[ValueType, ...]:
    x, w, r = (context.require_type(index, FLOATS) for index in range(3))
    context.require_same_type((0, 1, 2, 3, 5, 6, 7))
    for index in range(3):
        context.require_rank(index, 3, 3)
    direction = context.string_of("direction")
    if direction not in _DIRECTIONS:
        raise context.fail(
            f"{context.op} has no direction {direction!r}", expected=", ".join(_DIRECTIONS)
        )
    count, hidden = len(_DIRECTIONS[direction]), r.shape[2]
    if context.attributes.get("hidden_size", hidden) != hidden:
        raise context.fail(
            "hidden_size differs from the weights",
            expected=hidden,
            got=context.attributes["hidden_size"],
        )
    by_batch = bool(context.int_of("layout"))
    batch, length = x.shape[:2] if by_batch else x.shape[1::-1]
    rows = layer.gates * hidden
    context.require_shape(1, (count, rows, x.shape[2]))
    context.require_shape(2, (count, rows, hidden))
    state = (batch, count, hidden) if by_batch else (count, batch, hidden)
    shapes = {3: (count, 2 * rows), 4: (batch,), 5: state, 6: state, 7: (count, 3 * hidden)}
    for index, shape in shapes.items():
        if context.present(index) is not None:
            context.require_shape(index, shape)
    if context.present(4) is not None:
        context.require_type(4, frozenset({DataType.INT32}))
    names = names_of(context.attributes, layer.activations, count)
    check_names(context, names, len(layer.activations) * count)
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
    """All steps of one direction; `outputs` are Y (length, batch, hidden) and the last states."""
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
    x, w = arguments.given(0), arguments.given(1)
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
    """What direction `d` multiplies its state by, read anew in every run."""
    attributes, r = arguments.attributes, arguments.given(2)
    bias, peepholes = arguments.optional(3), arguments.optional(7)
    rows, hidden = arguments.given(1).shape[1], r.shape[2]
    recurrent_bias = np.zeros(rows, arguments.given(0).dtype) if bias is None else bias[d, rows:]
    peep = None
    if peepholes is not None:
        i, o, f = peepholes[d].reshape(3, hidden)
        peep = (i, o, f)
    return _Weights(
        r[d].T,
        recurrent_bias,
        peep,
        gates,
        hidden,
        bool(attributes.get("linear_before_reset", 0)),
        bool(attributes.get("input_forget", 0)),
    )


def _one(states: Array | None, direction: int, by_batch: bool) -> Array | None:
    """The state of one direction: (batch, hidden)."""
    if states is None:
        return None
    return states[:, direction] if by_batch else states[direction]


def _of_direction(outputs: Sequence[Array], d: int, by_batch: bool) -> list[Array]:
    """Y of one direction as (length, batch, hidden), its states as (batch, hidden)."""
    whole = [y[:, :, d].transpose(1, 0, 2) if by_batch else y[:, d] for y in outputs[:1]]
    return whole + [state[:, d] if by_batch else state[d] for state in outputs[1:]]


def _workspace(context: WorkspaceContext) -> int:
    """The inputs' share of the gates of all steps, what one step takes, weights as BLAS wants them,
    and the input step after step."""
    x, w, r = context.operand(0), context.operand(1), context.operand(2)
    by_batch = bool(context.int_of("layout"))
    batch, length = x.shape[:2] if by_batch else x.shape[1::-1]
    (_, rows, size), hidden = w.shape, r.shape[2]
    steps = batch * (rows * (length + 6) + 16 * hidden)
    turned = math.prod(x.shape) if by_batch else 0
    numbers = steps + turned + rows * (size + hidden + 4)
    return numbers * x.data_type.compute_dtype.itemsize


_ATTRIBUTES = declared(
    activation_alpha=Attribute("floats"), activation_beta=Attribute("floats"),
    activations=Attribute("strings"), clip=Attribute("float"), direction="forward",
    hidden_size=Attribute("int"), layout=0,
)  # fmt: skip


def _operator(layer: _Layer, most: int, **more: Attribute) -> OpDef:
    return OpDef(
        layer.name, (3, most), partial(_infer, layer), partial(_kernel, layer),
        outputs=(1, layer.states + 1), attributes={**_ATTRIBUTES, **more},
        gradient=recurrent_gradient,
        batching=recurrent, workspace=WorkspaceRule(_workspace, is_kept=False),
        checks=True,
    )  # fmt: skip


OPERATORS = (
    _operator(_RNN, 6, activations=Attribute("strings", ("Tanh", "Tanh"))),
    _operator(_GRU, 6, linear_before_reset=Attribute("int", 0)),
    _operator(_LSTM, 8, input_forget=Attribute("int", 0)),
)

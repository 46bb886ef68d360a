"""Gradients of RNN, GRU and LSTM: directions, layouts, and the products over all steps.

The results of a layer are all its hidden states; weights get one Gemm over all steps and samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stitch.ops.gradient import GradientContext
from stitch.ops.recurrent.gate_functions import names_of
from stitch.ops.recurrent.recurrent_cell_gradients import (
    Direction,
    Flow,
    gru_flow,
    lstm_flow,
    rnn_flow,
)

_CELLS = {"RNN": rnn_flow, "GRU": gru_flow, "LSTM": lstm_flow}
_DEFAULTS = {"RNN": ("tanh",), "GRU": ("sigmoid", "tanh"), "LSTM": ("sigmoid", "tanh", "tanh")}


def _check(context: GradientContext, directions: int) -> tuple[str, ...]:
    """The activations of all directions."""
    defaults = _DEFAULTS[context.op]
    names = names_of(context.attributes, defaults, directions)
    plain = context.op == "RNN" and set(names) <= {"tanh", "relu"}
    odd = [
        what
        for what, given in (
            ("activations " + ", ".join(names), names != defaults * directions and not plain),
            ("clip", context.attributes.get("clip") is not None),
            ("sequence_lens", context.has(4)),
            ("peepholes", context.has(7)),
            ("input_forget", bool(context.attributes.get("input_forget", 0))),
        )
        if given
    ]
    if odd:
        raise context.fail(" and ".join(odd), "use the layer without, or leave it untrained")
    return names


def recurrent_gradient(context: GradientContext) -> Sequence[Any]:
    """The gradients of x, W, R, B and first states, over all directions."""
    directions = context.type_of(1).shape[0]
    names = _check(context, directions)
    backward = {"reverse": (True,), "forward": (False,)}.get(
        context.string_of("direction"), (False, True)
    )
    layer = _Layer(context, names)
    by_direction = [layer.one(d, turned) for d, turned in enumerate(backward)]
    results: list[Any] = [None] * len(context.input_types)
    for index in range(len(results)):
        parts = [one[index] for one in by_direction]
        if context.wants(index) and parts[0] is not None:
            results[index] = layer.together(index, parts)
    return results


class _Layer:
    """What all directions share."""

    def __init__(self, context: GradientContext, names: tuple[str, ...]) -> None:
        self.context = context
        self.names = names
        self.by_batch = bool(context.int_of("layout"))
        shape = context.type_of(0).shape
        self.batch, self.steps = shape[:2] if self.by_batch else shape[1::-1]
        self.hidden = context.type_of(2).shape[2]

    def one(self, d: int, turned: bool) -> list[Any]:
        """Gradients of all operands from one direction; of x in the order of the operand."""
        c = self.context
        first = self._state(c.input(5) if c.has(5) else None, d)
        after = self._over_time(c.output(0), d, turned)
        before = first
        if self.steps > 1:
            until = (self.steps - 1) * self.batch
            before = c.apply("Concat", first, c.apply("Slice", after, [0], [until], [0]), axis=0)
        gradients = (*c.gradients, None, None)[:3]
        weights, recurrent = (self._weights(i, d) for i in (1, 2))
        input_bias, recurrent_bias = self._biases(d)
        lstm = c.op == "LSTM"
        direction = Direction(
            c, self.steps, self.batch, self.hidden,
            self.names[d * len(_DEFAULTS[c.op])], self._x(turned), before, after, weights,
            recurrent, input_bias, recurrent_bias,
            self._state(c.input(6) if c.has(6) else None, d) if lstm else None,
            None if gradients[0] is None else self._over_time(gradients[0], d, turned),
            None if gradients[1] is None else self._state(gradients[1], d),
            None if gradients[2] is None else self._state(gradients[2], d),
        )  # fmt: skip
        return self._results(direction, _CELLS[c.op](direction), turned)

    def _results(self, d: Direction, flow: Flow, turned: bool) -> list[Any]:
        c, gradients = self.context, [None] * 8
        if c.wants(0):
            x = c.shaped(c.apply("Gemm", flow.gates, d.weights), (self.steps, self.batch, -1))
            gradients[0] = self._turned(x) if turned else x
        if c.wants(1):
            gradients[1] = c.apply("Gemm", flow.gates, d.x, transA=1)
        if c.wants(2):
            gradients[2] = flow.recurrent_weights
            if gradients[2] is None:
                gradients[2] = c.apply("Gemm", flow.recurrent, d.before, transA=1)
        if c.wants(3):
            sums = [c.apply("ReduceSum", v, [0], keepdims=0) for v in (flow.gates, flow.recurrent)]
            gradients[3] = c.apply("Concat", *sums, axis=0)
        gradients[5], gradients[6] = flow.state, flow.cell
        return gradients

    def together(self, index: int, parts: list[Any]) -> Any:
        """One operand's gradient from all directions."""
        c = self.context
        if index == 0:
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return c.apply("Transpose", total, perm=[1, 0, 2]) if self.by_batch else total
        axis = 1 if index > 3 and self.by_batch else 0
        wide = [c.apply("Unsqueeze", part, [axis]) for part in parts]
        return wide[0] if len(wide) == 1 else c.apply("Concat", *wide, axis=axis)

    def _turned(self, value: Any) -> Any:
        return self.context.apply("Slice", value, [-1], [-self.steps - 1], [0], [-1])

    def _x(self, turned: bool) -> Any:
        c, x = self.context, self.context.input(0)
        x = c.apply("Transpose", x, perm=[1, 0, 2]) if self.by_batch else x
        return c.shaped(self._turned(x) if turned else x, (self.steps * self.batch, x.shape[2]))

    def _over_time(self, y: Any, d: int, turned: bool) -> Any:
        """One direction of [steps, directions, batch, hidden], in the order in which it ran."""
        c = self.context
        y = c.apply("Transpose", y, perm=[1, 2, 0, 3]) if self.by_batch else y
        y = y if y.shape[1] == 1 else c.apply("Slice", y, [d], [d + 1], [1])
        return c.shaped(self._turned(y) if turned else y, (self.steps * self.batch, self.hidden))

    def _state(self, state: Any, d: int) -> Any:
        c, shape = self.context, (self.batch, self.hidden)
        if state is None:
            return c.zeros(shape, c.type_of(0).data_type)
        axis = 1 if self.by_batch else 0
        if state.shape[axis] > 1:
            state = c.apply("Slice", state, [d], [d + 1], [axis])
        return c.shaped(state, shape)

    def _weights(self, index: int, d: int) -> Any:
        c, weights = self.context, self.context.input(index)
        if weights.shape[0] > 1:
            weights = c.apply("Slice", weights, [d], [d + 1], [0])
        return c.shaped(weights, weights.shape[1:])

    def _biases(self, d: int) -> tuple[Any, Any]:
        if not self.context.has(3):
            return None, None
        c, both = self.context, self._weights(3, d)
        first, second = c.apply_many("Split", 2, both, num_outputs=2)
        return first, second

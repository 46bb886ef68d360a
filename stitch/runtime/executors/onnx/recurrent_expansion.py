"""Recurrent layers as scans over primitive nodes, where ONNX Runtime's kernels differ.

Its RNN, GRU and LSTM (1.32) have no kernel for float64 or batches in front, bound only some gates
by `clip`, take other defaults for the parameters of activations, and end the process over no steps.
Default activations of float32 without a clip are given to its kernels as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper

from stitch.ops import int_of, onnx_code, recurrent_activations, string_of
from stitch.program import ABSENT, DataType, Operation
from stitch.runtime.executors.host import compute_type
from stitch.runtime.executors.onnx.form_writer import Attributes, FormWriter, value_name

#: By operator: gates in a row of weights, states.
FORMS: Mapping[str, tuple[int, int]] = {"RNN": (1, 1), "GRU": (3, 1), "LSTM": (4, 2)}
#: The activations that its kernels compute as ONNX says.
USUAL: Mapping[str, tuple[str, ...]] = {
    "RNN": ("tanh",), "GRU": ("sigmoid", "tanh"), "LSTM": ("sigmoid", "tanh", "tanh")
}  # fmt: skip


def recurrent(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Write a layer step by step; False where ONNX Runtime's own kernel is right."""
    kind, layer = writer.type_of(operation.inputs[0]), _Layer(writer, operation, attributes)
    names = [tuple(name for name, _, _ in functions) for functions in layer.functions]
    is_usual = all(found == USUAL[operation.op] for found in names)
    told = any(attributes.get(name) for name in ("clip", "input_forget", "layout"))
    changed = told or 0 in kind.shape
    if is_usual and not changed and kind.data_type is not DataType.FLOAT64:
        return False
    layer.write()
    return True


class _Layer:
    """One layer that is written: names of operands, types, the nodes of a step."""

    def __init__(self, writer: FormWriter, operation: Operation, attributes: Attributes) -> None:
        self.writer, self.operation, self.attributes = writer, operation, attributes
        self.gates, self.states = FORMS[operation.op]
        self.by_batch = bool(int_of(attributes, "layout"))
        kind = writer.type_of(operation.inputs[0])
        self.dtype = kind.data_type.compute_dtype.type
        self.code = onnx_code(compute_type(kind))
        self.hidden = writer.type_of(operation.inputs[2]).shape[2]
        self.steps, self.batch = kind.shape[1::-1] if self.by_batch else kind.shape[:2]
        direction = string_of(attributes, "direction")
        self.backward = {"forward": [0], "reverse": [1], "bidirectional": [0, 1]}[direction]
        self.functions = recurrent_activations(operation.op, attributes, len(self.backward))

    def optional(self, index: int) -> str:
        """The name of an operand, empty where there is none."""
        inputs = self.operation.inputs
        return self.writer.operand(inputs[index]) if index < len(inputs) else ""

    def one(self, name: str, d: int, axis: int = 0) -> str:
        """The part of an operand that belongs to a direction."""
        at = self.writer.scalar(d, np.int64)
        return self.writer.node("Gather", [name, at], axis=axis) if name else ""

    def write(self) -> None:
        """Add all directions, and join their results."""
        found = [self._direction(d, backward) for d, backward in enumerate(self.backward)]
        results = [*self.operation.outputs, ABSENT, ABSENT]
        # Y has directions behind its steps, or behind batch and steps; states before the batch, or
        # behind it.
        for index, axis in enumerate((2 if self.by_batch else 1, *[int(self.by_batch)] * 2)):
            value = results[index]
            if value == ABSENT:
                continue
            axes = self.writer.ints(axis)
            parts = [self.writer.node("Unsqueeze", [f[index], axes]) for f in found]
            self.writer.node("Concat", parts, value_name(value), axis=axis)

    def _direction(self, d: int, backward: int) -> list[str]:
        """The names of Y and of the last states of one direction."""
        node, rows = self.writer.node, self.gates * self.hidden
        states = []
        for index in range(self.states):
            given = self.one(self.optional(5 + index), d, int(self.by_batch))
            if not given:
                zeros = np.zeros((self.batch, self.hidden), self.dtype)
                given = self.writer.constant(zeros)
            states.append(given)
        if not self.steps:
            whole = (self.batch, 0) if self.by_batch else (0, self.batch)
            nothing = self.writer.constant(np.empty((*whole, self.hidden), self.dtype))
            return [nothing, *states]
        x = self.optional(0)
        if self.by_batch:
            x = node("Transpose", [x], perm=[1, 0, 2])
        w, r = (node("Transpose", [self.one(self.optional(i), d)], perm=[1, 0]) for i in (1, 2))
        share, bias = node("MatMul", [x, w]), self.one(self.optional(3), d)
        inner = ""
        if bias:
            halves = [self.writer.ints(*span) for span in ((0,), (rows,), (2 * rows,))]
            outer, inner = (node("Slice", [bias, a, b]) for a, b in itertools.pairwise(halves))
            share = node("Add", [share, outer])
        peepholes = self._parts(self.one(self.optional(7), d), 3, 0) if self.states == 2 else []
        return self._scan(share, states, (r, inner, peepholes), d, backward)

    def _parts(self, name: str, count: int, axis: int) -> list[str]:
        """An operand in so many parts of the hidden size."""
        if not name:
            return []
        ends = [self.writer.ints(i * self.hidden) for i in range(count + 1)]
        at = self.writer.ints(axis)
        return [self.writer.node("Slice", [name, a, b, at]) for a, b in itertools.pairwise(ends)]

    def _scan(
        self, share: str, states: list[str], weights: tuple[str, str, list[str]], d: int, back: int
    ) -> list[str]:
        """The steps of one direction, and Y in its order of axes."""
        writer, shape = self.writer, [self.batch, self.hidden]
        lengths = self.optional(4)
        scanned, rows = [share], [writer.fresh()]
        before, after = [writer.fresh() for _ in states], []
        slots = [self._slot(name, shape) for name in before]
        slots.append(self._slot(rows[0], [self.batch, self.gates * self.hidden]))
        if lengths:
            scanned.append(writer.constant(np.arange(self.steps, dtype=np.int32)))
            rows.append(writer.fresh())
            slots.append(helper.make_tensor_value_info(rows[1], onnx_code(DataType.INT32), []))
        outer, writer.nodes = writer.nodes, []
        after = self._step(rows[0], before, weights, self.functions[d])
        y = after[0]
        if lengths:
            column = writer.node("Unsqueeze", [lengths, writer.ints(1)])
            alive = writer.node("Less", [rows[1], column])
            nothing = writer.scalar(0, self.dtype)
            after = [
                writer.node("Where", [alive, new, old])
                for new, old in zip(after, before, strict=True)
            ]
            y = writer.node("Where", [alive, y, nothing])
        results = [writer.node("Identity", [name]) for name in (*after, y)]
        nodes, writer.nodes = writer.nodes, outer
        graph = helper.make_graph(
            nodes, "step", slots, [self._slot(name, shape) for name in results]
        )
        names = [writer.fresh() for _ in results]
        writer.nodes.append(helper.make_node(
            "Scan", [*states, *scanned], names, body=graph, num_scan_inputs=len(scanned),
            scan_input_directions=[back] * len(scanned), scan_output_directions=[back],
        ))  # fmt: skip
        whole = names[-1]
        if self.by_batch:
            whole = writer.node("Transpose", [whole], perm=[1, 0, 2])
        return [whole, *names[:-1]]

    def _slot(self, name: str, shape: Sequence[int]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, self.code, shape)

    def _step(
        self, share: str, states: list[str], weights: tuple[str, str, list[str]],
        functions: Sequence[tuple[str, float, float]],
    ) -> list[str]:  # fmt: skip
        """The states after one step."""
        node, (r, inner, peepholes) = self.writer.node, weights
        f = [self._function(*function) for function in functions]
        h = states[0]

        def add(*names: str) -> str:
            first, *others = [name for name in names if name]
            for other in others:
                first = node("Add", [first, other])
            return first

        if self.operation.op == "GRU":
            return [self._gru(share, h, r, inner, f)]
        gates = add(share, node("MatMul", [h, r]), inner)
        if self.operation.op == "RNN":
            return [f[0](gates)]
        c = states[1]
        i, o, forget, cell = self._parts(gates, 4, 1)
        i_peep, o_peep, f_peep = peepholes or ("", "", "")
        i = f[0](add(i, node("Mul", [i_peep, c]) if i_peep else ""))
        if int_of(self.attributes, "input_forget"):
            forget = node("Sub", [self.writer.scalar(1, self.dtype), i])
        else:
            forget = f[0](add(forget, node("Mul", [f_peep, c]) if f_peep else ""))
        c = add(node("Mul", [forget, c]), node("Mul", [i, f[1](cell)]))
        o = f[0](add(o, node("Mul", [o_peep, c]) if o_peep else ""))
        return [node("Mul", [o, f[2](c)]), c]

    def _gru(
        self, share: str, h: str, r: str, inner: str, f: Sequence[Callable[[str], str]]
    ) -> str:
        node = self.writer.node
        shares, parts = self._parts(share, 3, 1), self._parts(r, 3, 1)
        biases = self._parts(inner, 3, 0) or ["", "", ""]

        def gate(index: int, state: str) -> str:
            product = node("MatMul", [state, parts[index]])
            return node("Add", [product, biases[index]]) if biases[index] else product

        z, reset = (f[0](node("Add", [shares[i], gate(i, h)])) for i in (0, 1))
        if int_of(self.attributes, "linear_before_reset"):
            hidden = node("Mul", [reset, gate(2, h)])
        else:
            hidden = gate(2, node("Mul", [reset, h]))
        new = f[1](node("Add", [shares[2], hidden]))
        kept = node("Sub", [self.writer.scalar(1, self.dtype), z])
        return node("Add", [node("Mul", [kept, new]), node("Mul", [z, h])])

    def _function(self, name: str, alpha: float, beta: float) -> Callable[[str], str]:
        """An activation, of what is bounded by `clip`, as nodes."""
        writer, clip = self.writer, self.attributes.get("clip")

        def call(x: str) -> str:
            if isinstance(clip, float) and clip > 0:
                bounds = (writer.scalar(limit, self.dtype) for limit in (-clip, clip))
                x = writer.node("Clip", [x, *bounds])
            a, b = (writer.scalar(number, self.dtype) for number in (alpha, beta))
            if name == "affine":
                return writer.node("Add", [writer.node("Mul", [x, a]), b])
            if name == "scaledtanh":
                return writer.node("Mul", [writer.node("Tanh", [writer.node("Mul", [x, b])]), a])
            op, parameters = _OPERATORS[name]
            given = {"alpha": alpha, "beta": beta}
            return writer.node(op, [x], None, **{key: given[key] for key in parameters})

        return call


_OPERATORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "relu": ("Relu", ()), "tanh": ("Tanh", ()), "sigmoid": ("Sigmoid", ()),
    "softsign": ("Softsign", ()), "softplus": ("Softplus", ()),
    "leakyrelu": ("LeakyRelu", ("alpha",)), "thresholdedrelu": ("ThresholdedRelu", ("alpha",)),
    "hardsigmoid": ("HardSigmoid", ("alpha", "beta")), "elu": ("Elu", ("alpha",)),
}  # fmt: skip

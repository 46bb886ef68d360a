"""A program as an ONNX model to be looked at: its operations and types as they are.

Nothing is rewritten for ONNX Runtime: operators of the domain `stitch` and of plugins stay, with
bodies as inner graphs. Layouts are properties of the model, source locations texts of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
from onnx import helper, numpy_helper

from stitch.errors import CompileError
from stitch.ops import onnx_code
from stitch.program import ABSENT, Body, Constant, Operation, Program, Value
from stitch.ttb import OPSET

#: Limit of a protobuf message, with some room for what is not data.
MAX_NBYTES = (1 << 31) - (1 << 20)


def onnx_bytes(program: Program) -> bytes:
    """Return a program as a serialized ONNX model.

    Raises:
        CompileError: Its constants do not fit in one protobuf message.
    """
    nbytes = sum(constant.data.nbytes for constant in program.constants)
    if nbytes > MAX_NBYTES:
        raise CompileError(
            "the constants are too large for an ONNX model in one file",
            expected=f"at most {MAX_NBYTES} bytes", got=f"{nbytes} bytes",
            remedy="--format=model_explorer and dot write no constants",
        )  # fmt: skip
    scope = _Scope(program, "", program.values)
    slots = ([slot.value for slot in program.inputs], [slot.value for slot in program.outputs])
    graph = _graph(scope, program.name, program.operations, program.constants, *slots)
    for slot, output in zip(program.outputs, graph.output, strict=True):
        # A value may be in several slots: one of them has its name.
        if output.name != slot.name:
            graph.node.append(helper.make_node("Identity", [output.name], [slot.name]))
            output.name = slot.name
    inner = [operation for body in program.bodies for operation in body.operations]
    domains = {operation.domain for operation in (*program.operations, *inner)}
    opsets = [helper.make_opsetid(domain, 1 if domain else OPSET) for domain in {"", *domains}]
    model = helper.make_model(graph, opset_imports=sorted(opsets, key=lambda o: o.domain),
                              producer_name="stitch")  # fmt: skip
    helper.set_model_props(model, dict(_layouts(scope)))
    return bytes(model.SerializeToString(deterministic=True))


class _Scope:
    """The names of the values of a program or a body: those of slots, else unique ones."""

    def __init__(self, program: Program, prefix: str, values: Sequence[Value]) -> None:
        self.program, self.prefix, self.values = program, prefix, values
        slots: dict[int, str] = {}
        if not prefix:
            slots = {slot.value: slot.name for slot in reversed(program.outputs)}
            slots |= {slot.value: slot.name for slot in program.inputs}
        taken = set(slots.values())
        self.names: list[str] = []
        for index, value in enumerate(values):
            name = prefix + (value.name or f"value{index}")
            name = f"{name}.{index}" if name in taken else name
            name = slots.get(index, name)
            taken.add(name)
            self.names.append(name)

    def name(self, value: int) -> str:
        return "" if value == ABSENT else self.names[value]

    def info(self, value: int) -> onnx.ValueInfoProto:
        kind = self.values[value].type
        return helper.make_tensor_value_info(
            self.names[value], onnx_code(kind.data_type), kind.shape
        )


def _layouts(scope: _Scope) -> Iterator[tuple[str, str]]:
    for name, value in zip(scope.names, scope.values, strict=True):
        if value.layout is not None:
            yield f"layout of {name}", value.layout.text()


def _graph(
    scope: _Scope, name: str, operations: Sequence[Operation], constants: Sequence[Constant],
    inputs: Sequence[int], outputs: Sequence[int],
) -> onnx.GraphProto:  # fmt: skip
    nodes = [_node(scope, index, operation) for index, operation in enumerate(operations)]
    initializers = [
        numpy_helper.from_array(constant.data, scope.names[constant.value])
        for constant in constants
    ]
    given = [value for value in inputs if value != ABSENT]
    stored = {constant.value for constant in constants}
    between = [i for i in range(len(scope.values)) if i not in {*given, *outputs, *stored}]
    return helper.make_graph(
        nodes, name, [scope.info(v) for v in given], [scope.info(v) for v in outputs],
        initializer=initializers, value_info=[scope.info(v) for v in between],
    )  # fmt: skip


def _node(scope: _Scope, index: int, operation: Operation) -> onnx.NodeProto:
    attributes = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in sorted(operation.attributes.items())
    }
    label = f"{scope.prefix}{operation.op}.{index}"
    node = helper.make_node(
        operation.op, [scope.name(v) for v in operation.inputs],
        [scope.name(v) for v in operation.outputs], label, operation.location or None,
        operation.domain or None, **attributes,
    )  # fmt: skip
    if operation.body != ABSENT:
        body: Body = scope.program.bodies[operation.body]
        inner = _Scope(scope.program, f"{label}/", body.values)
        graph = _graph(inner, label, body.operations, body.constants, body.inputs, body.outputs)
        node.attribute.append(helper.make_attribute("body", graph))
    return node

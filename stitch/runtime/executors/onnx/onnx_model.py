"""Convert a program to an ONNX model that ONNX Runtime accepts.

Types narrower than float32 become float32; inside a program only a `Cast` rounds to them. Operators
that ONNX Runtime computes differently are rewritten or refused, a Gelu written in primitive
operators is fused, and convolutions by weights that are not constant use the blocked layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper

from stitch.errors import CompileError
from stitch.ops import attributes_of, onnx_code
from stitch.program import (
    ABSENT,
    CONDITION,
    Body,
    DataType,
    Operation,
    Program,
    ScanForm,
    ValueType,
    is_scan,
)
from stitch.runtime.executors.blocked_convolutions import blocked_part
from stitch.runtime.executors.element_runs import ElementRun, element_runs
from stitch.runtime.executors.host import compute_type
from stitch.runtime.executors.onnx.blocked_writer import BlockedWriter, block_channels
from stitch.runtime.executors.onnx.model_writer import ModelWriter, OnnxModel, value_name
from stitch.runtime.executors.onnx.rewrites import (
    REWRITES,
    has_empty_results,
    write_empty,
    write_over_empty,
)

# Gelu fusion


@dataclass(frozen=True, slots=True)
class Gelu:
    """A Gelu by tanh: its input value and the indices of its operations but the last."""

    input: int
    inside: frozenset[int]


def find_gelus(program: Program) -> dict[int, Gelu]:
    """Find `(0.5 x) (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, as in GPT-2.

    Returns the groups by the index of their last operation. One node takes a third of the time.
    """
    matcher = _GeluMatcher(program)
    groups = {}
    for index, operation in enumerate(program.operations):
        if operation.op == "Tanh" and not operation.domain:
            match = matcher.match(index, operation)
            if match is not None:
                groups[match[0]] = match[1]
    return groups


class _GeluMatcher:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.constants = program.constant_data()
        self.makers = {v: i for i, o in enumerate(program.operations) for v in o.outputs}
        self.readers = program.readers()
        self.returned = {slot.value for slot in program.outputs}

    def match(self, tanh: int, operation: Operation) -> tuple[int, Gelu] | None:
        """Return the last operation of the Gelu around a Tanh, and the Gelu."""
        inner = self.scaled(operation.inputs[0], math.sqrt(2 / math.pi))
        above = self.only_reader(operation.outputs[0], "Add")
        if inner is None or above is None:
            return None
        if not any(self.is_number(v, 1.0) for v in self.program.operations[above].inputs):
            return None
        last = self.only_reader(self.program.operations[above].outputs[0], "Mul")
        if last is None:
            return None
        raised = self.program.operations[above].outputs[0]
        halves = [v for v in self.program.operations[last].inputs if v != raised]
        half = self.scaled(halves[0], 0.5) if len(halves) == 1 else None
        if half is None or self.program.values[half[0]].type.data_type.compute_dtype != np.float32:
            return None
        x = half[0]
        cubic = self.cubic_operations(inner[0], x)
        if cubic is None:
            return None
        inside = frozenset((tanh, above, inner[1], half[1], *cubic))
        if any(self.is_read_outside(index, inside | {last}) for index in inside):
            return None
        return last, Gelu(x, inside)

    def cubic_operations(self, value: int, x: int) -> tuple[int, ...] | None:
        """Return the operations that compute `x + 0.044715 x^3`; None if the value is another."""
        for a, b, maker in self.operands(value, "Add"):
            term = self.scaled(b, 0.044715) if a == x else None
            if term is None:
                continue
            for square, again, cube in self.operands(term[0], "Mul"):
                for one, two, squared in self.operands(square, "Mul"):
                    if one == two == again == x:
                        return maker, term[1], cube, squared
            for base, exponent, cube in self.operands(term[0], "Pow"):
                if base == x and self.is_number(exponent, 3.0):
                    return maker, term[1], cube
        return None

    def operands(self, value: int, op: str) -> Iterator[tuple[int, int, int]]:
        """Yield the operands, in both orders, and the index of the `op` that computes a value."""
        index = self.makers.get(value)
        if index is None:
            return
        operation = self.program.operations[index]
        if operation.op == op and not operation.domain and len(operation.inputs) == 2:
            first, second = operation.inputs
            yield first, second, index
            if first != second and op != "Pow":
                yield second, first, index

    def scaled(self, value: int, number: float) -> tuple[int, int] | None:
        """Return the factor beside a number in the product that computes a value, and its index."""
        for a, b, index in self.operands(value, "Mul"):
            if self.is_number(b, number):
                return a, index
        return None

    def is_number(self, value: int, number: float) -> bool:
        """Whether a value is a constant scalar equal to a number in float32 precision."""
        data = self.constants.get(value)
        return data is not None and data.size == 1 and math.isclose(
            float(data.reshape(())), number, rel_tol=1e-6
        )  # fmt: skip

    def only_reader(self, value: int, op: str) -> int | None:
        """Return the index of the only operation that reads a value, if it is `op`."""
        readers = self.readers.get(value, set())
        reader = next(iter(readers)) if len(readers) == 1 else None
        if reader is None or self.program.operations[reader].op != op:
            return None
        return None if self.program.operations[reader].domain else reader

    def is_read_outside(self, index: int, group: frozenset[int]) -> bool:
        """Whether a result of an operation is read outside a group."""
        results = self.program.operations[index].outputs
        return any(v in self.returned or self.readers.get(v, set()) - group for v in results)


# Scans

Write = Callable[[ModelWriter, Operation], None]


def write_scan(writer: ModelWriter, operation: Operation, write: Write) -> None:
    """Write a scan; raises `CompileError` if an operation of its body cannot be written."""
    form = ScanForm.of(operation)
    results = [writer.fresh() if v == ABSENT else value_name(v) for v in operation.outputs]
    if form.count and form.has_condition:
        _write_while(writer, operation, form, results, write)
    elif form.count:
        _write_rounds(writer, operation, form, results, write)
    else:
        _write_no_round(writer, operation, form, results)


def _write_no_round(
    writer: ModelWriter, operation: Operation, form: ScanForm, results: list[str]
) -> None:
    """Write the initial states and empty collections."""
    for state, result in zip(operation.inputs[: form.states], results, strict=False):
        writer.node("Identity", [writer.operand(state)], result)
    elements = writer.program.bodies[operation.body].output_types[form.states :]
    for element, result in zip(elements, results[form.states :], strict=True):
        kind = form.whole(element)
        empty = writer.constant(np.empty(kind.shape, kind.data_type.compute_dtype))
        writer.cast(empty, compute_type(kind), result)


def _write_rounds(
    writer: ModelWriter, operation: Operation, form: ScanForm, results: list[str], write: Write
) -> None:
    body, many = writer.program.bodies[operation.body], form.states + form.sequences
    shared = dict(zip(body.inputs[many:], operation.inputs[many:], strict=True))
    at = writer.number_body_values(operation.body, shared)
    operands = [writer.operand(v) for v in operation.inputs[:many]]
    backward = list(map(int, form.taken_backward))
    slots = [_slot(value_name(at[v]), body.values[v].type) for v in body.inputs[:many]]
    if not form.sequences:
        # ONNX's Scan needs at least one sequence: add one of empty elements.
        operands.append(writer.constant(np.empty((form.count, 0), np.uint8)))
        slots.append(_slot(writer.fresh(), ValueType((0,), DataType.UINT8)))
        backward = [0]
    nodes, outputs = _body_graph(writer, body, at, write)
    node = helper.make_node(
        "Scan", operands, results,
        body=helper.make_graph(nodes, "round", slots, outputs),
        num_scan_inputs=len(backward),
    )  # fmt: skip
    directions = {"input": backward, "output": list(map(int, form.given_backward))}
    for side, reversed_axes in directions.items():
        if any(reversed_axes):
            node.attribute.append(helper.make_attribute(f"scan_{side}_directions", reversed_axes))
    writer.nodes.append(node)


def _write_while(
    writer: ModelWriter, operation: Operation, form: ScanForm, results: list[str], write: Write
) -> None:
    """Write a Loop that also carries its condition as a state, whose last value may be read."""
    body = writer.program.bodies[operation.body]
    shared = dict(zip(body.inputs[form.states :], operation.inputs[form.states :], strict=True))
    at = writer.number_body_values(operation.body, shared)
    states = [writer.operand(v) for v in operation.inputs[: form.states]]
    most = writer.constant(np.asarray(form.count, np.int64))
    slots = [
        _slot(writer.fresh(), ValueType((), DataType.INT64)), _slot(writer.fresh(), CONDITION),
        *(_slot(value_name(at[v]), body.values[v].type) for v in body.inputs[: form.states]),
    ]  # fmt: skip
    nodes, outputs = _body_graph(writer, body, at, write)
    condition = writer.fresh()
    nodes.append(helper.make_node("Identity", [outputs[0].name], [condition]))
    graph = helper.make_graph(nodes, "round", slots, [_slot(condition, CONDITION), *outputs])
    operands = [most, states[0], *states]
    writer.nodes.append(helper.make_node("Loop", operands, results, body=graph))


def _body_graph(
    writer: ModelWriter, body: Body, at: Mapping[int, int], write: Write
) -> tuple[list[onnx.NodeProto], list[onnx.ValueInfoProto]]:
    """Return the nodes and outputs of a scan's body."""
    outer, writer.nodes = writer.nodes, []
    try:
        for inner in body.operations:
            moved = replace(
                inner,
                inputs=tuple([at[v] for v in inner.inputs]),
                outputs=tuple([at[v] for v in inner.outputs]),
            )
            _write_inner(writer, moved, write)
        names = [_rounded_name(writer, at[v]) for v in body.outputs]
    finally:
        nodes, writer.nodes = writer.nodes, outer
    return nodes, [_slot(name, kind) for name, kind in zip(names, body.output_types, strict=True)]


def _write_inner(writer: ModelWriter, operation: Operation, write: Write) -> None:
    try:
        write(writer, operation)
    except CompileError as error:
        if is_scan(operation):
            raise  # It names the operation of its own body.
        name = f"{operation.domain}.{operation.op}".lstrip(".")
        where = f" at {operation.location}" if operation.location else ""
        raise CompileError(f"{name}{where} in its body: {error.what}") from error


def _rounded_name(writer: ModelWriter, value: int) -> str:
    """Return the name of a body's result, rounded to its type."""
    name, kind = writer.named.get(value) or value_name(value), writer.type_of(value).data_type
    if kind.dtype == kind.compute_dtype:
        return name
    return writer.cast(writer.cast(name, kind), DataType.FLOAT32)


def _slot(name: str, kind: ValueType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx_code(compute_type(kind)), kind.shape)


def write_model(program: Program) -> OnnxModel:
    """Convert a whole program; raises `CompileError` as `write_operation_model` does."""
    writer = ModelWriter(program)
    gelus = find_gelus(program)
    inside = {index for gelu in gelus.values() for index in gelu.inside}
    blocked = blocked_part(program, inside | gelus.keys())
    blocks = BlockedWriter(writer, blocked) if blocked.convolutions and block_channels() else None
    taken = blocked.operations if blocks is not None else frozenset[int]()
    runs = element_runs(program, inside | gelus.keys() | taken)
    inside |= {index for run in runs.values() for index in run.operations}
    for index, operation in enumerate(program.operations):
        if index in gelus:
            operand = writer.operand(gelus[index].input)
            writer.give(operation, "Gelu", [operand], approximate="tanh")
        elif blocks is not None and index in taken:
            blocks.write(index, operation)
        elif index in runs:
            _write_run(writer, program, runs[index])
        elif index not in inside:
            _write(writer, operation)
    if blocks is not None:
        blocks.finish()
    inputs = tuple(s.value for s in program.inputs if s.value in writer.used)
    return writer.finish(inputs, tuple(s.value for s in program.outputs))


def write_operation_model(program: Program, operation: Operation) -> OnnxModel:
    """Convert one operation alone, to find out whether ONNX Runtime can run it.

    Raises:
        CompileError: ONNX lacks the operator, or ONNX Runtime would compute it differently.
    """
    writer = ModelWriter(program)
    _write(writer, operation)
    read = {v for v in operation.inputs if v != ABSENT}
    inputs = sorted(v for v in writer.used & read if v not in writer.constants)
    return writer.finish(tuple(inputs), tuple(v for v in operation.outputs if v != ABSENT))


#: Narrow types that are written, and the operators in which they are.
_PACKED = frozenset({DataType.INT4, DataType.UINT4})
_QUANTIZING = frozenset({"QuantizeLinear", "DequantizeLinear"})


def _write(writer: ModelWriter, operation: Operation) -> None:
    if operation.is_foreign:
        if has_empty_results(writer, operation):
            write_empty(writer, operation)
        else:
            writer.plain_foreign(operation)
        return
    for value in (*operation.inputs, *operation.outputs):
        if value != ABSENT and writer.type_of(value).data_type.is_narrow:
            kind = writer.type_of(value).data_type
            # Which narrow types kernels take differs from version to version.
            if kind not in _PACKED or operation.op not in _QUANTIZING:
                raise CompileError(f"{kind.value} tensors are not supported in {operation.op}")
    attributes = attributes_of(operation)
    if is_scan(operation):
        write_scan(writer, operation, _write)
        return
    if write_over_empty(writer, operation, attributes):
        return
    rewrite = REWRITES.get((operation.domain, operation.op))
    if rewrite is None and operation.domain:
        raise CompileError("ONNX has no equivalent operator")
    if rewrite is None or not rewrite(writer, operation, attributes):
        writer.plain(operation, attributes)


def _write_run(writer: ModelWriter, program: Program, run: ElementRun) -> None:
    """Write a run of elementwise operations in chunks."""
    operations = [program.operations[i] for i in run.operations]
    outputs = [v for o in operations for v in o.outputs]
    inside = set(run.operations)
    outside = {s.value for s in program.outputs}
    outside |= {v for i, o in enumerate(program.operations) if i not in inside for v in o.inputs}
    read = dict.fromkeys(v for o in operations for v in o.inputs if v not in outputs)
    long = [v for v in read if math.prod(program.values[v].type.shape) > 1]
    results = [v for v in outputs if v in outside]
    names = {v: _number(writer, program, v) for v in read if v not in long}

    def write(rows: Sequence[str]) -> Sequence[str]:
        names.update(zip(long, rows, strict=True))
        for operation in operations:
            operands = [names[v] for v in operation.inputs]
            attributes = attributes_of(operation)
            names[operation.outputs[0]] = writer.node(operation.op, operands, None, **attributes)
        return [names[v] for v in results]

    writer.over_chunks(long, results, run.count, write)


def _number(writer: ModelWriter, program: Program, value: int) -> str:
    """Return the name of a single number as a scalar, which adds no dimensions to a chunk."""
    if not program.values[value].type.shape:
        return writer.operand(value)
    return writer.node("Reshape", [writer.operand(value), writer.constant(np.zeros(0, np.int64))])

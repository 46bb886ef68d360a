"""Convert a program to an ONNX model that ONNX Runtime accepts.

Types narrower than float32 become float32; inside a program only a `Cast` rounds to them. Operators
that ONNX Runtime computes differently are rewritten or refused, a Gelu written in primitive
operators is fused, and convolutions by weights that are not constant use the blocked layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper

from stitch import plugins
from stitch.errors import CompileError
from stitch.ops import attributes_of, definition_of, onnx_code
from stitch.program import (
    ABSENT,
    CONDITION,
    Array,
    Body,
    DataType,
    Operation,
    Program,
    ScanForm,
    ValueType,
    is_scan,
)
from stitch.runtime.executors.host import compute_type
from stitch.runtime.executors.onnx.blocked_writer import BlockedWriter, block_channels
from stitch.runtime.executors.onnx.model_writer import ModelWriter, OnnxModel, value_name
from stitch.runtime.executors.onnx.rewrites import (
    REWRITES,
    has_empty_results,
    write_empty,
    write_over_empty,
)
from stitch.runtime.executors.prices import ElementRun, blocked_part, element_runs

# Gelu fusion

#: A pattern of values: the operand (X), a number, or an operator with the patterns of its operands.
Pattern = str | float | tuple["Pattern", ...]
X = "x"


def _gelu_by_tanh(cube: Pattern) -> Pattern:
    inner = ("Mul", ("Add", X, ("Mul", cube, 0.044715)), math.sqrt(2 / math.pi))
    return ("Mul", ("Mul", X, 0.5), ("Add", ("Tanh", inner), 1.0))


#: `(0.5 x) (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, as in GPT-2.
GELUS = (_gelu_by_tanh(("Mul", ("Mul", X, X), X)), _gelu_by_tanh(("Pow", X, 3.0)))


@dataclass(frozen=True, slots=True)
class Match:
    """The value that X stands for (ABSENT before it is met), and the operations of a pattern."""

    x: int
    operations: frozenset[int] = frozenset()


def find_gelus(program: Program) -> dict[int, Match]:
    """Find Gelus by tanh by their last operation: one node takes a third of the time."""
    constants, readers = program.constant_data(), program.readers()
    makers = {v: i for i, o in enumerate(program.operations) for v in o.outputs}
    returned = {slot.value for slot in program.outputs}

    def match(value: int, pattern: Pattern, x: int) -> Match | None:
        if isinstance(pattern, str):
            return Match(value) if x in (ABSENT, value) else None
        if isinstance(pattern, float):
            data = constants.get(value)
            is_equal = data is not None and data.size == 1 and math.isclose(
                float(data.reshape(())), pattern, rel_tol=1e-6
            )  # fmt: skip
            return Match(x) if is_equal else None
        index = makers.get(value)
        if index is None:
            return None
        operation, (op, *parts) = program.operations[index], pattern
        if (operation.domain, operation.op) != ("", op):
            return None
        for operands in dict.fromkeys((operation.inputs, operation.inputs[::-1])):
            found = Match(x, frozenset((index,)))
            for operand, part in zip(operands, parts, strict=True):
                inner = match(operand, part, found.x)
                if inner is None:
                    break
                found = Match(inner.x, found.operations | inner.operations)
            else:
                return found
            if op == "Pow":
                break
        return None

    def is_alone(index: int, group: frozenset[int]) -> bool:
        """Whether only a group reads the results of an operation."""
        results = program.operations[index].outputs
        return all(v not in returned and readers.get(v, set()) <= group for v in results)

    gelus = {}
    for last, operation in enumerate(program.operations):
        if operation.op != "Mul" or operation.domain:
            continue
        kind = program.values[operation.outputs[0]].type
        for pattern in GELUS if kind.data_type.compute_dtype == np.float32 else ():
            found = match(operation.outputs[0], pattern, ABSENT)
            if found is not None and all(
                is_alone(i, found.operations) for i in found.operations - {last}
            ):
                gelus[last] = found
    return gelus


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
    writer = ModelWriter(program, program.constant_data())
    gelus = find_gelus(program)
    inside = {index for gelu in gelus.values() for index in gelu.operations} - gelus.keys()
    blocked = blocked_part(program, inside | gelus.keys())
    blocks = BlockedWriter(writer, blocked) if blocked.convolutions and block_channels() else None
    taken = blocked.operations if blocks is not None else frozenset[int]()
    runs = element_runs(program, inside | gelus.keys() | taken)
    inside |= {index for run in runs.values() for index in run.operations}
    for index, operation in enumerate(program.operations):
        if index in gelus:
            operand = writer.operand(gelus[index].x)
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


def write_operation_model(
    program: Program, operation: Operation, constants: Mapping[int, Array]
) -> OnnxModel:
    """Convert one operation alone, to find out whether ONNX Runtime can run it.

    Args:
        constants: The program's constants, by value.

    Raises:
        CompileError: ONNX lacks the operator, or ONNX Runtime would compute it differently.
    """
    writer, inputs, outputs = _written_alone(program, operation, constants)
    return writer.finish(inputs, outputs)


def check_writable(program: Program, operation: Operation, constants: Mapping[int, Array]) -> None:
    """Raise what `write_operation_model` raises, without building the model."""
    writer, inputs, outputs = _written_alone(program, operation, constants)
    writer.versions(inputs, outputs)


def _written_alone(
    program: Program, operation: Operation, constants: Mapping[int, Array]
) -> tuple[ModelWriter, tuple[int, ...], tuple[int, ...]]:
    read = {v for v in operation.inputs if v != ABSENT}
    writer = ModelWriter(program, {v: constants[v] for v in read if v in constants})
    _write(writer, operation)
    inputs = sorted(v for v in writer.used & read if v not in writer.constants)
    return writer, tuple(inputs), tuple(v for v in operation.outputs if v != ABSENT)


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
        form = definition_of(operation).onnx
        if form is None:
            raise CompileError("ONNX has no equivalent operator")
        plugins.called("operators", operation.domain, form, writer, operation, attributes)
        return
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

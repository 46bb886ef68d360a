"""Scans as nodes of ONNX's own `Scan`, whose body is a graph inside the model; with a condition, as
nodes of its `Loop`.

Comes in: a scan, the writer of the model, how an operation is written. Goes out: its node. What all
rounds share is read by name from the model around, so constants are arranged for products once.
What a round hands on (states, what is collected) is rounded as outputs are; what is inside is not.
Must not know sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper

from stitch.errors import CompileError
from stitch.ops import onnx_code
from stitch.program import (
    ABSENT,
    CONDITION,
    Body,
    DataType,
    Operation,
    ScanForm,
    ValueType,
    is_scan,
)
from stitch.runtime.executors.host import compute_type
from stitch.runtime.executors.onnx.form_writer import FormWriter, value_name

Write = Callable[[FormWriter, Operation], None]


def write_scan(writer: FormWriter, operation: Operation, write: Write) -> None:
    """Add a scan; raises `CompileError` for a body in which something cannot be written."""
    form = ScanForm.of(operation)
    results = [writer.fresh() if v == ABSENT else value_name(v) for v in operation.outputs]
    if form.count and form.has_condition:
        _write_while(writer, operation, form, results, write)
    elif form.count:
        _write_rounds(writer, operation, form, results, write)
    else:
        _write_no_round(writer, operation, form, results)


def _write_no_round(
    writer: FormWriter, operation: Operation, form: ScanForm, results: list[str]
) -> None:
    """The states as they are, and collections of nothing."""
    for given, result in zip(operation.inputs[: form.states], results, strict=False):
        writer.node("Identity", [writer.operand(given)], result)
    elements = writer.program.bodies[operation.body].output_types[form.states :]
    for element, result in zip(elements, results[form.states :], strict=True):
        kind = form.whole(element)
        held = writer.constant(np.empty(kind.shape, kind.data_type.compute_dtype))
        writer.cast(held, compute_type(kind), result)


def _write_rounds(
    writer: FormWriter, operation: Operation, form: ScanForm, results: list[str], write: Write
) -> None:
    body, many = writer.program.bodies[operation.body], form.states + form.sequences
    shared = dict(zip(body.inputs[many:], operation.inputs[many:], strict=True))
    at = writer.entered(operation.body, shared)
    operands = [writer.operand(v) for v in operation.inputs[:many]]
    backward = list(map(int, form.taken_backward))
    slots = [_slot(value_name(at[v]), body.values[v].type) for v in body.inputs[:many]]
    if not form.sequences:
        # Its scans go over at least one sequence: here one of elements without any number.
        operands.append(writer.constant(np.empty((form.count, 0), np.uint8)))
        slots.append(_slot(writer.fresh(), ValueType((0,), DataType.UINT8)))
        backward = [0]
    nodes, given = _written_body(writer, body, at, write)
    node = helper.make_node(
        "Scan", operands, results,
        body=helper.make_graph(nodes, "round", slots, given),
        num_scan_inputs=len(backward),
    )  # fmt: skip
    directions = {"input": backward, "output": list(map(int, form.given_backward))}
    for side, taken in directions.items():
        if any(taken):
            node.attribute.append(helper.make_attribute(f"scan_{side}_directions", taken))
    writer.nodes.append(node)


def _write_while(
    writer: FormWriter, operation: Operation, form: ScanForm, results: list[str], write: Write
) -> None:
    """A loop, whose condition is a state as well: its last value may be wanted."""
    body = writer.program.bodies[operation.body]
    shared = dict(zip(body.inputs[form.states :], operation.inputs[form.states :], strict=True))
    at = writer.entered(operation.body, shared)
    states = [writer.operand(v) for v in operation.inputs[: form.states]]
    most = writer.constant(np.asarray(form.count, np.int64))
    slots = [
        _slot(writer.fresh(), ValueType((), DataType.INT64)), _slot(writer.fresh(), CONDITION),
        *(_slot(value_name(at[v]), body.values[v].type) for v in body.inputs[: form.states]),
    ]  # fmt: skip
    nodes, given = _written_body(writer, body, at, write)
    goes_on = writer.fresh()
    nodes.append(helper.make_node("Identity", [given[0].name], [goes_on]))
    inside = helper.make_graph(nodes, "round", slots, [_slot(goes_on, CONDITION), *given])
    operands = [most, states[0], *states]
    writer.nodes.append(helper.make_node("Loop", operands, results, body=inside))


def _written_body(
    writer: FormWriter, body: Body, at: Mapping[int, int], write: Write
) -> tuple[list[onnx.NodeProto], list[onnx.ValueInfoProto]]:
    """The nodes of a round, and what it makes."""
    outer, writer.nodes = writer.nodes, []
    try:
        for inner in body.operations:
            moved = replace(
                inner,
                inputs=tuple([at[v] for v in inner.inputs]),
                outputs=tuple([at[v] for v in inner.outputs]),
            )
            _write_inner(writer, moved, write)
        made = [_made(writer, at[v]) for v in body.outputs]
    finally:
        nodes, writer.nodes = writer.nodes, outer
    return nodes, [_slot(name, kind) for name, kind in zip(made, body.output_types, strict=True)]


def _write_inner(writer: FormWriter, operation: Operation, write: Write) -> None:
    try:
        write(writer, operation)
    except CompileError as error:
        if is_scan(operation):
            raise  # It says what of its own body cannot be written.
        name = f"{operation.domain}.{operation.op}".lstrip(".")
        where = f" at {operation.location}" if operation.location else ""
        raise CompileError(f"{name}{where} in its body: {error.what}") from error


def _made(writer: FormWriter, value: int) -> str:
    """The name of what a round makes, in its own type's precision."""
    name, kind = writer.named.get(value) or value_name(value), writer.type_of(value).data_type
    if kind.dtype == kind.compute_dtype:
        return name
    return writer.cast(writer.cast(name, kind), DataType.FLOAT32)


def _slot(name: str, kind: ValueType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx_code(compute_type(kind)), kind.shape)

"""Runs of long elementwise operations, written for ONNX Runtime as one `Scan` over blocks.

Comes in: a run of a program (`element_runs`), the writer of its model. Goes out: its nodes. ONNX
Runtime computes every node over the whole of its operands, so each of a dozen passes goes by way of
memory; the rows of a `Scan` are views, and stay in the caches. Must not know sessions.
"""

from __future__ import annotations

import math

import numpy as np

from stitch.ops import lookup, resolve_attributes
from stitch.program import Program, ValueType
from stitch.runtime.executors.element_runs import ElementRun
from stitch.runtime.executors.onnx_writer import FormWriter, value_name


def write_run(writer: FormWriter, program: Program, run: ElementRun) -> None:
    """The nodes of a run: its long operands in blocks, a `Scan` over them, and its results.

    A result that goes out of the model goes out in blocks, the same bytes: a node that gave it its
    shape back would copy it.
    """
    operations = [program.operations[i] for i in run.operations]
    kind = program.values[operations[0].outputs[0]].type
    size = math.prod(kind.shape) // run.count
    made = [v for o in operations for v in o.outputs]
    given = {s.value for s in program.outputs}
    inside = set(run.operations)
    outside = {
        v for i, o in enumerate(program.operations) if i not in inside for v in o.inputs
    } | given
    long = [
        v
        for v in dict.fromkeys(v for o in operations for v in o.inputs)
        if v not in made and math.prod(program.values[v].type.shape) > 1
    ]
    cut = writer.constant(np.array([run.count, -1], np.int64))
    blocks = [writer.node("Reshape", [writer.operand(v), cut]) for v in long]
    names = {v: writer.fresh() for v in (*long, *made)}
    results = [v for v in made if v in outside]
    outer, writer.nodes = writer.nodes, []
    for operation in operations:
        operands = [
            names[v] if v in names else _number(writer, program, v) for v in operation.inputs
        ]
        attributes = resolve_attributes(
            lookup(operation.op), operation.attributes, operation.location
        )
        writer.node(operation.op, operands, names[operation.outputs[0]], **attributes)
    body, writer.nodes = writer.nodes, outer
    scanned = {v: value_name(v) if v in given else writer.fresh() for v in results}
    writer.scan(
        body,
        tuple(zip(blocks, (names[v] for v in long), strict=True)),
        tuple((names[v], name) for v, name in scanned.items()),
        ValueType((size,), kind.data_type),
    )
    shape = writer.constant(np.array(kind.shape, np.int64))
    for value, name in scanned.items():
        if value in given:
            writer.blocked[value] = (run.count, size)
        if value not in given or any(value in o.inputs for o in program.operations):
            whole = value_name(value) if value not in given else writer.fresh()
            writer.node("Reshape", [name, shape], whole)
            writer.named[value] = whole


def _number(writer: FormWriter, program: Program, value: int) -> str:
    """One number, without dimensions, so that it does not add any to a block."""
    if not program.values[value].type.shape:
        return writer.operand(value)
    outer, writer.nodes = writer.nodes, []
    name = writer.node("Reshape", [writer.operand(value), writer.constant(np.zeros(0, np.int64))])
    writer.nodes = [*outer, *writer.nodes]
    return name

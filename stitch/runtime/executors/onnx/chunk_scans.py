"""Runs of long elementwise operations, written for ONNX Runtime as one `Scan` over chunks.

Comes in: a run of a program (`element_runs`), the writer of its model. Goes out: its nodes. ONNX
Runtime computes every node over the whole of its operands, so each of a dozen passes goes by way of
memory; the rows of a `Scan` are views, and stay in the caches. Must not know sessions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from stitch.ops import lookup, resolve_attributes
from stitch.program import Program, ValueType
from stitch.runtime.executors.element_runs import ElementRun
from stitch.runtime.executors.onnx.form_writer import FormWriter, value_name


def write_run(writer: FormWriter, program: Program, run: ElementRun) -> None:
    """The nodes of a run of elementwise operations."""
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
            attributes = resolve_attributes(
                lookup(operation.op), operation.attributes, operation.location
            )
            names[operation.outputs[0]] = writer.node(operation.op, operands, None, **attributes)
        return [names[v] for v in results]

    write_chunks(writer, long, results, run.count, write)


def write_chunks(
    writer: FormWriter,
    operands: Sequence[int],
    results: Sequence[int],
    count: int,
    write: Callable[[Sequence[str]], Sequence[str]],
) -> None:
    """Long operands in chunks, a `Scan` over them, and its results, all of one type.

    `write` is given the names of one chunk of each operand, writes nodes, and gives the names of
    the results. A result that goes out of the model goes out in chunks, the same bytes: a node that
    gave it its shape back would copy it.
    """
    program = writer.program
    kind, given = writer.type_of(results[0]), {s.value for s in program.outputs}
    cut = writer.constant(np.array([count, -1], np.int64))
    chunks = [writer.node("Reshape", [writer.operand(v), cut]) for v in operands]
    rows, size = [writer.fresh() for _ in operands], math.prod(kind.shape) // count
    with writer.body() as body:
        inner = write(rows)
    scanned = {v: value_name(v) if v in given else writer.fresh() for v in results}
    writer.scan(
        body,
        tuple(zip(chunks, rows, strict=True)),
        tuple(zip(inner, scanned.values(), strict=True)),
        ValueType((size,), kind.data_type),
    )
    shape = writer.constant(np.array(kind.shape, np.int64))
    for value, name in scanned.items():
        if value in given:
            writer.chunked[value] = (count, size)
        if value not in given or any(value in o.inputs for o in program.operations):
            whole = value_name(value) if value not in given else writer.fresh()
            writer.node("Reshape", [name, shape], whole)
            writer.named[value] = whole


def _number(writer: FormWriter, program: Program, value: int) -> str:
    """One number, without dimensions, so that it does not add any to a chunk."""
    if not program.values[value].type.shape:
        return writer.operand(value)
    return writer.node("Reshape", [writer.operand(value), writer.constant(np.zeros(0, np.int64))])

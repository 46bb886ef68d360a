"""The ONNX form of a program: its operations as a model that ONNX Runtime takes.

Comes in: a program. Goes out: its form (opset 26, IR version 13). Types narrower than float32
become float32: inside a program only a `Cast` to one of them rounds. Operators that ONNX Runtime
computes otherwise than Stitch does are rewritten or refused; groups that are one operator of its
are written as that one, and convolutions by weights that are no constants in its blocked layout.
Must not know sessions, but for the channels of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stitch.errors import CompileError
from stitch.ops import attributes_of
from stitch.program import ABSENT, DataType, Operation, Program, is_scan
from stitch.runtime.executors.blocked import blocked_part
from stitch.runtime.executors.element_runs import ElementRun, element_runs
from stitch.runtime.executors.onnx.blocked_writer import BlockedWriter, block_channels
from stitch.runtime.executors.onnx.form_writer import FormWriter, OnnxForm, value_name
from stitch.runtime.executors.onnx.fused_groups import fusions
from stitch.runtime.executors.onnx.rewrites import (
    REWRITES,
    has_empty_results,
    write_empty,
    written_over_nothing,
)
from stitch.runtime.executors.onnx.scan_nodes import write_scan


def onnx_form(program: Program) -> OnnxForm:
    """The ONNX form of a whole program; raises `CompileError` as `operation_form` does."""
    writer = FormWriter(program)
    fused = fusions(program)
    inside = {index for group in fused.values() for index in group.inside}
    blocked = blocked_part(program, inside | fused.keys())
    blocks = BlockedWriter(writer, blocked) if blocked.convolutions and block_channels() else None
    taken = blocked.taken if blocks is not None else frozenset[int]()
    runs = element_runs(program, inside | fused.keys() | taken)
    inside |= {index for run in runs.values() for index in run.operations}
    for index, operation in enumerate(program.operations):
        if index in fused:
            group = fused[index]
            out = value_name(operation.outputs[0])
            writer.node(group.op, [writer.operand(group.input)], out, **dict(group.attributes))
        elif blocks is not None and index in taken:
            blocks.write(index, operation)
        elif index in runs:
            _write_run(writer, program, runs[index])
        elif index not in inside:
            _write(writer, operation)
    if blocks is not None:
        blocks.finish()
    inputs = tuple(s.value for s in program.inputs if s.value in writer.used)
    return writer.form(inputs, tuple(s.value for s in program.outputs))


def operation_form(program: Program, operation: Operation) -> OnnxForm:
    """The ONNX form of one operation by itself, to find out whether it can run.

    Raises `CompileError` for an operator that is not ONNX's, or that would give wrong results.
    """
    writer = FormWriter(program)
    _write(writer, operation)
    read = {v for v in operation.inputs if v != ABSENT}
    inputs = sorted(v for v in writer.used & read if v not in writer.constants)
    return writer.form(tuple(inputs), tuple(v for v in operation.outputs if v != ABSENT))


#: Narrow types that it takes within a model, in these operators.
_PACKED = frozenset({DataType.INT4, DataType.UINT4})
_QUANTIZING = frozenset({"QuantizeLinear", "DequantizeLinear"})


def _write(writer: FormWriter, operation: Operation) -> None:
    if operation.is_foreign:
        if has_empty_results(writer, operation):
            write_empty(writer, operation)
        else:
            writer.plain_foreign(operation)
        return
    for value in (*operation.inputs, *operation.outputs):
        if value != ABSENT and writer.type_of(value).data_type.is_narrow:
            kind = writer.type_of(value).data_type
            # Its kernels take other sets of these types at every version.
            if kind not in _PACKED or operation.op not in _QUANTIZING:
                raise CompileError(f"tensors of type {kind.value} are not given to it")
    attributes = attributes_of(operation)
    if is_scan(operation):
        write_scan(writer, operation, _write)
        return
    if written_over_nothing(writer, operation, attributes):
        return
    rewrite = REWRITES.get((operation.domain, operation.op))
    if rewrite is None and operation.domain:
        raise CompileError("ONNX has no such operator")
    if rewrite is None or not rewrite(writer, operation, attributes):
        writer.plain(operation, attributes)


def _write_run(writer: FormWriter, program: Program, run: ElementRun) -> None:
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
            attributes = attributes_of(operation)
            names[operation.outputs[0]] = writer.node(operation.op, operands, None, **attributes)
        return [names[v] for v in results]

    writer.over_chunks(long, results, run.count, write)


def _number(writer: FormWriter, program: Program, value: int) -> str:
    """One number, without dimensions, so that it does not add any to a chunk."""
    if not program.values[value].type.shape:
        return writer.operand(value)
    return writer.node("Reshape", [writer.operand(value), writer.constant(np.zeros(0, np.int64))])

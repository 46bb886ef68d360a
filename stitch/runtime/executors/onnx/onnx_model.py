"""Convert a program to an ONNX model that ONNX Runtime accepts.

Types narrower than float32 become float32: inside a program only a `Cast` to one of them rounds.
Operators that ONNX Runtime computes differently from Stitch are rewritten or refused; groups that
equal one ONNX operator are fused into it; convolutions by weights that are not constants use the
blocked layout.
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
from stitch.runtime.executors.onnx.model_writer import FormWriter, OnnxForm, value_name
from stitch.runtime.executors.onnx.rewrites import (
    REWRITES,
    has_empty_results,
    write_empty,
    written_over_nothing,
)

# Groups of operations that ONNX Runtime has as one operator


@dataclass(frozen=True, slots=True)
class Fused:
    """One group: the operator that stands for it, and the indices of the others inside it."""

    op: str
    attributes: tuple[tuple[str, str], ...]
    input: int
    inside: frozenset[int]


def fusions(program: Program) -> dict[int, Fused]:
    """The groups by the index of their last operation.

    Gelu by tanh: `(0.5 x) (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, as GPT-2 has it.
    """
    links = _Links(program)
    groups = {}
    for index, operation in enumerate(program.operations):
        if operation.op == "Tanh" and not operation.domain:
            match = links.gelu_around(index, operation)
            if match is not None:
                groups[match[0]] = match[1]
    return groups


class _Links:
    """Which operation makes each value of a program, and which read it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.constants = program.constant_data()
        self.makers = {v: i for i, o in enumerate(program.operations) for v in o.outputs}
        self.readers = program.readers()
        self.given = {slot.value for slot in program.outputs}

    def gelu_around(self, tanh: int, operation: Operation) -> tuple[int, Fused] | None:
        """The Gelu of which this Tanh is the middle, and the index of its last operation."""
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
        cubic = self.with_cubic_term(inner[0], x)
        if cubic is None:
            return None
        inside = frozenset((tanh, above, inner[1], half[1], *cubic))
        if any(self.is_seen_outside(index, inside | {last}) for index in inside):
            return None
        return last, Fused("Gelu", (("approximate", "tanh"),), x, inside)

    def with_cubic_term(self, value: int, x: int) -> tuple[int, ...] | None:
        """The operations that make `x + 0.044715 x^3`; None where others do."""
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
        """Both orders of the operands of what makes a value, if that is `op`, and its index."""
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
        """What is multiplied by a number to make a value, and the index of the product."""
        for a, b, index in self.operands(value, "Mul"):
            if self.is_number(b, number):
                return a, index
        return None

    def is_number(self, value: int, number: float) -> bool:
        """Whether a value is one constant number, to the digits of float32."""
        data = self.constants.get(value)
        return data is not None and data.size == 1 and math.isclose(
            float(data.reshape(())), number, rel_tol=1e-6
        )  # fmt: skip

    def only_reader(self, value: int, op: str) -> int | None:
        """The index of the one operation that reads a value, if it is `op`."""
        readers = self.readers.get(value, set())
        reader = next(iter(readers)) if len(readers) == 1 else None
        if reader is None or self.program.operations[reader].op != op:
            return None
        return None if self.program.operations[reader].domain else reader

    def is_seen_outside(self, index: int, group: frozenset[int]) -> bool:
        """Whether something beside the group reads what an operation makes."""
        results = self.program.operations[index].outputs
        return any(v in self.given or self.readers.get(v, set()) - group for v in results)


# Scans

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

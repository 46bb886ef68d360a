"""Compiled programs compute what their graphs say, in the very bytes that the compiler assigned.

A small machine of our own: slots are arrays, an aliasing output is its input's array, intermediate
values are views of one poisoned scratch. Any overlap that should not be there changes a result.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch import ops
from stitch.compiler import CompileOptions, compile_graph
from stitch.graph.computation_graph import ComputationGraph
from stitch.linker import Wire, link_programs
from stitch.machine import load_machine
from stitch.program import (
    Array,
    DataType,
    InputSlot,
    Operation,
    OutputSlot,
    Ownership,
    Program,
    Value,
    ValueType,
)
from tests.support.gradients.running import run

_TINY = load_machine("tiny")
_UNARY = ("Relu", "Neg", "Identity", "Exp", "Tanh", "Softmax", "Transpose")
_BINARY = ("Add", "Mul", "Sub", "Max", "MatMul", "Greater")


@st.composite
def _graphs(draw: st.DrawFn) -> ComputationGraph:
    values = [Value(f"x{i}", ValueType((5, 5), DataType.FLOAT32)) for i in range(3)]
    values.append(Value("narrow", ValueType((1, 5), DataType.FLOAT32)))
    donated = [draw(st.sampled_from(list(Ownership))) for _ in values]
    inputs = tuple(InputSlot(v.name, i, ownership=donated[i]) for i, v in enumerate(values))
    operations: list[Operation] = []
    for _ in range(draw(st.integers(1, 16))):
        op = draw(st.sampled_from(_UNARY + _BINARY))
        wide = [i for i, v in enumerate(values) if v.type == values[0].type]
        floats = [i for i, v in enumerate(values) if v.type.data_type is DataType.FLOAT32]
        # MatMul needs square operands; the others broadcast the narrow ones.
        pool = wide if op in ("MatMul", "Transpose") else floats
        operands = tuple(draw(st.sampled_from(pool)) for _ in range(1 + (op in _BINARY)))
        (kind,) = ops.infer_types(op, [values[v].type for v in operands])
        values.append(Value(f"t{len(values)}", kind))
        operations.append(Operation(op, operands, (len(values) - 1,)))
    chosen = [draw(st.integers(0, len(values) - 1)) for _ in range(draw(st.integers(1, 4)))]
    outputs = tuple(OutputSlot(f"y{i}", v) for i, v in enumerate(chosen))
    return ComputationGraph("g", inputs, outputs, tuple(values), tuple(operations))


def _meaning(graph: ComputationGraph, inputs: list[Array]) -> list[Array]:
    names = [slot.name for slot in graph.inputs]
    return [*run(graph, dict(zip(names, inputs, strict=True))).values()]


def _run_in_place(program: Program, inputs: list[Array]) -> list[Array]:
    banks = _TINY.shape.space(program.scratch.space).banks
    scratch = np.full(program.scratch.size_per_bank * banks, 0xAB, np.uint8)
    arrays = dict(program.constant_data())
    arrays.update({s.value: a.copy() for s, a in zip(program.inputs, inputs, strict=True)})
    for slot in program.outputs:
        if slot.aliases_input is not None:
            arrays[slot.value] = arrays[program.inputs[slot.aliases_input].value]
        else:
            kind = program.values[slot.value].type
            arrays[slot.value] = np.empty(kind.shape, kind.data_type.dtype)
    for operation in program.operations:
        (made,) = operation.outputs
        if made not in arrays:
            arrays[made] = _view(scratch, program.values[made])
        steps = ops.bind(operation.op, [arrays[v] for v in operation.inputs], [arrays[made]])
        with np.errstate(all="ignore"):
            for step in steps:
                step()
    return [arrays[slot.value] for slot in program.outputs]


def _view(scratch: Array, value: Value) -> Array:
    layout, kind = value.desc.layout, value.type
    assert layout.address is not None
    end = layout.address + layout.data_type.nbytes(value.desc.elements)
    return scratch[layout.address : end].view(kind.data_type.dtype).reshape(kind.shape)


@given(_graphs(), st.integers(0, 99), st.booleans())
@settings(max_examples=60, deadline=None)
def test_results_in_assigned_bytes_are_bit_equal_with_the_graphs_meaning(
    graph: ComputationGraph, seed: int, optimized: bool
) -> None:
    chance = np.random.default_rng(seed)
    inputs = [
        chance.standard_normal(graph.input_type(i).shape).astype(np.float32)
        for i in range(len(graph.inputs))
    ]
    program = compile_graph(graph, _TINY, CompileOptions(optimize=optimized)).program
    expected = _meaning(graph, inputs)
    made = _run_in_place(program, inputs)
    assert [a.dtype for a in made] == [a.dtype for a in expected]
    assert [a.tobytes() for a in made] == [a.tobytes() for a in expected]


@given(st.lists(_graphs(), min_size=2, max_size=4), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_compiled_programs_linked_into_one_give_the_results_of_the_graphs_in_turn(
    graphs: list[ComputationGraph], seed: int
) -> None:
    chance = np.random.default_rng(seed)
    programs = [compile_graph(graph, _TINY).program for graph in graphs]
    wires: list[Wire] = []
    results: list[list[Array]] = []
    outside: list[Array] = []
    for p, graph in enumerate(graphs):
        inputs = []
        for i in range(len(graph.inputs)):
            kind = graph.input_type(i)
            # The first fitting output of the program before feeds the first inputs.
            fits = [o for o in range(len(graphs[p - 1].outputs)) if p] if i < 2 else []
            fits = [o for o in fits if graphs[p - 1].output_type(o) == kind]
            if fits:
                wires.append(Wire(p - 1, fits[0], p, i))
                inputs.append(results[p - 1][fits[0]])
            else:
                inputs.append(chance.standard_normal(kind.shape).astype(np.float32))
                outside.append(inputs[-1])
        results.append(_meaning(graph, inputs))
    keep = {(p, o) for p, graph in enumerate(graphs) for o in range(len(graph.outputs))}
    linked = link_programs(programs, wires, machine=_TINY.shape, name="all", keep=keep)
    made = _run_in_place(linked, outside)
    expected = [array for arrays in results for array in arrays]
    assert [a.tobytes() for a in made] == [a.tobytes() for a in expected]


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (3, 0, 2)])
def test_scalars_and_empty_tensors_have_an_address(shape: tuple[int, ...]) -> None:
    kind = ValueType(shape, DataType.FLOAT32)
    graph = ComputationGraph(
        "g",
        (InputSlot("x", 0),),
        (OutputSlot("y", 2),),
        tuple(Value(name, kind) for name in "xty"),
        (Operation("Exp", (0,), (1,)), Operation("Neg", (1,), (2,))),
    )
    program = compile_graph(graph, _TINY).program
    x = np.full(shape, 2, np.float32)
    assert _run_in_place(program, [x])[0].tobytes() == _meaning(graph, [x])[0].tobytes()

"""ONNX models: a file or `ModelProto` of opset 1 to 28 becomes a computation graph.

Symbolic dimensions take the examples' sizes. An input whose data decides a shape becomes a constant
with the example's value, and the program checks at each run that it is given that value. Functions
are expanded, branches of constant conditions inlined, short loops written out; what data decide
becomes a choice or a loop that ends by data, and sequences become their tensors (`x[0]`, `x[1]`,
...). Sizes that depend on data, and types that Stitch lacks, are refused by name, all at once.
Importing this module needs the package onnx (an optional extra).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stitch.errors import CompileError, FormatError, StitchError
from stitch.frontend.onnx.graph_inputs import (
    BoundInput,
    Examples,
    FlatInputs,
    Shapes,
    bind_inputs,
    flat_inputs,
    flat_output,
)
from stitch.frontend.onnx.kept_loops import UNROLLED_ROUNDS, Loops
from stitch.frontend.onnx.loop_nodes import MAX_ROUNDS
from stitch.frontend.onnx.node_walk import Walk
from stitch.frontend.onnx.protos import OnnxModel, read_model
from stitch.frontend.onnx.values import Failed, Scope
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.linker import remove_dead_code
from stitch.program import Array

#: An input that decides shapes holds sizes, axes or indices; larger ones are data.
MAX_DECIDING_ELEMENTS = 4096


def from_onnx(
    model: str | Path | Any,
    example_inputs: Examples = (),
    input_shapes: Shapes | None = None,
    unroll: int = UNROLLED_ROUNDS,
) -> ComputationGraph:
    """The graph of an ONNX model: a path or `ModelProto`.

    `example_inputs` are arrays, descriptors or types, by position or by name; `input_shapes` are
    shapes by name; loops of at most `unroll` rounds are written out. Raises `FormatError` for a
    file that is not sound (`IncompatibleError` for an opset or IR version), `CompileError` for what
    cannot be compiled.
    """
    read = read_model(model)
    flat = flat_inputs(read.graph, example_inputs)
    inputs = bind_inputs(flat.graph, flat.examples, input_shapes or {}, read.title)
    loops = Loops(unroll)
    try:
        return _translated(read, flat, inputs, loops)
    except CompileError:
        if loops.kept:
            # What comes after may have to know what a loop comes to.
            with suppress(CompileError):
                return _translated(read, flat, inputs, Loops(MAX_ROUNDS))
        raise


def _translated(
    read: OnnxModel, flat: FlatInputs, inputs: Sequence[BoundInput], loops: Loops
) -> ComputationGraph:
    fixed: set[str] = set()
    while True:
        walk = Walk(read, ComputationGraphBuilder(_name(read)), loops)
        slots = _declared(walk, inputs)
        outputs = _walked(walk, inputs, fixed, slots, flat)
        wanted = [name for name in walk.dependencies.wanted if name not in fixed]
        if wanted:
            fixed.update(_fixable(inputs, wanted, walk, read))
            continue
        walk.refusals.raise_any()
        if not outputs:
            raise CompileError("all outputs of the model are empty sequences", where=read.title)
        checks = {one.name: one.example for one in inputs if one.name in fixed}
        graph = _built(walk.builder, outputs, checks, slots)
        # A loop that could not stay was begun as one.
        return remove_dead_code(graph) if loops.given_up else graph


def _name(model: OnnxModel) -> str:
    return str(model.graph.name) or Path(model.title).stem


def _declared(walk: Walk, inputs: Sequence[BoundInput]) -> dict[str, SymbolicTensor]:
    """The input slots by name."""
    builder, slots = walk.builder, {}
    for one in inputs:
        with builder.at(f"{walk.model.title}: input {one.name!r}"):
            slots[one.name] = builder.input(one.name, one.type.shape, one.type.data_type)
            builder.place(*one.placement)
        walk.dependencies.add_input(one.name, slots[one.name])
        walk.declared.bind(one.name, one.type.shape)
    return slots


def _walked(
    walk: Walk,
    inputs: Sequence[BoundInput],
    fixed: Collection[str],
    slots: Mapping[str, SymbolicTensor],
    flat: FlatInputs,
) -> list[tuple[str, SymbolicTensor]]:
    """All nodes; gives the outputs by name, without those that were refused."""
    graph, title = walk.model.graph, walk.model.title
    scope = Scope(walk.model.opsets)
    bound = {
        one.name: walk.builder.constant(one.example) if one.name in fixed else slots[one.name]
        for one in inputs
    }
    parts = {name for names in flat.structures.values() for name in names or ()}
    for one in inputs:
        if one.name not in parts:
            scope.define(one.name, bound[one.name], title)
    for name in flat.structures:
        scope.define(name, flat.value(name, bound), title)
    dense = [tensor for tensor in graph.initializer if tensor.name not in slots]
    scope.add_initializers(dense, graph.sparse_initializer)
    walk.nodes(graph.node, scope)
    if not graph.output:
        raise FormatError("the model has no outputs", where=title)
    outputs: list[tuple[str, SymbolicTensor]] = []
    for info in graph.output:
        where = f"{title}: output {info.name!r}"
        try:
            value = walk.look_up(info.name, scope, where)
            if value is None:
                raise FormatError("an output has no name", where=where)
            if not isinstance(value, Failed):
                outputs += flat_output(info.name, value, where)
        except StitchError as error:
            walk.refusals.failed(where, error)
    return outputs


def _fixable(
    inputs: Sequence[BoundInput], wanted: Sequence[str], walk: Walk, model: OnnxModel
) -> list[str]:
    """The wanted inputs, if each is one that may become a constant; else raises."""
    by_name: Mapping[str, BoundInput] = {one.name: one for one in inputs}
    lacking = [name for name in wanted if by_name[name].example is None]
    data = [name for name in wanted if not _may_decide(by_name[name])]
    if data:
        # The shape depends on what is computed, not on a setting: the operator's error says so.
        walk.refusals.raise_any()
    if lacking:
        raise CompileError(
            f"the values of {', '.join(map(repr, lacking))} decide shapes, so they must be known",
            where=model.title,
            remedy="give example inputs with these values; the program then takes no others",
        )
    return list(wanted)


def _may_decide(one: BoundInput) -> bool:
    """Integers and flags, and numbers such as the bounds of a Range."""
    if one.type.data_type.is_floating:
        return len(one.type.shape) <= 1 and math.prod(one.type.shape) <= 16
    return math.prod(one.type.shape) <= MAX_DECIDING_ELEMENTS


def _built(
    builder: ComputationGraphBuilder,
    outputs: Sequence[tuple[str, SymbolicTensor]],
    checks: Mapping[str, Array | None],
    slots: Mapping[str, SymbolicTensor],
) -> ComputationGraph:
    """The graph; its smallest output passes through the checks of the fixed inputs."""
    smallest = min(range(len(outputs)), key=lambda i: _nbytes(outputs[i][1]))
    for index, (name, value) in enumerate(outputs):
        for fixed, array in checks.items() if index == smallest else ():
            with builder.at(f"input {fixed!r}"):
                value = builder.op(
                    "Expect", value, slots[fixed], array, domain="stitch", name=fixed
                )
        builder.output(name, value)
    return builder.build()


def _nbytes(tensor: SymbolicTensor) -> int:
    return tensor.size * tensor.data_type.itemsize

"""ONNX's Gradient: the derivative of one value by others, from the operators' own rules.

Comes in: a graph under construction, a value and those that it is derived by.
Goes out: the gradients, in the same graph. Source: `ai.onnx.preview.training.Gradient`, version 1,
where the operands are the very values that its attributes name. Must not know: scopes, files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stitch import ops
from stitch.errors import CompileError
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import ABSENT, Operation


def gradients(
    builder: ComputationGraphBuilder,
    result: SymbolicTensor,
    sources: Sequence[SymbolicTensor],
    where: str,
) -> list[SymbolicTensor]:
    """The derivative of the sum of `result` by each source; zeros where it does not depend on it.

    Raises `CompileError` for an operator without a gradient.
    """
    steps = tuple(builder.operations)
    path = {source.index for source in sources}
    for step in steps:
        if not path.isdisjoint(step.inputs):
            made = [v for v in step.outputs if v != ABSENT]
            path.update(v for v in made if builder.type_of(v).data_type.is_floating)
    totals: dict[int, SymbolicTensor] = {}
    if result.index in path:
        unit = builder.constant(np.ones((), result.dtype))
        totals[result.index] = builder.op("Expand", unit, list(result.shape))
    wanted = {source.index for source in sources}
    for step in reversed(steps):
        flowing = [totals.get(v) for v in step.outputs]
        if any(part is not None for part in flowing) and wanted.isdisjoint(step.outputs):
            for operand, part in _parts(builder, step, flowing, path, where):
                before = totals.get(operand)
                totals[operand] = part if before is None else before + part
    return [
        totals.get(source.index, builder.constant(np.zeros(source.shape, source.dtype)))
        for source in sources
    ]


def _parts(
    builder: ComputationGraphBuilder,
    step: Operation,
    flowing: Sequence[SymbolicTensor | None],
    path: set[int],
    where: str,
) -> list[tuple[int, SymbolicTensor]]:
    """What flows back from one operation into each of its operands on the path."""
    chosen = tuple(value in path for value in step.inputs)
    if not any(chosen):
        return []
    definition = ops.definition_of(step)
    if definition.gradient is None:
        raise CompileError(f"operator Gradient is not supported through {step.op}, which has none",
                           where=where)  # fmt: skip
    tensors = [None if v == ABSENT else SymbolicTensor(builder, v) for v in step.inputs]

    def read(side: str, index: int) -> SymbolicTensor:
        return SymbolicTensor(builder, (step.inputs if side == "input" else step.outputs)[index])

    context = ops.GradientContext(
        step.op,
        builder,
        ops.resolve_attributes(definition, step.attributes, where),
        tuple(None if t is None else t.type for t in tensors),
        tuple(None if v == ABSENT else builder.type_of(v) for v in step.outputs),
        tuple(None if t is None else builder.known_data(t) for t in tensors),
        tuple(flowing),
        chosen,
        read,
        where,
    )
    pairs = zip(step.inputs, definition.gradient(context), chosen, strict=False)
    return [(value, part) for value, part, on_path in pairs if on_path and part is not None]

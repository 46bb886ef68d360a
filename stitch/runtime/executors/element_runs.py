"""Runs of long elementwise operations that ONNX Runtime computes chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from stitch.program import ABSENT, DataType, Operation, Program

#: Operators that are one node each, the same for every float type.
ELEMENTWISE = frozenset({
    "Abs", "Add", "Div", "Erf", "Exp", "Log", "Mul", "Neg", "Reciprocal", "Sigmoid", "Sqrt", "Sub",
    "Tanh",
})  # fmt: skip
FLOATS = (DataType.FLOAT32, DataType.FLOAT64)
#: Elements of a chunk at most, and operations that a run has at least.
MOST_PER_CHUNK = 1 << 15
LEAST_OPERATIONS = 5


@dataclass(frozen=True, slots=True)
class ElementRun:
    """Consecutive operations, all on results of one shape, and into how many chunks that is cut."""

    operations: tuple[int, ...]
    count: int


def chunk_count(size: int) -> int:
    """Into how many equal chunks a chain of passes is cut; 1 where that would not pay.

    Over a million float32 a pass takes 300 us and over chunks 150, and each chunk takes 10 us more:
    with ten passes 3.7 ms against 2.1 for chunks of 2^15 and 2^16, and 2.5 for chunks of 2^13.
    """
    if size < 2 * MOST_PER_CHUNK:
        return 1
    least = -(-size // MOST_PER_CHUNK)
    return next((n for n in range(least, 4 * least + 1) if size % n == 0), 1)


def element_runs(program: Program, without: Collection[int] = ()) -> dict[int, ElementRun]:
    """The runs of a program by their first operation; none holds one of `without`."""
    runs: dict[int, ElementRun] = {}
    run: list[int] = []
    last = ABSENT

    def close() -> None:
        if len(run) >= LEAST_OPERATIONS:
            shape = program.values[program.operations[run[0]].outputs[0]].type.shape
            count = chunk_count(math.prod(shape))
            if count > 1:
                runs[run[0]] = ElementRun(tuple(run), count)
        run.clear()

    for index, operation in enumerate(program.operations):
        if index in without or not _is_elementwise(program, operation):
            close()
            continue
        result = operation.outputs[0]
        if run and program.values[result].type != program.values[last].type:
            close()
        run.append(index)
        last = result
    close()
    return runs


def _is_elementwise(program: Program, operation: Operation) -> bool:
    if operation.domain or operation.op not in ELEMENTWISE:
        return False
    result = program.values[operation.outputs[0]].type
    kinds = [program.values[v].type for v in operation.inputs]
    return result.data_type in FLOATS and all(
        k.data_type is result.data_type and (k.shape == result.shape or math.prod(k.shape) == 1)
        for k in kinds
    )

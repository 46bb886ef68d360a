"""Find runs of long elementwise operations that ONNX Runtime computes in chunks."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from stitch.program import ABSENT, DataType, Operation, Program

#: Operators that are one node for every float type.
ELEMENTWISE = frozenset({
    "Abs", "Add", "Div", "Erf", "Exp", "Log", "Mul", "Neg", "Reciprocal", "Sigmoid", "Sqrt", "Sub",
    "Tanh",
})  # fmt: skip
FLOATS = (DataType.FLOAT32, DataType.FLOAT64)
MAX_CHUNK_SIZE = 1 << 15
MIN_OPERATIONS = 5


@dataclass(frozen=True, slots=True)
class ElementRun:
    """Consecutive operations with results of one type, and the number of chunks to compute."""

    operations: tuple[int, ...]
    count: int


def chunk_count(size: int) -> int:
    """Return the number of equal chunks for `size` elements; 1 if chunks do not pay.

    A pass over a million float32 takes 300 us, in chunks 150 us, and each chunk costs 10 us.
    """
    if size < 2 * MAX_CHUNK_SIZE:
        return 1
    least = -(-size // MAX_CHUNK_SIZE)
    return next((n for n in range(least, 4 * least + 1) if size % n == 0), 1)


def element_runs(program: Program, without: Collection[int] = ()) -> dict[int, ElementRun]:
    """Return the runs of a program by their first operation; none holds one of `without`."""
    runs: dict[int, ElementRun] = {}
    run: list[int] = []
    last = ABSENT

    def close() -> None:
        if len(run) >= MIN_OPERATIONS:
            shape = program.values[program.operations[run[0]].outputs[0]].type.shape
            count = chunk_count(math.prod(shape))
            if count > 1:
                runs[run[0]] = ElementRun(tuple(run), count)
        run.clear()

    for index, operation in enumerate(program.operations):
        if index in without or not program.forms[index].get(
            "is elementwise", _is_elementwise, program, operation
        ):
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

"""ONNX Runtime agrees with our kernels on every row of the operators' tables, or refuses by name.

The tables are those of `tests/ops`; each row is one program of one operation, run twice.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from stitch.errors import CompileError
from stitch.program import Array
from stitch.runtime.executors import Executor, make_executor
from tests.support.grids import every
from tests.support.operators.against_onnx import assert_close
from tests.support.operators.one_operation import MACHINE, Binding, Row, one_operation, table_rows

ROWS: dict[str, list[Row]] = defaultdict(list)
for _row in table_rows("elementwise", "structured"):
    ROWS[_row.op].append(_row)


def second_run(executor: Executor, row: Row) -> list[Array]:
    """The outputs of the second of two runs over spoiled bytes."""
    one = one_operation(row)
    binding = Binding(executor.prepare(one.program, MACHINE), one.program)
    binding.run(one.operands)
    return binding.run(one.operands)


@pytest.mark.parametrize("op", every(2, sorted(ROWS)))
def test_every_row_agrees_or_is_refused_by_name(op: str) -> None:
    numpy, onnxruntime = make_executor("numpy"), make_executor("onnxruntime")
    right = 0
    for row in ROWS[op]:
        try:
            found = second_run(onnxruntime, row)
        except CompileError as error:
            assert op in str(error), row
            continue
        for ours, theirs in zip(second_run(numpy, row), found, strict=True):
            assert_close(theirs, ours)
        right += 1
    assert right > 0, f"no row of {op} runs"

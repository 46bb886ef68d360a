"""How operators may be divided: what a rule permits gives the shards of the whole operation.

Every row of every operator is one shard. Each way to divide its operands that a rule permits is
computed by shards, and as one operation on the operands that the shards make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from stitch.ops import (
    COPIES,
    SUMS,
    DividedOperation,
    Part,
    attributes_of,
    definition_of,
    evaluate,
    operators,
)
from stitch.program import ABSENT, Array
from tests.support.grids import CAMPAIGN
from tests.support.operators.drawn_operands import operands_of
from tests.support.operators.lanes import rows
from tests.support.operators.one_operation import Row, one_operation

DEGREE = 2
#: Operators of ONNX that no rule divides; what is elementwise has a rule.
UNDIVIDED = {
    "BitCast", "Col2Im", "ConstantOfShape", "ConvInteger", "CumProd", "CumSum", "DFT",
    "DeformConv", "DequantizeLinear", "Det", "GRU", "GatherND", "GridSample", "LSTM",
    "MatMulInteger", "OneHot", "Pad", "QLinearConv", "QLinearMatMul", "QuantizeLinear", "RNN",
    "Range", "Resize", "RoiAlign", "ScatterElements", "ScatterND", "Shape", "Size",
    "TensorScatter", "TfIdfVectorizer", "Tile", "Trilu",
}  # fmt: skip


def whole(shards: Sequence[Array | None], part: Part) -> Array | None:
    """The value that shards make."""
    if shards[0] is None or part == COPIES:
        return shards[0]
    if part == SUMS:
        return np.sum(np.stack([s for s in shards if s is not None]), 0, dtype=shards[0].dtype)
    assert isinstance(part, int)
    return np.concatenate([s for s in shards if s is not None], part)


def ways(row: Row) -> list[tuple[tuple[Part, ...], tuple[Part, ...]]]:
    """How the operands and results of a row's operation may be divided."""
    one = one_operation(row)
    operation, values = one.program.operations[0], one.program.values
    data = {c.value: c.data for c in one.program.constants}
    kinds = tuple([None if v == ABSENT else values[v].type for v in operation.inputs])
    results = tuple([values[v].type for v in operation.outputs])
    choices: list[list[Part]] = [
        [COPIES] if kind is None or v in data else [COPIES, SUMS, *range(len(kind.shape))]
        for v, kind in zip(operation.inputs, kinds, strict=True)
    ]
    found = []
    for parts in product(*choices):
        if set(parts) == {COPIES}:
            continue
        divided = DividedOperation(
            operation, definition_of(operation), attributes_of(operation), kinds, results,
            tuple([data.get(v) for v in operation.inputs]), parts,
        ).divided_results()  # fmt: skip
        if divided is not None:
            found.append((parts, divided))
    return found


def check(row: Row) -> int:
    """Compare all ways that are permitted; return their number."""
    found = ways(row)
    for parts, divided in found:
        drawn = [operands_of(row.specs, seed) for seed in (7, 8)]
        # Copies and constants are those of the first shard.
        shards = [
            [first if part == COPIES else own
             for first, own, part in zip(drawn[0], each, parts, strict=True)]
            for each in drawn
        ]  # fmt: skip
        words: dict[str, Any] = {
            "domain": row.domain, "attributes": row.attributes, "outputs": row.outputs
        }  # fmt: skip
        with np.errstate(all="ignore"):
            made = [evaluate(row.op, each, **words) for each in shards]
            expected = [
                whole(each, part)
                for each, part in zip(zip(*made, strict=True), divided, strict=True)
            ]
            operands = [
                whole(each, part)
                for each, part in zip(zip(*shards, strict=True), parts, strict=True)
            ]
            if row.op in ("Reshape", "Expand") and expected[0] is not None:
                operands[1] = np.array(expected[0].shape, np.int64)
            got = evaluate(row.op, operands, **words)
        for a, b in zip(got, expected, strict=True):
            assert b is not None
            assert a.shape == b.shape, (row, parts, divided)
            message = str((row, parts, divided))
            if a.dtype.kind in "biu":
                np.testing.assert_array_equal(a, b, err_msg=message)
                continue
            eps = 5e-6 if a.dtype.itemsize >= 4 else 0.3 if a.dtype.itemsize == 1 else 2e-2
            x, y = a.astype(np.float64), b.astype(np.float64)
            finite = np.abs(y[np.isfinite(y)])
            atol = eps * min(1e300, 1 + float(finite.max(initial=0)))
            np.testing.assert_allclose(x, y, rtol=eps, atol=atol, err_msg=message)
    return len(found)


@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=CAMPAIGN)])
def test_shards_make_what_the_whole_operation_gives(which: str) -> None:
    permitted = Counter[str]()
    taken = Counter[str]()
    for row in rows():
        taken[row.op] += 1
        if which == "all" or taken[row.op] % 12 == 1:
            permitted[row.op] += check(row)
    names = {d.name for d in operators() if not d.domain}
    if which == "all":
        assert {name for name in names if not permitted[name]} == UNDIVIDED

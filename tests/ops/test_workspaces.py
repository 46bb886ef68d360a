"""No kernel takes more bytes than its definition says, at binding or while its steps run."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from stitch.ops import KernelMemory, bind, infer_types, kernel_workspace, operators
from stitch.ops.workspaces import ANY_KERNEL_NBYTES, PIECES_NBYTES, workspace_rule
from stitch.program import SCAN, DataType, ValueType
from tests.support.grids import every
from tests.support.operators.drawn_operands import in_compute_type, operands_of
from tests.support.operators.workspace_rows import ROWS

DEFINITIONS = {d.name: d for d in operators()}


@dataclass(frozen=True, slots=True)
class Taken:
    """What a kernel was declared to take, what it took at most, and what binding kept of it."""

    declared: int
    most: int
    kept: int
    may_keep: bool


def taken(index: int, constant: bool) -> Taken:
    """One operation bound and run once, as `tracemalloc` sees it."""
    op, specs, attributes, count, *_ = (*ROWS[index], 1)
    operands = operands_of(specs)
    kinds = [
        None if a is None else ValueType(a.shape, DataType.from_dtype(a.dtype)) for a in operands
    ]
    words: dict[str, Any] = {"domain": DEFINITIONS[op].domain, "attributes": attributes}
    types = infer_types(op, kinds, constants=operands, outputs=count, **words)
    declared = kernel_workspace(op, kinds, types, **words)
    outputs = [np.empty(t.shape, t.data_type.compute_dtype) for t in types]
    inputs = [in_compute_type(a) for a in operands]
    memory = KernelMemory()
    tracemalloc.start()
    try:
        with np.errstate(all="ignore"):
            before = tracemalloc.get_traced_memory()[0]
            steps = bind(
                op,
                inputs,
                outputs,
                constant=[constant] * len(inputs),
                types=[t.data_type for t in types],
                **words,
            )
            for step in steps:
                step()
            most = tracemalloc.get_traced_memory()[1] - before
            del steps
            memory.take(declared)
            with memory:
                before = tracemalloc.get_traced_memory()[0]
                again = bind(op, inputs, outputs, constant=[constant] * len(inputs), **words)
                kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert again is not None
    return Taken(declared, most, kept, workspace_rule(op, kinds).is_kept)


def test_every_operator_has_a_row() -> None:
    # A scan is measured with its body: tests/runtime/test_memory_of_scans.py.
    assert {row[0] for row in ROWS} | {SCAN[1]} == {d.name for d in operators()}


#: Measured in a campaign: their steps are thousands of Python objects, each of which is traced.
SLOW = ("ConvTranspose", "RoiAlign", "TfIdfVectorizer", "TopK")


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=pytest.mark.campaign("memory") if op in SLOW else ())
        for op in sorted({row[0] for row in ROWS})
    ],
)
def test_a_kernel_takes_no_more_than_is_declared_and_not_far_less(op: str) -> None:
    """A rule that says far too much would refuse programs that fit."""
    found = [taken(index, False) for index, row in enumerate(ROWS) if row[0] == op]
    check(op, found)
    assert min(one.declared / (one.most + PIECES_NBYTES) for one in found) <= 4


@pytest.mark.parametrize("index", every(5, range(len(ROWS))))
def test_a_kernel_with_constant_operands_takes_no_more_than_is_declared(index: int) -> None:
    check(ROWS[index][0], [taken(index, True)])


def check(op: str, found: list[Taken]) -> None:
    for one in found:
        assert one.most <= one.declared
        if not one.may_keep:
            # Steps are Python objects: of a ConvTranspose one for each element of the kernel.
            assert one.kept <= 5 * ANY_KERNEL_NBYTES

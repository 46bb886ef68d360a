"""How many bytes a NumPy kernel takes beside its operands and results: rules that many share.

Comes in: types, known data and attributes of an operation. Goes out: bytes. A rule may say more
than a kernel takes, never less: `tests/ops/test_workspaces.py` measures every operator.
"""

from __future__ import annotations

import math

from stitch.ops.definition import Workspace, WorkspaceContext

#: What any kernel may take besides: a few blocks of a chain, and the steps themselves.
ANY_KERNEL_NBYTES = 1 << 20


def operands(times: float) -> Workspace:
    """A rule: so many times what operands and results take in the compute type."""

    def rule(context: WorkspaceContext) -> int:
        return int(times * context.nbytes)

    return rule


#: A rule for kernels that go through their operands once, with steps for each block of them.
few = operands(1 / 8)


def integers(times: float, otherwise: Workspace) -> Workspace:
    """A rule for kernels that compute with integers as with wider numbers."""
    wide = operands(times)

    def rule(context: WorkspaceContext) -> int:
        first = context.inputs[0]
        assert first is not None
        return (otherwise if first.data_type.is_floating else wide)(context)

    return rule


def columns(context: WorkspaceContext) -> int:
    """A rule for kernels that gather every window of their first operand: all of them at once,
    in the accumulators of integers or in numbers of the operand, and both sides twice."""
    data, result = context.inputs[0], context.outputs[0]
    assert data is not None
    weights = next(t for t in context.inputs[1:] if t is not None and len(t.shape) > 1)
    window = math.prod(weights.shape[2:])
    gathered = math.prod(data.shape[:2]) * window * math.prod(result.shape[2:])
    itemsize = data.data_type.compute_dtype.itemsize if data.data_type.is_floating else 8
    return 3 * gathered * itemsize + 4 * context.nbytes

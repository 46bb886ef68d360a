"""How many bytes a NumPy kernel takes beside its operands and results: rules that many share.

Comes in: types, known data and attributes of an operation. Goes out: bytes. A rule may say more
than a kernel takes, never less: `tests/ops/test_workspaces.py` measures every operator.
"""

from __future__ import annotations

from stitch.ops.definition import WorkspaceContext, WorkspaceRule

#: What any kernel may take besides: a few blocks of a chain, and the steps themselves.
ANY_KERNEL_NBYTES = 1 << 20


def operands(times: float, *, is_kept: bool = True) -> WorkspaceRule:
    """A rule: so many times what operands and results take in the compute type."""

    def nbytes(context: WorkspaceContext) -> int:
        return int(times * context.nbytes)

    return WorkspaceRule(nbytes, is_kept)


#: A rule for kernels that go through their operands once, with steps for each block of them.
few = operands(1 / 8, is_kept=False)


def integers(times: float, otherwise: WorkspaceRule) -> WorkspaceRule:
    """A rule for kernels that compute with integers as with wider numbers."""
    wide = operands(times)

    def nbytes(context: WorkspaceContext) -> int:
        first = context.inputs[0]
        assert first is not None
        return (otherwise if first.data_type.is_floating else wide).nbytes(context)

    return WorkspaceRule(nbytes)

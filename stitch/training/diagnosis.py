"""Diagnosis: which operation first made a loss that is no number.

Comes in: the cells of a training as they were before forward, and its stitched programs. Goes out:
a sentence. The programs run once more, one operation at a time. Must not know: optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from stitch.program import Array
from stitch.runtime import HookContext, RuntimeDevice
from stitch.training.profiling import first_result
from stitch.training.stitching import NamedCells, Stitched


def culprit(cells: NamedCells, names: Iterable[str], programs: Sequence[Stitched]) -> str:
    """The first tensor among the named that holds NaN or Inf, else the first operation to make one.

    Leaves the results of the programs in their cells.
    """
    for name in names:
        tensor = cells.get(name)
        if tensor is not None and not _is_finite(tensor.numpy()):
            return f"{name!r} held NaN or Inf before the step"
    with _looking(cells.device) as culprits:
        for program in programs:
            program.again()
        cells.device.flush()
    return culprits[0] if culprits else "an earlier micro-batch of this step"


@contextmanager
def _looking(device: RuntimeDevice) -> Iterator[list[str]]:
    """Within the block, the first operation that makes NaN or Inf of finite operands is noted."""
    culprits: list[str] = []

    def after(context: HookContext) -> None:
        operation = context.operation
        if culprits or operation is None or all(map(_is_finite, context.outputs)):
            return
        if all(array is None or _is_finite(array) for array in context.inputs):
            place = f" at {operation.location}" if operation.location else ""
            result = first_result(context)
            program = context.program.name
            culprits.append(f"{operation.op} -> {result!r} of {program!r}{place}")

    with device.hooks.registered({"after_operation": after}):
        yield culprits
        device.flush()


def _is_finite(array: Array) -> bool:
    """Whether there is no NaN and no Inf in an array."""
    return array.dtype.kind in "iub" or bool(np.isfinite(array.astype(np.float64)).all())

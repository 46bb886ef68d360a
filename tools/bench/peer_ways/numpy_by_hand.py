"""NumPy by hand: `np.dot`, `np.add`, `np.maximum` with `out=`, everything made beforehand.

No installed product: the least that these programs can cost with NumPy's kernels.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from peer_ways.cases import Case, NotAvailableError, Way
from peer_ways.chains import Layers
from stitch.program import Array


def make_ways(case: Case, stack: ExitStack) -> list[Way]:
    """One function over buffers that exist before; biases as large as what they join."""
    if not isinstance(case.merged, Layers):
        raise NotAvailableError("only layers are written out by hand")
    batch = case.merged.batch
    steps = [
        (
            np.ascontiguousarray(w),
            np.ascontiguousarray(np.broadcast_to(b, (batch, b.size))),
            np.empty((batch, b.size), np.float32),
        )
        for w, b in case.merged.layers
    ]
    dot, add, maximum = np.dot, np.add, np.maximum
    # An array without dimensions: ufuncs convert scalars on every call.
    zero = np.zeros((), np.float32)

    def run(x: Array) -> Array:
        for w, b, h in steps:
            dot(x, w, out=h)
            add(h, b, out=h)
            maximum(h, zero, out=h)
            x = h
        return x

    return [Way("numpy by hand, out=", run, case.x)]

"""Kernels that call functions of the caller's on arrays in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

from stitch.program import Array, TensorDesc, as_read_only
from stitch.runtime.executors.executor import (
    BoundProgram,
    PreparedProgram,
    ignore_errors,
    report_errors,
)


class FunctionCall(ABC):
    """One call of a function, which runs once or never."""

    __slots__ = ()

    @abstractmethod
    def run(self, arrays: tuple[Array, ...]) -> None:
        """Call it on its inputs (read-only) and outputs; raises what the function raises."""

    @abstractmethod
    def stop(self, why: str) -> None:
        """It will not run, or did not come to its end; `why`: for who waits for what it gives."""

    @property
    @abstractmethod
    def is_cancelled(self) -> str | None:
        """Why it cannot run, where something that it is given was never made."""


class CallBox:
    """Holds the call that the next run of some steps makes; empty between runs."""

    __slots__ = ("call",)

    def __init__(self) -> None:
        self.call: FunctionCall | None = None


class CallKernel(PreparedProgram):
    """A function of the caller's, as recordings know it; `box` holds the call of a run."""

    def __init__(self, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> None:
        self.inputs, self.outputs, self.box = inputs, outputs, CallBox()

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """One step, which calls with arrays over these bytes."""
        read = [as_read_only(_dense(*one)) for one in zip(inputs, self.inputs, strict=True)]
        left = [_dense(*one) for one in zip(outputs, self.outputs, strict=True)]
        return BoundProgram((partial(call_in_turn, self.box, *read, *left),), (), {}, 0)


def call_in_turn(box: CallBox, *arrays: Array) -> None:
    """Make the call whose turn it is, with NumPy's errors reported as it does by default."""
    call, box.call = box.call, None
    assert call is not None, "each run is given its calls"
    # Kernels ignore them; to a function they are reported as NumPy does unless told otherwise.
    report_errors()
    try:
        call.run(arrays)
    finally:
        ignore_errors()


def _dense(region: Array, desc: TensorDesc) -> Array:
    dtype = desc.layout.data_type.dtype
    dense: Array = region[: desc.elements * dtype.itemsize].view(dtype).reshape(desc.shape)
    return dense

"""ATen operators that make elements: full of one number, ranges, the identity.

Comes in: a `Call` and the operands of the schema. Goes out: constants in the builder. Must not
know: fx nodes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call, Number, Row, Value
from stitch.graph import SymbolicTensor

aten = torch.ops.aten


def _full(call: Call, size: Any, value: Value, **_: Any) -> SymbolicTensor:
    """Also full_like and new_full: the result's type says it all."""
    return call.builder.broadcast(call.cast(value), call.shape)


def _filled(number: Number, call: Call, *_: Any, **__: Any) -> SymbolicTensor:
    return call.filled(number)


def _range_step(
    call: Call, start: Number, end: Number, step: Number = 1, **_: Any
) -> SymbolicTensor:
    places = start + np.arange(call.shape[0]) * step
    return call.builder.constant(places.astype(call.data_type.dtype))


def _range(call: Call, end: Number, **_: Any) -> SymbolicTensor:
    return _range_step(call, 0, end)


def _scalar_tensor(call: Call, value: Number, **_: Any) -> SymbolicTensor:
    return call.cast(value)


def _eye(call: Call, *_: Any, **__: Any) -> SymbolicTensor:
    return call.builder.constant(np.eye(*call.shape, dtype=call.data_type.dtype))


def _item(call: Call, *_: Any, **__: Any) -> SymbolicTensor:
    raise CompileError(
        "a number is read out of a tensor, so the graph depends on data",
        remedy="keep it a tensor, or use torch.compile, which breaks the graph there",
    )


LOWERINGS: dict[Any, Row] = {
    aten.full.default: _full, aten.full_like.default: _full, aten.new_full.default: _full,
    aten.copy.default: _full, aten.fill.Scalar: _full, aten.fill.Tensor: _full,
    aten.zeros.default: partial(_filled, 0), aten.zeros_like.default: partial(_filled, 0),
    aten.new_zeros.default: partial(_filled, 0), aten.ones.default: partial(_filled, 1),
    aten.ones_like.default: partial(_filled, 1), aten.new_ones.default: partial(_filled, 1),
    # Memory that torch leaves as it is may hold anything: zeros are as good, and reproducible.
    aten.empty.memory_format: partial(_filled, 0), aten.empty_like.default: partial(_filled, 0),
    aten.new_empty.default: partial(_filled, 0), aten.empty_strided.default: partial(_filled, 0),
    aten.new_empty_strided.default: partial(_filled, 0),
    aten.arange.start_step: _range_step, aten.arange.start: _range_step,
    aten.arange.default: _range, aten.scalar_tensor.default: _scalar_tensor,
    aten.eye.default: _eye, aten.eye.m: _eye, aten._local_scalar_dense.default: _item,
    aten.item.default: _item,
}  # fmt: skip

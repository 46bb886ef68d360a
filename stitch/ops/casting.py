"""Changes of data type: Cast and CastLike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.attributes import int_of
from stitch.ops.definition import Attribute, InferenceContext, KernelArguments, OpDef, Thunk
from stitch.ops.element_types import EVERY, data_type_of_code
from stitch.ops.inference import require_type
from stitch.ops.steps import copy_steps, given
from stitch.program import Array, DataType, ValueType

_NARROW = (DataType.FLOAT16, DataType.BFLOAT16)


def _infer_cast(context: InferenceContext) -> tuple[ValueType, ...]:
    data = require_type(context, 0, EVERY)
    target = data_type_of_code(int_of(context.attributes, "to"), context.op)
    return (ValueType(data.shape, target),)


def _infer_cast_like(context: InferenceContext) -> tuple[ValueType, ...]:
    data, like = require_type(context, 0, EVERY), require_type(context, 1, EVERY)
    return (ValueType(data.shape, like.data_type),)


def round_to_odd(source: Array, out: Array) -> None:
    """To float32, so that rounding to a type of at most 22 bits afterwards rounds only once.

    What float32 cannot hold is cut off and remembered in its last bit (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    np.copyto(out, source, "unsafe")
    if source.dtype.kind == "f":
        wide, back = source, out.astype(np.float64)
    else:
        wide, back = source.astype(np.longdouble), out.astype(np.longdouble)
    inexact = (back != wide) & np.isfinite(out)
    # Towards zero first (the bit pattern of a magnitude is ordered), then the odd last bit.
    bits = out.view(np.int32)
    np.subtract(bits, 1, bits, where=inexact & (np.abs(back) > np.abs(wide)))
    np.bitwise_or(bits, 1, bits, where=inexact)


def _cast(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = given(arguments, 0), arguments.outputs[0]
    narrow = "to" in arguments.attributes and (
        data_type_of_code(int_of(arguments.attributes, "to")) in _NARROW
    )
    wide = source.dtype == np.float64 or (source.dtype.kind in "iu" and source.itemsize > 2)
    if narrow and wide and out.dtype == np.float32:
        return (partial(round_to_odd, source, out),)
    return copy_steps(source, out)


_ROUNDING = {"round_mode": Attribute("string", "up"), "saturate": Attribute("int", 1)}

OPERATORS = (
    OpDef(
        "Cast",
        (1, 1),
        _infer_cast,
        _cast,
        attributes={"to": Attribute("int", required=True), **_ROUNDING},
        elementwise=True,
        doc="round_mode and saturate concern float8 types, which Stitch does not compute in.",
    ),
    OpDef("CastLike", (2, 2), _infer_cast_like, _cast, attributes=_ROUNDING),
)

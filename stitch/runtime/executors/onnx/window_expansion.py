"""Windows that ONNX Runtime has no operator for, or lays otherwise.

Comes in: an operation and the writer of its model. Goes out: `stitch.Window` as a Gather whose
indices are computed, pools with their pads written out, those of long images plane by plane.
"""

from __future__ import annotations

import math

import numpy as np

from stitch.ops import computed_nbytes, windows_of
from stitch.program import ABSENT, Operation, Program
from stitch.runtime.executors.onnx.form_writer import Attributes, FormWriter, value_name

#: From images of so many bytes on, more than second-level caches hold, ...
PLANES_NBYTES = 1 << 21
#: ... and by windows up to so wide, up to so many places apart, planes take less time than blocks.
PLANES_KERNEL, PLANES_STRIDE = 3, 2


def pool(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """A pool with the pads that `auto_pad` means: ONNX Runtime (1.32) forgets dilations in them,
    and ends the process where none of its windows is left. One without results is not computed."""
    kind = writer.type_of(operation.outputs[0])
    if 0 in kind.shape:
        for value in (v for v in operation.outputs if v != ABSENT):
            made = writer.type_of(value)
            empty = np.zeros(made.shape, made.data_type.compute_dtype)
            writer.node("Identity", [writer.constant(empty)], value_name(value))
        return True
    laid = laid_out(writer, operation, attributes)
    if _is_of_planes(writer, operation, laid):
        return _by_planes(writer, operation, laid)
    if laid is not attributes:
        writer.plain(operation, laid)
    return laid is not attributes


def _is_of_planes(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Whether a MaxPool takes less time plane by plane.

    ONNX Runtime puts any image of whole blocks of channels into blocks for it, and out of them
    afterwards. In blocks it is fast, but a long image has to go through memory twice more. (us, as
    it is and by planes, out of memory: 64x16x28x28 by 2x2 408, 260; 8x64x56x56 848, 447, by 3x3 in
    steps of 2 716, 573, of 3 701, 788; but 64x32x14x14 by 2x2 156, 202.) Behind convolutions by
    constants, images are in blocks.
    """
    image = writer.type_of(operation.inputs[0])
    kernel, strides = attributes["kernel_shape"], attributes.get("strides") or (1, 1)
    assert isinstance(kernel, tuple) and isinstance(strides, tuple)
    return (
        operation.op == "MaxPool"
        and len(operation.outputs) == 1
        and len(kernel) == 2
        and computed_nbytes(image) >= PLANES_NBYTES
        and max(map(int, kernel)) <= PLANES_KERNEL
        and max(map(int, strides)) <= PLANES_STRIDE
        and not _has_blocks(writer.program)
    )


def _has_blocks(program: Program) -> bool:
    """Whether there are convolutions that ONNX Runtime puts into blocks by itself."""
    fixed = program.fixed_values()
    return any(o.op == "Conv" and o.inputs[1] in fixed for o in program.operations)


def _by_planes(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """One channel fills no block."""
    image, value = writer.type_of(operation.inputs[0]), operation.outputs[0]
    count = math.prod(image.shape[:2])
    planes = writer.node(
        "Reshape", [writer.operand(operation.inputs[0]), writer.ints(count, 1, *image.shape[2:])]
    )
    written = {k: list(v) if isinstance(v, tuple) else v for k, v in attributes.items()}
    name = writer.given_as(value, (count, 1, *writer.type_of(value).shape[2:]))
    writer.shaped_back(value, writer.node("MaxPool", [planes], name, **written))
    return True


def laid_out(writer: FormWriter, operation: Operation, attributes: Attributes) -> Attributes:
    """The attributes of a pool, with pads in place of `auto_pad` where it is dilated."""
    is_same = str(attributes.get("auto_pad", "")).startswith("SAME")
    dilations = attributes.get("dilations")
    if not is_same or not isinstance(dilations, tuple) or set(dilations) == {1}:
        return attributes
    kernel, size = attributes["kernel_shape"], writer.type_of(operation.inputs[0]).shape[2:]
    assert isinstance(kernel, tuple)
    windows = windows_of(attributes, size, tuple(map(int, kernel)))
    pads = (*windows.begin, *windows.end)
    return {**attributes, "auto_pad": "NOTSET", "pads": pads}


def window_of_rows(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Rows by number, the outermost axis first; a number below 0, which would count from the end,
    becomes one that is refused."""
    data, base, strides = map(writer.operand, operation.inputs)
    count, rank = (writer.type_of(v).shape[0] for v in operation.inputs[::2])
    lengths = writer.type_of(operation.outputs[0]).shape[:rank]
    zero, end = writer.scalar(0, np.int64), writer.scalar(count, np.int64)
    # Far outside is outside; of numbers that are cut no sum is too large for its type.
    rows = writer.node("Clip", [base, writer.scalar(-1, np.int64), end])
    steps = writer.node("Clip", [strides, writer.scalar(-count, np.int64), end])
    for axis, length in enumerate(lengths):
        places = np.arange(length, dtype=np.int64)
        along = writer.constant(places.reshape(-1, *(1,) * (rank - 1 - axis)))
        step = writer.node("Gather", [steps, writer.scalar(axis, np.int64)])
        rows = writer.node("Add", [rows, writer.node("Mul", [step, along])])
    inside = writer.node("Where", [writer.node("Less", [rows, zero]), end, rows])
    return writer.give(operation, "Gather", [data, inside], axis=0)

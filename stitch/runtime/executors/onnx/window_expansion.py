"""Windows that ONNX Runtime has no operator for, or lays otherwise."""

from __future__ import annotations

import math

import numpy as np

from stitch.errors import CompileError
from stitch.ops import computed_nbytes, pool_windows, transposed_windows, windows_of
from stitch.program import ABSENT, Operation, Program, ValueType
from stitch.runtime.executors.onnx.form_writer import Attributes, FormWriter

#: From images of so many bytes on, more than second-level caches hold, ...
PLANES_NBYTES = 1 << 21
#: ... and by windows up to so wide, up to so many places apart, planes take less time than blocks.
PLANES_KERNEL, PLANES_STRIDE = 3, 2
#: Windows up to so long may be longer than twice their image.
LONG_KERNEL = 1024


def pool(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """A pool with the pads that `auto_pad` means: ONNX Runtime (1.32) forgets dilations in them,
    and takes pads below 0 where strides are longer than windows."""
    check_kernel(writer.type_of(operation.inputs[0]), attributes)
    size = writer.type_of(operation.inputs[0]).shape[2:]
    if operation.op == "MaxPool" and not all_see_something(attributes, size):
        raise CompileError("of a window of padding alone it gives the least number, not -inf")
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


def laid_out(
    writer: FormWriter, operation: Operation, attributes: Attributes, weights: int = 1
) -> Attributes:
    """The attributes of a pool or a convolution, with pads in place of `auto_pad`; `weights` is the
    operand whose shape says the kernel where no attribute does."""
    if not str(attributes.get("auto_pad", "")).startswith("SAME"):
        return attributes
    image = operation.inputs[operation.op == "MaxPoolGradient"]
    size = writer.type_of(image).shape[2:]
    kernel = attributes.get("kernel_shape") or writer.type_of(operation.inputs[weights]).shape[2:]
    assert isinstance(kernel, tuple)
    windows = windows_of(attributes, size, tuple(map(int, kernel)))
    pads = (*windows.begin, *windows.end)
    return {**attributes, "auto_pad": "NOTSET", "pads": pads}


def check_kernel(image: ValueType, attributes: Attributes) -> None:
    """Refuse windows far longer than the image: it looks at each of their elements."""
    kernel = attributes["kernel_shape"]
    assert isinstance(kernel, tuple)
    for length, size in zip(map(int, kernel), image.shape[2:], strict=True):
        if length > max(LONG_KERNEL, 2 * size):
            raise CompileError(f"a window of {length} elements over an image of {size}")


def all_see_something(attributes: Attributes, size: tuple[int, ...]) -> bool:
    """Whether each window of a pool has an element that is no padding."""
    windows = pool_windows(attributes, size)
    for i, length in enumerate(windows.size):
        first = np.arange(windows.output[i]) * windows.strides[i] - windows.begin[i]
        # The first element of each window that does not lie before the image.
        tap = np.maximum(-(first // windows.dilations[i]), 0)
        is_inside = (tap < windows.kernel[i]) & (first + tap * windows.dilations[i] < length)
        if not is_inside.all():
            return False
    return True


def convolution(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """A convolution with the pads that `auto_pad` means: it stops where windows are dilated."""
    if operation.op == "ConvInteger" and math.prod(_shape_of(writer, operation, 3)) > 1:
        raise CompileError("it takes one zero point for all weights")
    laid = laid_out(writer, operation, attributes, 3 if operation.op == "QLinearConv" else 1)
    if laid is not attributes:
        writer.plain(operation, laid)
    return laid is not attributes


def _shape_of(writer: FormWriter, operation: Operation, index: int) -> tuple[int, ...]:
    value = operation.inputs[index] if index < len(operation.inputs) else ABSENT
    return () if value == ABSENT else writer.type_of(value).shape


def transposed_convolution(
    writer: FormWriter, operation: Operation, attributes: Attributes
) -> bool:
    """A ConvTranspose with pads in place of `auto_pad` and `output_shape`, which it counts for
    itself where strides or dilations leave gaps; refuses results longer than windows reach."""
    is_same = str(attributes.get("auto_pad", "")).startswith("SAME")
    if not is_same and "output_shape" not in attributes:
        return False
    kernel = writer.type_of(operation.inputs[1]).shape[2:]
    size = writer.type_of(operation.inputs[0]).shape[2:]
    windows = transposed_windows(attributes, size, kernel)
    rank = len(kernel)
    extra = attributes.get("output_padding") or (0,) * rank
    assert isinstance(extra, tuple)
    reached = [
        windows.strides[i] * (size[i] - 1) + int(extra[i])
        + windows.dilations[i] * (kernel[i] - 1) + 1 - windows.begin[i] - windows.end[i]
        for i in range(rank)
    ]  # fmt: skip
    if reached != list(windows.size):
        raise CompileError("it makes no result that is longer than its windows reach")
    pads = (*windows.begin, *windows.end)
    laid = {k: v for k, v in attributes.items() if k != "output_shape"}
    writer.plain(operation, {**laid, "auto_pad": "NOTSET", "pads": pads})
    return True


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

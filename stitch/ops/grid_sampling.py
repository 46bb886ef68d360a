"""GridSample, DeformConv and RoiAlign: interpolation at real coordinates.

They gather the neighbours of each coordinate and weight them; coordinates outside count as 0 or are
mapped inside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from stitch.errors import TaskError
from stitch.ops.batching import in_first_axis
from stitch.ops.convolution import CONVOLUTION, bias_steps, check_kernel_shape, check_output
from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import EVERY, FLOATS, INT64
from stitch.ops.inference import Attributes, InferenceContext, Shape, float_of, int_of, string_of
from stitch.ops.resampling import cubic_weight
from stitch.ops.steps import check_indices, pieces_of, slice_range
from stitch.ops.windows import check_window_attributes, windows_of
from stitch.ops.workspaces import MOST_IMAGES
from stitch.program import Array, ValueType

#: About how many bytes of output rows a DeformConv computes together.
_DEFORMED_NBYTES = 10 << 20


def _infer_grid(context: InferenceContext) -> tuple[ValueType, ...]:
    mode = context.require_word("mode", ("nearest", "linear", "cubic"))
    context.require_word("padding_mode", ("zeros", "border", "reflection"))
    x = context.require_type(0, EVERY if mode == "nearest" else FLOATS)
    grid = context.require_type(1, FLOATS)
    rank = context.require_rank(0, 3)
    context.require_rank(1, rank, rank)
    context.require_shape(1, (x.shape[0], *grid.shape[1:-1], rank - 2))
    what = f"{context.op} cannot sample an image without elements"
    context.require(0 not in x.shape[2:], what, got=x.shape)
    return (ValueType((*x.shape[:2], *grid.shape[1:-1]), x.data_type),)


def _reflect(coordinates: Array, low: float, high: float) -> Array:
    """Return coordinates mirrored at both borders until they are inside."""
    span = high - low
    if span <= 0:
        return np.full_like(coordinates, low)
    folded = np.mod(coordinates - low, 2 * span)
    return np.asarray(low + np.where(folded > span, 2 * span - folded, folded))


def _grid_taps(place: Array, size: int, attributes: Attributes) -> tuple[Array, Array]:
    """Return indices and weights, [taps, *place.shape] each, for coordinates along one axis."""
    mode, padding = string_of(attributes, "mode"), string_of(attributes, "padding_mode")
    corners = bool(int_of(attributes, "align_corners"))
    low, high = (0.0, size - 1.0) if corners else (-0.5, size - 0.5)
    place = (place + 1) / 2 * (size - 1) if corners else ((place + 1) * size - 1) / 2
    place = np.rint(place) if mode == "nearest" else place
    # Between the border and the first element, clamping the taps is enough.
    beyond = (place < low) | (place > high)
    if padding == "border" and mode == "cubic":
        # Only the taps are clamped; from here on they are all the same element.
        place = np.clip(place, -2, size + 1)
    elif padding == "border":
        place = np.where(beyond, np.clip(place, 0, size - 1), place)
    elif padding == "reflection":
        place = np.where(beyond, _reflect(place, low, high), place)
    if mode == "nearest":
        # Reflection at half an element may leave a fraction.
        taps, weights = np.trunc(place)[None], np.ones((1, *place.shape))
    else:
        base = np.floor(place)
        span = np.arange(0, 2) if mode == "linear" else np.arange(-1, 3)
        taps = base + span.reshape(-1, *(1,) * place.ndim)
        distance = np.abs(place - taps)
        weights = np.clip(1 - distance, 0, 1) if mode == "linear" else cubic_weight(distance, -0.75)
    if padding == "zeros":
        weights = np.where((taps < 0) | (taps >= size), 0, weights)
    elif padding == "reflection":
        taps = np.trunc(_reflect(taps, low, high))
    return np.clip(np.nan_to_num(taps), 0, size - 1).astype(np.intp), weights


def _grid(arguments: KernelArguments) -> Sequence[Thunk]:
    x, grid, out = arguments.operand(0), arguments.operand(1), arguments.outputs[0]
    # Not -1: the result may be empty.
    points = math.prod(grid.shape[1:-1])
    places = grid.reshape(len(grid), points, grid.shape[-1])
    results = out.reshape(*out.shape[:2], points)
    point = _point_nbytes(x.shape, arguments.string_of("mode"))

    def run() -> None:
        for part in pieces_of(places.shape[1], point):
            results[:, :, part] = _sampled(x, places[:, part], arguments.attributes)

    return (run,)


def _point_nbytes(image: Shape, mode: str) -> int:
    """Return the bytes of one sampled point of every image."""
    taps = {"nearest": 1, "linear": 2, "cubic": 4}[mode]
    return image[0] * (40 * image[1] + 60 * taps * (len(image) - 2) + 60)


def _sampled(x: Array, places: Array, attributes: Attributes) -> Array:
    """Sample images x at coordinates [samples, points, axes]: [samples, channels, points]."""
    samples = np.arange(len(x)).reshape(-1, 1)
    axes = [
        _grid_taps(places[..., -1 - axis].astype(np.float64), size, attributes)
        for axis, size in enumerate(x.shape[2:])
    ]
    total = np.zeros(
        (*places.shape[:2], x.shape[1]), np.float64 if x.dtype.kind == "f" else x.dtype
    )
    for chosen in itertools.product(*(range(len(taps)) for taps, _ in axes)):
        index = tuple(taps[i] for i, (taps, _) in zip(chosen, axes, strict=True))
        weight = math.prod(
            (weights[i] for i, (_, weights) in zip(chosen, axes, strict=True)), start=1.0
        )
        values = np.moveaxis(x, 1, -1)[(samples, *index)]
        if string_of(attributes, "mode") == "nearest":
            total[...] = np.where(np.asarray(weight)[..., None] != 0, values, 0)
        else:
            total += values * np.asarray(weight)[..., None]
    return np.moveaxis(total, -1, 1)


def bilinear(image: Array, y: Array, x: Array) -> list[tuple[Array, Array]]:
    """Return values and weights of the four neighbours of points in [channels, height, width]."""
    height, width = image.shape[1:]
    top, left = np.floor(y), np.floor(x)
    corners = []
    for row, column in itertools.product((top, top + 1), (left, left + 1)):
        weight = (1 - np.abs(y - row)) * (1 - np.abs(x - column))
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        rows = np.clip(np.nan_to_num(row), 0, height - 1).astype(np.intp)
        columns = np.clip(np.nan_to_num(column), 0, width - 1).astype(np.intp)
        corners.append((image[:, rows, columns], np.where(inside, weight, 0)))
    return corners


def _infer_deform(context: InferenceContext) -> tuple[ValueType, ...]:
    x, w = context.require_type(0, FLOATS), context.require_type(1, FLOATS)
    context.require_same_type(range(5))
    context.require_rank(0, 4, 4)
    context.require_rank(1, 4, 4)
    group, parts = (context.int_of(name) for name in ("group", "offset_group"))
    fits = group > 0 and parts > 0 and x.shape[1] == w.shape[1] * group
    context.require(
        fits and w.shape[0] % group == 0 and x.shape[1] % parts == 0
        and all(size >= 1 for size in w.shape),
        f"channels of DeformConv do not match its weights, {group=} or offset_group={parts}",
        got=f"{x.shape[1]} channels, weights {list(w.shape)}",
    )  # fmt: skip
    check_window_attributes(context, x.shape[2:], w.shape[2:])
    what = f"{context.op} cannot sample an image without elements"
    context.require(0 not in x.shape[2:], what, got=x.shape)
    check_kernel_shape(context, w.shape[2:])
    output = windows_of(context.attributes, x.shape[2:], w.shape[2:]).output
    check_output(context, output)
    places = parts * math.prod(w.shape[2:])
    context.require_shape(2, (x.shape[0], 2 * places, *output))
    context.require_shape(3, w.shape[:1])
    context.require_shape(4, (x.shape[0], places, *output))
    return (ValueType((x.shape[0], w.shape[0], *output), x.data_type),)


def _deformed_row_nbytes(w: Array | ValueType, channels: int, width: int) -> int:
    """Return the bytes of one output row: neighbours, weighted, and sums."""
    kernel = math.prod(w.shape[2:])
    return (60 * channels + 150) * kernel * width + 8 * w.shape[0] * width


def _deformed_rows(height: int, row: int) -> Iterator[slice]:
    """Slice output rows of `row` bytes each into pieces of about equal length."""
    count = -(-height // max(1, _DEFORMED_NBYTES // row))
    return slice_range(height, -(-height // count))


def _deform(arguments: KernelArguments) -> Sequence[Thunk]:
    x, w, offset = (arguments.operand(index) for index in range(3))
    out, mask = arguments.outputs[0], arguments.optional(4)
    parts = arguments.int_of("offset_group")
    group = arguments.int_of("group")
    windows = windows_of(arguments.attributes, x.shape[2:], w.shape[2:])
    rows, columns = (
        (np.arange(windows.output[a]) * windows.strides[a] - windows.begin[a])
        + (np.arange(windows.kernel[a]) * windows.dilations[a])[:, None]
        for a in (0, 1)
    )
    grid_y, grid_x = rows[:, None, :, None], columns[None, :, None, :]
    shape = (x.shape[0], parts, *windows.kernel, 2, *windows.output)
    offsets = offset.reshape(shape)
    masks = None if mask is None else mask.reshape(*shape[:4], *windows.output)
    weights = w.reshape(group, w.shape[0] // group, -1)

    row = _deformed_row_nbytes(w, x.shape[1], windows.output[1])

    def run() -> None:
        for n, image in enumerate(x.reshape(x.shape[0], parts, x.shape[1] // parts, *x.shape[2:])):
            for rows in _deformed_rows(windows.output[0], row):
                gathered = []
                for part, channels in enumerate(image):
                    shift = offsets[n, part][..., rows, :]
                    places = grid_y[:, :, rows] + shift[:, :, 0], grid_x + shift[:, :, 1]
                    samples = sum(
                        (v * k for v, k in bilinear(channels, *places)), start=np.zeros(())
                    )
                    gathered.append(
                        samples if masks is None else samples * masks[n, part][..., rows, :]
                    )
                taps = np.concatenate(gathered).reshape(group, weights.shape[2], -1)
                into = out[n][:, rows]
                into[...] = np.matmul(weights, taps).reshape(into.shape)

    return (run, *bias_steps(arguments.optional(3), out))


_DEFORM_ATTRIBUTES = {k: v for k, v in CONVOLUTION.attributes.items() if k != "auto_pad"}


# RoiAlign -----------------------------------------------------------------------------------------

#: Limit of sampled points along one axis, output size times sampling_ratio.
MAX_SAMPLES = 1 << 13


def _infer_roi(context: InferenceContext) -> tuple[ValueType, ...]:
    x, rois = context.require_type(0, FLOATS), context.require_type(1, FLOATS)
    context.require_same_type((0, 1))
    context.require_type(2, INT64)
    context.require_rank(0, 4, 4)
    context.require_rank(1, 2, 2)
    context.require_shape(1, (rois.shape[0], 4))
    context.require_shape(2, (rois.shape[0],))
    context.require_word("mode", ("avg", "max"))
    context.require_word("coordinate_transformation_mode", ("half_pixel", "output_half_pixel"))
    size = [context.int_of(f"output_{side}") for side in ("height", "width")]
    context.require(
        min(size) >= 1 and 0 not in x.shape[2:], "image or result of RoiAlign is empty",
        expected="sizes >= 1", got=f"image {list(x.shape)}, result {size}",
    )  # fmt: skip
    ratio = context.int_of("sampling_ratio")
    context.require(
        max(size) * max(ratio, 1) <= MAX_SAMPLES, "RoiAlign samples too many points",
        expected=f"output size times sampling_ratio {MAX_SAMPLES} at most",
        got=f"output {size}, sampling_ratio {ratio}",
    )  # fmt: skip
    return (ValueType((rois.shape[0], x.shape[1], *size), x.data_type),)


def _check_regions(rois: Array, size: Shape, scale: float) -> None:
    """Raise `TaskError` for regions that are not finite, or much larger than the image: the work
    grows with a region's area."""
    sides = np.abs(rois[:, 2:] - rois[:, :2]) * abs(scale)
    most = MOST_IMAGES * max(size)
    if not (np.isfinite(rois).all() and (sides <= most).all()):
        raise TaskError(
            "RoiAlign: a region is not finite or too large",
            expected=f"finite corners, sides of at most {most} pixels",
            got=f"sides of up to {sides.max()} pixels",
        )


def _places(start: float, length: float, bins: int, count: int) -> Array:
    """Return the coordinates at which bins are sampled along one axis: [bins, samples]."""
    within = (np.arange(count) + 0.5) / max(count, 1)
    return np.asarray(start + (np.arange(bins)[:, None] + within) * (length / bins))


def _one_roi(image: Array, roi: Array, attributes: Attributes, out: Array) -> None:
    half = string_of(attributes, "coordinate_transformation_mode") == "half_pixel"
    box = roi.astype(np.float64) * float_of(attributes, "spatial_scale") - (0.5 if half else 0.0)
    lengths = box[2:] - box[:2] if half else np.maximum(box[2:] - box[:2], 1.0)
    ratio, averages = int_of(attributes, "sampling_ratio"), string_of(attributes, "mode") == "avg"
    across, down = (
        ratio if ratio > 0 else max(math.ceil(length / bins), 0)
        for length, bins in ((lengths[0], out.shape[2]), (lengths[1], out.shape[1]))
    )
    if not across * down:
        out[...] = 0
        return
    xs = _places(box[0], lengths[0], out.shape[2], across)
    ys = _places(box[1], lengths[1], out.shape[1], down)
    for bin_, places in enumerate(ys):
        total: Array | None = None
        for part in pieces_of(down, _row_nbytes(image.shape[0], xs.size, image.dtype.itemsize)):
            parts = _weighted(image, places[None, part], xs)
            # ONNX's max is that of weighted neighbours, not of interpolated values.
            one = _total(parts).sum((1, 3, 4)) if averages else np.max(parts, 0).max((1, 3, 4))
            if total is not None:
                one = total + one if averages else np.maximum(total, one)
            total = one
        assert total is not None
        out[:, bin_] = total / (down * across) if averages else total


def _row_nbytes(channels: int, columns: int, itemsize: int) -> int:
    """Return the bytes of one row of sampled points: neighbours, weighted and summed."""
    return columns * channels * (4 * itemsize + 80)


def _total(parts: Sequence[Array]) -> Array:
    return sum(parts, start=np.zeros(()))


def _weighted(image: Array, ys: Array, xs: Array) -> list[Array]:
    """Return the weighted neighbours of each point: [channels, rows, columns, down, across]."""
    height, width = image.shape[1:]
    y, x = np.broadcast_arrays(ys[:, None, :, None], xs[None, :, None, :])
    beyond = (y < -1) | (y > height) | (x < -1) | (x > width)
    y, x = np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)
    return [v * np.where(beyond, 0, w) for v, w in bilinear(image, y, x)]


def _roi_align(arguments: KernelArguments) -> Sequence[Thunk]:
    x, rois, indices = (arguments.operand(index) for index in range(3))
    out, checked = arguments.outputs[0], np.empty(indices.shape, np.intp)
    scale = arguments.float_of("spatial_scale")

    def run() -> None:
        check_indices("RoiAlign", indices, x.shape[0], checked)
        _check_regions(rois, x.shape[2:], scale)
        for image, roi, result in zip(checked, rois, out, strict=True):
            _one_roi(x[image], roi, arguments.attributes, result)

    return (run,)


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "GridSample", (2, 2), _infer_grid, _grid,
        attributes=declared(align_corners=0, mode="linear", padding_mode="zeros"),
        batching=in_first_axis(),
    ),
    OpDef(
        "DeformConv", (3, 5), _infer_deform, _deform,
        attributes=declared(**_DEFORM_ATTRIBUTES, offset_group=1), batching=in_first_axis(1, 3),
    ),
    OpDef(
        "RoiAlign", (3, 3), _infer_roi, _roi_align,
        attributes=declared(
            coordinate_transformation_mode="half_pixel", mode="avg", output_height=1,
            output_width=1, sampling_ratio=0, spatial_scale=1.0,
        ),
        checks=True,
    ),
)  # fmt: skip

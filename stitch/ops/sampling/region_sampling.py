"""RoiAlign: regions of images, sampled between elements and gathered into bins.

The regions are data: one that is no number, or so large that its samples would be without end, is
refused. Source: ONNX's RoiAlign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stitch.errors import TaskError
from stitch.ops.attributes import Attributes, float_of, int_of, string_of
from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS, INT64
from stitch.ops.inference import InferenceContext, Shape
from stitch.ops.sampling.grid_sampling import bilinear
from stitch.ops.sampling.sampling_batching import roi_align
from stitch.ops.steps import check_indices, stretches
from stitch.ops.workspaces import WorkspaceContext, WorkspaceRule
from stitch.program import Array, ValueType

#: The longest side of a region to align, in longer sides of the image.
MOST_IMAGES = 4
#: Places at which an attribute may ask a region to be sampled along one axis.
MAX_SAMPLES = 1 << 13
#: Places that are looked at together (or one row of a bin's samples), and about how many bytes of
#: channels at them.
_PIECE = 1 << 14
_PIECE_NBYTES = 1 << 24


def _infer_roi(context: InferenceContext) -> tuple[ValueType, ...]:
    x, rois = context.require_type(0, FLOATS), context.require_type(1, FLOATS)
    context.require_same_type((0, 1))
    context.require_type(2, INT64)
    context.require_rank(0, 4, 4)
    context.require_rank(1, 2, 2)
    context.require_shape(1, (rois.shape[0], 4))
    context.require_shape(2, (rois.shape[0],))
    words = {"mode": ("avg", "max"), "coordinate_transformation_mode": (
        "half_pixel", "output_half_pixel",
    )}  # fmt: skip
    for name, known in words.items():
        if context.string_of(name) not in known:
            raise context.fail(f"{name} of RoiAlign has no such value", expected=", ".join(known))
    size = [context.int_of(f"output_{side}") for side in ("height", "width")]
    if min(size) < 1 or 0 in x.shape[2:]:
        raise context.fail("RoiAlign needs images and results that are not empty", got=size)
    ratio = context.int_of("sampling_ratio")
    if max(size) * max(ratio, 1) > MAX_SAMPLES:
        raise context.fail(
            "RoiAlign would sample a region at too many places",
            expected=f"at most {MAX_SAMPLES} along an axis",
            got=f"results of {size}, sampling_ratio {ratio}",
        )
    return (ValueType((rois.shape[0], x.shape[1], *size), x.data_type),)


def _check_regions(rois: Array, size: Shape, scale: float) -> None:
    """Raises `TaskError` for regions that are not finite, or far larger than the image: each pixel
    of a region is sampled."""
    sides = np.abs(rois[:, 2:] - rois[:, :2]) * abs(scale)
    most = MOST_IMAGES * max(size)
    if not (np.isfinite(rois).all() and (sides <= most).all()):
        raise TaskError(
            "RoiAlign: a region is not finite, or far larger than the image",
            expected=f"finite corners, sides of at most {most} pixels",
            got=f"sides of up to {sides.max()}",
        )


def _places(start: float, length: float, bins: int, count: int) -> Array:
    """Where each bin is sampled along one axis: (bins, samples)."""
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
    channels = _channels(_points(ys.size, xs.size), image.dtype.itemsize)
    for part in stretches(len(image), channels):
        _bins(image[part], ys, xs, averages, out[part])


def _points(rows: int, columns: int) -> int:
    """The most places that are looked at together, of so many."""
    return min(rows * columns, max(_PIECE, columns))


def _channel_nbytes(points: int, itemsize: int) -> int:
    """What the neighbours of so many places take for one channel: as they are, weighed, summed."""
    return points * (4 * itemsize + 80)


def _channels(points: int, itemsize: int) -> int:
    """How many channels are looked at together."""
    return max(1, _PIECE_NBYTES // _channel_nbytes(points, itemsize))


def _bins(image: Array, ys: Array, xs: Array, averages: bool, out: Array) -> None:
    """The bins of one region and some channels."""
    if ys.size * xs.size <= _PIECE:
        parts = _weighed(image, ys, xs)
        # ONNX takes the largest weighted neighbour, not the largest interpolated value.
        out[...] = _total(parts).mean((3, 4)) if averages else np.max(parts, 0).max((3, 4))
        return
    rows, down = max(1, _PIECE // xs.size), ys.shape[1]
    for bin_, places in enumerate(ys):
        total: Array | None = None
        for part in stretches(down, rows):
            parts = _weighed(image, places[None, part], xs)
            one = _total(parts).sum((1, 3, 4)) if averages else np.max(parts, 0).max((1, 3, 4))
            if total is not None:
                one = total + one if averages else np.maximum(total, one)
            total = one
        assert total is not None
        out[:, bin_] = total / (down * xs.shape[1]) if averages else total


def _total(parts: Sequence[Array]) -> Array:
    return sum(parts, start=np.zeros(()))


def _weighed(image: Array, ys: Array, xs: Array) -> list[Array]:
    """The four neighbours of each place, weighed: (channels, rows, columns, down, across) each."""
    height, width = image.shape[1:]
    y, x = np.broadcast_arrays(ys[:, None, :, None], xs[None, :, None, :])
    beyond = (y < -1) | (y > height) | (x < -1) | (x > width)
    y, x = np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)
    return [v * np.where(beyond, 0, w) for v, w in bilinear(image, y, x)]


def _roi_align(arguments: KernelArguments) -> Sequence[Thunk]:
    x, rois, indices = (arguments.given(index) for index in range(3))
    out, checked = arguments.outputs[0], np.empty(indices.shape, np.intp)
    scale = arguments.float_of("spatial_scale")

    def run() -> None:
        check_indices("RoiAlign", indices, x.shape[0], checked)
        _check_regions(rois, x.shape[2:], scale)
        for image, roi, result in zip(checked, rois, out, strict=True):
            _one_roi(x[image], roi, arguments.attributes, result)

    return (run,)


def _workspace(context: WorkspaceContext) -> int:
    """The places of a region, their weights, and the channels at those looked at together. Where
    the regions decide how many places there are: as many as the largest that is not refused has."""
    x, rois = context.operand(0), context.operand(1)
    ratio, itemsize = (context.int_of("sampling_ratio"), x.data_type.compute_dtype.itemsize)
    rows, columns = (
        bins * ratio if ratio > 0 else MOST_IMAGES * max(x.shape[2:]) + bins
        for bins in context.outputs[0].shape[2:]
    )
    points = _points(rows, columns)
    channels = min(x.shape[1], _channels(points, itemsize))
    sums = 4 * 8 * math.prod(context.outputs[0].shape[1:])
    region = channels * _channel_nbytes(points, itemsize) + 200 * points + 40 * (rows + columns)
    return region + sums + 80 * rois.shape[0]


OPERATORS = (
    OpDef(
        "RoiAlign", (3, 3), _infer_roi, _roi_align,
        attributes=declared(
            coordinate_transformation_mode="half_pixel", mode="avg", output_height=1,
            output_width=1, sampling_ratio=0, spatial_scale=1.0,
        ),
        batching=roi_align, workspace=WorkspaceRule(_workspace, is_kept=False), checks=True,
    ),
)  # fmt: skip

"""ATen operators of backward passes that torch's decompositions leave whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, KeptWhole, Row, in_one_type
from stitch.frontend.torch.lowering.picked_elements import slice_scatter
from stitch.frontend.torch.lowering.window_operators import (
    spread,
    weighted,
    window_reads,
    window_weights,
)
from stitch.frontend.torch.pool_gradients import GRADIENT
from stitch.graph import SymbolicTensor
from stitch.program import Array

aten = torch.ops.aten
Three = tuple[SymbolicTensor | None, SymbolicTensor | None, SymbolicTensor | None]
Sizes = Sequence[int]
#: The domain of Stitch's own operators.
OWN = "stitch"


def _convolution_backward(
    call: Call,
    grad: SymbolicTensor,
    x: SymbolicTensor,
    weight: SymbolicTensor,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    wanted: Sequence[bool],
) -> Three:
    b, spatial = call.builder, len(weight.shape) - 2
    if not transposed and not weight.shape[1]:
        of_x, of_weight, of_bias = (
            None if kind is None else b.constant(np.zeros(kind.shape, kind.data_type.dtype))
            for kind in call.results
        )
        return of_x, of_weight, of_bias
    steps, pads = spread(stride, spatial), spread(padding, spatial)
    attributes: dict[str, Any] = {
        "strides": steps, "pads": pads * 2, "dilations": spread(dilation, spatial), "group": groups,
    }  # fmt: skip
    of_x = of_weight = of_bias = None
    if wanted[0] and 0 in call.used and transposed:
        of_x = b.op("Conv", grad, weight, **attributes)
    elif wanted[0] and 0 in call.used:
        # What the strides skipped at the end of each axis saw no window.
        skipped = [
            length + 2 * p - d * (k - 1) - 1 - (count - 1) * s
            for length, p, d, k, count, s in zip(
                x.shape[2:], pads, attributes["dilations"], weight.shape[2:], grad.shape[2:],
                steps, strict=True,
            )
        ]  # fmt: skip
        of_x = b.op("ConvTranspose", grad, weight, **attributes, output_padding=skipped)
    if wanted[1] and 1 in call.used:
        # A transposed convolution is the gradient of a plain one: the two only change places.
        image, seen = (grad, x) if transposed else (x, grad)
        shape = list(weight.shape[2:])
        of_weight = b.op(
            "ConvWeightGradient", image, seen, domain=OWN, **attributes, kernel_shape=shape
        )
    if wanted[2] and 2 in call.used:
        of_bias = b.reduce_sum(grad, (0, *range(2, spatial + 2)))
    return of_x, of_weight, of_bias


# Pooling -------------------------------------------------------------------------------------


def _max_pool_backward(
    spatial: int, call: Call, grad: SymbolicTensor, x: SymbolicTensor, *operands: Any
) -> SymbolicTensor:
    """Each gradient goes to the place that had the maximum; several windows may share one."""
    b, indices = call.builder, operands[-1]
    planes = math.prod(x.shape[:-spatial])
    empty = b.broadcast(call.cast(0), (planes, math.prod(x.shape[-spatial:])))
    places, parts = b.reshape(indices, (planes, -1)), b.reshape(grad, (planes, -1))
    added = b.op("ScatterElements", empty, places, parts, axis=1, reduction="add")
    return b.reshape(added, x.shape)


def _max_pool_by_result(
    call: Call, grad: SymbolicTensor, x: SymbolicTensor, result: SymbolicTensor, kernel: Sizes,
    stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool,
) -> SymbolicTensor:  # fmt: skip
    b, is_single = call.builder, len(x.shape) == len(kernel) + 1
    operands = [b.unsqueeze(t, 0) if is_single else t for t in (call.cast(grad), x, result)]
    of_x = b.op(
        "MaxPoolGradient", *operands, domain=OWN, kernel_shape=list(kernel), strides=list(stride),
        pads=list(padding) * 2, dilations=list(dilation), ceil_mode=int(ceil_mode),
    )  # fmt: skip
    return b.squeeze(of_x, 0) if is_single else of_x


def _average_pool_backward(
    spatial: int,
    call: Call,
    grad: SymbolicTensor,
    x: SymbolicTensor,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes | int,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> SymbolicTensor:
    """Per axis a product with the weights with which windows read places, transposed."""
    kernel = spread(kernel_size, spatial)
    strides = spread(stride, spatial) if stride else kernel
    counts: list[Array] = []
    for axis, pad in enumerate(spread(padding, spatial)):
        length, count = x.shape[axis - spatial], grad.shape[axis - spatial]
        starts = np.arange(count) * strides[axis] - pad
        reads = window_reads(length, count, kernel[axis], strides[axis], pad)
        ends = np.minimum(starts + kernel[axis], length + pad)
        size = ends - starts if count_include_pad else reads.sum(1)
        divided = divisor_override is not None
        counts.append(reads / (np.ones(count) if divided else size)[:, None])
    result = weighted(call, grad, counts)
    return result if divisor_override is None else call.builder.mul(result, 1.0 / divisor_override)


def _adaptive_average_backward(
    spatial: int, call: Call, grad: SymbolicTensor, x: SymbolicTensor
) -> SymbolicTensor:
    b, lengths, sizes = call.builder, x.shape[-spatial:], grad.shape[-spatial:]
    if all(size == 1 for size in sizes):
        return b.broadcast(b.mul(grad, 1.0 / math.prod(lengths)), x.shape)
    tables = [window_weights(n, s).T for n, s in zip(lengths, sizes, strict=True)]
    return weighted(call, grad, tables)


def _replicated_backward(
    spatial: int, call: Call, grad: SymbolicTensor, x: SymbolicTensor, padding: Sizes
) -> SymbolicTensor:
    """Each gradient goes to the element that its place repeats."""
    if 0 in grad.shape or 0 in x.shape:
        return call.filled(0)
    b, places = call.builder, np.zeros(1, np.int64)
    for axis in range(spatial):
        length, count = x.shape[axis - spatial], grad.shape[axis - spatial]
        along = np.clip(np.arange(count) - padding[2 * (spatial - 1 - axis)], 0, length - 1)
        places = np.add.outer(places * length, along).reshape(-1)
    planes, size = math.prod(x.shape[:-spatial]), math.prod(x.shape[-spatial:])
    empty = b.broadcast(call.cast(0), (planes, size))
    index = b.broadcast(b.constant(places), (planes, places.size))
    parts = b.reshape(grad, (planes, places.size))
    added = b.op("ScatterElements", empty, index, parts, axis=1, reduction="add")
    return b.reshape(added, x.shape)


# Parts ---------------------------------------------------------------------------------------


def _select_backward(
    call: Call, grad: SymbolicTensor, sizes: Sizes, dim: int, index: int
) -> SymbolicTensor:
    wide = call.builder.unsqueeze(grad, dim % len(sizes))
    return _slice_backward(call, wide, sizes, dim, index % sizes[dim], index % sizes[dim] + 1, 1)


def _slice_backward(
    call: Call, grad: SymbolicTensor, sizes: Sizes, dim: int, start: int, end: int, step: int
) -> SymbolicTensor:
    """The gradient of a part among zeros."""
    axis = dim % len(sizes)
    first, last, _ = slice(start, end, step).indices(sizes[axis])
    if step != 1 or 0 in grad.shape:
        return slice_scatter(call, call.filled(0), grad, axis, start, end, step)
    before, after = [0] * len(sizes), [0] * len(sizes)
    before[axis], after[axis] = first, sizes[axis] - last
    if not any((*before, *after)):
        return grad
    zero = call.cast(0, grad.data_type)
    return call.builder.op("Pad", grad, before + after, zero)


def _gelu_backward(
    call: Call, grad: SymbolicTensor, x: SymbolicTensor, *, approximate: str = "none"
) -> SymbolicTensor:
    b, operands = call.builder, (call.cast(grad), call.cast(x))
    return b.op("GeluGradient", *operands, domain=OWN, approximate=approximate)


@in_one_type
def _layer_norm_backward(
    call: Call,
    grad: SymbolicTensor,
    x: SymbolicTensor,
    normalized_shape: Sizes,
    mean: SymbolicTensor,
    inverse: SymbolicTensor,
    weight: SymbolicTensor | None,
    bias: SymbolicTensor | None,
    wanted: Sequence[bool],
) -> Three:
    if weight is None:
        weight = call.builder.constant(np.ones(tuple(normalized_shape), x.dtype))
    attributes = {"axis": len(x.shape) - len(normalized_shape)}
    operands = [grad, x, mean, inverse, weight]
    parts = call.builder.apply("LayerNormalizationGradient", operands, 3, attributes, OWN)
    first, second, third = (part if wanted[i] else None for i, part in enumerate(parts))
    return first, second, third


@in_one_type
def _batch_norm_backward(
    call: Call,
    grad: SymbolicTensor,
    x: SymbolicTensor,
    weight: SymbolicTensor | None,
    running_mean: SymbolicTensor | None,
    running_variance: SymbolicTensor | None,
    mean: SymbolicTensor | None,
    inverse: SymbolicTensor | None,
    training: bool,
    epsilon: float,
    wanted: Sequence[bool],
) -> Three:
    """By the batch's own statistics one operator, by those that ran before a line per element."""
    b, scale = call.builder, call.optional(weight, 1, (x.shape[1],))
    if training:
        assert mean is not None and inverse is not None, "a training pass has kept both"
        # One over the deviation, of which its operator asks the variance.
        variance = b.sub(b.reciprocal(b.square(inverse)), float(epsilon))
        operands = [grad, x, scale, mean, variance]
        parts = b.apply("BatchNormalizationGradient", operands, 3, {"epsilon": epsilon}, OWN)
        first, second, third = (part if wanted[i] else None for i, part in enumerate(parts))
        return first, second, third
    assert running_mean is not None and running_variance is not None, "it has run by these"
    wide, axes = (x.shape[1],) + (1,) * (len(x.shape) - 2), (0, *range(2, len(x.shape)))
    inverse = b.rsqrt(b.add(running_variance, float(epsilon)))
    of_x = b.mul(grad, b.reshape(b.mul(scale, inverse), wide))
    centred = b.sub(x, b.reshape(running_mean, wide))
    of_scale = b.mul(b.reduce_sum(b.mul(grad, centred), axes), inverse)
    of_shift = b.reduce_sum(grad, axes)
    return (
        of_x if wanted[0] else None, of_scale if wanted[1] else None,
        of_shift if wanted[2] else None,
    )  # fmt: skip


def _softmax_backward(
    call: Call, grad: SymbolicTensor, result: SymbolicTensor, dim: int, _: Any
) -> SymbolicTensor:
    if not result.shape:
        return call.filled(0)
    b, axis = call.builder, dim % len(result.shape)
    same = b.cast(grad, result.data_type)
    return call.cast(b.op("SoftmaxGradient", same, result, domain=OWN, axis=axis))


LOWERINGS: dict[Any, Row] = {
    aten.gelu_backward.default: KeptWhole(_gelu_backward, exported=False),
    aten.native_layer_norm_backward.default: KeptWhole(_layer_norm_backward, exported=False),
    aten.native_batch_norm_backward.default: KeptWhole(_batch_norm_backward, exported=False),
    aten._softmax_backward_data.default: KeptWhole(_softmax_backward, exported=False),
    aten.convolution_backward.default: _convolution_backward,
    GRADIENT: _max_pool_by_result,
    aten.max_pool2d_with_indices_backward.default: partial(_max_pool_backward, 2),
    aten.max_pool3d_with_indices_backward.default: partial(_max_pool_backward, 3),
    aten.adaptive_max_pool3d_backward.default: partial(_max_pool_backward, 3),
    aten.replication_pad1d_backward.default: partial(_replicated_backward, 1),
    aten.replication_pad2d_backward.default: partial(_replicated_backward, 2),
    aten.replication_pad3d_backward.default: partial(_replicated_backward, 3),
    aten.adaptive_max_pool2d_backward.default: partial(_max_pool_backward, 2),
    aten.avg_pool2d_backward.default: partial(_average_pool_backward, 2),
    aten.avg_pool3d_backward.default: partial(_average_pool_backward, 3),
    aten.select_backward.default: KeptWhole(_select_backward, exported=False),
    aten.slice_backward.default: KeptWhole(_slice_backward, exported=False),
    aten._adaptive_avg_pool2d_backward.default: partial(_adaptive_average_backward, 2),
    aten._adaptive_avg_pool3d_backward.default: partial(_adaptive_average_backward, 3),
}  # fmt: skip


def join_selected(graph: Any) -> None:
    """A sum of the gradients of x[0], x[1], ... of all parts of x is those gradients stacked."""
    for node in reversed(list(graph.nodes)):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        leaves = _selected(node)
        if leaves is None:
            continue
        (sizes, dim), *others = {(tuple(n.args[1]), n.args[2] % len(n.args[1])) for n in leaves}
        parts = {n.args[3] % sizes[dim]: n.args[0] for n in leaves}
        if others or len(leaves) != len(parts) or len(parts) != sizes[dim]:
            continue
        node.target, node.args = aten.stack.default, ([parts[i] for i in sorted(parts)], dim)
    for node in reversed(list(graph.nodes)):
        if node.target in (aten.add.Tensor, aten.select_backward.default) and not node.users:
            graph.erase_node(node)


def _selected(node: Any) -> list[Any] | None:
    """The gradients of parts that a node alone reads, and of which it is the sum; else None."""
    if node.target is aten.select_backward.default:
        return [node]
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    gradients: list[Any] = []
    for operand in node.args:
        alone = isinstance(operand, torch.fx.Node) and len(operand.users) == 1
        leaves = _selected(operand) if alone else None
        if leaves is None:
            return None
        gradients += leaves
    return gradients

"""ATen operators of backward passes that torch does not decompose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, KeptWhole, Row, Several, in_one_type
from stitch.frontend.torch.lowering.picked_elements import slice_scatter
from stitch.frontend.torch.lowering.window_operators import (
    spread,
    weighted,
    window_reads,
    window_weights,
)
from stitch.graph import SymbolicTensor
from stitch.program import Array

aten = torch.ops.aten
Sizes = Sequence[int]
#: The domain of Stitch's own operators.
OWN = "stitch"


def _convolution_backward(
    call: Call, grad: SymbolicTensor, x: SymbolicTensor, weight: SymbolicTensor,
    bias_sizes: Sizes | None, stride: Sizes, padding: Sizes, dilation: Sizes, transposed: bool,
    output_padding: Sizes, groups: int, wanted: Sequence[bool],
) -> Several:  # fmt: skip
    b, spatial = call.builder, len(weight.shape) - 2
    if not transposed and not weight.shape[1]:
        return tuple(
            None if kind is None else b.constant(np.zeros(kind.shape, kind.data_type.dtype))
            for kind in call.results
        )
    steps, pads = spread(stride, spatial), spread(padding, spatial)
    attributes: dict[str, Any] = {
        "strides": steps, "pads": pads * 2, "dilations": spread(dilation, spatial), "group": groups,
    }  # fmt: skip
    of_x = of_weight = of_bias = None
    if wanted[0] and 0 in call.used and transposed:
        of_x = b.op("Conv", grad, weight, **attributes)
    elif wanted[0] and 0 in call.used:
        # Elements at the end of each axis that the strides skip.
        skipped = [
            length + 2 * p - d * (k - 1) - 1 - (count - 1) * s
            for length, p, d, k, count, s in zip(
                x.shape[2:], pads, attributes["dilations"], weight.shape[2:], grad.shape[2:],
                steps, strict=True,
            )
        ]  # fmt: skip
        of_x = b.op("ConvTranspose", grad, weight, **attributes, output_padding=skipped)
    if wanted[1] and 1 in call.used:
        # A transposed convolution is the gradient of a plain one, so the two are swapped.
        image, seen = (grad, x) if transposed else (x, grad)
        shape = list(weight.shape[2:])
        of_weight = b.op(
            "ConvWeightGradient", image, seen, domain=OWN, **attributes, kernel_shape=shape
        )
    if wanted[2] and 2 in call.used:
        of_bias = b.reduce_sum(grad, (0, *range(2, spatial + 2)))
    return of_x, of_weight, of_bias


# Pooling -------------------------------------------------------------------------------------

#: By the number of spatial axes: max pooling with indices, and its gradient by these.
_POOLS = {
    2: (aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward),
    3: (aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward),
}


def max_pool_gradient(
    gradient: torch.Tensor, x: torch.Tensor, result: torch.Tensor, kernel: list[int],
    stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool,
) -> torch.Tensor:  # fmt: skip
    """The gradient of a max pool by its operand and result, for graphs that torch runs."""
    pool, backward = _POOLS[len(kernel)]
    windows = kernel, stride, padding, dilation, ceil_mode
    of_x: torch.Tensor = backward(gradient, x, *windows, pool(x, *windows)[1])
    return of_x


_OPERATOR = torch.library.custom_op("stitch::max_pool_gradient", max_pool_gradient, mutates_args=())
_OPERATOR.register_fake(lambda gradient, x, *_: torch.empty_like(x))
MAX_POOL_GRADIENT = torch.ops.stitch.max_pool_gradient.default


def _decomposed_pool_gradient(spatial: int, gradient: Any, x: Any, *operands: Any) -> Any:
    """Needs no indices from the forward pass. Its pool is merged with that of the forward pass,
    because equal nodes are merged."""
    *windows, ceil_mode, _ = operands
    kernel, stride, padding, dilation = (
        list(each) * (spatial if len(each) == 1 else 1) for each in windows
    )
    result, _ = _POOLS[spatial][0](x, *windows, ceil_mode)
    return MAX_POOL_GRADIENT(
        gradient, x, result, kernel, stride or kernel, padding, dilation, ceil_mode
    )


#: For aot_autograd.
POOL_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    backward.default: partial(_decomposed_pool_gradient, spatial)
    for spatial, (_, backward) in _POOLS.items()
}


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
    spatial: int, call: Call, grad: SymbolicTensor, x: SymbolicTensor, kernel_size: Sizes,
    stride: Sizes, padding: Sizes | int, ceil_mode: bool, count_include_pad: bool,
    divisor_override: int | None,
) -> SymbolicTensor:  # fmt: skip
    """Multiply along each axis by the transposed weights of the windows."""
    kernel = spread(kernel_size, spatial)
    strides = spread(stride, spatial) if stride else kernel
    counts: list[Array] = []
    for axis, pad in enumerate(spread(padding, spatial)):
        length, count = x.shape[axis - spatial], grad.shape[axis - spatial]
        starts = np.arange(count) * strides[axis] - pad
        reads = window_reads(length, count, kernel[axis], strides[axis], pad)
        ends = np.minimum(starts + kernel[axis], length + pad)
        size = ends - starts if count_include_pad else reads.sum(1)
        counts.append(reads / size[:, None] if divisor_override is None else reads)
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


# Parts ---------------------------------------------------------------------------------------


def _select_backward(
    call: Call, grad: SymbolicTensor, sizes: Sizes, dim: int, index: int
) -> SymbolicTensor:
    wide = call.builder.unsqueeze(grad, dim % len(sizes))
    return _slice_backward(call, wide, sizes, dim, index % sizes[dim], index % sizes[dim] + 1, 1)


def _slice_backward(
    call: Call, grad: SymbolicTensor, sizes: Sizes, dim: int, start: int, end: int, step: int
) -> SymbolicTensor:
    """Pad the gradient of a slice with zeros."""
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
    call: Call, grad: SymbolicTensor, x: SymbolicTensor, normalized_shape: Sizes,
    mean: SymbolicTensor, inverse: SymbolicTensor, weight: SymbolicTensor | None,
    bias: SymbolicTensor | None, wanted: Sequence[bool],
) -> Several:  # fmt: skip
    if weight is None:
        weight = call.builder.constant(np.ones(tuple(normalized_shape), x.dtype))
    attributes = {"axis": len(x.shape) - len(normalized_shape)}
    operands = [grad, x, mean, inverse, weight]
    parts = call.builder.apply("LayerNormalizationGradient", operands, 3, attributes, OWN)
    return _wanted(parts, wanted)


def _wanted(parts: Sequence[SymbolicTensor], wanted: Sequence[bool]) -> Several:
    return tuple(part if is_wanted else None for part, is_wanted in zip(parts, wanted, strict=True))


@in_one_type
def _batch_norm_backward(
    call: Call, grad: SymbolicTensor, x: SymbolicTensor, weight: SymbolicTensor | None,
    running_mean: SymbolicTensor | None, running_variance: SymbolicTensor | None,
    mean: SymbolicTensor | None, inverse: SymbolicTensor | None, training: bool, epsilon: float,
    wanted: Sequence[bool],
) -> Several:  # fmt: skip
    """One operator for the batch's own statistics; an affine function of each element for running
    ones."""
    b, scale = call.builder, call.optional(weight, 1, (x.shape[1],))
    if training:
        assert mean is not None and inverse is not None, "the forward pass saved both"
        variance = b.sub(b.reciprocal(b.square(inverse)), float(epsilon))
        operands = [grad, x, scale, mean, variance]
        parts = b.apply("BatchNormalizationGradient", operands, 3, {"epsilon": epsilon}, OWN)
        return _wanted(parts, wanted)
    assert running_mean is not None and running_variance is not None, "the forward pass read both"
    wide, axes = (x.shape[1],) + (1,) * (len(x.shape) - 2), (0, *range(2, len(x.shape)))
    inverse = b.rsqrt(b.add(running_variance, float(epsilon)))
    of_x = b.mul(grad, b.reshape(b.mul(scale, inverse), wide))
    centred = b.sub(x, b.reshape(running_mean, wide))
    of_scale = b.mul(b.reduce_sum(b.mul(grad, centred), axes), inverse)
    return _wanted((of_x, of_scale, b.reduce_sum(grad, axes)), wanted)


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
    MAX_POOL_GRADIENT: _max_pool_by_result,
    aten.avg_pool2d_backward.default: partial(_average_pool_backward, 2),
    aten.avg_pool3d_backward.default: partial(_average_pool_backward, 3),
    aten.select_backward.default: KeptWhole(_select_backward, exported=False),
    aten.slice_backward.default: KeptWhole(_slice_backward, exported=False),
    aten._adaptive_avg_pool2d_backward.default: partial(_adaptive_average_backward, 2),
    aten._adaptive_avg_pool3d_backward.default: partial(_adaptive_average_backward, 3),
}  # fmt: skip


def join_selected(graph: Any) -> None:
    """Replace a sum of the gradients of all of x[0], x[1], ... by a stack of those gradients."""
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
    """The select_backward nodes of which a node is the sum, if only it reads them; else None."""
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

"""ATen operators with weights: products of matrices, linear layers, convolution."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, KeptWhole, Number, Row
from stitch.frontend.torch.lowering.window_operators import spread
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten


def _matmul(call: Call, a: SymbolicTensor, b: SymbolicTensor) -> SymbolicTensor:
    kind = _summed_type(call)
    return call.cast(call.builder.matmul(call.cast(a, kind), call.cast(b, kind)))


def _summed_type(call: Call) -> DataType:
    """The type in which products are summed: ONNX multiplies no matrices of narrow integers, and
    torch's sums are those of int32 modulo the range of the type."""
    is_narrow = not call.data_type.is_floating and call.data_type.dtype.itemsize < 4
    return DataType.INT32 if is_narrow else call.data_type


def _linear(
    call: Call, x: SymbolicTensor, weight: SymbolicTensor, bias: SymbolicTensor | None = None
) -> SymbolicTensor:
    b = call.builder
    is_matrix = len(weight.shape) == 2 and x.shape
    if is_matrix and call.data_type.is_floating:
        return b.linear(x, weight, bias)
    product = _matmul(call, x, b.transpose(weight, (1, 0)) if is_matrix else weight)
    return product if bias is None else b.add(product, bias)


def _add_product(
    call: Call,
    added: SymbolicTensor,
    first: SymbolicTensor,
    second: SymbolicTensor,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> SymbolicTensor:
    """beta added + alpha (first second): a Gemm for matrices."""
    b, tensors = call.builder, [call.cast(t) for t in (first, second, added)]
    if len(first.shape) == len(second.shape) == 2 and call.data_type.is_floating:
        attributes: dict[str, Any] = {
            name: float(value) for name, value in (("alpha", alpha), ("beta", beta)) if value != 1
        }
        kept = tensors if beta != 0 else tensors[:2]
        return b.apply("Gemm", kept, 1, attributes)[0]
    product = _matmul(call, tensors[0], tensors[1])
    scaled = product if alpha == 1 else b.mul(product, call.cast(alpha))
    if beta == 0:
        return b.broadcast(scaled, call.shape)
    return b.add(tensors[2] if beta == 1 else b.mul(tensors[2], call.cast(beta)), scaled)


def _add_products(
    call: Call,
    added: SymbolicTensor,
    first: SymbolicTensor,
    second: SymbolicTensor,
    **factors: Number,
) -> SymbolicTensor:
    """beta added + alpha (the sum of all products): one product of matrices laid side by side."""
    b, (count, rows, width) = call.builder, first.shape
    beside = b.reshape(b.transpose(first, (1, 0, 2)), (rows, count * width))
    below = b.reshape(second, (count * width, second.shape[-1]))
    return _add_product(call, added, beside, below, **factors)


def _trilinear(
    call: Call,
    first: SymbolicTensor,
    second: SymbolicTensor,
    third: SymbolicTensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> SymbolicTensor:
    """The product of three tensors, each without some of the axes, summed over others."""
    letters = string.ascii_lowercase[: len(first.shape) + len(expand1)]

    def without(axes: Sequence[int]) -> str:
        return "".join(letter for axis, letter in enumerate(letters) if axis not in axes)

    # Two at a time: the product of all three is larger than any of them.
    pair = "".join(
        letter for axis, letter in enumerate(letters)
        if not (axis in expand1 and axis in expand2)
        and not (axis in sumdim and axis in expand3)
    )  # fmt: skip
    b, (given, result) = call.builder, (map(without, (expand1, expand2, expand3)), without(sumdim))
    one, two, three = given
    product = b.einsum(f"{one},{two}->{pair}", first, second)
    return b.einsum(f"{pair},{three}->{result}", product, third)


def _convolution(
    call: Call,
    x: SymbolicTensor,
    weight: SymbolicTensor,
    bias: SymbolicTensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> SymbolicTensor:
    b, spatial = call.builder, len(weight.shape) - 2
    if not transposed and not weight.shape[1]:
        # Of no input channels torch makes no output channels, however many weights there are.
        return b.constant(np.zeros(call.shape, call.data_type.dtype))
    single = len(x.shape) == spatial + 1
    batch = b.unsqueeze(x, 0) if single else x
    attributes: dict[str, Any] = {
        "strides": spread(stride, spatial), "pads": spread(padding, spatial) * 2,
        "dilations": spread(dilation, spatial), "group": groups,
    }  # fmt: skip
    if transposed:
        attributes["output_padding"] = spread(output_padding, spatial)
    result = b.op("ConvTranspose" if transposed else "Conv", batch, weight, bias, **attributes)
    return b.squeeze(result, 0) if single else result


LOWERINGS: dict[Any, Row] = {
    aten.mm.default: _matmul, aten.bmm.default: _matmul, aten.matmul.default: KeptWhole(_matmul),
    aten.mv.default: _matmul, aten.dot.default: _matmul, aten.linear.default: KeptWhole(_linear),
    aten.addmm.default: _add_product, aten.baddbmm.default: _add_product,
    aten._trilinear.default: _trilinear,
    aten.addmv.default: _add_product, aten.addbmm.default: _add_products,
    aten.convolution.default: _convolution,
}  # fmt: skip

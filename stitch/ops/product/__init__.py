"""Sums of products: MatMul, Einsum, transforms of signals, determinants, products of bytes.

Knows windows and types: a product of quantized numbers may be a convolution.
"""

from stitch.ops.definition import OpDef
from stitch.ops.product import einsum, fourier, matmul, quantized_products

__all__ = ["OPERATORS"]

OPERATORS: tuple[OpDef, ...] = (
    *matmul.OPERATORS,
    *einsum.OPERATORS,
    *quantized_products.OPERATORS,
    *fourier.OPERATORS,
)

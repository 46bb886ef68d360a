"""Sums of products: MatMul, Einsum, transforms of signals, determinants, products of bytes.

Comes in: matrices and batches of them. Goes out: `OPERATORS`, their gradient rules inside them.
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

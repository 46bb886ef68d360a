"""The one list of operators: each themed file adds its tuple, and a name may come only once.

A new operator is one `OpDef` in the tuple `OPERATORS` of the file of its theme, and one row in
the table of cases of a test file: `test_every_operator_has_a_case` asks for it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from itertools import chain

from stitch.errors import CompileError
from stitch.ops import (
    activation,
    batch_normalization,
    cache_writing,
    casting,
    checking,
    comparison,
    convolution,
    convolution_weights,
    counting,
    determinant,
    einsum,
    elementary,
    elementwise,
    error_function,
    fourier,
    gelu_gradient,
    generating,
    indexing,
    layer_gradient,
    matmul,
    max_pool_gradient,
    normalization,
    optimizer_steps,
    padding,
    pooling,
    quantization,
    quantized_products,
    rearranging,
    recurrent,
    reduction,
    region_sampling,
    resampling,
    reshaping,
    sampling,
    scanning,
    scattering,
    softmax,
    softmax_gradient,
    unfolding,
)
from stitch.ops.definition import OpDef

_THEMES = (
    elementwise, elementary, comparison, activation, gelu_gradient, error_function, matmul,
    convolution, convolution_weights, pooling, max_pool_gradient, batch_normalization,
    normalization, layer_gradient, softmax, softmax_gradient, reduction, scanning, reshaping,
    rearranging, padding, indexing, scattering, generating, casting, einsum, recurrent, resampling,
    quantization, quantized_products, fourier, sampling, region_sampling, unfolding, determinant,
    cache_writing, counting, optimizer_steps, checking,
)  # fmt: skip
_OPERATORS: tuple[OpDef, ...] = tuple(chain.from_iterable(theme.OPERATORS for theme in _THEMES))
_BY_NAME = {(definition.domain, definition.name): definition for definition in _OPERATORS}

assert len(_BY_NAME) == len(_OPERATORS), [
    key for key, times in Counter((d.domain, d.name) for d in _OPERATORS).items() if times > 1
]


def operators() -> tuple[OpDef, ...]:
    """Every operator that Stitch knows."""
    return _OPERATORS


def lookup(op: str, domain: str = "") -> OpDef:
    """The definition of an operator; raises `CompileError` that names close matches.

    >>> lookup("Relu").elementwise
    True
    """
    domain = "" if domain == "ai.onnx" else domain
    found = _BY_NAME.get((domain, op))
    if found is None:
        names = [name for space, name in _BY_NAME if space == domain]
        near = difflib.get_close_matches(op, names, 3)
        shown = f"{domain}.{op}" if domain else op
        raise CompileError(
            f"unknown operator {shown!r}",
            expected=f"one of {len(names)} operators of this domain (ONNX opset 26 names)"
            if names
            else f"a known domain, not {domain!r}",
            remedy=f"did you mean {' or '.join(near)}?" if near else None,
        )
    return found

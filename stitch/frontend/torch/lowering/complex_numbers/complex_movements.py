"""ATen operators that move complex numbers as their shapes say: views, slices, joins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import (
    Call,
    ComplexTensor,
    KeptWhole,
    Lowered,
    Lowering,
)
from stitch.frontend.torch.lowering import backward_operators, picked_elements, shapes
from stitch.frontend.torch.lowering.complex_numbers.number_pairs import ComplexValue, pair_of
from stitch.graph import SymbolicTensor

aten = torch.ops.aten
#: What the schema calls an axis, or several.
_AXES = frozenset(("dim", "dims", "dim0", "dim1"))
#: What the schema calls a shape, or what is listed for every axis, and its entry for the pairs.
_LENGTHS = {"input_sizes": 2, "repeats": 1}


def _moved(target: Any, *, added: int = 0, whole: bool = False) -> Lowering:
    """A lowering by that for real numbers. `added`: axes that the result has more; `whole`: all
    axes are listed."""
    real = _real_lowering(target)
    names = [argument.name for argument in target._schema.arguments]

    def lowered(call: Call, *operands: Any, **named: Any) -> Lowered:
        first = operands[0]
        rank = len((first[0] if isinstance(first, list | tuple) else first).shape) + added

        def shown(name: str, value: Any) -> Any:
            if name in _AXES:
                return _axes(value, rank, whole)
            if name in _LENGTHS:
                return [*value, _LENGTHS[name]]
            return _in_pairs(call, value)

        given = [shown(name, value) for name, value in zip(names, operands, strict=False)]
        return _as_complex(real(call, *given, **{n: shown(n, v) for n, v in named.items()}))

    return lowered


def _real_lowering(target: Any) -> Lowering:
    for family in (shapes, picked_elements, backward_operators):
        row = family.LOWERINGS.get(target)
        if row is not None:
            return row.lowering if isinstance(row, KeptWhole) else row
    raise AssertionError(f"{target} has no lowering for real numbers")


def _axes(value: Any, rank: int, whole: bool) -> Any:
    if isinstance(value, int):
        return value % max(rank, 1)
    return [*(axis % max(rank, 1) for axis in value), *([rank] if whole else ())]


def _in_pairs(call: Call, value: Any) -> Any:
    if isinstance(value, ComplexTensor):
        return pair_of(call, value)
    if isinstance(value, list | tuple) and any(isinstance(v, ComplexTensor) for v in value):
        return [pair_of(call, v) for v in value]
    return value


def _as_complex(results: Any) -> Lowered:
    if isinstance(results, SymbolicTensor):
        return ComplexTensor(results)
    return [None if result is None else ComplexTensor(result) for result in results]


def _with_both_complex(target: Any) -> Lowering:
    """A real tensor into which complex ones are written, or the reverse: both are complex."""
    lowering = _moved(target)

    def lowered(
        call: Call, x: ComplexValue, source: ComplexValue, *rest: Any, **named: Any
    ) -> Lowered:
        both = [ComplexTensor(pair_of(call, value)) for value in (x, source)]
        return lowering(call, *both, *rest, **named)

    return lowered


def _index_put(
    call: Call, x: ComplexValue, places: Any, source: ComplexValue, accumulate: bool = False
) -> Lowered:
    real = _real_lowering(aten.index_put.default)
    return _as_complex(real(call, pair_of(call, x), places, pair_of(call, source), accumulate))


def _pad(call: Call, x: ComplexTensor, pad: Sequence[int], value: complex = 0) -> Lowered:
    if value != 0:
        raise CompileError("complex numbers are padded by zeros", got=repr(value))
    real = _real_lowering(aten.constant_pad_nd.default)
    return _as_complex(real(call, pair_of(call, x), [0, 0, *pad]))


_BY_SHAPE: dict[Any, Lowering] = {
    target: _moved(target) for target in (
        aten.view.default, aten._unsafe_view.default, aten.reshape.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
        aten.expand.default,
    )
}  # fmt: skip
LOWERINGS: dict[Any, Lowering] = {
    **_BY_SHAPE,
    **{target: _moved(target) for target in (
        aten.slice.Tensor, aten.select.int, aten.cat.default, aten.split.Tensor,
        aten.split_with_sizes.default, aten.unbind.int, aten.flip.default, aten.repeat.default,
        aten.index_select.default, aten.index.Tensor, aten.slice_backward.default,
    )},
    aten.select_backward.default: _moved(aten.select_backward.default, added=1),
    aten.permute.default: _moved(aten.permute.default, whole=True),
    aten.transpose.int: _moved(aten.transpose.int),
    aten.stack.default: _moved(aten.stack.default, added=1),
    aten.slice_scatter.default: _with_both_complex(aten.slice_scatter.default),
    aten.select_scatter.default: _with_both_complex(aten.select_scatter.default),
    aten.index_put.default: _index_put, aten.constant_pad_nd.default: _pad,
}  # fmt: skip

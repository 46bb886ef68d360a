"""Forms: what values of functions over nests are, apart from numbers: tensors, nests of such with
their lengths, several of either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.rows import Indexed, IndexTree, leaf_rows
from stitch.fractal.zipped import Nest, Zipped
from stitch.graph import SymbolicTensor


@dataclass(frozen=True, slots=True)
class ValueForm:
    """A tensor (neither), a nest with these lengths (`tree`), or several values (`parts`)."""

    tree: IndexTree | None = None
    parts: tuple[ValueForm, ...] | None = None

    @staticmethod
    def of(value: Any) -> ValueForm:
        """The form of a value."""
        if isinstance(value, tuple):
            return ValueForm(parts=tuple([ValueForm.of(each) for each in value]))
        if isinstance(value, FractalTensor):
            return ValueForm(value.index.tree)
        return ValueForm()

    def leaves(self) -> Iterator[ValueForm]:
        """The forms of tensors and nests, in order."""
        if self.parts is None:
            yield self
        else:
            for part in self.parts:
                yield from part.leaves()

    def value(self, tensors: Iterator[Any]) -> Any:
        """The value of this form that is made of the next tensors: of a nest, all its leaves."""
        if self.parts is not None:
            return tuple([part.value(tensors) for part in self.parts])
        tensor = next(tensors)
        return tensor if self.tree is None else FractalTensor.of(tensor, Indexed.whole(self.tree))

    def nest(self, tensors: Iterator[Any], count: int) -> Any:
        """So many values of this form as a nest of them, or several; a tensor has all of one kind
        along its first axis."""
        if self.parts is not None:
            return tuple([part.nest(tensors, count) for part in self.parts])
        tensor = next(tensors)
        if self.tree is None:
            return FractalTensor.of(tensor, Indexed.whole(IndexTree.of([count])))
        rows = tensor.reshape(count * self.tree.numel, *tensor.shape[2:])
        repeated = [n if isinstance(n, int) else np.tile(n, count) for n in self.tree.lengths]
        return FractalTensor.of(rows, Indexed.whole(IndexTree.of([count, *repeated])))


def element_form(xs: Nest, number: int) -> ValueForm:
    """The form of one element."""
    if isinstance(xs, Zipped):
        return ValueForm(parts=tuple([element_form(part, number) for part in xs.parts]))
    if xs.depth == 1:
        return ValueForm()
    uniform = xs.index.tree.uniform
    if uniform is not None:
        return ValueForm(IndexTree.of(uniform[1:]))
    return ValueForm(xs.index.element(number).tree)


def is_uniform(xs: Nest) -> bool:
    """Whether all elements have one form for sure."""
    if isinstance(xs, Zipped):
        return all(map(is_uniform, xs.parts))
    return xs.depth == 1 or xs.index.tree.uniform is not None


def rows_of(xs: FractalTensor, data: SymbolicTensor) -> SymbolicTensor:
    """The leaves of a nest over these rows, one after the other: `[numel, *leaf]`."""
    return leaf_rows(data, xs.index)

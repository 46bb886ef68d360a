"""The structure of values of functions over nests: tensors, nests with their lengths, tuples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.rows import Indexed, IndexTree
from stitch.fractal.zipped import Nest, Zipped


@dataclass(frozen=True, slots=True)
class Structure:
    """A tensor (neither), a nest with these lengths (`tree`), or a tuple (`parts`)."""

    tree: IndexTree | None = None
    parts: tuple[Structure, ...] | None = None

    @staticmethod
    def of(value: Any) -> Structure:
        if isinstance(value, tuple):
            return Structure(parts=tuple([Structure.of(each) for each in value]))
        if isinstance(value, FractalTensor):
            return Structure(value.index.tree)
        return Structure()

    def value(self, tensors: Iterator[Any]) -> Any:
        """Build a value of this structure from the next tensors; a nest takes one with all its
        leaves."""
        if self.parts is not None:
            return tuple([part.value(tensors) for part in self.parts])
        tensor = next(tensors)
        return tensor if self.tree is None else FractalTensor.of(tensor, Indexed.whole(self.tree))

    def nest(self, tensors: Iterator[Any], count: int) -> Any:
        """Build a nest of `count` values of this structure; tensors have all of them along
        axis 0."""
        if self.parts is not None:
            return tuple([part.nest(tensors, count) for part in self.parts])
        tensor = next(tensors)
        if self.tree is None:
            return FractalTensor.of(tensor, Indexed.whole(IndexTree.of([count])))
        rows = tensor.reshape(count * self.tree.numel, *tensor.shape[2:])
        repeated = [n if isinstance(n, int) else np.tile(n, count) for n in self.tree.lengths]
        return FractalTensor.of(rows, Indexed.whole(IndexTree.of([count, *repeated])))


def element_structure(xs: Nest, number: int) -> Structure:
    """Return the structure of one element."""
    if isinstance(xs, Zipped):
        return Structure(parts=tuple([element_structure(part, number) for part in xs.parts]))
    if xs.depth == 1:
        return Structure()
    uniform = xs.index.tree.uniform
    if uniform is not None:
        return Structure(IndexTree.of(uniform[1:]))
    return Structure(xs.index.element(number).tree)


def is_uniform(xs: Nest) -> bool:
    """Return whether all elements have the same structure, as far as the index tells."""
    if isinstance(xs, Zipped):
        return all(map(is_uniform, xs.parts))
    return xs.depth == 1 or xs.index.tree.uniform is not None

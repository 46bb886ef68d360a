"""Operators that move elements, as methods: reshape, transpose, slices, concat, gather, top-k.

Comes in: tensors, with shapes and axes as plain integers. Goes out: ONNX operations whose
shape-deciding operands are int64 constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stitch.graph.emitter import axes_of, axis_of
from stitch.graph.methods.elementwise_methods import ElementwiseMethods
from stitch.graph.methods.index_selection import selection_of
from stitch.graph.source_location import mistake
from stitch.graph.symbolic import Operand, SymbolicTensor
from stitch.graph.tensor_operations import Axes
from stitch.program import DataType


class ShapeMethods(ElementwiseMethods):
    """Elements keep their values and change their places."""

    __slots__ = ()

    def reshape(self, x: Operand, shape: int | Sequence[int]) -> SymbolicTensor:
        """The same elements under another shape; one dimension may be -1."""
        tensor = self.tensor(x)
        wanted = [int(d) for d in ([shape] if isinstance(shape, int) else shape)]
        rest = math.prod(d for d in wanted if d != -1)
        if wanted.count(-1) == 1 and rest > 0 and tensor.size % rest == 0:
            wanted[wanted.index(-1)] = tensor.size // rest
        if min(wanted, default=0) < 0 or math.prod(wanted) != tensor.size:
            raise mistake(
                "a reshape keeps the number of elements",
                expected=f"{tensor.size} elements, as in {list(tensor.shape)}",
                got=str(list(shape) if isinstance(shape, Sequence) else shape),
            )
        if tuple(wanted) == tensor.shape:
            return tensor
        return self._one("Reshape", tensor, wanted, allowzero=1 if 0 in wanted else None)

    view = reshape

    def flat(self, x: Operand) -> SymbolicTensor:
        """All but the first axis joined: NxCxHxW becomes N x (C H W)."""
        return self._one("Flatten", x)

    def flatten(self, x: Operand, start: int = 1, end: int = -1) -> SymbolicTensor:
        """The axes from `start` to `end`, inclusive, joined into one: by default all but the
        batch's, as a layer does it."""
        tensor = self.tensor(x)
        rank = len(tensor.shape)
        if rank == 0:
            return self.reshape(tensor, (1,))
        if rank == 1 and start == 1:
            return tensor
        first, last = axis_of(start, rank, "flatten"), axis_of(end, rank, "flatten")
        joined = math.prod(tensor.shape[first : last + 1])
        return self.reshape(tensor, (*tensor.shape[:first], joined, *tensor.shape[last + 1 :]))

    def transpose(self, x: Operand, axes: Sequence[int] | None = None) -> SymbolicTensor:
        """The axes in the given order, or reversed."""
        tensor = self.tensor(x)
        rank = len(tensor.shape)
        order = axes_of(axes, rank, "transpose") if axes is not None else tuple(range(rank))[::-1]
        if len(order) != rank:
            raise mistake("a transpose names every axis", expected=f"{rank} axes", got=str(axes))
        return self._one("Transpose", tensor, perm=order) if rank > 1 else tensor

    permute = transpose

    def swapaxes(self, x: Operand, first: int, second: int) -> SymbolicTensor:
        """Two axes exchanged (torch's transpose)."""
        tensor = self.tensor(x)
        rank = len(tensor.shape)
        order = list(range(rank))
        a, b = axis_of(first, rank, "swapaxes"), axis_of(second, rank, "swapaxes")
        order[a], order[b] = order[b], order[a]
        return self.transpose(tensor, order)

    def squeeze(self, x: Operand, axis: Axes = None) -> SymbolicTensor:
        """Without the given axes of length 1, or without any such axis."""
        tensor = self.tensor(x)
        rank = len(tensor.shape)
        if axis is None:
            axes = tuple(i for i, d in enumerate(tensor.shape) if d == 1)
        else:
            axes = axes_of(axis, rank, "squeeze")
        return self._one("Squeeze", tensor, list(axes)) if axes else tensor

    def unsqueeze(self, x: Operand, axis: int | Sequence[int]) -> SymbolicTensor:
        """With new axes of length 1, counted in the result."""
        tensor = self.tensor(x)
        count = 1 if isinstance(axis, int) else len(axis)
        axes = axes_of(axis, len(tensor.shape) + count, "unsqueeze")
        return self._one("Unsqueeze", tensor, list(axes))

    def expand(self, x: Operand, shape: Sequence[int]) -> SymbolicTensor:
        """Repeated to a shape; -1 keeps a dimension (torch's expand)."""
        tensor = self.tensor(x)
        lead = len(shape) - len(tensor.shape)
        wanted = [
            tensor.shape[i - lead] if d == -1 and i >= lead else int(d) for i, d in enumerate(shape)
        ]
        return self.broadcast(tensor, wanted)

    def broadcast(self, x: Operand, shape: Sequence[int]) -> SymbolicTensor:
        """Repeated to a shape by NumPy's rule; raises `CompileError` if it would shrink."""
        tensor, wanted = self.tensor(x), tuple(int(d) for d in shape)
        padded = (1,) * (len(wanted) - len(tensor.shape)) + tensor.shape
        if len(padded) != len(wanted) or any(
            d not in (1, w) or w < 0 for d, w in zip(padded, wanted, strict=True)
        ):
            raise mistake(
                "a tensor broadcasts only along axes of length 1",
                expected=f"a shape that ends like {list(tensor.shape)}",
                got=str(list(wanted)),
            )
        return tensor if wanted == tensor.shape else self._one("Expand", tensor, list(wanted))

    def concat(self, tensors: Sequence[Operand], axis: int = 0) -> SymbolicTensor:
        """Tensors joined along an axis; their types must agree."""
        like = next((t for t in tensors if isinstance(t, SymbolicTensor)), None)
        parts = [self.tensor(t, like) for t in tensors]
        if not parts:
            raise mistake("a concat needs at least one tensor")
        self._same_type("Concat", parts)
        return self._one("Concat", *parts, axis=axis_of(axis, len(parts[0].shape), "concat"))

    def stack(self, tensors: Sequence[Operand], axis: int = 0) -> SymbolicTensor:
        """Tensors of one shape joined along a new axis."""
        return self.concat([self.unsqueeze(t, axis) for t in tensors], axis)

    def split(
        self, x: Operand, sizes: int | Sequence[int], axis: int = 0
    ) -> tuple[SymbolicTensor, ...]:
        """Cut along an axis: into parts of these sizes, or of `sizes` each (torch's split)."""
        tensor = self.tensor(x)
        place = axis_of(axis, len(tensor.shape), "split")
        length = tensor.shape[place]
        if isinstance(sizes, int):
            whole = max(1, sizes)
            sizes = [min(whole, length - start) for start in range(0, length, whole)] or [0]
        if sum(sizes) != length or min(sizes, default=-1) < 0:
            raise mistake(
                "the parts of a split make up the whole axis",
                expected=f"sizes that add up to {length}",
                got=str(list(sizes)),
            )
        return self.apply("Split", [tensor, list(sizes)], len(sizes), {"axis": place})

    def chunk(self, x: Operand, count: int, axis: int = 0) -> tuple[SymbolicTensor, ...]:
        """Cut along an axis into `count` parts, the last perhaps smaller (torch's chunk)."""
        tensor = self.tensor(x)
        length = tensor.shape[axis_of(axis, len(tensor.shape), "chunk")]
        return self.split(tensor, -(-length // max(1, count)), axis)

    def gather(self, x: Operand, indices: Operand, axis: int = 0) -> SymbolicTensor:
        """The slices along an axis that the indices name (ONNX Gather, `numpy.take`)."""
        tensor = self.tensor(x)
        return self._one(
            "Gather",
            tensor,
            self._indices(indices),
            axis=axis_of(axis, len(tensor.shape), "gather"),
        )

    def window_rows(
        self, x: Operand, base: Operand, strides: Operand | Sequence[int], lengths: Sequence[int]
    ) -> SymbolicTensor:
        """Rows at equal distances: row `base + i * strides[0] + j * strides[1] + ...` for each
        index of `[*lengths]`; rows out of range raise `TaskError` when it runs."""
        operands = [x, self._indices(base), self._indices(strides)]
        words = {"lengths": [int(n) for n in lengths]}
        return self.apply("Window", operands, 1, words, "stitch")[0]

    def gather_elements(self, x: Operand, indices: Operand, axis: int = 0) -> SymbolicTensor:
        """One element per index, along an axis (ONNX GatherElements, torch's gather)."""
        tensor = self.tensor(x)
        place = axis_of(axis, len(tensor.shape), "gather_elements")
        return self._one("GatherElements", tensor, self._indices(indices), axis=place)

    def _indices(self, indices: Operand | Sequence[int]) -> SymbolicTensor:
        if isinstance(indices, SymbolicTensor):
            return indices
        return self.tensor(np.asarray(indices, np.int64))

    def slice(
        self,
        x: Operand,
        starts: Sequence[int],
        ends: Sequence[int],
        axes: Sequence[int] | None = None,
        steps: Sequence[int] | None = None,
    ) -> SymbolicTensor:
        """From `starts` up to `ends` along some axes (ONNX Slice)."""
        places = list(range(len(starts))) if axes is None else list(axes)
        return self._one("Slice", x, list(starts), list(ends), places, list(steps or ()) or None)

    def reverse(self, x: Operand, axis: Axes = 0) -> SymbolicTensor:
        """Back to front along one or more axes."""
        tensor = self.tensor(x)
        axes = axes_of(axis, len(tensor.shape), "reverse")
        if not axes:
            return tensor
        ends = [-tensor.shape[a] - 1 for a in axes]
        return self.slice(tensor, [-1] * len(axes), ends, axes, [-1] * len(axes))

    def topk(
        self, x: Operand, k: int, axis: int = -1, largest: bool = True, sorted: bool = True
    ) -> tuple[SymbolicTensor, SymbolicTensor]:
        """The k largest (or smallest) elements along an axis, and their places (int64)."""
        tensor = self.tensor(x)
        attributes = {
            "axis": axis_of(axis, len(tensor.shape), "topk"),
            "largest": int(largest),
            "sorted": int(sorted),
        }
        values, places = self.apply("TopK", [tensor, [k]], 2, dict(attributes))
        return values, places

    def index(self, x: SymbolicTensor, key: object) -> SymbolicTensor:
        """What `x[key]` selects; see `selection_of`."""
        chosen = selection_of(x.shape, key)
        result = x
        if chosen.axes:
            steps = chosen.steps if set(chosen.steps) != {1} else None
            result = self.slice(result, chosen.starts, chosen.ends, chosen.axes, steps)
        if chosen.gathered:
            result = self._elements(result, chosen.gathered, chosen.place)
        if chosen.dropped:
            result = self._one("Squeeze", result, list(chosen.dropped))
        if chosen.new_axes:
            result = self._one("Unsqueeze", result, list(chosen.new_axes))
        return result

    def _elements(
        self, x: SymbolicTensor, gathered: Sequence[tuple[int, Operand]], place: int
    ) -> SymbolicTensor:
        """The elements that index arrays name together, their axes before axis `place` of the
        others."""
        numbers = [self.cast(self._indices(indices), DataType.INT64) for _, indices in gathered]
        if len(numbers) == 1:
            return self._one("Gather", x, numbers[0], axis=gathered[0][0])
        named = [axis for axis, _ in gathered]
        wide = np.broadcast_shapes(*[each.shape for each in numbers])
        together = self.stack([self.broadcast(each, wide) for each in numbers], len(wide))
        others = [axis for axis in range(len(x.shape)) if axis not in named]
        found = self._one("GatherND", self.transpose(x, [*named, *others]), together)
        rank, count = len(wide), len(wide) + len(others)
        order = [*range(rank, rank + place), *range(rank), *range(rank + place, count)]
        return self.transpose(found, order) if place and rank else found

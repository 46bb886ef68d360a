"""Calls of functions over nests become graphs, their data the inputs.

Comes in: calls, nests with data. Goes out: a graph, what is given for its inputs, the form of its
value. Must not know devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from stitch.fractal.current import NestCall, using
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.rows import Affine, Indexed
from stitch.fractal.traced import Traced
from stitch.fractal.value_forms import ValueForm
from stitch.fractal.zipped import Nest, Zipped
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.program import Body, DataType, ValueType
from stitch.runtime import Tensor

#: Lists of so few whole numbers are part of a program.
MAX_NUMBERS = 1024
#: Of so many bytes a part of the rows is copied, that parts elsewhere are the same program.
MAX_PART_NBYTES = 1 << 24


class GraphTracing:
    """A call becomes a graph; all data of its nests and arguments become inputs.

    `shares`: the same data is one input wherever it stands. `keeps_numbers`: few whole numbers are
    part of the graph, for functions that ask for them.
    """

    def __init__(self, name: str, *, shares: bool = True, keeps_numbers: bool = True) -> None:
        self.builder, self.shares = ComputationGraphBuilder(name), shares
        self.keeps_numbers = keeps_numbers
        #: Whether there were such numbers.
        self.has_numbers = False
        #: What is given for the inputs of the graph.
        self.arguments: list[Any] = []
        self.count = 0
        self._inputs: dict[int, SymbolicTensor] = {}
        #: By data, first row and how many.
        self._parts: dict[tuple[int, int, int], SymbolicTensor] = {}

    def traced(
        self, write: Callable[[Traced, NestCall, Nest, Any], Any], call: NestCall, xs: Nest,
        initializer: Any,
    ) -> ValueForm:  # fmt: skip
        """Write a call down; gives the form of its value, whose tensors are the graph's outputs."""
        arguments = tuple([self.brought(each) for each in call.arguments])
        named = {name: self.brought(each) for name, each in call.named.items()}
        inside = NestCall(call.name, call.function, arguments, named)
        brought = self.brought(xs)
        first = None if initializer is None else self.brought(initializer)
        return self.written(lambda way: write(way, inside, brought, first))

    def written(self, write: Callable[[Traced], Any]) -> ValueForm:
        """Write down what is called in the way given; gives the form of its value, whose tensors
        are the graph's outputs."""
        way = Traced(self.builder)
        with using(way):
            value = as_values(write(way))
            form, tensors = way.flat(value)
        for number, tensor in enumerate(tensors):
            self.builder.output(f"output_{number}", tensor)
        return form

    def graph(self) -> ComputationGraph:
        """The graph of what was traced."""
        return self.builder.build()

    def brought(self, value: Any) -> Any:
        """A value with its data as inputs of the graph; numbers and functions stay."""
        if isinstance(value, FractalTensor):
            if _are_numbers(value):
                self.has_numbers = True
                if self.keeps_numbers:
                    return value
            return self._rows(value)
        if isinstance(value, Zipped):
            return Zipped([self.brought(part) for part in value.parts])
        if isinstance(value, tuple | list):
            parts = [self.brought(each) for each in value]
            # Functions may ask for the parts of a named tuple by their names.
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, SymbolicTensor) and value.written is not None:
            return self._input(value.written)
        if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.ndim):
            return self._input(value)
        return value

    def rearranged(self, value: Any) -> Any:
        """As `brought`, but that leaves become inputs in their order, and all of them."""
        if isinstance(value, FractalTensor):
            kind = ValueType((value.numel, *value.leaf_shape), DataType.from_dtype(value.dtype))
            rows = self._next_input(kind.shape, kind.data_type)
            return FractalTensor.of(rows, Indexed.whole(value.index.tree))
        if isinstance(value, Zipped):
            return Zipped([self.rearranged(part) for part in value.parts])
        if isinstance(value, tuple | list):
            return tuple([self.rearranged(each) for each in value])
        return self._input(np.asarray(value) if not isinstance(value, Tensor) else value)

    def _input(self, data: Any) -> SymbolicTensor:
        found = self._inputs.get(id(data)) if self.shares else None
        if found is None:
            kind = data.data_type.in_arrays if isinstance(data, Tensor) else data.dtype
            found = self._next_input(data.shape, kind)
            self._inputs[id(data)] = found
            self.arguments.append(data)
        return found

    def _rows(self, nest: FractalTensor) -> FractalTensor:
        """A nest over an input. Of some rows of many, the first is an input as well: parts that
        are alike, `xs[a:b]` for many a, are one graph."""
        data, where, lengths = nest.data, nest.index.map, nest.index.tree.uniform
        rows = self._input(data)
        if not isinstance(where, Affine) or lengths is None or not nest.numel:
            return FractalTensor.of(rows, nest.index)
        first, last = where.reached(lengths)
        count = last - first + 1
        row_nbytes = math.prod(nest.leaf_shape) * nest.dtype.itemsize
        if count == data.shape[0] or count * row_nbytes > MAX_PART_NBYTES:
            return FractalTensor.of(rows, nest.index)
        key = id(data), first, count
        part = self._parts.get(key)
        if part is None:
            begin = self._input(np.array(first, np.int64))
            part = self._parts[key] = self.builder.window_rows(rows, begin, [1], [count])
        inside = Affine(where.base - first, where.strides)
        return FractalTensor.of(part, Indexed(nest.index.tree, inside))

    def _next_input(self, shape: tuple[int, ...], kind: Any) -> SymbolicTensor:
        self.count += 1
        return self.builder.input(f"input_{self.count - 1}", shape, kind)


def _are_numbers(nest: FractalTensor) -> bool:
    """Whether leaves are few whole numbers that are known."""
    is_known = isinstance(nest.data, np.ndarray) and nest.dtype.kind in "iub"
    return is_known and not nest.leaf_shape and nest.numel <= MAX_NUMBERS


def meaning_of(graph: ComputationGraph) -> Hashable:
    """Equal for graphs that compute the same, slot by slot."""
    inputs = tuple([slot.value for slot in graph.inputs])
    outputs = tuple([slot.value for slot in graph.outputs])
    whole = Body(inputs, outputs, graph.values, graph.operations, graph.constants)
    return (whole.meaning, *[body.meaning for body in graph.bodies])


def as_values(value: Any) -> Any:
    """What a function gives, or is given: lists and zipped nests as tuples."""
    if isinstance(value, Zipped):
        return tuple([as_values(part) for part in value.parts])
    if isinstance(value, tuple | list):
        return tuple([as_values(each) for each in value])
    return value

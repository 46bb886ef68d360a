"""Calls of functions over nests become graphs, their data the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stitch.fractal.current import NestCall, using
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.rows import Affine, Indexed
from stitch.fractal.tracing.call_inputs import CallInputs, RowsPart, type_of_input
from stitch.fractal.tracing.nest_work import NestWork
from stitch.fractal.tracing.traced import Traced
from stitch.fractal.value_forms import ValueForm
from stitch.fractal.zipped import Zipped
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.program import Body, DataType, ValueType
from stitch.runtime import Tensor


class GraphTracing:
    """A call becomes a graph; all data of its nests and arguments become inputs.

    `inputs`: those of a call, that the graph begins with.
    """

    def __init__(self, name: str, inputs: CallInputs | None = None) -> None:
        self.builder = ComputationGraphBuilder(name)
        self.given = inputs or CallInputs(keeps_numbers=True)
        self.count = 0
        self._inputs: list[SymbolicTensor] = []
        self._parts: dict[RowsPart, SymbolicTensor] = {}

    def traced(self, work: NestWork) -> ValueForm:
        """Write a call down; gives the form of its value, whose tensors are the graph's outputs."""
        call = work.call
        arguments = tuple([self.brought(each) for each in call.arguments])
        named = {name: self.brought(each) for name, each in call.named.items()}
        xs = self.brought(work.xs)
        first = None if work.initializer is None else self.brought(work.initializer)
        inside = work.on(NestCall(call.name, call.function, arguments, named), xs, first)
        return self.written(inside.written)

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
            return value if self.given.is_kept(value) else self._rows(value)
        if isinstance(value, Zipped):
            return Zipped([self.brought(part) for part in value.parts])
        if isinstance(value, tuple | list):
            parts = [self.brought(each) for each in value]
            # Functions may ask for the parts of a named tuple by their names.
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        data = self.given.data_of(value)
        return value if data is None else self._input(self.given.place(data))

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
        data = value if isinstance(value, Tensor) else np.asarray(value)
        return self._next_input(data.shape, type_of_input(data))

    def _input(self, place: int) -> SymbolicTensor:
        """An input by its number, after all those before it."""
        for data in self.given.arguments[len(self._inputs) : place + 1]:
            self._inputs.append(self._next_input(data.shape, type_of_input(data)))
        return self._inputs[place]

    def _rows(self, nest: FractalTensor) -> FractalTensor:
        """A nest over an input, or a part of one."""
        part, where = self.given.part(nest), nest.index.map
        rows = self._input(self.given.place(nest.data))
        if part is None or not isinstance(where, Affine):
            return FractalTensor.of(rows, nest.index)
        if part not in self._parts:
            begin = self._input(part.begin)
            self._parts[part] = self.builder.window_rows(rows, begin, [1], [part.count])
        inside = Affine(where.base - part.first, where.strides)
        return FractalTensor.of(self._parts[part], Indexed(nest.index.tree, inside))

    def _next_input(self, shape: tuple[int, ...], kind: Any) -> SymbolicTensor:
        self.count += 1
        return self.builder.input(f"input_{self.count - 1}", shape, kind)


class GraphMeaning:
    """Equal for graphs that compute the same, slot by slot."""

    __slots__ = ("__weakref__", "_hash", "_meaning")

    def __init__(self, graph: ComputationGraph) -> None:
        inputs = tuple([slot.value for slot in graph.inputs])
        outputs = tuple([slot.value for slot in graph.outputs])
        whole = Body(inputs, outputs, graph.values, graph.operations, graph.constants)
        self._meaning = (whole.meaning, *[body.meaning for body in graph.bodies])
        self._hash = hash(self._meaning)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GraphMeaning) and self._meaning == other._meaning

    def __hash__(self) -> int:
        return self._hash


def as_values(value: Any) -> Any:
    """What a function gives, or is given: lists and zipped nests as tuples."""
    if isinstance(value, Zipped):
        return tuple([as_values(part) for part in value.parts])
    if isinstance(value, tuple | list):
        return tuple([as_values(each) for each in value])
    return value

"""In parallel: a call is traced into a graph, its loops are scheduled, and it runs as one program.

The function is traced anew at each call, so that nothing that it reads can be stale; a program that
was compiled before for the same graph is run again. Where a function asks for data, as `filter` and
Python's `if` do, the call goes element by element, and what is inside its function in parallel.
Comes in: calls, nests with data, a device. Goes out: nests over tensors of the device. Must not
know how loops are scheduled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from stitch.compiler import compile_graph
from stitch.fractal.current import NestCall, using
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.sequential import Sequential, check_bool
from stitch.fractal.traced import LengthsOfDataError, Traced
from stitch.fractal.value_forms import ValueForm
from stitch.fractal.zipped import Nest, Zipped
from stitch.graph import ComputationGraph, ComputationGraphBuilder, NoDataError, SymbolicTensor
from stitch.program import Body
from stitch.runtime import LoadedProgram, RuntimeDevice, Tensor
from stitch.ttb import Binary

#: Programs that a device keeps for graphs that come again.
MAX_PROGRAMS = 256


class Parallel:
    """Runs calls as programs of a device; `sequential` runs what cannot be traced."""

    def __init__(self, device: RuntimeDevice, sequential: Sequential) -> None:
        self.device, self.sequential = device, sequential
        self.builder = sequential.builder
        self._programs: OrderedDict[Hashable, LoadedProgram] = OrderedDict()

    def given(self, data: Any) -> Any:
        """A leaf, with data."""
        return self.sequential.given(data)

    def mapped(self, call: NestCall, xs: Nest) -> Any:
        """All elements, cells of one form at the same time."""
        return self._run(lambda way, c, x, _: way.mapped(c, x), call, xs, None,
                         lambda: self.sequential.mapped(call, xs))  # fmt: skip

    def scanned(self, call: NestCall, xs: Nest, initializer: Any, *, from_right: bool) -> Any:
        """All states."""
        return self._run(
            lambda way, c, x, first: way.scanned(c, x, first, from_right=from_right),
            call, xs, initializer,
            lambda: self.sequential.scanned(call, xs, initializer, from_right=from_right),
        )  # fmt: skip

    def folded(
        self, call: NestCall, xs: Nest, initializer: Any, *, from_right: bool, is_associative: bool
    ) -> Any:
        """The last state."""
        words = {"from_right": from_right, "is_associative": is_associative}
        return self._run(
            lambda way, c, x, first: way.folded(c, x, first, **words), call, xs, initializer,
            lambda: self.sequential.folded(call, xs, initializer, **words),
        )  # fmt: skip

    def kept(self, call: NestCall, xs: Nest) -> Any:
        """The numbers of the elements for which a predicate is true, all asked at the same time."""
        said = self.mapped(call, xs)
        is_one = isinstance(said, FractalTensor) and said.depth == 1
        check_bool(call, said.leaves()[0] if is_one else said, "element 0")
        return np.flatnonzero(said.numpy())

    def _run(
        self, write: Callable[[Traced, NestCall, Nest, Any], Any], call: NestCall, xs: Nest,
        initializer: Any, otherwise: Callable[[], Any],
    ) -> Any:  # fmt: skip
        """The value of a call: traced and run, or computed otherwise where lengths depend on
        data."""
        tracing = GraphTracing(f"fractal_{call.name}")
        try:
            form = tracing.trace(write, call, xs, initializer)
        except (LengthsOfDataError, NoDataError):
            with using(self):
                return otherwise()
        graph = tracing.graph()
        key = meaning_of(graph)
        program = self._programs.get(key)
        if program is None:
            program = self._compiled(graph)
            while len(self._programs) >= MAX_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs[key] = program
        self._programs.move_to_end(key)
        found = program(*tracing.arguments)
        results = iter(found if isinstance(found, tuple) else (found,))
        return self._shown(form.value(results))

    def _compiled(self, graph: ComputationGraph) -> LoadedProgram:
        machine = self.device.machine
        program = compile_graph(graph, machine).program
        return self.device.load(Binary((program,), machine.shape, "fractal"))

    def _shown(self, value: Any) -> Any:
        """Results as others give them: leaves as tensors with data."""
        if isinstance(value, tuple):
            return tuple([self._shown(each) for each in value])
        return value if isinstance(value, FractalTensor) else self.given(value)


class GraphTracing:
    """A call becomes a graph; all data of its nests and arguments become inputs."""

    def __init__(self, name: str) -> None:
        self.builder = ComputationGraphBuilder(name)
        #: What is given for the inputs of the graph.
        self.arguments: list[Any] = []
        self._inputs: dict[int, SymbolicTensor] = {}

    def trace(
        self, write: Callable[[Traced, NestCall, Nest, Any], Any], call: NestCall, xs: Nest,
        initializer: Any,
    ) -> ValueForm:  # fmt: skip
        """Write a call down; gives the form of its value, whose tensors are the graph's outputs."""
        way = Traced(self.builder)
        arguments = tuple([self.brought(each) for each in call.arguments])
        named = {name: self.brought(each) for name, each in call.named.items()}
        inside = NestCall(call.name, call.function, arguments, named)
        brought = self.brought(xs)
        first = None if initializer is None else self.brought(initializer)
        with using(way):
            value = write(way, inside, brought, first)
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
                return value  # Functions may ask for them.
            return FractalTensor.of(self._input(value.data), value.index)
        if isinstance(value, Zipped):
            return Zipped([self.brought(part) for part in value.parts])
        if isinstance(value, tuple | list):
            return type(value)([self.brought(each) for each in value])
        if isinstance(value, SymbolicTensor) and value.written is not None:
            return self._input(value.written)
        if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.ndim):
            return self._input(value)
        return value

    def _input(self, data: Any) -> SymbolicTensor:
        found = self._inputs.get(id(data))
        if found is None:
            kind = data.data_type.in_arrays if isinstance(data, Tensor) else data.dtype
            found = self.builder.input(f"input_{len(self.arguments)}", data.shape, kind)
            self._inputs[id(data)] = found
            self.arguments.append(data)
        return found


#: Lists of so few whole numbers are part of a program.
MAX_NUMBERS = 1024


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

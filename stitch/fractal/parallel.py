"""In parallel: a call is traced into a graph, its loops are scheduled, and it runs as one program.

The function is traced anew at each call, so that nothing that it reads can be stale; a program that
was compiled before for the same graph is run again. Where a function asks for data, as `filter` and
Python's `if` do, the call goes element by element, and what is inside its function in parallel.
Comes in: calls, nests with data, a device. Goes out: nests over tensors of the device. Must not
know how loops are scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stitch.compiler import CompileOptions, compile_graph
from stitch.fractal.current import NestCall, using
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.graph_tracing import GraphTracing, meaning_of
from stitch.fractal.kept_programs import KeptPrograms
from stitch.fractal.sequential import Sequential, check_bool
from stitch.fractal.traced import LengthsOfDataError, Traced
from stitch.fractal.zipped import Nest
from stitch.graph import ComputationGraph, NoDataError
from stitch.runtime import LoadedProgram, RuntimeDevice
from stitch.ttb import Binary

#: Programs that a device keeps for graphs that come again.
MAX_PROGRAMS = 256


class Parallel:
    """Runs calls as programs of a device; `sequential` runs what cannot be traced."""

    def __init__(
        self, device: RuntimeDevice, sequential: Sequential, schedule: str | None = None
    ) -> None:
        self.device, self.sequential, self.schedule = device, sequential, schedule
        self.builder = sequential.builder
        self._programs: KeptPrograms[LoadedProgram] = KeptPrograms(MAX_PROGRAMS)

    def scheduled(self, schedule: str) -> Parallel:
        """The same with loops that run so wherever they can."""
        return Parallel(self.device, self.sequential, schedule)

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
            form = tracing.traced(write, call, xs, initializer)
        except (LengthsOfDataError, NoDataError):
            with using(self):
                return otherwise()
        graph = tracing.graph()
        key = meaning_of(graph)
        program = self._programs.get(key)
        if program is None:
            program = self._compiled(graph)
            self._programs.keep(key, program, graph)
        found = program(*tracing.arguments)
        results = iter(found if isinstance(found, tuple) else (found,))
        return self._shown(form.value(results))

    def _compiled(self, graph: ComputationGraph) -> LoadedProgram:
        machine = self.device.machine
        options = CompileOptions(schedule=self.schedule)
        program = compile_graph(graph, machine, options).program
        return self.device.load(Binary((program,), machine.shape, "fractal"))

    def _shown(self, value: Any) -> Any:
        """Results as others give them: leaves as tensors with data."""
        if isinstance(value, tuple):
            return tuple([self._shown(each) for each in value])
        return value if isinstance(value, FractalTensor) else self.given(value)

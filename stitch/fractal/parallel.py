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
from weakref import WeakKeyDictionary

import numpy as np

from stitch.compiler import CompileOptions, compile_graph, rated_executor
from stitch.fractal.current import NestCall, report_call, using
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.graph_tracing import GraphTracing, meaning_of
from stitch.fractal.kept_programs import KeptPrograms
from stitch.fractal.sequential import Sequential, check_bool
from stitch.fractal.traced import LengthsOfDataError, Traced
from stitch.fractal.value_forms import ValueForm
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
        self._scheduled: dict[str, Parallel] = {}
        self._loops: WeakKeyDictionary[LoadedProgram, tuple[str, ...]] = WeakKeyDictionary()

    def scheduled(self, schedule: str) -> Parallel:
        """The same with loops that run so wherever they can; one for each schedule, as it keeps
        programs."""
        found = self._scheduled.get(schedule)
        if found is None:
            made = Parallel(self.device, self.sequential, schedule)
            found = self._scheduled.setdefault(schedule, made)
        return found

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
        try:
            tracing, form = self._traced(write, call, xs, initializer)
        except (LengthsOfDataError, NoDataError) as error:
            why = error.what
            report_call(call.name, lambda: f"element by element, as {why}")
            with using(self):
                return otherwise()
        graph = tracing.graph()
        key = meaning_of(graph)
        program = self._programs.get(key)
        if program is None:
            program, loops = self._compiled(graph)
            self._programs.keep(key, program, graph)
            self._loops[program] = loops
        report_call(call.name, lambda: "; ".join(["one program", *self._loops.get(program, ())]))
        found = program(*tracing.arguments)
        results = iter(found if isinstance(found, tuple) else (found,))
        return self._shown(form.value(results))

    def _traced(
        self, write: Callable[[Traced, NestCall, Nest, Any], Any], call: NestCall, xs: Nest,
        initializer: Any,
    ) -> tuple[GraphTracing, ValueForm]:  # fmt: skip
        """A call as a graph. Whole numbers are data as others are, so that one program does for
        all of them; a function that asks for them is traced again, with them part of the graph."""
        tracing = GraphTracing(f"fractal_{call.name}", keeps_numbers=False)
        try:
            return tracing, tracing.traced(write, call, xs, initializer)
        except LengthsOfDataError:
            raise
        except Exception:
            if not tracing.has_numbers:
                raise
        tracing = GraphTracing(f"fractal_{call.name}")
        return tracing, tracing.traced(write, call, xs, initializer)

    def _compiled(self, graph: ComputationGraph) -> tuple[LoadedProgram, tuple[str, ...]]:
        """A program for a graph, and how its loops run."""
        machine = self.device.machine
        executor = rated_executor(self.device.executor)
        options = CompileOptions(schedule=self.schedule, executor=executor)
        compiled = compile_graph(graph, machine, options)
        loaded = self.device.load(Binary((compiled.program,), machine.shape, "fractal"))
        return loaded, tuple([note.text() for note in compiled.loops])

    def _shown(self, value: Any) -> Any:
        """Results as others give them: leaves as tensors with data."""
        if isinstance(value, tuple):
            return tuple([self._shown(each) for each in value])
        return value if isinstance(value, FractalTensor) else self.given(value)

"""`DynamicProgram`: a module compiled once for many sizes of its inputs.

Tracing and the passes run once, with symbolic sizes; `at` replaces them by numbers and places the
result. Spaces, layouts and scratch depend on sizes in steps (shares of L1, tiles), so they are
computed for each size, by the code that any compilation runs. Where the result of the passes
depends on the sizes (constants of symbolic shape are folded, equal ones merged), the passes run for
each size, too, so that they need no guards.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from stitch.compiler.compile_graph import prepare_graph
from stitch.compiler.options import Compilation, CompileOptions
from stitch.compiler.pass_cache import PassCache
from stitch.compiler.placement import GraphPlacer
from stitch.compiler.sized_graph import SizedGraph, type_text
from stitch.errors import CompileError
from stitch.graph import ComputationGraph
from stitch.linker import remove_dead_code
from stitch.machine import Machine, MachineShape
from stitch.program import ABSENT, Guard, Program, SizeNeeded, SymbolicSizes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DynamicProgram:
    """A graph with symbolic sizes, and the guards that tracing it and its passes relied on.

    Attributes:
        graph: The graph after the passes, or before them; shapes have symbolic sizes.
        sizes: The named sizes with their bounds, hints and guards.
        machine: The memory of the machine that it is compiled for.
        options: The options of the compilation.
        needs_passes: Whether the passes run for each size.
        is_read: Whether it is of a file, whose types may agree at some sizes only.
    """

    graph: ComputationGraph
    sizes: SymbolicSizes
    machine: MachineShape
    options: CompileOptions
    needs_passes: bool = False
    is_read: bool = False
    _sized: SizedGraph = field(init=False)
    _placers: list[GraphPlacer] = field(init=False, default_factory=list)
    #: None if no passes run for each size, or if they make constants that depend on them.
    _passes: PassCache | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        graph = self.graph
        if self.needs_passes and not self.options.reassociate:
            graph = remove_dead_code(graph) if self.options.optimize else graph
            passes = PassCache(graph, self.machine, self.options, not self.is_read)
            object.__setattr__(self, "_passes", passes)
        object.__setattr__(self, "_sized", SizedGraph(graph))

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The relations between sizes that the program relies on."""
        return self.sizes.guards

    def at(self, **sizes: int) -> Program:
        """Return the static program at some sizes, equal to compiling the module at them.

        Args:
            **sizes: A number for each named size.

        Raises:
            UsageError: A size is missing, unknown or out of its bounds.
            CompileError: A guard does not hold; the error names the line that relied on it.
            OutOfMemoryError: The program does not fit the machine at these sizes.
        """
        return self.compilation_at(sizes)[1].program

    def compilation_at(self, sizes: dict[str, int]) -> tuple[ComputationGraph, Compilation]:
        """Return the graph and the compilation at some sizes; raises what `at` raises."""
        graph = self._graph_at(sizes)
        if not self.needs_passes:
            if not self._placers:
                self._placers.append(GraphPlacer(graph, self.machine, self.options))
            placer = self._placers[0]
        elif self._passes is not None:
            graph, placer = self._passes.at(graph, sizes)
        else:
            graph, _ = prepare_graph(graph, None, self.options)
            placer = GraphPlacer(graph, self.machine, self.options)
        return graph, Compilation(*placer.place(graph))

    def results_at(self, sizes: dict[str, int], known: dict[Hashable, int]) -> list[int]:
        """Return a number for each result at some sizes, equal where equal operations compute it.

        Args:
            sizes: A number for each named size.
            known: The numbers so far, of this program and of those it is compared with.

        Raises:
            CompileError: As `at`.
        """
        # The passes with symbols have left what is redundant at these sizes only.
        graph, _ = prepare_graph(self._graph_at(sizes), None, self.options)
        numbers = {ABSENT: ABSENT}

        def add(value: int, *made: Hashable) -> None:
            key = (*made, graph.values[value].type)
            numbers[value] = known.setdefault(key, len(known))

        for i, slot in enumerate(graph.inputs):
            add(slot.value, "input", i)
        for constant in graph.constants:
            add(constant.value, "constant", constant.data.tobytes())
        for o in graph.operations:
            attributes = tuple([(name, repr(v)) for name, v in sorted(o.attributes.items())])
            operands = tuple([numbers[value] for value in o.inputs])
            for i, value in enumerate(o.outputs):
                add(value, o.op, o.domain, o.opset, o.math_fidelity, attributes, operands, i)
        return [numbers[slot.value] for slot in graph.outputs]

    def _graph_at(self, sizes: dict[str, int]) -> ComputationGraph:
        what = f"program {self.options.name or self.graph.name!r}"
        checked = self.sizes.check(sizes, what)
        try:
            return self._sized.at(checked)
        except (ArithmeticError, ValueError) as error:
            raise CompileError(
                f"{what} has no shapes at these sizes: {error}",
                got=", ".join(f"{name}={size}" for name, size in checked.items()),
                remedy="choose other sizes",
            ) from error

    def size_lines(self) -> list[str]:
        """Return the sizes with their bounds, and the guards, a line each."""
        return [
            *(f"  size {dim.name}: {dim.least} to {dim.most}" for dim in self.sizes.dims.values()),
            *(f"  {'specialised' if guard.is_specialised else 'guard'} {guard.text()}"
              for guard in self.guards),
        ]  # fmt: skip

    def text(self) -> str:
        """Return sizes, guards and the types of the slots as readable text."""
        graph, lines = self.graph, [f"dynamic program @{self.options.name or self.graph.name} {{"]
        lines += self.size_lines()
        lines += [
            f"  {side} {slot.name}: {type_text(graph.values[slot.value].type)}"
            for side, slots in (("input", graph.inputs), ("output", graph.outputs))
            for slot in slots
        ]
        return "\n".join([*lines, "}\n"])


def compile_dynamic(
    graph: ComputationGraph, sizes: SymbolicSizes, machine: Machine, options: CompileOptions
) -> DynamicProgram:
    """Compile a graph whose inputs have symbolic sizes, and end the recording of guards.

    Raises:
        CompileError: The graph has loops, states or foreign operators, or its types do not agree.
    """
    refused = [
        ("operations with a body (loops, scans, conditions)", bool(graph.bodies)),
        ("states", bool(graph.initial_state)),
        ("foreign operators", bool(graph.foreign_operations())),
    ]
    for what, is_there in refused:
        if is_there:
            raise CompileError(
                f"dynamic_shapes= does not support {what}", where=f"graph {graph.name!r}",
                remedy="compile the module without dynamic_shapes=, once for each size",
            )  # fmt: skip
    before = sizes.guards
    sizes.is_strict = True
    try:
        prepared, _ = prepare_graph(graph, None, options)
    except SizeNeeded:
        sizes.reset(before)
        return DynamicProgram(graph, sizes, machine.shape, options, needs_passes=True)
    finally:
        sizes.is_open = False
    return DynamicProgram(prepared, sizes, machine.shape, options)

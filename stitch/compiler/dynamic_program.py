"""`DynamicProgram`: a module compiled once for many sizes of its inputs.

Tracing runs once, with symbolic sizes; `at` replaces them by numbers, runs the passes unless they
decide what they have decided before (`PassCache`), and places the result. The passes depend on the
sizes (what is folded, what changes nothing, which constants are equal), as do spaces, layouts and
scratch, in steps: all is computed for each size, by the code that any compilation runs, so that
`at` equals compiling there and needs no guards for it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from stitch.compiler.compile_graph import prepare_graph
from stitch.compiler.options import Compilation, CompileOptions
from stitch.compiler.pass_cache import PassCache
from stitch.compiler.placement import GraphPlacer
from stitch.compiler.sized_graph import SizedGraph
from stitch.errors import CompileError, OutOfMemoryError
from stitch.graph import ComputationGraph, check_types
from stitch.linker import remove_dead_code
from stitch.machine import Machine, MachineShape
from stitch.program import ABSENT, Guard, Program, SymbolicSizes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DynamicProgram:
    """A graph with symbolic sizes, and the guards that tracing it and its passes relied on.

    Attributes:
        graph: The graph before the passes; shapes have symbolic sizes.
        sizes: The named sizes with their bounds, hints and guards.
        machine: The memory of the machine that it is compiled for.
        options: The options of the compilation.
        is_prepared: Whether the passes have run on `graph`, but for what depends on sizes: of a
            graph that is reassociated, whose results need not equal those of compiling at a size.
    """

    graph: ComputationGraph
    sizes: SymbolicSizes
    machine: MachineShape
    options: CompileOptions
    is_prepared: bool = False
    _sized: SizedGraph = field(init=False)
    #: None if the graph is to be reassociated, which makes values that depend on sizes.
    _passes: PassCache | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        graph = self.graph
        if self.is_prepared or not self.options.reassociate:
            options = replace(self.options, reassociate=False)
            graph = remove_dead_code(graph) if options.optimize else graph
            is_typed = self.sizes.without_guards(lambda: not check_types(graph)) or False
            passes = PassCache(graph, self.machine, options, is_typed)
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
        if self._passes is not None:
            graph, placer = self._passes.at(graph, sizes)
        else:
            graph, _ = prepare_graph(graph, None, self.options)
            placer = GraphPlacer(graph, self.machine, self.options)
        try:
            return graph, Compilation(*placer.place(graph))
        except OutOfMemoryError as error:
            chosen = ", ".join([f"{name}={sizes[name]}" for name in self.sizes.dims])
            error.where = f"{error.where}, at {chosen}"
            raise

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
            f"  {side} {slot.name}: {graph.values[slot.value].type.text()}"
            for side, slots in (("input", graph.inputs), ("output", graph.outputs))
            for slot in slots
        ]
        return "\n".join([*lines, "}\n"])


def compile_dynamic(
    graph: ComputationGraph, sizes: SymbolicSizes, machine: Machine, options: CompileOptions
) -> DynamicProgram:
    """Compile a graph whose inputs have symbolic sizes, and end the recording of guards.

    Raises:
        CompileError: The graph has loops, states or foreign operators, or a placement option names
            what it does not have.
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
    graph, prepared = graph.with_placement(*options.placement), None
    if options.reassociate:
        prepared = sizes.without_guards(lambda: prepare_graph(graph, None, options)[0])
    sizes.is_open = False
    if prepared is not None:
        return DynamicProgram(prepared, sizes, machine.shape, options, is_prepared=True)
    return DynamicProgram(graph, sizes, machine.shape, options)

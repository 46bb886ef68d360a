"""Compile a computation graph: passes, loop schedules, placement.

The same graph and options give the same program, in every process.
"""

from __future__ import annotations

from stitch.compiler.loops import LoopNote, schedule_loops
from stitch.compiler.options import Compilation, CompileOptions
from stitch.compiler.passes import (
    FOLD_GROWTH_NBYTES,
    fold_constants,
    fold_transposes,
    horizontal_fusion,
    merge_common_subexpressions,
    optimize_bodies,
    remove_identities,
    transpose_products,
)
from stitch.compiler.placement import GraphPlacer, apply_kinds
from stitch.errors import CompileError
from stitch.graph import ComputationGraph, check_types
from stitch.linker import drop_unused_values, order_by_use, remove_dead_code
from stitch.machine import Machine

_DEFAULTS = CompileOptions()


def compile_graph(
    graph: ComputationGraph, machine: Machine, options: CompileOptions = _DEFAULTS
) -> Compilation:
    """Compile a graph for a machine.

    Raises:
        CompileError: Types do not agree, a placement option cannot be satisfied, or a requested
            alias is not proved.
        LayoutError: A layout is invalid.
        OutOfMemoryError: The program does not fit the machine.
    """
    graph, loops = prepare_graph(graph, machine, options)
    program, warnings = GraphPlacer(graph, machine.shape, options).place(graph)
    return Compilation(program, warnings, loops)


def prepare_graph(
    graph: ComputationGraph, machine: Machine | None, options: CompileOptions
) -> tuple[ComputationGraph, tuple[LoopNote, ...]]:
    """Return the graph that is placed, and the schedules of its loops; sizes may be symbolic.

    `machine` is None for a graph without loops.

    Raises:
        CompileError: Types do not agree.
    """
    require_types(graph)
    graph = apply_kinds(graph.with_placement(*options.placement))
    # Target shapes and axes must be constants even without optimisation.
    loops: tuple[LoopNote, ...] = ()
    if options.optimize:
        graph = optimize(graph)
        if options.reassociate:
            graph = _absorb_transposes(graph)
        if machine is not None:
            scheduled = schedule_loops(graph, machine, options.schedule, options.executor)
            if scheduled.notes:
                graph, loops = optimize(scheduled.graph), scheduled.notes
    else:
        graph = drop_unused_values(fold_constants(graph, 0))
    return order_by_use(graph), loops


def require_types(graph: ComputationGraph) -> None:
    """Raise `CompileError` if the types of a graph do not agree."""
    problems = check_types(graph)
    if problems:
        raise CompileError(
            f"the types of computation graph {graph.name!r} do not agree: "
            + "; ".join(map(str, problems[:8]))
        )


def _absorb_transposes(graph: ComputationGraph) -> ComputationGraph:
    """Read operands of products in place of their transposes, then remove duplicates."""
    graph = remove_identities(transpose_products(fold_transposes(graph)))
    return remove_dead_code(merge_common_subexpressions(graph))


#: Maximum nesting depth of scans whose bodies are optimised.
_NESTED = 16


def optimize(graph: ComputationGraph, nested: int = _NESTED) -> ComputationGraph:
    """Apply the passes that preserve every result bit for bit, also to bodies of scans."""
    graph = remove_dead_code(graph)
    graph = fold_constants(graph, FOLD_GROWTH_NBYTES)
    graph = remove_identities(graph)
    graph = merge_common_subexpressions(graph)
    if nested < _NESTED:
        # Rounds process little data: their time is proportional to the number of operations.
        graph = horizontal_fusion(graph)
    graph = remove_dead_code(graph)
    if not nested:
        return graph
    with_bodies = optimize_bodies(graph, lambda body: optimize(body, nested - 1))
    return graph if with_bodies is graph else remove_dead_code(with_bodies)

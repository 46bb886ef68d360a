"""A graph of aot_autograd as a function: one program, or programs and torch's operators in turn.

Comes in: an fx graph. Goes out: a function of torch tensors, and a `GraphReport`. What Stitch
refuses torch runs (`graph_cut` says in which order), on the same tensors: what a program gives is
a tensor of torch on its bytes, what torch gives is an argument. Must not know: dynamo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from stitch.errors import CompileError, InternalError
from stitch.frontend.torch.compile.graph_cut import (
    ORIGIN,
    GraphPart,
    Step,
    copied,
    cut_graph,
    is_exchange_of_keys,
    is_operation,
    is_view,
    nbytes_of,
    unit_of,
)
from stitch.frontend.torch.compile.graph_program import GraphProgram
from stitch.frontend.torch.compile.graph_report import Fallback, GraphReport, Heard
from stitch.frontend.torch.compile.outer_graph import OuterGraph
from stitch.frontend.torch.compile.program_form import (
    REMEDY,
    Building,
    GraphSettings,
    compiled_form,
)
from stitch.frontend.torch.compile.shared_storage import SharedStorage
from stitch.frontend.torch.compile.symbolic_sizes import (
    DEPENDS_ON_DATA,
    ByShapes,
    depending_on_data,
    is_static,
)
from stitch.frontend.torch.node_places import location_of, name_of
from stitch.frontend.torch.refused_nodes import MAX_LINES, Refusal

#: A function of a list of arguments, which it empties.
Run = Callable[[list[Any]], Sequence[Any]]
#: From a part and its settings to what makes what runs it (or raises `RefusedByExecutor`), and what
#: of the part has no lowering.
Compile = Callable[[GraphPart, GraphSettings], tuple[Callable[[], Run], Sequence[Refusal]]]


class RefusedByExecutor(Exception):
    """The device's executor does not run a program; `each`: the nodes that are to blame."""

    def __init__(self, each: Sequence[Refusal]) -> None:
        super().__init__()
        self.each = each


def stitched(
    module: Any,
    storage: SharedStorage,
    settings: GraphSettings,
    heard: Heard,
    refused: Mapping[Any, str] | None = None,
) -> Run:
    """A graph as a function of its arguments.

    `refused`: nodes that torch is to run anyway, with reasons. Raises `CompileError` for what
    cannot be compiled where `settings.raises`; what loading raises.
    """
    reasons = {} if refused is None else {unit_of(n): why for n, why in refused.items()}
    if is_static(module.graph):
        return _sized(module, storage, settings, heard, reasons)
    dependent = depending_on_data(module.graph)
    if dependent and settings.raises:
        lines = dict.fromkeys(f"{name_of(node)}: {location_of(node)}" for node in dependent)
        raise CompileError(
            "sizes depend on data:\n  - " + "\n  - ".join(list(lines)[:MAX_LINES]),
            where=settings.name,
            remedy=REMEDY,
        )
    reasons.update({unit_of(node): DEPENDS_ON_DATA for node in dependent})

    def by_shapes(part: Any, wanted: GraphSettings) -> Run:
        # Not `stitched` again: sizes of nested tensors stay symbols, and are torch's.
        return ByShapes(part, lambda sized: _sized(sized, storage, wanted, heard, {})).__call__

    def compiled(
        part: GraphPart, wanted: GraphSettings
    ) -> tuple[Callable[[], Run], Sequence[Refusal]]:
        made = torch.fx.GraphModule(module, part.graph)
        return lambda: by_shapes(made, wanted), ()

    if not reasons:
        return by_shapes(module, settings)
    # Strides are not known yet, so they are promised to all who read a value.
    return _cut_and_stitched(
        module,
        replace(settings, exact_outputs=_output_count(module.graph)),
        reasons,
        compiled,
        heard,
    )


def _output_count(graph: Any) -> int:
    return len(next(reversed(graph.nodes)).args[0])


def _sized(
    module: Any,
    storage: SharedStorage,
    settings: GraphSettings,
    heard: Heard,
    reasons: dict[Any, str],
) -> Run:
    def compiled(
        part: GraphPart, wanted: GraphSettings
    ) -> tuple[Callable[[], Run], Sequence[Refusal]]:
        building = Building(part.graph, module, wanted)
        return lambda: _program(building, storage).__call__, building.refusals

    if not reasons:
        building = Building(copied(module.graph), module, settings)
        refusals = building.refusals
        if not refusals:
            try:
                program = _program(building, storage)
            except RefusedByExecutor as refused:
                refusals = refused.each
            else:
                has_program = building.graph is not None
                heard(_report_of_one(module.graph, settings, has_program=has_program))
                return program.__call__
        reasons = _origins(refusals)
    return _cut_and_stitched(module, settings, reasons, compiled, heard)


def _cut_and_stitched(
    module: Any, settings: GraphSettings, reasons: dict[Any, str], compiled: Compile, heard: Heard
) -> Run:
    """A graph of which torch runs the nodes in `reasons`, and what has to go with them."""
    graph = module.graph
    by_torch = set(reasons)
    while True:
        steps = cut_graph(
            graph, by_torch, static=settings.static, visible=settings.exact_outputs,
            share=settings.shares_outputs,
        )  # fmt: skip
        parts = [step for step in steps if isinstance(step, GraphPart)]
        small = [part for part in parts if _is_small(part, settings)]
        for part in small:
            why = f"its part of the graph has {part.operations} of the {settings.min_operations} "
            reasons.update(dict.fromkeys(map(unit_of, part.nodes), why + "operations wanted"))
        refusals: list[Refusal] = []
        runs: list[Callable[[], Run]] = []
        for number, part in enumerate(() if small else parts):
            wanted = _settings_of(part, settings, graph, number, by_torch)
            made, refused = compiled(part, wanted)
            runs.append(made)
            refusals += refused
        if not small and not refusals:
            try:
                programs = [make() for make in runs]
                break
            except RefusedByExecutor as refused:
                refusals += refused.each
        reasons.update(_origins(refusals))
        by_torch.update(reasons)
    outer = OuterGraph(module, is_backward=settings.role == "backward")
    run: Run = outer.run(steps, programs)
    heard(_report(graph, settings, steps, reasons, by_torch))
    return run


def _program(building: Building, storage: SharedStorage) -> GraphProgram:
    """A graph's program on the device; raises `RefusedByExecutor` where its executor does not run
    it, and others may."""
    try:
        return GraphProgram(compiled_form(building, storage.device), storage)
    except CompileError as error:
        if building.settings.raises or building.graph is None:
            raise
        raise RefusedByExecutor(building.refused_by(storage.device, error)) from error


def _is_small(part: GraphPart, settings: GraphSettings) -> bool:
    if part.operations >= settings.min_operations:
        return False
    return not any(map(is_exchange_of_keys, part.nodes))


def _origins(refusals: Iterable[Refusal]) -> dict[Any, str]:
    reasons: dict[Any, str] = {}
    for refusal in refusals:
        origin = refusal.node.meta.get(ORIGIN)
        if origin is None:
            raise InternalError(
                f"internal error: the refused node {refusal.node} stands for none of the graph",
                where=refusal.where, got=refusal.reason, remedy="please report it",
            )  # fmt: skip
        reasons.setdefault(unit_of(origin), refusal.reason)
    return reasons


def _settings_of(
    part: GraphPart, whole: GraphSettings, graph: Any, number: int, by_torch: set[Any]
) -> GraphSettings:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    lasting = {placeholders[position] for position in whole.static}
    static = frozenset(i for i, node in enumerate(part.inputs) if node in lasting)
    fresh = frozenset(
        i for i, node in enumerate(part.inputs)
        if unit_of(node) in by_torch and not is_view(node)
    )  # fmt: skip
    # A part: outputs that share bytes are views that torch makes.
    return replace(
        whole, name=f"{whole.name}_{number}", static=static, exact_outputs=part.exact,
        role="part", fresh=fresh,
    )  # fmt: skip


# What is told of it --------------------------------------------------------------------------


def _counted(nodes: Iterable[Any]) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(name_of(node) for node in nodes if is_operation(node)).most_common())


def _report_of_one(graph: Any, settings: GraphSettings, *, has_program: bool) -> GraphReport:
    end = next(reversed(graph.nodes))
    read = [node for node in graph.nodes if node.op == "placeholder" and node.users]
    made = [node for node in end.all_input_nodes if node.op == "call_function"]
    return GraphReport(
        settings.name, settings.role, int(has_program), _counted(graph.nodes), (), (),
        sum(map(nbytes_of, read)) if has_program else 0, sum(map(nbytes_of, made)),
    )  # fmt: skip


def _report(
    graph: Any,
    settings: GraphSettings,
    steps: Sequence[Step],
    reasons: Mapping[Any, str],
    by_torch: set[Any],
) -> GraphReport:
    parts = [step for step in steps if isinstance(step, GraphPart)]
    mine = [node for part in parts for node in part.nodes]
    theirs = [step for step in steps if not isinstance(step, GraphPart) and unit_of(step) is step]
    made = {node for part in parts for node in part.outputs}
    given = [node for part in parts for node in part.inputs if node not in made]
    end = next(reversed(graph.nodes))
    taken = [
        node
        for node in made
        if any(user is end or unit_of(user) in by_torch for user in node.users)
    ]
    fallbacks = tuple(
        Fallback(name_of(node), location_of(node), reasons[node])
        for node in theirs
        if node in reasons
    )
    return GraphReport(
        settings.name, settings.role, sum(bool(part.outputs) for part in parts), _counted(mine),
        _counted(node for node in theirs if node in reasons), fallbacks,
        sum(map(nbytes_of, given)), sum(map(nbytes_of, taken)),
    )  # fmt: skip

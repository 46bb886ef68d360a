"""Compile a graph of aot_autograd to a function: one program, or programs and torch's operators in
turn (in the order of `subgraphs`), which pass torch tensors to each other."""

from __future__ import annotations

import keyword
import logging
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from stitch.errors import CompileError, InternalError, StitchError
from stitch.frontend.torch.aten_walk import is_known
from stitch.frontend.torch.compile.graph_program import (
    REMEDY,
    GraphLowering,
    GraphProgram,
    GraphSettings,
    boxed,
    compile_lowered,
)
from stitch.frontend.torch.compile.subgraphs import (
    ORIGIN,
    GraphPart,
    Step,
    copied,
    cut_graph,
    is_exchange_of_keys,
    is_operation,
    is_view,
    nbytes_of,
    restrided,
    storage_of,
    unit_of,
    unusual_strides,
)
from stitch.frontend.torch.compile.symbolic_graph import (
    DEPENDS_ON_DATA,
    ByShapes,
    GraphSymbols,
    NamedSizes,
    depending_on_data,
    has_symbols,
    is_static,
)
from stitch.frontend.torch.graph_report import Fallback, GraphReport, ReportListener
from stitch.frontend.torch.refused_nodes import MAX_LINES, Refusal, briefly, location_of, name_of
from stitch.frontend.torch.shared_storage import SharedStorage
from stitch.frontend.torch.torch_internals import OpOverload

_log = logging.getLogger(__name__)

# Generated code that calls programs and torch's operators -----------------------------------------

#: The names of values in the generated code, where they are no keywords; other objects are `c0`...
_NAME = re.compile(r"\b[vp]\d+\b(?!=)")
#: The file name in tracebacks of the generated code.
FILE = "<stitched graph>"


class HostGraph:
    """Generates the function of one graph. `is_backward`: its arguments may be results of
    programs."""

    def __init__(self, module: Any, *, is_backward: bool) -> None:
        self._module, self._is_backward = module, is_backward
        self._lines: list[str] = []
        self._objects: list[Any] = []
        #: The names of values; the values of programs; the names of restrided values.
        self._names: dict[Any, str] = {}
        self._of_programs: set[Any] = set()
        self._restrided: dict[Any, str] = {}

    def run(self, steps: Sequence[Step], runs: Sequence[Any]) -> Any:
        """Return the function; `runs`: the functions of the parts among the steps, in order."""
        nodes = list(self._module.graph.nodes)
        placeholders = [self._named(node) for node in nodes if node.op == "placeholder"]
        if placeholders:
            self._lines.append(f"{', '.join(placeholders)}, = arguments")
        self._lines.append("arguments.clear()")
        rest = iter(runs)
        for step in steps:
            if isinstance(step, GraphPart):
                self._call_part(step, next(rest))
            else:
                self._call(step, exact=True)
        results = self._text(list(nodes[-1].args[0]), exact=False)
        self._lines.append(f"return {results}")
        names = ", ".join(f"c{number}" for number in range(len(self._objects)))
        body = "".join(f"        {line}\n" for line in self._with_deletions())
        text = f"def bind({names}):\n    def run(arguments):\n{body}    return run\n"
        namespace: dict[str, Any] = {}
        exec(compile(text, FILE, "exec"), namespace)
        return boxed(namespace["bind"](*self._objects))

    # -- statements --------------------------------------------------------------------------------

    def _call_part(self, part: GraphPart, run: Any) -> None:
        if not part.outputs:
            return
        inputs = self._text(list(part.inputs), exact=False)
        results = [self._named(node) for node in part.outputs]
        self._of_programs.update(part.outputs)
        self._lines.append(f"{', '.join(results)}, = {self._object(run)}({inputs})")

    def _call(self, node: Any, *, exact: bool) -> None:
        target = node.target
        if node.op == "get_attr":
            self._names[node] = self._object(attrgetter(target)(self._module))
            return
        # The method that OpOverload.__call__ forwards to.
        if type(target) is OpOverload:
            target = target._op
        operands = [self._text(value, exact=exact) for value in node.args]
        for name, value in node.kwargs.items():
            text = self._text(value, exact=exact)
            if name.isidentifier() and not keyword.iskeyword(name):
                operands.append(f"{name}={text}")
            else:
                operands.append(f"**{{{self._object(name)}: {text}}}")
        if target is operator.getitem:
            call = f"{operands[0]}[{operands[1]}]"
        else:
            call = f"{self._object(target)}({', '.join(operands)})"
        self._lines.append(f"{self._named(node)} = {call}")

    def _with_deletions(self) -> list[str]:
        """The statements, each followed by `del` of the names that are not read later."""
        last = {name: at for at, line in enumerate(self._lines) for name in _NAME.findall(line)}
        lines: list[str] = []
        for at, line in enumerate(self._lines):
            lines.append(line)
            unused = sorted({name for name in _NAME.findall(line) if last[name] == at})
            if unused and not line.startswith("return"):
                lines.append(f"del {', '.join(unused)}")
        return lines

    # -- values ------------------------------------------------------------------------------------

    def _named(self, node: Any) -> str:
        """A new name for the result of a statement."""
        name = self._names[node] = f"v{len(self._names)}"
        return name

    def _object(self, value: Any) -> str:
        self._objects.append(value)
        return f"c{len(self._objects) - 1}"

    def _text(self, value: Any, *, exact: bool) -> str:
        """The code of an operand; `exact`: in the strides that torch's operator was traced with."""
        if isinstance(value, torch.fx.Node):
            return self._exact_name(value) if exact else self._name(value)
        if isinstance(value, list | tuple):
            items = [self._text(item, exact=exact) for item in value]
            if isinstance(value, list):
                return f"[{', '.join(items)}]"
            return f"({''.join(f'{item}, ' for item in items)})"
        if isinstance(value, Mapping):
            pairs = [
                f"{self._object(key)}: {self._text(item, exact=exact)}"
                for key, item in value.items()
            ]
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, slice):
            ends = (value.start, value.stop, value.step)
            return f"slice({', '.join(self._text(end, exact=exact) for end in ends)})"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self._object(value)

    def _name(self, node: Any) -> str:
        if node not in self._names:
            # Constants, and nodes without operands, are computed before their first reader.
            self._call(node, exact=False)
        return self._names[node]

    def _exact_name(self, node: Any) -> str:
        name = self._name(node)
        if not self._may_differ(node):
            return name
        if node not in self._restrided:
            strides = self._object(tuple(node.meta["val"].stride()))
            exact = self._restrided[node] = f"p{len(self._restrided)}"
            self._lines.append(f"{exact} = {self._object(restrided)}({name}, {strides})")
        return self._restrided[node]

    def _may_differ(self, node: Any) -> bool:
        kind = node.meta.get("val")
        if storage_of(node) is None or has_symbols(kind) or kind.is_contiguous():
            return False
        if node.op == "placeholder":
            # It may be the result of a program of the forward pass, in other strides.
            return self._is_backward
        return node in self._of_programs and unusual_strides(kind) is None


# Stitched graphs ----------------------------------------------------------------------------------

#: A function of a list of arguments, which it empties.
Run = Callable[[list[Any]], Sequence[Any]]
#: Lowers a part. Returns a function that builds its `Run` (or raises `RefusedByExecutor`), and the
#: refused nodes.
Compile = Callable[[GraphPart, GraphSettings], tuple[Callable[[], Run], Sequence[Refusal]]]


class RefusedByExecutor(Exception):
    """The device's executor does not run a program because of the nodes `each`."""

    def __init__(self, each: Sequence[Refusal]) -> None:
        super().__init__()
        self.each = each


def stitched(
    module: Any, storage: SharedStorage, settings: GraphSettings, listener: ReportListener,
    refused: Mapping[Any, str] | None = None,
) -> Run:  # fmt: skip
    """Compile a graph of aot_autograd to a function of its arguments.

    Args:
        module: The graph module.
        storage: The memory shared with the device.
        settings: The graph's settings.
        listener: Called with the report of each compiled graph.
        refused: Nodes that torch has to run, with the reasons.

    Raises:
        CompileError: a node cannot be compiled and `settings.raises` is set.
    """
    reasons = {} if refused is None else {unit_of(n): why for n, why in refused.items()}
    if is_static(module.graph):
        return _sized(module, storage, settings, listener, reasons)
    dependent = depending_on_data(module.graph)
    if dependent and settings.raises:
        lines = dict.fromkeys(f"{name_of(node)}: {location_of(node)}" for node in dependent)
        raise CompileError(
            "sizes depend on data:\n  - " + "\n  - ".join(list(lines)[:MAX_LINES]),
            where=settings.name,
            remedy=REMEDY,
        )
    reasons.update({unit_of(node): DEPENDS_ON_DATA for node in dependent})

    recompiles: list[str] = []

    def report(each: GraphReport) -> None:
        listener(replace(each, recompiles=tuple(dict.fromkeys(recompiles))))

    if not reasons:
        graph = copied(module.graph)
        build, refusals = _named(module, graph, module, storage, settings, listener, recompiles)
        if not refusals:
            run = build()
            if run.is_named:
                report(_report_of_one(module.graph, settings, has_program=run.has_program))
            return run.__call__
        reasons = _origins(refusals)

    def lower(
        part: GraphPart, wanted: GraphSettings
    ) -> tuple[Callable[[], Run], Sequence[Refusal]]:
        spare = torch.fx.GraphModule(module, copied(part.graph))
        build, refusals = _named(module, part.graph, spare, storage, wanted, listener, recompiles)
        return lambda: build().__call__, refusals

    # Strides are not known yet, so all outputs are exact.
    outputs = len(module.graph.output_node().args[0])
    return _cut_and_stitched(
        module, replace(settings, exact_outputs=outputs), reasons, lower, report
    )


def _named(
    root: Any, graph: Any, module: Any, storage: SharedStorage, settings: GraphSettings,
    listener: ReportListener, recompiles: list[str],
) -> tuple[Callable[[], ByShapes], Sequence[Refusal]]:  # fmt: skip
    """Lower a graph with named sizes.

    Args:
        root: The module with its attributes.
        graph: The graph; it is changed.
        module: A module with a copy of the graph, to be specialised where named sizes do not do.
        storage: The memory shared with the device.
        settings: The graph's settings.
        listener: Called with the report of each specialised graph.
        recompiles: Receives why other sizes are compiled again.

    Returns:
        A function that compiles it, and the nodes whose operators have no lowering.
    """

    def specialised(why: str) -> ByShapes:
        recompiles.append(why)
        _log.info("graph %s is specialised for each set of shapes: %s", settings.name, why)

        def report(each: GraphReport) -> None:
            listener(replace(each, recompiles=(why,)))

        # Not `stitched`: sizes of nested tensors stay symbolic, and run in torch.
        return ByShapes(module, lambda sized: _sized(sized, storage, settings, report, {}))

    try:
        symbols = GraphSymbols.of(graph)
        sizes = symbols.sizes(symbols.hints)
        lowering = GraphLowering(graph, root, replace(settings, raises=False), sizes)
    except StitchError as error:
        why = briefly(error)
        return lambda: specialised(why), ()
    refusals = lowering.refusals
    missing = [refusal for refusal in refusals if not is_known(refusal.node)]
    if missing and not settings.raises:
        return lambda: specialised(missing[0].reason), missing
    if refusals:
        first = refusals[0]
        return lambda: specialised(f"{first.operator} ({first.where}): {first.reason}"), ()

    def build() -> ByShapes:
        try:
            named, first = NamedSizes.of(symbols, lowering, storage)
        except StitchError as error:
            return specialised(briefly(error))
        recompiles.extend(named.guards())
        return ByShapes(
            module, lambda sized: _sized(sized, storage, settings, listener, {}), named, first
        )

    return build, ()


def _sized(
    module: Any, storage: SharedStorage, settings: GraphSettings, listener: ReportListener,
    reasons: dict[Any, str],
) -> Run:  # fmt: skip
    def lower(
        part: GraphPart, wanted: GraphSettings
    ) -> tuple[Callable[[], Run], Sequence[Refusal]]:
        lowering = GraphLowering(part.graph, module, wanted)
        return lambda: _program(lowering, storage).__call__, lowering.refusals

    if not reasons:
        lowering = GraphLowering(copied(module.graph), module, settings)
        refusals = lowering.refusals
        if not refusals:
            try:
                program = _program(lowering, storage)
            except RefusedByExecutor as refused:
                refusals = refused.each
            else:
                has_program = lowering.graph is not None
                listener(_report_of_one(module.graph, settings, has_program=has_program))
                return program.__call__
        reasons = _origins(refusals)
    return _cut_and_stitched(module, settings, reasons, lower, listener)


def _cut_and_stitched(
    module: Any, settings: GraphSettings, reasons: dict[Any, str], lower: Compile,
    listener: ReportListener,
) -> Run:  # fmt: skip
    """Compile a graph in which torch runs the nodes in `reasons`, and those that depend on them."""
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
            build, refused = lower(part, wanted)
            runs.append(build)
            refusals += refused
        if not small and not refusals:
            try:
                programs = [build() for build in runs]
                break
            except RefusedByExecutor as refused:
                refusals += refused.each
        reasons.update(_origins(refusals))
        by_torch.update(reasons)
    outer = HostGraph(module, is_backward=settings.role == "backward")
    run: Run = outer.run(steps, programs)
    listener(_report(graph, settings, steps, reasons, by_torch))
    return run


def _program(lowering: GraphLowering, storage: SharedStorage) -> GraphProgram:
    """Compile and load a graph; raise `RefusedByExecutor` if the device's executor refuses it and
    torch may run its nodes."""
    try:
        return GraphProgram(compile_lowered(lowering, storage.device), storage)
    except CompileError as error:
        if lowering.settings.raises or lowering.graph is None:
            raise
        raise RefusedByExecutor(lowering.refused_by(storage.device, error)) from error


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
                f"internal error: the refused node {refusal.node} has no original in the graph",
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
    # The outputs of a part do not share memory: torch makes the views.
    return replace(
        whole, name=f"{whole.name}_{number}", static=static, exact_outputs=part.exact,
        role="part", fresh=fresh,
    )  # fmt: skip


# Reports -------------------------------------------------------------------------------------


def _counted(nodes: Iterable[Any]) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(name_of(node) for node in nodes if is_operation(node)).most_common())


def _report_of_one(graph: Any, settings: GraphSettings, *, has_program: bool) -> GraphReport:
    end = graph.output_node()
    read = [node for node in graph.nodes if node.op == "placeholder" and node.users]
    results = [node for node in end.all_input_nodes if node.op == "call_function"]
    return GraphReport(
        settings.name, settings.role, int(has_program), _counted(graph.nodes), (), (),
        sum(map(nbytes_of, read)) if has_program else 0, sum(map(nbytes_of, results)),
    )  # fmt: skip


def _report(
    graph: Any, settings: GraphSettings, steps: Sequence[Step], reasons: Mapping[Any, str],
    by_torch: set[Any],
) -> GraphReport:  # fmt: skip
    parts = [step for step in steps if isinstance(step, GraphPart)]
    mine = [node for part in parts for node in part.nodes]
    theirs = [step for step in steps if not isinstance(step, GraphPart) and step in reasons]
    results = {node for part in parts for node in part.outputs}
    to_programs = [node for part in parts for node in part.inputs if node not in results]
    end = graph.output_node()
    to_torch = [
        node for node in results
        if any(user is end or unit_of(user) in by_torch for user in node.users)
    ]  # fmt: skip
    fallbacks = [Fallback(name_of(node), location_of(node), reasons[node]) for node in theirs]
    return GraphReport(
        settings.name, settings.role, sum(bool(part.outputs) for part in parts), _counted(mine),
        _counted(theirs), tuple(fallbacks), sum(map(nbytes_of, to_programs)),
        sum(map(nbytes_of, to_torch)),
    )  # fmt: skip

"""A graph of aot_autograd as a function: one program, or programs and torch's operators in turn.

What Stitch refuses torch runs (`subgraphs` says in which order), on the same tensors: what a
program gives is a tensor of torch on its bytes, what torch gives is an argument.
"""

from __future__ import annotations

import copy
import keyword
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from stitch.errors import CompileError, InternalError
from stitch.frontend.torch.compile.graph_program import (
    REMEDY,
    Building,
    GraphProgram,
    GraphSettings,
    boxed,
    compiled_form,
)
from stitch.frontend.torch.compile.graph_report import Fallback, GraphReport, Heard
from stitch.frontend.torch.compile.shared_storage import SharedStorage
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
from stitch.frontend.torch.refused_nodes import MAX_LINES, Refusal, location_of, name_of

# --------------------------------------------------------------------------------------------------
# Symbolic sizes

_log = logging.getLogger(__name__)
#: Shapes for which one symbolic graph keeps programs; the oldest go first.
MAX_SHAPES = 64
DEPENDS_ON_DATA = "the sizes of what it reads or gives depend on data"


class ByShapes:
    """A graph with symbolic sizes: a function for each set of shapes that it is called with."""

    def __init__(self, module: Any, compile_sized: Callable[[Any], Callable[..., Any]]) -> None:
        self._module, self._compile = module, compile_sized
        self._runs: dict[tuple[Any, ...], Callable[..., Any]] = {}

    @boxed
    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        key = tuple(map(_kind, arguments))
        run = self._runs.get(key)
        if run is None:
            _log.info("compiled anew, for shapes number %d: %s", len(self._runs) + 1, key)
            run = self._runs[key] = self._compile(with_sizes_of(self._module, arguments))
            while len(self._runs) > MAX_SHAPES:
                del self._runs[next(iter(self._runs))]
        return run(arguments)  # type: ignore[no-any-return]  # torch has no types here


def _kind(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    if argument.layout is not torch.strided:
        return argument.shape, argument.layout, argument.dtype
    return argument.shape, argument.stride(), argument.dtype


_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_static(graph: Any) -> bool:
    """Whether all sizes in a graph are numbers already."""
    return not any(has_symbols(node.meta.get("val")) for node in graph.nodes)


def has_symbols(value: Any) -> bool:
    """Whether a size, or a number, in what a node gives is a symbol."""
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride()) if value.layout is torch.strided else value.shape
        return any(isinstance(size, torch.SymInt) for size in sizes)
    if isinstance(value, list | tuple):
        return any(map(has_symbols, value))
    return isinstance(value, _SYMBOLS)


def depending_on_data(graph: Any) -> list[Any]:
    """The operators of a graph that read or give what has sizes, or is a number, out of data."""
    values = {node: _depends(node.meta.get("val")) for node in graph.nodes}
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and (values[node] or any(values[source] for source in node.all_input_nodes))
    ]


def _depends(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_depends, value))
    is_sized = isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    return is_sized and bool(free_unbacked_symbols(value))


def _fake_of(tensor: Any, mode: Any) -> Any:
    if tensor.layout is not torch.strided:
        return mode.from_tensor(tensor)
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


class _Recorder(torch.fx.Interpreter):  # type: ignore[misc]  # torch has no types here
    """Remembers what every node gives."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.results: dict[Any, Any] = {}

    def run_node(self, node: Any) -> Any:
        self.results[node] = super().run_node(node)
        return self.results[node]


def _size_inner_graphs(module: Any, results: Mapping[Any, Any]) -> None:
    """Gives the graphs that operators of a graph run the sizes of what these are given."""
    for node in module.graph.nodes:
        inner = [
            source.target for source in node.all_input_nodes
            if source.op == "get_attr" and isinstance(results[source], torch.fx.GraphModule)
        ]  # fmt: skip
        if not inner:
            continue
        lists = [given for given in node.args if isinstance(given, list | tuple)]
        operands = torch.fx.node.map_arg([v for given in lists for v in given], results.get)
        for target in inner:
            setattr(module, target, with_sizes_of(getattr(module, target), operands))


def with_sizes_of(module: Any, arguments: Sequence[Any]) -> Any:
    """A copy of a graph module for arguments of just these shapes."""
    # Loops ask it for the symbols that they make.
    shapes = ShapeEnv()
    mode = torch._subclasses.FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    sized = copy.deepcopy(module)
    with mode, torch.no_grad():
        fakes = [_fake_of(a, mode) if isinstance(a, torch.Tensor) else a for a in arguments]
        recorder = _Recorder(sized)
        recorder.run(*fakes)
    _size_inner_graphs(sized, recorder.results)
    numbers = {n: v for n, v in recorder.results.items() if isinstance(v, _NUMBERS)}
    for node in sized.graph.nodes:
        if node.op != "output":
            node.meta["val"] = recorder.results[node]
        if node.op not in ("placeholder", "get_attr"):
            node.args = torch.fx.node.map_arg(node.args, lambda n: numbers.get(n, n))
            node.kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: numbers.get(n, n))
    for node in reversed(list(sized.graph.nodes)):
        if node in numbers and node.op == "call_function" and not node.users:
            sized.graph.erase_node(node)
    return sized


# --------------------------------------------------------------------------------------------------
# Stitched graphs

# --------------------------------------------------------------------------------------------------
# The function that calls programs and torch's operators one after the other, written out.

#: The name of the file in which tracebacks show the code.
FILE = "<stitched graph>"


class HostGraph:
    """Writes the function of one graph. `is_backward`: other programs may have made what it is
    given."""

    def __init__(self, module: Any, *, is_backward: bool) -> None:
        self._module, self._is_backward = module, is_backward
        #: The statements, each with the names that it reads.
        self._lines: list[tuple[str, set[str]]] = []
        self._read: set[str] = set()
        self._objects: list[Any] = []
        #: The names of values, of those that programs make, and of those in promised strides.
        self._names: dict[Any, str] = {}
        self._of_programs: set[Any] = set()
        self._promised: dict[Any, str] = {}

    def run(self, steps: Sequence[Step], runs: Sequence[Any]) -> Any:
        """The function; `runs` are those of the parts among the steps, in their order."""
        nodes = list(self._module.graph.nodes)
        given = [self._named(node) for node in nodes if node.op == "placeholder"]
        if given:
            self._say(f"{', '.join(given)}, = arguments")
        self._say("arguments.clear()")
        rest = iter(runs)
        for step in steps:
            if isinstance(step, GraphPart):
                self._call_part(step, next(rest))
            else:
                self._call(step, promised=True)
        results = self._text(list(nodes[-1].args[0]), promised=False)
        self._say(f"return {results}")
        names = ", ".join(f"c{number}" for number in range(len(self._objects)))
        body = "".join(f"        {line}\n" for line in self._with_ends())
        text = f"def bind({names}):\n    def run(arguments):\n{body}    return run\n"
        made: dict[str, Any] = {}
        exec(compile(text, FILE, "exec"), made)
        return boxed(made["bind"](*self._objects))

    # -- statements --------------------------------------------------------------------------------

    def _call_part(self, part: GraphPart, run: Any) -> None:
        if not part.outputs:
            return
        inputs = self._text(list(part.inputs), promised=False)
        results = [self._named(node) for node in part.outputs]
        self._of_programs.update(part.outputs)
        self._say(f"{', '.join(results)}, = {self._object(run)}({inputs})")

    def _call(self, node: Any, *, promised: bool) -> None:
        target = node.target
        if node.op == "get_attr":
            self._names[node] = self._object(attrgetter(target)(self._module))
            return
        # What calls it is a function in Python that does no more.
        if type(target) is torch._ops.OpOverload:
            target = target._op
        operands = [self._text(value, promised=promised) for value in node.args]
        for name, value in node.kwargs.items():
            text = self._text(value, promised=promised)
            if name.isidentifier() and not keyword.iskeyword(name):
                operands.append(f"{name}={text}")
            else:
                operands.append(f"**{{{self._object(name)}: {text}}}")
        if target is operator.getitem:
            call = f"{operands[0]}[{operands[1]}]"
        else:
            call = f"{self._object(target)}({', '.join(operands)})"
        self._say(f"{self._named(node)} = {call}")

    def _say(self, line: str) -> None:
        """A statement, which reads what was named since the last."""
        self._lines.append((line, self._read))
        self._read = set()

    def _with_ends(self) -> list[str]:
        """The statements, each followed by the end of what nobody reads after it."""
        last = {name: at for at, (_, read) in enumerate(self._lines) for name in read}
        lines: list[str] = []
        for at, (line, read) in enumerate(self._lines):
            lines.append(line)
            gone = sorted(name for name in read if last[name] == at)
            if gone and not line.startswith("return"):
                lines.append(f"del {', '.join(gone)}")
        return lines

    # -- values ------------------------------------------------------------------------------------

    def _named(self, node: Any) -> str:
        """The name of what a statement gives from here on; it ends there if nobody reads it."""
        name = self._names[node] = f"v{len(self._names)}"
        self._read.add(name)
        return name

    def _object(self, value: Any) -> str:
        self._objects.append(value)
        return f"c{len(self._objects) - 1}"

    def _text(self, value: Any, *, promised: bool) -> str:
        """An operand; `promised`: as torch's operators read it."""
        if isinstance(value, torch.fx.Node):
            return self._as_promised(value) if promised else self._name(value)
        if isinstance(value, list | tuple):
            items = [self._text(item, promised=promised) for item in value]
            if isinstance(value, list):
                return f"[{', '.join(items)}]"
            return f"({''.join(f'{item}, ' for item in items)})"
        if isinstance(value, Mapping):
            pairs = [f"{self._object(k)}: {self._text(v, promised=promised)}"
                     for k, v in value.items()]  # fmt: skip
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, slice):
            ends = (value.start, value.stop, value.step)
            return f"slice({', '.join(self._text(end, promised=promised) for end in ends)})"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self._object(value)

    def _name(self, node: Any) -> str:
        if node not in self._names:
            # Constants, and what is made of nothing, come into being where they are read: before
            # the statement that is being written.
            read, self._read = self._read, set()
            self._call(node, promised=False)
            self._read = read
        name = self._names[node]
        if name.startswith("v"):
            self._read.add(name)
        return name

    def _as_promised(self, node: Any) -> str:
        """A value in the strides that torch's operators were traced with."""
        name = self._name(node)
        if not self._may_differ(node):
            return name
        if node not in self._promised:
            read, self._read = self._read, {name}
            strides = self._object(tuple(node.meta["val"].stride()))
            made = self._promised[node] = f"p{len(self._promised)}"
            self._read.add(made)
            self._say(f"{made} = {self._object(restrided)}({name}, {strides})")
            self._read = read
        self._read.discard(name)
        self._read.add(self._promised[node])
        return self._promised[node]

    def _may_differ(self, node: Any) -> bool:
        kind = node.meta.get("val")
        if storage_of(node) is None or has_symbols(kind) or kind.is_contiguous():
            return False
        if node.op == "placeholder":
            # A program of the forward pass may have made it, which promises no strides.
            return self._is_backward
        return node in self._of_programs and unusual_strides(kind) is None


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
    outer = HostGraph(module, is_backward=settings.role == "backward")
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

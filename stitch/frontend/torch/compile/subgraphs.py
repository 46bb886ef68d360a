"""The outputs of a graph of aot_autograd: which of them a program makes, and how torch sees
them.

A graph of aot_autograd cut into stretches that programs run and steps that torch runs.

A node's level is how often the way to it changes between programs and torch: even levels are
programs', odd ones torch's. No way leaves a level and comes back, so a level is one part, however
many branches it has; all takes time linear in the graph. Then a node whose results are smaller
than what it keeps alive waits for those who read it.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from stitch.frontend.torch.lowering import CHECKS, KEEPING, REPLAYING

# --------------------------------------------------------------------------------------------------
# Nodes and outputs


@dataclass(frozen=True, slots=True)
class Argument:
    """An output that is an argument, at this position."""

    position: int


@dataclass(frozen=True, slots=True)
class ArgumentView:
    """An output that is a view of an argument, which was traced with `strides_of_argument`.

    Where sizes are symbols, aot_autograd makes the user's view with these strides and offset.
    `offset` is from the first element of the argument on.
    """

    position: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    strides_of_argument: tuple[int, ...]

    def of(self, argument: Any) -> Any:
        """The view."""
        base = restrided(argument, self.strides_of_argument)
        return base.as_strided(self.shape, self.strides, base.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Known:
    """An output that is a number or None."""

    value: Any


@dataclass(frozen=True, slots=True)
class Result:
    """An output of the program; `strides` where they are not those of a dense row-major tensor;
    `may_be_copied`: torch's code reads it, and no backward pass."""

    index: int
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    may_be_copied: bool
    #: One entry for each tensor that torch holds as a view of our bytes.
    views: set[int] = field(default_factory=set)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class View:
    """An output that shares the bytes of a result with others: what torch writes to one shows."""

    result: Result
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Same:
    """An output that is an earlier one, at this place."""

    place: int


Output = Argument | ArgumentView | Known | Result | View | Same
Made = TypeVar("Made")


def shown(
    outputs: Sequence[Output],
    arguments: Sequence[Any],
    results: Sequence[Made],
    show: Callable[[Made, Result], Any],
) -> list[Any]:
    """The outputs as torch tensors; `show` makes one of a program's result, dense and row-major."""
    tensors: list[Any] = []
    shared: dict[int, Any] = {}
    for output in outputs:
        if isinstance(output, Result):
            tensor = show(results[output.index], output)
            tensors.append(tensor if output.strides is None else _strided(tensor, output))
        elif isinstance(output, View):
            index = output.result.index
            if index not in shared:
                shared[index] = _strided(show(results[index], output.result), output.result)
            tensors.append(shared[index].as_strided(output.shape, output.strides, output.offset))
        elif isinstance(output, Argument):
            tensors.append(arguments[output.position])
        elif isinstance(output, ArgumentView):
            tensors.append(output.of(arguments[output.position]))
        else:
            tensors.append(tensors[output.place] if isinstance(output, Same) else output.value)
    return tensors


def without_views(outputs: Sequence[Output]) -> tuple[Output, ...]:
    """Outputs as they were when torch held none: what was read from a file."""
    for result in results_of(outputs):
        result.views.clear()
    return tuple(outputs)


def results_of(outputs: Sequence[Output]) -> list[Result]:
    """What a program makes of these outputs."""
    made = [output.result if isinstance(output, View) else output for output in outputs]
    return [result for result in made if isinstance(result, Result)]


def _strided(tensor: Any, output: Result) -> Any:
    """The bytes of a tensor in the strides of eager torch.

    No view in torch's sense: autograd forbids writing to those of a function's outputs.
    """
    if output.strides is None:
        return tensor
    empty = torch.empty(0, dtype=output.dtype, device="cpu")
    return empty.set_(tensor.untyped_storage(), 0, output.shape, output.strides)


def sorted_outputs(
    graph: Any, positions: Mapping[str, int], exact: int, *, share: bool, may_copy: bool = False
) -> tuple[tuple[Result, ...], tuple[Output, ...]]:
    """What a program has to make, which is what the graph gives then; and what each output is.

    The user sees the first `exact` outputs. With `share`, those of them that are views of one
    value in eager torch share its bytes; where there are gradients, aot_autograd makes the user's
    views of that value with the strides and offsets of these.
    """
    end = next(node for node in graph.nodes if node.op == "output")
    arguments = {storage_of(n): n for n in graph.nodes if n.op == "placeholder" and _is_tensor(n)}
    arguments.pop(None, None)
    sources = _sources(graph, end.args[0][:exact]) if share else {}
    sorting = _Sorting(positions, sources, arguments, may_copy)
    for place, value in enumerate(end.args[0]):
        sorting.add(place, value, is_exact=place < exact)
    end.args = (tuple(sorting.wanted),)
    return tuple(sorting.results), tuple(sorting.outputs)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def storage_of(node: Any) -> int | None:
    """The identity of the bytes that a node's tensor lies in, if it lies in any."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def _sources(graph: Any, outputs: Sequence[Any]) -> dict[Any, Any]:
    """For outputs that share bytes with others, the node that made those bytes."""
    makers: dict[int, Any] = {}
    for node in graph.nodes:
        storage = None if node.op == "output" else storage_of(node)
        if storage is not None:
            makers.setdefault(storage, node)
    nodes = [node for node in outputs if _is_tensor(node) and storage_of(node) is not None]
    count = Counter(map(storage_of, nodes))
    sources = {}
    for node in nodes:
        storage = storage_of(node)
        assert storage is not None, "those without are left out"
        maker = makers[storage]
        kind = maker.meta["val"]
        whole = kind.is_contiguous() or unusual_strides(kind) is not None
        same_type = _bits(kind) == _bits(node.meta["val"])
        if count[storage] > 1 and maker.op == "call_function" and whole and same_type:
            sources[node] = maker
    return sources


def _bits(kind: Any) -> tuple[Any, ...]:
    """How torch reads the bytes of a tensor: those that are read alike may be shared."""
    return kind.dtype, kind.is_neg(), kind.is_conj()


class _Sorting:
    """One walk over the outputs of a graph."""

    def __init__(
        self, positions: Mapping[str, int], sources: Mapping[Any, Any],
        arguments: Mapping[Any, Any], may_copy: bool,
    ) -> None:  # fmt: skip
        self.positions, self.sources, self.arguments = positions, sources, arguments
        self.may_copy = may_copy
        self.outputs: list[Output] = []
        self.wanted: list[Any] = []
        self.results: list[Result] = []
        self._places: dict[Any, int] = {}
        self._shared: dict[Any, Result] = {}

    def add(self, place: int, value: Any, *, is_exact: bool) -> None:
        """One output more."""
        if not _is_tensor(value):
            self.outputs.append(Known(value.meta["val"] if hasattr(value, "meta") else value))
        elif value.op == "placeholder":
            self.outputs.append(Argument(self.positions[value.name]))
        elif is_exact and (view := self._view_of_argument(value)) is not None:
            self.outputs.append(view)
        elif value in self.sources:
            self.outputs.append(self._view(value))
        elif not is_exact and value in self._places:
            self.outputs.append(Same(self._places[value]))
        else:
            result = self._result(value, is_exact)
            if result.strides is None:
                self._places[value] = place
            self.outputs.append(result)

    def _view_of_argument(self, value: Any) -> ArgumentView | None:
        argument, kind = self.arguments.get(storage_of(value)), value.meta["val"]
        if argument is None or argument.name not in self.positions:
            return None
        whole = argument.meta["val"]
        if _bits(kind) != _bits(whole):
            return None
        offset = int(kind.storage_offset()) - int(whole.storage_offset())
        if offset < 0:
            # Of what lies before the argument in its storage the next one may have nothing.
            return None
        return ArgumentView(
            self.positions[argument.name], tuple(kind.shape), tuple(kind.stride()), offset,
            tuple(whole.stride()),
        )  # fmt: skip

    def _view(self, value: Any) -> View:
        source, kind = self.sources[value], value.meta["val"]
        if source not in self._shared:
            self._shared[source] = self._result(source, True)
        offset = int(kind.storage_offset()) - int(source.meta["val"].storage_offset())
        return View(self._shared[source], tuple(kind.shape), tuple(kind.stride()), offset)

    def _result(self, value: Any, is_exact: bool) -> Result:
        kind = value.meta["val"]
        strides = unusual_strides(kind) if is_exact else None
        result = Result(len(self.wanted), kind.dtype, tuple(kind.shape), strides, self.may_copy)
        self.wanted.append(value)
        self.results.append(result)
        return result


def restrided(tensor: Any, strides: tuple[int, ...]) -> Any:
    """A tensor in these strides; the same, if it has them."""
    if tensor.stride() == strides:
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    made[once].copy_(tensor[once])
    return made


def unusual_strides(kind: Any) -> tuple[int, ...] | None:
    """The strides that a tensor has in eager torch, where it is dense in another order of axes."""
    if kind.layout is not torch.strided or kind.is_contiguous() or kind.numel() == 0:
        return None
    strides = tuple(int(s) for s in kind.stride())
    step = 1
    for axis in reversed(axes_in_memory(strides)):
        if kind.shape[axis] != 1 and strides[axis] != step:
            return None
        step *= kind.shape[axis]
    return strides


def axes_in_memory(strides: Sequence[int]) -> tuple[int, ...]:
    """Axes from the largest stride to the smallest: the order in which the elements lie."""
    return tuple(sorted(range(len(strides)), key=lambda axis: (-strides[axis], axis)))


# --------------------------------------------------------------------------------------------------
# Cutting a graph

_IN_TORCH = ("aten", "prims")


@dataclass(frozen=True, slots=True)
class GraphPart:
    """A stretch of a graph that is one program: nodes of the whole graph that it reads and gives.

    `exact`: how many of its outputs, which come first, are to have the strides of eager torch.
    """

    graph: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    exact: int
    #: The nodes of the whole graph that it stands for.
    nodes: tuple[Any, ...]

    @property
    def operations(self) -> int:
        """How many operations it has; views and constants are none."""
        return sum(map(is_operation, self.nodes))


#: A `GraphPart`, or a node that torch runs.
Step = Any
#: Where a copy of a node says of which one it is.
ORIGIN = "stitch_origin"


# What a node is ------------------------------------------------------------------------------


def unit_of(node: Any) -> Any:
    """The node that computes a value: of what is picked from several results, who gave them."""
    while node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        if not isinstance(source, torch.fx.Node) or is_tensor(source):
            break
        node = source
    return node


def is_tensor(node: Any) -> bool:
    """Whether a node gives one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_view(node: Any) -> bool:
    """Whether a node gives a tensor on the bytes of one that it reads."""
    storage = storage_of(node) if node.op == "call_function" else None
    if storage is None:
        return False
    return any(storage_of(source) == storage for source in unit_of(node).all_input_nodes)


def is_random(node: Any) -> bool:
    """Whether a node draws random numbers."""
    return is_exchange_of_keys(node) or torch.Tag.nondeterministic_seeded in getattr(
        node.target, "tags", ()
    )


def is_exchange_of_keys(node: Any) -> bool:
    """Whether another graph has to run a node as this one does: it exchanges a random state."""
    return node.target in (KEEPING, REPLAYING)


def _is_mutating(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _keeps_its_turn(node: Any) -> bool:
    """Whether a node has effects that torch's user may see the order of."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    return is_random(node) or _is_mutating(node) or node.target.namespace not in _IN_TORCH


def nbytes_of(node: Any) -> int:
    """The bytes of what a node gives."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    total = 0
    for each in values:
        if isinstance(each, torch.Tensor):
            sizes = [size if isinstance(size, int) else 1 for size in each.shape]
            total += math.prod(sizes) * each.dtype.itemsize
    return total


def copied(graph: Any) -> Any:
    """A copy of a graph whose nodes know of which they are copies."""
    copies: dict[Any, Any] = {}
    made = torch.fx.Graph()
    outputs = made.graph_copy(graph, copies)
    made.output(outputs)
    for node, copy in copies.items():
        copy.meta[ORIGIN] = node
    return made


# Cutting -------------------------------------------------------------------------------------


def cut_graph(
    graph: Any, by_torch: set[Any], *, static: frozenset[int], visible: int, share: bool
) -> tuple[Step, ...]:
    """The steps of a graph of which torch runs some nodes; `by_torch` gets what else it runs.

    `static`: positions of arguments that live on anyway. `visible`: how many outputs, the first,
    the user sees. `share`: outputs that are views of one value are to share its bytes. What torch
    reads as a view of something is a view that torch makes: so strides, offsets and storages are
    those of eager torch, and no bytes are copied for it.
    """
    for node in reversed(list(graph.nodes)):
        if node.target in CHECKS and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    by_torch.intersection_update(graph.nodes)
    by_torch.update([unit_of(node) for node in by_torch])
    _make_views(graph, by_torch, visible if share else 0)
    graph.eliminate_dead_code()
    by_torch.intersection_update(graph.nodes)
    seen = next(reversed(graph.nodes)).args[0][:visible]
    return tuple(_Cut(graph, by_torch, static, frozenset(seen)).steps())


def _make_views(graph: Any, by_torch: set[Any], shared: int) -> None:
    """Views that torch's nodes read become torch's; what programs read of them stays theirs.

    Of the first `shared` outputs those that are views of one value become torch's too.
    """
    copies: dict[Any, Any] = {}
    waiting = [node for node in graph.nodes if unit_of(node) in by_torch]

    def copy_of(node: Any) -> Any:
        if node not in copies:
            with graph.inserting_after(node):
                copies[node] = graph.node_copy(node)
            by_torch.add(copies[node])
            waiting.append(copies[node])
        return copies[node]

    def is_of_programs(node: Any) -> bool:
        return node.op == "call_function" and unit_of(node) not in by_torch

    if shared:
        end = next(reversed(graph.nodes))
        seen = dict.fromkeys(n for n in end.args[0][:shared] if isinstance(n, torch.fx.Node))
        count = Counter(map(storage_of, seen))
        for node in seen:
            if count[storage_of(node)] > 1 and is_of_programs(node) and is_view(node):
                end.replace_input_with(node, copy_of(node))
    while waiting:
        node = waiting.pop()
        for source in node.all_input_nodes:
            is_picked_from = unit_of(node) is unit_of(source) and node in by_torch
            if is_of_programs(source) and (is_view(source) or is_picked_from):
                node.replace_input_with(source, copy_of(source))


@dataclass
class _Cut:
    graph: Any
    by_torch: set[Any]
    static: frozenset[int]
    seen: frozenset[Any]
    levels: dict[Any, int] = field(default_factory=dict)
    #: What a node has to wait for although it reads none of its values, and the reverse.
    after: dict[Any, list[Any]] = field(default_factory=lambda: defaultdict(list))
    before: dict[Any, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def steps(self) -> Iterator[Step]:
        self._order()
        self._rise()
        self._sink()
        levels: dict[int, list[Any]] = defaultdict(list)
        for node in self.graph.nodes:
            level = self._level(node)
            if level is not None:
                levels[level].append(node)
        for level in sorted(levels):
            if level % 2:
                yield from levels[level]
            else:
                yield self._part(levels[level])

    def is_free(self, node: Any) -> bool:
        """Whether everyone who reads a value makes it: a constant, or what is made of nothing."""
        if node.op == "get_attr":
            return True
        if node.op != "call_function" or node in self.by_torch or node.all_input_nodes:
            return False
        return is_tensor(node) and not is_random(node)

    def _has_level(self, node: Any) -> bool:
        return node.op == "call_function" and not self.is_free(node)

    def _level(self, node: Any) -> int | None:
        return self.levels[unit_of(node)] if self._has_level(node) else None

    def _order(self) -> None:
        """Who waits for whom without reading it: effects keep their turns, and who writes to bytes
        comes after all that read them before."""
        writes = any(_is_mutating(node) for node in self.by_torch)
        last: Any = None
        readers: dict[int, list[Any]] = defaultdict(list)
        writers: dict[int, Any] = {}
        for node in self.graph.nodes:
            if not self._has_level(node) or unit_of(node) is not node:
                continue
            if node in self.by_torch and _keeps_its_turn(node):
                if last is not None:
                    self._wait(node, last)
                last = node
            if not writes:
                continue
            for storage in set(map(storage_of, node.all_input_nodes)) - {None}:
                assert storage is not None
                if storage in writers:
                    self._wait(node, writers[storage])
                if _is_mutating(node):
                    for reader in readers.pop(storage, ()):
                        self._wait(node, reader)
                    writers[storage] = node
                readers[storage].append(node)

    def _wait(self, node: Any, earlier: Any) -> None:
        if node is not earlier:
            self.after[node].append(earlier)
            self.before[earlier].append(node)

    def _rise(self) -> None:
        """Gives each node the lowest level that it can have."""
        for node in self.graph.nodes:
            if not self._has_level(node) or unit_of(node) is not node:
                continue
            mine = node in self.by_torch
            level = int(mine)
            for source in (*node.all_input_nodes, *self.after.get(node, ())):
                if self._has_level(source):
                    unit = unit_of(source)
                    level = max(level, self.levels[unit] + (mine != (unit in self.by_torch)))
            self.levels[node] = level

    def _sink(self) -> None:
        """Lets wait what would only be kept: see the text above."""
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        lasting = {placeholders[i] for i in self.static if i < len(placeholders)}
        readers: dict[Any, list[Any]] = defaultdict(list)
        for node in self.graph.nodes:
            for source in node.all_input_nodes:
                if unit_of(node) is not unit_of(source):
                    readers[unit_of(source)].append(node)
        for node in reversed(self.graph.nodes):
            if node not in self.levels or (node in self.by_torch and _keeps_its_turn(node)):
                continue
            users = [*readers[node], *self.before.get(node, ())]
            if not users or any(user.op == "output" for user in users):
                continue
            mine = node in self.by_torch
            units = [unit_of(user) for user in users if self._has_level(user)]
            latest = min(self.levels[u] - (mine != (u in self.by_torch)) for u in units)
            if latest > self.levels[node]:
                kept = [s for s in node.all_input_nodes if s not in lasting and not self.is_free(s)]
                if sum(map(nbytes_of, kept)) <= nbytes_of(node):
                    self.levels[node] = latest

    def _part(self, nodes: Sequence[Any]) -> GraphPart:
        inside = set(nodes)
        made = torch.fx.Graph()
        copies: dict[Any, Any] = {}
        inputs: list[Any] = []
        for node in nodes:
            for source in node.all_input_nodes:
                if source not in inside and source not in copies and not self.is_free(source):
                    inputs.append(source)
                    copies[source] = made.placeholder(source.name)
                    copies[source].meta = dict(source.meta)
        for node in nodes:
            for source in node.all_input_nodes:
                if source not in copies:
                    copies[source] = made.node_copy(source)
                    copies[source].meta[ORIGIN] = source
            copies[node] = made.node_copy(node, copies.__getitem__)
            copies[node].meta[ORIGIN] = node
        exact: list[Any] = []
        plain: list[Any] = []
        for node in nodes:
            outer = [user for user in node.users if user not in inside]
            if outer:
                is_exact = node in self.seen or any(map(self._is_torchs, outer))
                (exact if is_exact else plain).append(node)
        outputs = (*exact, *plain)
        made.output(tuple(copies[node] for node in outputs))
        return GraphPart(made, tuple(inputs), outputs, len(exact), tuple(nodes))

    def _is_torchs(self, reader: Any) -> bool:
        return unit_of(reader) in self.by_torch


def is_operation(node: Any) -> bool:
    """Whether a node computes something: no view, no constant, no part of several results."""
    return node.op == "call_function" and unit_of(node) is node and not is_view(node)

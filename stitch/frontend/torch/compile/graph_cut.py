"""A graph of aot_autograd cut into stretches that programs run and steps that torch runs.

A node's level is how often the way to it changes between programs and torch: even levels are
programs', odd ones torch's. No way leaves a level and comes back, so a level is one part, however
many branches it has; all takes time linear in the graph. Then a node whose results are smaller
than what it keeps alive waits for those who read it.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stitch.frontend.torch.compile.graph_outputs import storage_of
from stitch.frontend.torch.lowering import CHECKS, KEEPING, REPLAYING

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

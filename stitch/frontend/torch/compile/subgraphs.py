"""The outputs of graphs of aot_autograd, and cutting graphs into parts for programs and for torch.

A node's level is the maximum number of changes between programs and torch on a path to it; even
levels are programs', odd ones torch's. No path leaves a level and returns to it, so each level is
one part, and cutting takes linear time. Then a node whose results are smaller than the operands
that it keeps alive is moved up to the level of its readers.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from stitch.frontend.torch.lowering import CHECKS, RESTORE_STATE, SAVE_STATE
from stitch.frontend.torch.shared_storage import Result
from stitch.frontend.torch.torch_internals import HigherOrderOperator, OpOverload

# Outputs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Argument:
    """An output that is the argument at this position."""

    position: int


@dataclass(frozen=True, slots=True)
class ArgumentView:
    """An output that is a view of an argument, which was traced with `strides_of_argument`.

    With symbolic sizes, aot_autograd makes the user's view with these strides and offset (from the
    first element of the argument).
    """

    position: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    strides_of_argument: tuple[int, ...]

    def of(self, argument: Any) -> Any:
        """The view of a given argument."""
        base = restrided(argument, self.strides_of_argument)
        return base.as_strided(self.shape, self.strides, base.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class ConstantOutput:
    """An output that is a number or None."""

    value: Any


@dataclass(frozen=True, slots=True)
class View:
    """An output that shares the memory of a result with other outputs."""

    result: Result
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


Output = Argument | ArgumentView | ConstantOutput | Result | View
RawResult = TypeVar("RawResult")


def output_tensors(
    outputs: Sequence[Output], arguments: Sequence[Any], results: Sequence[RawResult],
    to_torch: Callable[[RawResult, Result], Any],
) -> list[Any]:  # fmt: skip
    """The outputs as torch tensors; `to_torch` converts a result of the program to a dense one."""
    tensors: list[Any] = []
    converted: dict[int, Any] = {}
    for output in outputs:
        if isinstance(output, Result | View):
            result = output if isinstance(output, Result) else output.result
            tensor = converted.get(result.index)
            if tensor is None:
                tensor = _strided(to_torch(results[result.index], result), result)
                converted[result.index] = tensor
            if isinstance(output, View):
                tensor = tensor.as_strided(output.shape, output.strides, output.offset)
            tensors.append(tensor)
        elif isinstance(output, Argument):
            tensors.append(arguments[output.position])
        elif isinstance(output, ArgumentView):
            tensors.append(output.of(arguments[output.position]))
        else:
            tensors.append(output.value)
    return tensors


def results_of(outputs: Sequence[Output]) -> list[Result]:
    """The results of the program among the outputs."""
    results = [output.result if isinstance(output, View) else output for output in outputs]
    return [result for result in results if isinstance(result, Result)]


def with_sizes(
    outputs: Sequence[Output], shape: Callable[[Sequence[Any]], tuple[Any, ...]]
) -> tuple[Output, ...]:
    """The outputs of a graph with symbolic sizes, with other sizes; `shape` converts a shape."""
    results: dict[int, Result] = {}

    def result_of(result: Result) -> Result:
        if result.index not in results:
            strides = None if result.strides is None else shape(result.strides)
            # Each has views of its own.
            results[result.index] = replace(
                result, shape=shape(result.shape), strides=strides, views=set()
            )
        return results[result.index]

    def sized(output: Output) -> Output:
        if isinstance(output, Result):
            return result_of(output)
        if isinstance(output, View | ArgumentView):
            (offset,) = shape((output.offset,))
            sizes = shape(output.shape), shape(output.strides), offset
            if isinstance(output, View):
                return View(result_of(output.result), *sizes)
            return ArgumentView(output.position, *sizes, shape(output.strides_of_argument))
        if isinstance(output, ConstantOutput) and isinstance(
            output.value, int | torch.SymInt | torch.SymBool
        ):
            return ConstantOutput(*shape((output.value,)))
        return output

    return tuple(map(sized, outputs))


def _strided(tensor: Any, output: Result) -> Any:
    """A tensor with the strides of eager torch on the same memory.

    Not a view for torch: autograd forbids writes to views of a function's outputs.
    """
    if output.strides is None:
        return tensor
    empty = torch.empty(0, dtype=output.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), 0, output.shape, output.strides)


def classify_outputs(
    graph: Any, positions: Mapping[str, int], exact: int, *, share: bool, may_copy: bool = False
) -> tuple[tuple[Result, ...], tuple[Output, ...]]:
    """Reduce the outputs of a graph to the results that a program has to compute.

    Args:
        graph: The graph; its outputs become the results.
        positions: Positions of arguments by name.
        exact: Number of outputs that the user sees; the first ones.
        share: Make these share memory if they are views of one value in eager torch. In training,
            aot_autograd makes the user's views of that value with their strides and offsets.
        may_copy: Torch may get copies of the results.

    Returns:
        The results, and a description of each output.
    """
    end = graph.output_node()
    arguments = {
        storage_of(node): node for node in graph.nodes
        if node.op == "placeholder" and is_tensor(node)
    }  # fmt: skip
    arguments.pop(None, None)
    sources = _sources(graph, end.args[0][:exact]) if share else {}
    classifier = _OutputClassifier(positions, sources, arguments, may_copy)
    for number, value in enumerate(end.args[0]):
        classifier.add(value, is_exact=number < exact)
    end.args = (tuple(classifier.nodes),)
    return tuple(classifier.results), tuple(classifier.outputs)


def is_tensor(node: Any) -> bool:
    """Whether a value is a node whose result is one tensor."""
    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def storage_of(node: Any) -> int | None:
    """The identity of the storage of a node's traced tensor; None if it has none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def _sources(graph: Any, outputs: Sequence[Any]) -> dict[Any, Any]:
    """For outputs that share memory with others, the node that computes that memory."""
    makers: dict[int, Any] = {}
    for node in graph.nodes:
        storage = None if node.op == "output" else storage_of(node)
        if storage is not None:
            makers.setdefault(storage, node)
    nodes = [node for node in outputs if is_tensor(node) and storage_of(node) is not None]
    count = Counter(map(storage_of, nodes))
    sources = {}
    for node in nodes:
        storage = storage_of(node)
        assert storage is not None, "filtered above"
        maker = makers[storage]
        kind = maker.meta["val"]
        is_dense = kind.is_contiguous() or unusual_strides(kind) is not None
        same_type = _bits(kind) == _bits(node.meta["val"])
        if count[storage] > 1 and maker.op == "call_function" and is_dense and same_type:
            sources[node] = maker
    return sources


def _bits(kind: Any) -> tuple[Any, ...]:
    """How torch interprets the bytes of a tensor."""
    return kind.dtype, kind.is_neg(), kind.is_conj()


class _OutputClassifier:
    """Classifies the outputs of a graph one by one."""

    def __init__(
        self, positions: Mapping[str, int], sources: Mapping[Any, Any],
        arguments: Mapping[Any, Any], may_copy: bool,
    ) -> None:  # fmt: skip
        self.positions, self.sources, self.arguments = positions, sources, arguments
        self.may_copy = may_copy
        self.outputs: list[Output] = []
        #: The nodes of the results.
        self.nodes: list[Any] = []
        self.results: list[Result] = []
        #: Row-major results, which the user does not see: outputs may repeat them.
        self._plain: dict[Any, Result] = {}
        self._shared: dict[Any, Result] = {}

    def add(self, value: Any, *, is_exact: bool) -> None:
        """Add an output."""
        if not is_tensor(value):
            constant = value.meta["val"] if hasattr(value, "meta") else value
            self.outputs.append(ConstantOutput(constant))
        elif value.op == "placeholder":
            self.outputs.append(Argument(self.positions[value.name]))
        elif is_exact and (view := self._view_of_argument(value)) is not None:
            self.outputs.append(view)
        elif value in self.sources:
            self.outputs.append(self._view(value))
        elif not is_exact and value in self._plain:
            self.outputs.append(self._plain[value])
        else:
            result = self._result(value, is_exact)
            if result.strides is None:
                self._plain[value] = result
            self.outputs.append(result)

    def _view_of_argument(self, value: Any) -> ArgumentView | None:
        argument, kind = self.arguments.get(storage_of(value)), value.meta["val"]
        if argument is None or argument.name not in self.positions:
            return None
        whole = argument.meta["val"]
        if _bits(kind) != _bits(whole):
            return None
        offset = kind.storage_offset() - whole.storage_offset()
        if offset < 0:
            # Another argument may have no storage before its first element.
            return None
        return ArgumentView(
            self.positions[argument.name], tuple(kind.shape), tuple(kind.stride()), offset,
            tuple(whole.stride()),
        )  # fmt: skip

    def _view(self, value: Any) -> View:
        source, kind = self.sources[value], value.meta["val"]
        if source not in self._shared:
            self._shared[source] = self._result(source, True)
        offset = kind.storage_offset() - source.meta["val"].storage_offset()
        return View(self._shared[source], tuple(kind.shape), tuple(kind.stride()), offset)

    def _result(self, value: Any, is_exact: bool) -> Result:
        kind = value.meta["val"]
        strides = unusual_strides(kind) if is_exact else None
        result = Result(len(self.nodes), kind.dtype, tuple(kind.shape), strides, self.may_copy)
        self.nodes.append(value)
        self.results.append(result)
        return result


def restrided(tensor: Any, strides: tuple[int, ...]) -> Any:
    """A tensor with these strides: the tensor itself, or a copy."""
    if tensor.stride() == strides:
        return tensor
    result = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    result[once].copy_(tensor[once])
    return result


def unusual_strides(kind: Any) -> tuple[int, ...] | None:
    """The strides of a tensor that is dense but not row-major; None for others."""
    if kind.layout is not torch.strided or kind.is_contiguous() or kind.numel() == 0:
        return None
    strides = tuple(kind.stride())
    step = 1
    for axis in reversed(axes_in_memory(strides)):
        if kind.shape[axis] != 1 and strides[axis] != step:
            return None
        step *= kind.shape[axis]
    return strides


def axes_in_memory(strides: Sequence[int]) -> tuple[int, ...]:
    """The axes from the largest stride to the smallest."""
    return tuple(sorted(range(len(strides)), key=lambda axis: (-strides[axis], axis)))


# Cutting a graph ----------------------------------------------------------------------------------

_IN_TORCH = ("aten", "prims")


@dataclass(frozen=True, slots=True)
class GraphPart:
    """A subgraph that becomes one program; `inputs`, `outputs` and `nodes` are nodes of the whole
    graph.

    `exact`: number of outputs, the first ones, that need the strides of eager torch.
    """

    graph: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    exact: int
    nodes: tuple[Any, ...]

    @property
    def operations(self) -> int:
        """Number of operations, without views and constants."""
        return sum(map(is_operation, self.nodes))


#: A `GraphPart`, or a node that torch runs.
Step = Any
#: Key in the metadata of a copied node for the original.
ORIGIN = "stitch_origin"


# Nodes ---------------------------------------------------------------------------------------


def unit_of(node: Any) -> Any:
    """The node that computes a value; of a getitem on several results, the node with these."""
    while node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        if not isinstance(source, torch.fx.Node) or is_tensor(source):
            break
        node = source
    return node


def is_view(node: Any) -> bool:
    """Whether the result of a node is a view of an operand."""
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
    """Whether a node passes a random state between graphs, so that both must run it alike."""
    return node.target in (SAVE_STATE, RESTORE_STATE)


def _is_mutating(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _has_effects(node: Any) -> bool:
    """Whether a node may have side effects, whose order must stay."""
    if not isinstance(node.target, OpOverload):
        return isinstance(node.target, HigherOrderOperator)
    return is_random(node) or _is_mutating(node) or node.target.namespace not in _IN_TORCH


def nbytes_of(node: Any) -> int:
    """The number of bytes of a node's results; symbolic sizes have torch's example, else count as
    1."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    total = 0
    for each in values:
        if isinstance(each, torch.Tensor):
            sizes = [s if isinstance(s, int) else s.node.hint or 1 for s in each.shape]
            total += math.prod(sizes) * each.dtype.itemsize
    return total


def copied(graph: Any) -> Any:
    """A copy of a graph; the metadata of its nodes has the originals."""
    copies: dict[Any, Any] = {}
    duplicate = torch.fx.Graph()
    duplicate.output(duplicate.graph_copy(graph, copies))
    for node, copy in copies.items():
        copy.meta[ORIGIN] = node
    return duplicate


# Cutting -------------------------------------------------------------------------------------


def cut_graph(
    graph: Any, by_torch: set[Any], *, static: frozenset[int], visible: int, share: bool
) -> tuple[Step, ...]:
    """Cut a graph into steps.

    Views that torch's nodes read are made by torch: their strides, offsets and storages are those
    of eager torch, and nothing is copied.

    Args:
        graph: The graph; it is changed.
        by_torch: The nodes that torch runs; further ones are added.
        static: Positions of arguments that outlive the call.
        visible: Number of outputs that the user sees; the first ones.
        share: Outputs that are views of one value must share its memory.
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
    seen = graph.output_node().args[0][:visible]
    return tuple(_Cut(graph, by_torch, static, frozenset(seen)).steps())


def _make_views(graph: Any, by_torch: set[Any], shared: int) -> None:
    """Copy views that torch's nodes read, for torch; programs read the originals. Of the first
    `shared` outputs, views of one value become torch's too."""
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
        end = graph.output_node()
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
    #: Order without data dependency: the nodes that must run before a node, and after it.
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
        """Whether each part that reads a value computes it: constants, nodes without operands."""
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
        """Find the order without data dependency: effects stay in order, and writes to a storage
        follow earlier reads."""
        writes = any(_is_mutating(node) for node in self.by_torch)
        last: Any = None
        readers: dict[int, list[Any]] = defaultdict(list)
        writers: dict[int, Any] = {}
        for node in self.graph.nodes:
            if not self._has_level(node) or unit_of(node) is not node:
                continue
            if node in self.by_torch and _has_effects(node):
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
        """Give each node its lowest level."""
        for node in self.graph.nodes:
            if not self._has_level(node) or unit_of(node) is not node:
                continue
            is_torchs = node in self.by_torch
            level = int(is_torchs)
            for source in (*node.all_input_nodes, *self.after.get(node, ())):
                if self._has_level(source):
                    unit = unit_of(source)
                    level = max(level, self.levels[unit] + (is_torchs != (unit in self.by_torch)))
            self.levels[node] = level

    def _sink(self) -> None:
        """Move nodes to the level of their readers if that keeps fewer bytes alive."""
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        lasting = {placeholders[i] for i in self.static if i < len(placeholders)}
        readers: dict[Any, list[Any]] = defaultdict(list)
        for node in self.graph.nodes:
            for source in node.all_input_nodes:
                if unit_of(node) is not unit_of(source):
                    readers[unit_of(source)].append(node)
        for node in reversed(self.graph.nodes):
            if node not in self.levels or (node in self.by_torch and _has_effects(node)):
                continue
            users = [*readers[node], *self.before.get(node, ())]
            if not users or any(user.op == "output" for user in users):
                continue
            is_torchs = node in self.by_torch
            units = [unit_of(user) for user in users if self._has_level(user)]
            latest = min(self.levels[u] - (is_torchs != (u in self.by_torch)) for u in units)
            if latest > self.levels[node]:
                operands = [
                    source for source in node.all_input_nodes
                    if source not in lasting and not self.is_free(source)
                ]  # fmt: skip
                if sum(map(nbytes_of, operands)) <= nbytes_of(node):
                    self.levels[node] = latest

    def _part(self, nodes: Sequence[Any]) -> GraphPart:
        inside = set(nodes)
        subgraph = torch.fx.Graph()
        copies: dict[Any, Any] = {}
        inputs: list[Any] = []
        for node in nodes:
            for source in node.all_input_nodes:
                if source not in inside and source not in copies and not self.is_free(source):
                    inputs.append(source)
                    copies[source] = subgraph.placeholder(source.name)
                    copies[source].meta = dict(source.meta)
        for node in nodes:
            for source in node.all_input_nodes:
                if source not in copies:
                    copies[source] = subgraph.node_copy(source)
                    copies[source].meta[ORIGIN] = source
            copies[node] = subgraph.node_copy(node, copies.__getitem__)
            copies[node].meta[ORIGIN] = node
        exact: list[Any] = []
        plain: list[Any] = []
        for node in nodes:
            outer = [user for user in node.users if user not in inside]
            if outer:
                is_exact = node in self.seen or any(unit_of(u) in self.by_torch for u in outer)
                (exact if is_exact else plain).append(node)
        outputs = (*exact, *plain)
        subgraph.output(tuple(copies[node] for node in outputs))
        return GraphPart(subgraph, tuple(inputs), outputs, len(exact), tuple(nodes))


def is_operation(node: Any) -> bool:
    """Whether a node computes something: it is no view, constant or getitem."""
    return node.op == "call_function" and unit_of(node) is node and not is_view(node)

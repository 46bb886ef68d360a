"""`PassCache`: the passes run once for all sizes at which they decide the same.

What the passes make of a graph depends on its sizes in four ways: which operations are folded,
which ones keep the shape of their operand, which operand a `Where` takes everywhere, and which
constants are equal. `PassCache` answers these questions for each size, which takes a fraction of
the time of the passes, and reuses what they made where the answers are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass

from stitch.compiler.compile_graph import prepare_graph, require_types
from stitch.compiler.options import CompileOptions
from stitch.compiler.passes import (
    FOLD_GROWTH_NBYTES,
    SAMPLE,
    ConstantFolder,
    chosen_operand,
    constant_digest,
    constant_sample,
    keeps_order,
)
from stitch.compiler.placement import GraphPlacer
from stitch.graph import ComputationGraph
from stitch.machine import MachineShape
from stitch.program import ABSENT, Array, Constant, same_bytes, same_shape

#: Results of the passes that are kept; the oldest is dropped first.
MAX_RESULTS = 64


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What the passes made at one size, and where its values are before the passes.

    Attributes:
        graph: The graph after the passes.
        placer: Places it.
        values: For each value its index before the passes.
        constants: For each constant the index before the passes, the data, and the constant.
    """

    graph: ComputationGraph
    placer: GraphPlacer
    values: list[int]
    constants: list[tuple[int, Array, Constant]]


class PassCache:
    """The results of the passes for one graph, by what they decide.

    Args:
        graph: The graph before the passes, with symbolic sizes and without dead code.
        machine: The memory of the machine.
        options: The options of the compilation; they do not reassociate.
        is_typed: Whether types are known to agree at all sizes: not those of a file.
    """

    __slots__ = (
        "_folder", "_is_typed", "_lock", "_machine", "_options", "_pairs", "_prepared",
        "_read", "_samples", "_wheres",
    )  # fmt: skip

    def __init__(
        self, graph: ComputationGraph, machine: MachineShape, options: CompileOptions,
        is_typed: bool,
    ) -> None:  # fmt: skip
        self._machine, self._options, self._is_typed = machine, options, is_typed
        growth = FOLD_GROWTH_NBYTES if options.optimize else 0
        self._folder = ConstantFolder(graph, growth)
        shapes = [value.type.shape for value in graph.values]
        #: Operands and results of operations that are identities at some sizes only.
        self._pairs = [
            (o.inputs[0], o.outputs[0])
            for o in graph.operations
            if keeps_order(o) and not same_shape(shapes[o.inputs[0]], shapes[o.outputs[0]])
        ]
        self._wheres = [o for o in graph.operations if o.op == "Where" and not o.domain]
        self._pairs += [
            (operand, o.outputs[0])
            for o in self._wheres
            for operand in o.inputs[1:]
            if not same_shape(shapes[operand], shapes[o.outputs[0]])
        ]
        #: By value, the last array with its sample.
        self._samples: dict[int, tuple[Array, Hashable]] = {}
        #: The operations that were folded last, and the values that the others read.
        self._read: tuple[frozenset[int], set[int]] | None = None
        self._prepared: dict[Hashable, _Prepared] = {}
        self._lock = threading.Lock()

    def at(
        self, graph: ComputationGraph, sizes: Mapping[str, int]
    ) -> tuple[ComputationGraph, GraphPlacer]:
        """Return what the passes make of the graph at some sizes, and its placer.

        Args:
            graph: The graph at these sizes.
            sizes: The named sizes.

        Raises:
            CompileError: Types do not agree at these sizes.
        """
        if not self._is_typed:
            require_types(graph)
        with self._lock:
            known, folded = self._folder.fold(graph, sizes)
            values = graph.values
            if self._read is None or self._read[0] != folded:
                left = [o.inputs for i, o in enumerate(graph.operations) if i not in folded]
                self._read = folded, {slot.value for slot in graph.outputs}.union(*left)
            key = (
                folded,
                tuple([values[a].type.shape == values[b].type.shape for a, b in self._pairs]),
                tuple([chosen_operand(o, known) for o in self._wheres]),
                self._equal_constants(known, self._read[1]),
            )
            found = self._prepared.get(key)
            if found is not None:
                return _moved(found, graph, known), found.placer
            prepared, _ = prepare_graph(graph, None, self._options)
            placer = GraphPlacer(prepared, self._machine, self._options)
            kept = _traced(prepared, placer, graph, known)
            if kept is not None:
                if len(self._prepared) >= MAX_RESULTS:
                    self._prepared.pop(next(iter(self._prepared)))
                self._prepared[key] = kept
            return prepared, placer

    def _equal_constants(self, known: dict[int, Array], read: Set[int]) -> tuple[int, ...]:
        """Return for each constant that is read the first constant that is equal."""
        #: By array, of which many values share one, the first value that is equal.
        firsts: dict[int, int] = {}
        #: By sample: the first value with it, and those of large arrays that are not equal.
        whole: dict[Hashable, int] = {}
        large: dict[Hashable, list[int]] = {}
        samples, found = self._samples, list[int]()
        for value, data in known.items():
            if value not in read:
                continue
            first = firsts.get(id(data))
            if first is None:
                kept = samples.get(value)
                if kept is None or kept[0] is not data:
                    kept = samples[value] = data, constant_sample(data)
                if data.size <= SAMPLE:
                    first = whole.setdefault(kept[1], value)
                else:
                    alike = large.setdefault(kept[1], [])
                    first = _first(alike, value, known)
                    if first == value:
                        alike.append(value)
                firsts[id(data)] = first
            found.append(first)
        return tuple(found)


def _first(alike: Sequence[int], value: int, known: Mapping[int, Array]) -> int:
    """Return the first of some values whose large array equals that of another one."""
    data = known[value]
    return next((other for other in alike if same_bytes(known[other], data)), value)


def _traced(
    prepared: ComputationGraph, placer: GraphPlacer, graph: ComputationGraph,
    known: dict[int, Array],
) -> _Prepared | None:  # fmt: skip
    """Return what the passes made, None if it has values or constants other than `graph`'s."""
    numbers = {id(value): index for index, value in enumerate(graph.values)}
    values = [numbers.get(id(value), ABSENT) for value in prepared.values]
    if ABSENT in values or len(numbers) < len(graph.values):
        return None
    if any(values[v] in known for o in prepared.operations for v in o.outputs if v != ABSENT):
        return None  # The passes had less memory for folding.
    constants: list[tuple[int, Array, Constant]] = []
    for constant in prepared.constants:
        data = known.get(values[constant.value])
        if data is None or constant_digest(data) != constant_digest(constant.data):
            return None
        constants.append((values[constant.value], data, constant))
    return _Prepared(prepared, placer, values, constants)


def _moved(
    found: _Prepared, graph: ComputationGraph, known: dict[int, Array]
) -> ComputationGraph:  # fmt: skip
    """Return what the passes make of a graph for which they decide what they decided before."""
    constants = [
        constant if known[source] is data else Constant(constant.value, known[source])
        for source, data, constant in found.constants
    ]
    values = tuple([graph.values[source] for source in found.values])
    return found.graph.resized(values, tuple(constants))

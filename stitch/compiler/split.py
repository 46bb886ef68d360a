"""Split a computation graph into parts that run in a chain with bit-equal results.

Without named nodes, cuts are where the fewest bytes cross, between parts of similar cost. The cost
counts the bytes that operations access and their multiplications.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise

import numpy as np

from stitch.compiler.body_graphs import add_output_identities, program_names
from stitch.compiler.compile_graph import optimize
from stitch.compiler.passes import FOLD_GROWTH_NBYTES, fold_constants
from stitch.errors import CompileError, unknown
from stitch.graph import ComputationGraph, PlacementOption
from stitch.linker import drop_unused_values, remove_dead_code
from stitch.ops import multiply_adds
from stitch.program import (
    ABSENT,
    Array,
    Body,
    FreeNames,
    InputKind,
    InputSlot,
    Operation,
    OutputSlot,
    Value,
    is_scan,
)

#: Larger than the bytes that cross any cut.
_APART_NBYTES = 1 << 50


def split_graph(graph: ComputationGraph, cuts: int | Sequence[str]) -> tuple[ComputationGraph, ...]:
    """Split a graph into a number of parts, or after named nodes.

    A node is named by its location (all of it, or the part after the colon) or by a value that it
    computes; a name may list several nodes, separated by commas. Part k is named `{graph}_{k}`.
    Activations enter the first part. Any other input enters the first part that reads it, which
    passes it on. Outputs leave the last part; a state stays in the part that reads and writes it.

    Args:
        graph: The graph to split.
        cuts: The number of parts, or the names of the nodes to cut after.

    Raises:
        CompileError: A name is unknown, a part would have no operations, or a cut would separate a
            state's input from its output.
    """
    initial = graph.initial_state
    graph = cuttable(graph)
    live = _Lives(graph)
    count = len(graph.operations)
    if isinstance(cuts, int):
        if not 1 <= cuts <= max(count, 1):
            raise CompileError(
                f"graph {graph.name!r} cannot be split into {cuts} parts",
                expected=f"1 to {max(count, 1)}: it has {count} operations",
            )
        ends = narrowest_cuts(graph, live.crossing_nbytes(), cuts)
    else:
        ends = _named_cuts(graph, cuts)
    bounds = list(pairwise((0, *ends, count)))
    parts = [_part(graph, live, k, *bound) for k, bound in enumerate(bounds)]
    return tuple([_with_states(part, initial) for part in _with_placement(graph, parts)])


def cuttable(graph: ComputationGraph) -> ComputationGraph:
    """Return the graph that is cut: shapes and axes are constants of the parts that need them, and
    values have the names of the whole program."""
    graph = remove_dead_code(fold_constants(graph, FOLD_GROWTH_NBYTES))
    program = add_output_identities(optimize(graph))
    # The passes keep values as they are: those of the program are found by identity.
    names = dict(zip(map(id, program.values), program_names(program), strict=True))
    free = FreeNames(names.values(), mark="_", first=1)
    values = [
        Value(names.get(id(value)) or free.free(value.name or f"v{index}"), value.type)
        for index, value in enumerate(graph.values)
    ]
    return replace(graph, values=tuple(values))


def cut_names(graph: ComputationGraph, most: int) -> tuple[str, ...]:
    """Return names of nodes to cut after, in their order, for at most `most` parts.

    Where there are more, the cuts are those of the narrowest parts of about equal cost. Cuts that
    separate a state's input from its output are left out.
    """
    graph = cuttable(graph)
    crossing, count = _Lives(graph).crossing_nbytes(), len(graph.operations)
    names = {end: name for name, end in node_ends(graph).items()}
    ends: Sequence[int] = [end for end in range(1, count) if crossing[end] < _APART_NBYTES]
    if len(ends) >= most:
        ends = narrowest_cuts(graph, crossing, most)
    return tuple([names[end] for end in ends if end in names and crossing[end] < _APART_NBYTES])


def _with_states(part: ComputationGraph, initial: Mapping[str, Array]) -> ComputationGraph:
    """Add the initial values of the states that belong to this part."""
    own = {slot.name for slot in part.inputs if slot.kind is InputKind.STATE}
    return replace(part, initial_state={n: a for n, a in initial.items() if n in own})


def _states_of(graph: ComputationGraph) -> dict[str, tuple[int, int]]:
    """Return the values of the input and output of each state, by name."""
    outputs = {slot.name: slot.value for slot in graph.outputs}
    return {
        slot.name: (slot.value, outputs[slot.name])
        for slot in graph.inputs
        if slot.kind is InputKind.STATE and slot.name in outputs
    }


def node_ends(graph: ComputationGraph) -> dict[str, int]:
    """Return the point after each node of a cuttable graph by the names of the node.

    These are its location, the location's part after the colon, and the values that it computes.
    """
    places: dict[str, int] = {}
    for i, operation in enumerate(graph.operations):
        written = [graph.values[v].name for v in operation.outputs if v != ABSENT]
        for name in (operation.location, operation.location.partition(":")[2], *written):
            if name:
                places[name] = i + 1
    return places


def _named_cuts(graph: ComputationGraph, names: Sequence[str]) -> tuple[int, ...]:
    places = node_ends(graph)
    ends: dict[int, str] = {}
    # A name may itself contain commas.
    listed = [[name] if name in places else name.split(",") for name in names]
    for name in filter(None, chain.from_iterable(listed)):
        if name not in places:
            raise unknown(
                f"program {graph.name!r} has no node {name!r} to cut after", name, places,
                CompileError,
                expected="a node, or a value that one makes, as the compiled program has them "
                "(model.text(), stitch-inspect --section=operations)",
            )  # fmt: skip
        end = places[name]
        if end in ends or end == len(graph.operations):
            why = f"is the same as after {ends[end]!r}" if end in ends else "is at the end"
            raise CompileError(
                f"a cut after {name!r} would leave a part without operations: it {why}",
                where=f"graph {graph.name!r}",
            )
        ends[end] = name
    return tuple(sorted(ends))


class _Lives:
    """Live ranges and slot names of all values that are not constants.

    Operation i is point i. Activations are live from before point 0, other inputs from their first
    reader; outputs are read after the last operation.
    """

    def __init__(self, graph: ComputationGraph) -> None:
        self._values = graph.values
        constants = {constant.value for constant in graph.constants}
        reads: dict[int, list[int]] = {}
        for i, operation in enumerate(graph.operations):
            for v in operation.inputs:
                if v != ABSENT and v not in constants:
                    reads.setdefault(v, []).append(i)
        #: States are read by the next call, not by a later part.
        self.states = _states_of(graph)
        for slot in graph.outputs:
            if slot.value not in constants and slot.name not in self.states:
                reads.setdefault(slot.value, []).append(len(graph.operations))
        self._reads = reads
        self._last = {v: places[-1] for v, places in reads.items()}
        self.start = {v: i for i, o in enumerate(graph.operations) for v in o.outputs}
        for one in graph.inputs:
            enters = one.kind is InputKind.ACTIVATION
            self.start[one.value] = -1 if enters else reads.get(one.value, [0])[0]
        for before, after in self.states.values():
            if before not in reads:
                self.start[before] = self.start[after]
        self.names = _crossing_names(graph)

    def arriving(self, first: int, end: int) -> list[int]:
        """Return the values that are live before `first` and read in `first` to `end - 1`."""
        return [
            v for v, reads in sorted(self._reads.items())
            if self.start[v] < first and bisect_left(reads, first) < bisect_left(reads, end)
        ]  # fmt: skip

    def leaving(self, first: int, end: int) -> list[int]:
        """Return the values that become live in `first` to `end - 1` and are read later."""
        return [v for v, last in sorted(self._last.items()) if first <= self.start[v] < end <= last]

    def crossing_nbytes(self) -> list[int]:
        """Return the bytes that cross each point, from 0 to the number of operations."""
        points = max([*self._last.values(), 0]) + 1
        change = [0] * (points + 1)
        for before, after in self.states.values():
            # Keep a state's first reader and its writer in one part if possible.
            change[self.start[before] + 1] += _APART_NBYTES
            change[self.start[after] + 1] -= _APART_NBYTES
        for v, last in self._last.items():
            nbytes = self._values[v].type.nbytes
            change[self.start[v] + 1] += nbytes
            change[last + 1] -= nbytes
        return list(accumulate(change[:points]))


def _crossing_names(graph: ComputationGraph) -> dict[int, str]:
    """Return a unique slot name for each value; inputs keep their names, outputs have theirs."""
    states = _states_of(graph)
    names = {slot.value: slot.name for slot in graph.inputs}
    taken = [*names.values(), *(slot.name for slot in graph.outputs)]
    free = FreeNames(taken, mark="_", first=1)
    # The name of a state is used by the part that writes it.
    names |= {before: free.free(f"{name}_before") for name, (before, _) in states.items()}
    for v, value in enumerate(graph.values):
        if v not in names:
            names[v] = free.free(value.name)
    return names


def _part(
    graph: ComputationGraph, live: _Lives, index: int, first: int, end: int
) -> ComputationGraph:
    """Return the part with the operations `first` to `end - 1`."""
    is_whole, is_last = end - first == len(graph.operations), end == len(graph.operations)
    # Outputs are read after the last operation; activations are live from before the first.
    arriving = live.arriving(first, end + is_last) if index else []
    inputs = [InputSlot(live.names[v], v) for v in arriving]
    start = first if index else -1
    inputs += [slot for slot in graph.inputs if start <= live.start[slot.value] < max(end, 1)]
    if is_last:
        leaving = [slot for slot in graph.outputs if slot.name not in live.states]
    else:
        leaving = [OutputSlot(live.names[v], v) for v in live.leaving(start, end)]
    leaving += [
        slot for slot in graph.outputs
        if slot.name in live.states and first <= live.start[slot.value] < end
    ]  # fmt: skip
    entering = {slot.name for slot in inputs}
    values, operations = list(graph.values), list(graph.operations[first:end])
    computed = {v for operation in operations for v in operation.outputs}
    outputs: list[OutputSlot] = []
    for slot in leaving:
        if slot.name in live.states and slot.name not in entering:
            raise _apart(graph, slot.name, slot.name)
        slot = _with_alias(graph, slot, inputs)
        if slot.value not in computed or slot.value in [other.value for other in outputs]:
            # An output is a value of its own: copy what only passes through.
            source = values[slot.value]
            values.append(Value(f"{source.name}_passed", source.type))
            operations.append(Operation("Identity", (slot.value,), (len(values) - 1,)))
            slot = replace(slot, value=len(values) - 1)
        outputs.append(slot)
    read = {v for operation in operations for v in operation.inputs}
    part = ComputationGraph(
        graph.name if is_whole else f"{graph.name}_{index}", tuple(inputs), tuple(outputs),
        tuple(values), tuple(operations),
        tuple(constant for constant in graph.constants if constant.value in read),
        bodies=graph.bodies,
    )  # fmt: skip
    return drop_unused_values(part)


def _with_alias(
    graph: ComputationGraph, slot: OutputSlot, inputs: Sequence[InputSlot]
) -> OutputSlot:
    """Replace `aliases_input` by the index of that input in its part."""
    if slot.aliases_input is None:
        return slot
    wanted = graph.inputs[slot.aliases_input]
    if wanted not in inputs:
        raise _apart(graph, slot.name, wanted.name)
    return replace(slot, aliases_input=inputs.index(wanted))


def _apart(graph: ComputationGraph, output: str, taken: str) -> CompileError:
    return CompileError(
        f"output {output!r} replaces input {taken!r}, but a cut separates them",
        where=f"graph {graph.name!r}",
        remedy="cut elsewhere with --split_at; if it is an alias, remove it",
    )


def _with_placement(
    graph: ComputationGraph, parts: Sequence[ComputationGraph]
) -> tuple[ComputationGraph, ...]:
    """Distribute the placement options of the graph to the parts that have their slots."""
    requested = list(parts)
    states = _states_of(graph)
    home = {slot.name: k for k, part in reversed([*enumerate(parts)]) for slot in part.inputs}
    for option in graph.placement:
        sides = graph.inputs if option.side == "input" else graph.outputs
        name = sides[graph.slot_index(option)].name
        is_state = name in states
        place = home[name] if option.side == "input" or is_state else len(parts) - 1
        value = option.value
        if option.field == "alias" and isinstance(value, str | int):
            value = value if isinstance(value, str) else graph.inputs[value].name
            if home[value] != place or value not in [s.name for s in graph.inputs]:
                raise _apart(graph, name, value)
        requested[place] = requested[place].with_placement(
            PlacementOption(option.side, name, option.field, value)
        )
    return tuple(requested)


#: Maximum deviation of a part's cost from the mean; the next is tried if no cuts satisfy it.
_SLACKS = (0.4, 0.7, 1.0, math.inf)
#: Multiplications that take as long as accessing one byte, approximately, on one core.
_PRODUCTS_PER_BYTE = 2


def narrowest_cuts(
    graph: ComputationGraph, crossing_nbytes: Sequence[int], parts: int
) -> tuple[int, ...]:
    """Return the `parts - 1` points at which the fewest bytes cross in total.

    Point p is before operation p. Each part has an operation and a cost near the mean; of equal
    cuts, the most even ones are taken.
    """
    if parts == 1:
        return ()
    costs = [operation_cost(one, graph.values, graph.bodies) for one in graph.operations]
    totals = np.array([0, *accumulate(costs)], np.float64)
    mean = max(totals[-1] / parts, 1.0)
    crossing = np.array(crossing_nbytes, np.float64)
    # If every choice separates a state, building that part raises the error.
    for passing in (np.where(crossing < _APART_NBYTES, crossing, np.inf), crossing):
        for slack in _SLACKS:
            cuts = _cuts(totals, passing, parts, mean, slack)
            if cuts is not None:
                return cuts
    raise AssertionError("with unlimited slack, some cuts must be valid")


def _cuts(
    totals: np.ndarray[tuple[int], np.dtype[np.float64]],
    crossing: np.ndarray[tuple[int], np.dtype[np.float64]],
    parts: int,
    mean: float,
    slack: float,
) -> tuple[int, ...] | None:
    """Return the best cuts by dynamic programming over (parts so far, end of the last part)."""
    count = len(totals) - 1
    # Byte counts are integers; the weight of unevenness is below 1, so it only breaks ties.
    unevenness = 0.5 / (parts * (parts * mean) ** 2)
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    steps = []
    for part in range(parts):
        nearer = np.full(count + 1, np.inf)
        source = np.zeros(count + 1, np.int64)
        for end in range(part + 1, count + 1):
            cost = totals[end] - totals[part:end]
            sums = best[part:end] + unevenness * (cost - mean) ** 2
            sums = np.where(np.abs(cost - mean) <= slack * mean, sums, np.inf)
            at = int(np.argmin(sums))
            nearer[end], source[end] = sums[at], part + at
        nearer[:count] += crossing[:count]
        best = nearer
        steps.append(source)
    if not np.isfinite(best[count]):
        return None
    ends = [count]
    for source in reversed(steps):
        ends.append(int(source[ends[-1]]))
    return tuple(reversed(ends[1:-1]))


def operation_cost(
    operation: Operation, values: Sequence[Value], bodies: Sequence[Body] = ()
) -> float:
    """Return bytes read and written, plus multiplications converted to bytes."""
    touched = [v for v in (*operation.inputs, *operation.outputs) if v != ABSENT]
    nbytes = sum(values[v].type.nbytes for v in touched)
    is_own = operation.domain and not is_scan(operation)
    products = 0 if is_own else multiply_adds(operation, values, bodies)
    return 1 + nbytes + products / _PRODUCTS_PER_BYTE

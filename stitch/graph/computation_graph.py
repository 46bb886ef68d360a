"""`ComputationGraph`: operators and logical tensors before anything is placed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stitch import ops
from stitch.errors import CompileError, Problem, closest
from stitch.graph.known_values import KnownValues
from stitch.graph.placement import PlacementError, PlacementOption, Side
from stitch.program import (
    ABSENT,
    Array,
    Body,
    Constant,
    DataType,
    InputKind,
    InputSlot,
    MemoryLayout,
    OperationList,
    OutputSlot,
    ValueType,
    body_lines,
    elements_text,
    has_symbols,
    is_deferred,
    structure_problems,
    summary,
)


@dataclass(frozen=True, slots=True)
class ComputationGraph(OperationList):
    """An unplaced entry point: slots, typed values, operations in run order, constants and
    placement options.

    Raises:
        CompileError: The parts are inconsistent; the message lists up to eight problems.
    """

    constants: tuple[Constant, ...] = ()
    placement: tuple[PlacementOption, ...] = ()
    #: Initial values of inputs of kind `state`, by name; the output of the same name is the next
    #: state. A pass may drop them: the compiler takes them from the original graph.
    initial_state: Mapping[str, Array] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        problems = graph_problems(self)
        if problems:
            listed = "; ".join(map(str, problems[:8]))
            raise CompileError(f"computation graph {self.name!r} is not well formed: {listed}")

    def __repr__(self) -> str:
        return f"<ComputationGraph {summary(self)}>"

    @property
    def meaning(self) -> Hashable:
        """Return a key that is equal for graphs that compute the same, slot by slot."""
        return self.as_body().meaning, *[body.meaning for body in self.bodies]

    def as_body(self) -> Body:
        """Return the operations between the slots as a body."""
        inputs, outputs = ([slot.value for slot in slots] for slots in (self.inputs, self.outputs))
        return Body(tuple(inputs), tuple(outputs), self.values, self.operations, self.constants)

    def input_type(self, index: int) -> ValueType:
        """Shape and logical data type of input `index`."""
        return self.values[self.inputs[index].value].type

    def output_type(self, index: int) -> ValueType:
        """Shape and logical data type of output `index`."""
        return self.values[self.outputs[index].value].type

    def slot_index(self, option: PlacementOption) -> int:
        """Return the index of the slot that `option` names.

        Raises:
            PlacementError: There is no such slot.
        """
        return self._index(option, self._places(option.side))

    def placement_by_slot(self, side: Side) -> tuple[tuple[PlacementOption, ...], ...]:
        """Return the placement options of each input, or of each output."""
        places = self._places(side)
        by_slot: list[list[PlacementOption]] = [[] for _ in self._slots(side)]
        for option in self.placement:
            if option.side == side:
                by_slot[self._index(option, places)].append(option)
        return tuple(map(tuple, by_slot))

    def _slots(self, side: Side) -> Sequence[InputSlot | OutputSlot]:
        return self.inputs if side == "input" else self.outputs

    def _places(self, side: Side) -> dict[str, int]:
        return _places(self._slots(side))

    def _index(self, option: PlacementOption, places: Mapping[str, int]) -> int:
        problem = _slot_problem(option.side, option.slot, places)
        if problem is not None:
            raise PlacementError(
                problem, where=f"graph {self.name!r}, placement option {option.text()}"
            )
        return option.slot if isinstance(option.slot, int) else places[option.slot]

    def with_placement(self, *placement: PlacementOption) -> ComputationGraph:
        """Return the graph with more placement options; a later one replaces an earlier one.

        `memory_layout=interleaved` also removes the shard spec of its slot.

        Raises:
            PlacementError: An option names a slot that does not exist, or aliases such an input.
        """
        kept: dict[tuple[str, int, str], PlacementOption] = {}
        places = {"input": self._places("input"), "output": self._places("output")}
        plain = {(w.side, self._index(w, places[w.side])) for w in placement
                 if w.value is MemoryLayout.INTERLEAVED}  # fmt: skip
        inherited = [w for w in self.placement if w.field != "shard_spec"
                     or (w.side, self._index(w, places[w.side])) not in plain]  # fmt: skip
        for option in (*inherited, *placement):
            if option.field == "alias" and isinstance(option.value, str | int):
                problem = _slot_problem("input", option.value, places["input"])
                if problem is not None:
                    where = f"graph {self.name!r}, placement option {option.text()}"
                    raise PlacementError(
                        f"an output cannot take the buffer of that input: {problem}", where=where
                    )
            kept[option.side, self._index(option, places[option.side]), option.field] = option
        return replace(self, placement=tuple(kept.values()))

    def text(self) -> str:
        """Return the graph as stable, readable text, the format of the golden files."""
        lines = body_lines(self, lambda i: self.values[i].type.text(), _shown)
        placement = [f"  placement {option.text()}" for option in self.placement]
        return "\n".join([f"graph @{self.name} {{", *lines, *placement, "}\n"])


def graph_problems(graph: ComputationGraph) -> tuple[Problem, ...]:
    """Return every defect: of structure, of values with a layout, of options without a slot."""
    problems = list(structure_problems(graph))
    for i, value in enumerate(graph.values):
        if value.layout is not None:
            where = f"value {i} ({value.name})"
            problems.append(Problem("placed", where, "a value of a graph must not have a layout"))
    for slot in graph.outputs:
        source = slot.aliases_input
        if source is not None and not 0 <= source < len(graph.inputs):
            where = f"output {slot.name!r}"
            detail = f"aliases input {source}, but the graph has {len(graph.inputs)} inputs"
            problems.append(Problem("unknown_slot", where, detail))
    sides = {"input": _places(graph.inputs), "output": _places(graph.outputs)}
    problems += _state_problems(graph, sides)
    for option in graph.placement:
        problem = _slot_problem(option.side, option.slot, sides[option.side])
        if problem is None and option.field == "alias" and isinstance(option.value, str | int):
            problem = _slot_problem("input", option.value, sides["input"])
        if problem is not None:
            problems.append(Problem("unknown_slot", f"placement option {option.text()}", problem))
    return tuple(problems)


def _state_problems(
    graph: ComputationGraph, sides: Mapping[str, Mapping[str, int]]
) -> Iterator[Problem]:
    """Yield initial values without a state slot, and those whose type differs from the slot's."""
    for name, array in graph.initial_state.items():
        index, becomes = sides["input"].get(name), sides["output"].get(name)
        kind = None if index is None else graph.inputs[index].kind
        where = f"the initial value of {name!r}"
        if index is None or becomes is None or kind is not InputKind.STATE:
            detail = "a state needs an input of kind `state` and an output of the same name"
            yield Problem("unknown_slot", where, detail)
            continue
        given = ValueType(array.shape, DataType.from_dtype(array.dtype))
        for side, wanted in (
            ("input", graph.input_type(index)), ("output", graph.output_type(becomes))
        ):  # fmt: skip
            if given != wanted:
                detail = f"the initial value is {given.text()}, the {side} is {wanted.text()}"
                yield Problem("type_mismatch", where, detail)


def check_types(graph: ComputationGraph) -> tuple[Problem, ...]:
    """Infer all types again; return every mismatch and every failure."""
    return tuple(_type_problems(graph))


def _type_problems(graph: ComputationGraph) -> Iterator[Problem]:
    listed: list[tuple[str, ComputationGraph | Body]] = [("", graph)]
    listed += [(f"body {i}, ", body) for i, body in enumerate(graph.bodies)]
    for prefix, part in listed:
        known = KnownValues({constant.value: constant.data for constant in part.constants})
        for i, operation in enumerate(part.operations):
            if operation.is_foreign:
                continue  # The types of its results are declared by the graph.
            where = f"{prefix}operation {i} ({operation.op})"
            where += f" at {operation.location}" if operation.location else ""
            operands = [None if j == ABSENT else part.values[j].type for j in operation.inputs]
            data = known.operands(operation)
            try:
                inferred = ops.infer_operation(operation, operands, data, bodies=graph.bodies)
            except CompileError as error:
                yield Problem("no_type", where, str(error).replace("\n", ";"))
                continue
            for index, kind in zip(operation.outputs, inferred, strict=True):
                if index != ABSENT and part.values[index].type != kind:
                    named = f"{part.values[index].name} is {part.values[index].type.text()}"
                    detail = f"{named}, inferred {kind.text()}"
                    yield Problem("type_mismatch", where, detail)
            known.add_operation(operation, operands)


def _places(slots: Iterable[InputSlot | OutputSlot]) -> dict[str, int]:
    """Return slot indices by name."""
    return {slot.name: index for index, slot in enumerate(slots)}


def _slot_problem(side: str, slot: str | int, places: Mapping[str, int]) -> str | None:
    if isinstance(slot, int):
        if 0 <= slot < len(places):
            return None
        listed = ", ".join(places) or "none"
        return f"there is no {side} {slot} of {len(places)}; {side}s, counted from 0: {listed}"
    if slot in places:
        return None
    near, listed = closest(slot, places), ", ".join(places) or "none"
    return f"there is no {side} {slot!r}; {side}s: {listed}" + (f"; {near}" if near else "")


def _shown(constant: Constant) -> str:
    data = constant.data
    if data.size > MOST_SHOWN or is_deferred(data):
        return ""
    return f" = {elements_text(data) if has_symbols(data) else data.tolist()}"


#: Elements of a constant that the text of a graph shows.
MOST_SHOWN = 4

"""Placement options → choices: what was asked for each slot, checked, before anything is placed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stitch.errors import CompileError
from stitch.graph import LAYOUT_FIELDS, ComputationGraph, PlacementOption
from stitch.program import DataType, InputKind, Ownership, ValueType

ByField = Mapping[str, PlacementOption]


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """The placement options about layouts, by field, for each input and output; and the aliases
    asked for.

    `aliases` pairs an output's index with an input's. Two slots that share a buffer share placement
    options.
    """

    inputs: tuple[ByField, ...]
    outputs: tuple[ByField, ...]
    aliases: tuple[tuple[int, int], ...]

    def rounded_outputs(self, graph: ComputationGraph) -> frozenset[int]:
        """The outputs whose storage type differs from their logical type."""
        return frozenset(
            i
            for i, placement in enumerate(self.outputs)
            if "data_type" in placement
            and placement["data_type"].value is not graph.output_type(i).data_type
        )


def apply_kinds(graph: ComputationGraph) -> ComputationGraph:
    """The graph with the requested kinds and ownership on its input slots."""
    slots = list(graph.inputs)
    for i, asked in enumerate(graph.placement_by_slot("input")):
        for option in asked:
            if isinstance(option.value, InputKind):
                slots[i] = replace(slots[i], kind=option.value)
            elif isinstance(option.value, Ownership):
                slots[i] = replace(slots[i], ownership=option.value)
    return replace(graph, inputs=tuple(slots))


def slot_placement(graph: ComputationGraph) -> SlotPlacement:
    """The layout placement options of each slot; raises `CompileError` with all that contradict a
    type.
    """
    inputs = [_layout_options(asked) for asked in graph.placement_by_slot("input")]
    outputs = [_layout_options(asked) for asked in graph.placement_by_slot("output")]
    aliases = _asked_aliases(graph)
    problems = [
        problem
        for side, by_slot, type_of in (
            ("input", inputs, graph.input_type),
            ("output", outputs, graph.output_type),
        )
        for i, placement in enumerate(by_slot)
        if (problem := _type_problem(f"{side} {i}", placement, type_of(i))) is not None
    ]
    for output, source in aliases:
        merged = dict(inputs[source])
        for name, option in outputs[output].items():
            if name in merged and merged[name].value != option.value:
                problems.append(
                    f"{option.text()} contradicts {merged[name].text()}: the output takes the "
                    "input's buffer"
                )
            merged.setdefault(name, option)
        inputs[source] = outputs[output] = merged
    if problems:
        raise CompileError(
            "these placement options cannot be met: " + "; ".join(problems),
            where=f"graph {graph.name!r}",
        )
    return SlotPlacement(tuple(inputs), tuple(outputs), aliases)


def _layout_options(placement: tuple[PlacementOption, ...]) -> dict[str, PlacementOption]:
    return {option.field: option for option in placement if option.field in LAYOUT_FIELDS}


def _type_problem(slot: str, placement: ByField, kind: ValueType) -> str | None:
    if "data_type" not in placement:
        return None
    option = placement["data_type"]
    stored = option.value
    if not isinstance(stored, DataType) or stored is kind.data_type:
        return None
    if stored.is_floating and kind.data_type.is_floating:
        return None
    return (
        f"{option.text()}: {slot} is {kind.text()}, and only floating types may be stored "
        "in another floating type; add a Cast to the module"
    )


def _asked_aliases(graph: ComputationGraph) -> tuple[tuple[int, int], ...]:
    names = [slot.name for slot in graph.inputs]
    pairs: dict[int, int] = {
        i: slot.aliases_input
        for i, slot in enumerate(graph.outputs)
        if slot.aliases_input is not None
    }
    for i, asked in enumerate(graph.placement_by_slot("output")):
        for option in asked:
            if option.field == "alias":
                pairs[i] = (
                    option.value
                    if isinstance(option.value, int)
                    else names.index(str(option.value))
                )
    twice = {i for i, times in Counter(pairs.values()).items() if times > 1}
    if twice:
        listed = ", ".join(repr(names[i]) for i in sorted(twice))
        raise CompileError(
            f"two outputs are to take the buffer of the same input: {listed}",
            where=f"graph {graph.name!r}",
            remedy="let only one of the outputs alias it",
        )
    return tuple(sorted(pairs.items()))

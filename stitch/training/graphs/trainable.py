"""`Trainable`: a graph whose weights are inputs, and the values that they start with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from stitch.errors import CompileError, UsageError, closest
from stitch.graph import ComputationGraph
from stitch.program import Array, InputKind, InputSlot
from stitch.training.graphs.graph_forms import KEPT_KINDS, evaluation_form

#: Operands that gradients never reach: they are statistics that the forward pass itself keeps.
_STATISTICS = {("", "BatchNormalization"): (3, 4)}
#: What a builder calls constants that were given no name.
_UNNAMED = re.compile(r"constant(_[0-9]+)?")


@dataclass(frozen=True, slots=True, eq=False)
class Trainable:
    """A graph whose PARAMETER inputs are trained and whose STATE inputs are buffers.

    `values` holds the initial value of each, by the name of its input. An output named like a STATE
    input is its next value. Raises `UsageError` for values that are missing or do not fit.
    """

    graph: ComputationGraph
    values: Mapping[str, Array] = field(repr=False)
    #: The graph for evaluation: the same parameters and states, no next values, nothing random.
    evaluation: ComputationGraph

    def __post_init__(self) -> None:
        problems = []
        for i, slot in enumerate(self.graph.inputs):
            if slot.kind not in KEPT_KINDS:
                continue
            kind, value = self.graph.input_type(i), self.values.get(slot.name)
            if value is None:
                problems.append(f"{slot.name} ({kind.text()}) has no initial value")
            elif np.shape(value) != kind.shape:
                problems.append(f"{slot.name} is {kind.text()}, its value {list(np.shape(value))}")
        if problems:
            raise UsageError(
                f"graph {self.graph.name!r} cannot start training: " + "; ".join(problems),
                remedy="give initial values by name: weights={'w': array}",
            )
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))

    def names(self, kind: InputKind) -> tuple[str, ...]:
        """The names of the inputs of one kind."""
        return tuple(slot.name for slot in self.graph.inputs if slot.kind is kind)


def as_trainable(
    graph: ComputationGraph,
    weights: Mapping[str, Array] | None = None,
    trainable: Iterable[str] | None = None,
    evaluation: ComputationGraph | None = None,
) -> Trainable:
    """The trainable form of a graph; its own is kept where it has PARAMETER inputs already.

    `trainable` names the constants (or parameters) to train; by default all floating constants that
    have a name and an axis, except statistics. `weights` replaces initial values, and gives those
    of inputs. `evaluation` is the graph for evaluation where it is not simply the same one without
    training modes. Raises `UsageError` for unknown names and values that do not fit.
    """
    # Theirs stay writable, and a training may start long after: what counts is what they hold now.
    given = {name: np.array(value) for name, value in (weights or {}).items()}
    have = {slot.name for slot in graph.inputs if slot.kind is InputKind.PARAMETER}
    wanted = None if trainable is None else set(trainable)
    if wanted is not None or not have:
        graph, promoted = _promoted(graph, wanted)
        given = {**promoted, **given}
    if wanted is not None and have - wanted:
        graph = _demoted(graph, have - wanted)
    known = {slot.name for slot in graph.inputs if slot.kind in KEPT_KINDS}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise UsageError(
            f"graph {graph.name!r} has no parameter or state {', '.join(map(repr, unknown))}",
            expected=", ".join(sorted(known)) or "none",
        )
    if not any(slot.kind is InputKind.PARAMETER for slot in graph.inputs):
        raise CompileError(
            f"graph {graph.name!r} has nothing to train",
            remedy="give inputs kind=parameter, name floating constants, or pass trainable=[...]",
        )
    if evaluation is None:
        evaluation = evaluation_form(graph)
    elif wanted is not None:
        evaluation = _demoted(evaluation, have - wanted)
    return Trainable(graph, given, evaluation)


def _promoted(
    graph: ComputationGraph, wanted: set[str] | None
) -> tuple[ComputationGraph, dict[str, Array]]:
    """Constants as PARAMETER inputs, with their data."""
    fixed = {
        operation.inputs[position]
        for operation in graph.operations
        for position in _STATISTICS.get((operation.domain, operation.op), ())
    }
    taken = {slot.name for slot in graph.inputs}
    slots, values = [], {}
    for constant in graph.constants:
        value = graph.values[constant.value]
        if wanted is not None:
            chosen = value.name in wanted
        else:
            chosen = bool(value.type.shape) and _UNNAMED.fullmatch(value.name) is None
            chosen = chosen and constant.value not in fixed
        if chosen and value.type.data_type.is_floating and value.name not in taken:
            slots.append(InputSlot(value.name, constant.value, InputKind.PARAMETER))
            values[value.name] = constant.data
    trained = [slot.name for slot in graph.inputs if slot.kind is InputKind.PARAMETER]
    missing = (wanted or set()).difference(trained, values)
    if missing:
        known = [*trained, *(graph.values[c.value].name for c in graph.constants)]
        raise UsageError(
            f"graph {graph.name!r} has no parameter and no floating constant "
            f"{', '.join(sorted(missing))} to train",
            expected=", ".join(known) or "none",
            remedy=closest(min(missing), known)
            or "leave trainable= out: of a torch module, parameter.requires_grad_() decides",
        )
    moved = {slot.value for slot in slots}
    constants = tuple(c for c in graph.constants if c.value not in moved)
    return replace(graph, inputs=(*graph.inputs, *slots), constants=constants), values


def _demoted(graph: ComputationGraph, frozen: set[str]) -> ComputationGraph:
    """Parameters that are not trained become state without a next value."""
    slots = tuple(
        replace(slot, kind=InputKind.STATE) if slot.name in frozen else slot
        for slot in graph.inputs
    )
    return replace(graph, inputs=slots)

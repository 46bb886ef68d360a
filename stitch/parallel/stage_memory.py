"""The memory of stages: a bound from segments, and what their compiled programs need.

The search uses the bound, which is never too high. What it finds is compiled where the bound does
not make sure that it fits: then the needs of its stages are known, and it searches again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from stitch.graph import ComputationGraph
from stitch.linker import demands
from stitch.machine import Machine, MachineShape, room_per_bank
from stitch.program import Layout, Program, Space, TensorDesc, ValueType
from stitch.training import (
    KEPT_KINDS,
    Stage,
    compile_stage,
    home_space,
    is_rate,
)

_SAVED = "saved."
#: How much more the programs of a stage may need than all values of its graphs at once.
_MARGIN = 2

Bytes = dict[Space, int]


class _Needs(NamedTuple):
    """The bytes per bank of a stage."""

    #: Of tensors that stay between steps.
    kept: Bytes
    #: Of the values of a micro-batch that wait for its backward pass.
    waiting: Bytes
    #: Of what a pass has beside these, the sum of gradients, and the update.
    passing: Bytes
    adding: Bytes
    updating: Bytes
    #: Of the program with the most slots, constants and scratch.
    alone: Bytes

    def total(self, micro_batches: int) -> Bytes:
        """Return the bytes with the values of so many micro-batches."""
        return {
            space: max(
                n + max(
                    micro_batches * self.waiting[space] + self.passing[space],
                    (micro_batches - 1) * self.waiting[space] + self.adding[space],
                    self.updating[space],
                ),
                self.alone[space],
            )
            for space, n in self.kept.items()
        }  # fmt: skip


class StageMemory:
    """The memory of the intervals of segments of a training.

    Args:
        is_merged: The segments of an interval have the programs of one stage; else each has its
            own, which run one after the other.
    """

    def __init__(
        self, segments: Sequence[Stage[ComputationGraph]], graph: ComputationGraph,
        spaces: Mapping[str, Space], recompute: str, *, is_merged: bool = True,
    ) -> None:  # fmt: skip
        self._segments, self._spaces, self._recompute = segments, spaces, recompute
        self._is_merged = is_merged
        self._batch = {slot.name for slot in graph.inputs if slot.kind not in KEPT_KINDS}
        self._bounds: dict[tuple[int, int, Machine], _Needs] = {}
        self._compiled: dict[tuple[int, int, Machine], _Needs] = {}
        self._values = [
            sum(value.type.nbytes for _, each in segment.in_order if each for value in each.values)
            for segment in segments
        ]  # fmt: skip

    def needed(self, first: int, end: int, machine: Machine, micro_batches: int) -> Bytes:
        """Return the bytes per bank by space that a stage needs on a machine: a lower bound, or
        what was compiled."""
        needs = self._compiled.get((first, end, machine)) or self._bound(first, end, machine)
        return needs.total(micro_batches)

    def _bound(self, first: int, end: int, machine: Machine) -> _Needs:
        """Return a lower bound of what an interval needs."""
        if (first, end, machine) not in self._bounds:
            self._bounds |= self._bounds_from(first, machine)
        needs = self._bounds[first, end, machine]
        if self._is_merged or end == first + 1:
            return needs
        single = [self._bound(k, k + 1, machine) for k in range(first, end)]

        def most(each: Sequence[Bytes]) -> Bytes:
            return {space: max(sizes[space] for sizes in each) for space in needs.kept}

        return needs._replace(
            passing=most([each.passing for each in single]),
            adding=most([each.adding for each in single]),
            updating=most([each.updating for each in single]),
        )

    def fits(self, first: int, end: int, machine: Machine, micro_batches: int) -> bool:
        """Return whether a stage fits each space of a machine, as far as is known."""
        needed = self.needed(first, end, machine, micro_batches)
        return all(n <= machine.shape.space(space).capacity for space, n in needed.items())

    def is_sure(self, first: int, end: int, machine: Machine, micro_batches: int) -> bool:
        """Return whether it is known whether a stage fits."""
        if (first, end, machine) in self._compiled:
            return True
        home = home_space(machine)
        shape, needed = machine.shape.space(home), self.needed(first, end, machine, micro_batches)
        most = needed[home] + _MARGIN * sum(self._values[first:end]) // shape.banks
        return most <= shape.capacity and all(
            space is home or not nbytes for space, nbytes in needed.items()
        )

    def compile(
        self, first: int, end: int, machine: Machine, stages: Sequence[Stage[ComputationGraph]]
    ) -> None:
        """Learn the needs of an interval from the programs of its stages."""
        roomy = replace(machine, shape=_roomy(machine))
        compiled = [compile_stage(stage, roomy, self._spaces) for stage in stages]
        backward = {id(each.backward) for each in compiled}
        kept = {name for stage in stages for name in _persistent(stage)}
        waits = {
            name.removeprefix(_SAVED) for stage in stages
            for name in (_entering(stage) if self._recompute == "all" else _saved(stage))
        }  # fmt: skip
        zero = dict.fromkeys(machine.shape.spaces, 0)
        alone = dict(zero)
        sizes: dict[str, tuple[Space, int]] = {}

        def wants(program: Program) -> Bytes:
            """Return what a program has beside tensors that are kept or wait."""
            beside, whole = dict(zero), dict(zero)
            listed = demands(program, program.scratch, machine.shape)
            names = [(s.name, True) for s in program.inputs]
            names += [(s.name, False) for s in program.outputs if s.aliases_input is None]
            names += [("", False)] * (len(listed) - len(names))
            for demand, (name, is_input) in zip(listed, names, strict=True):
                whole[demand.space] += demand.size_per_bank
                plain = name.removeprefix(_SAVED)
                if plain in waits or (is_input and name in kept):
                    sizes[plain] = demand.space, demand.size_per_bank
                elif not (name in kept and id(program) in backward):
                    beside[demand.space] += demand.size_per_bank
            for space, nbytes in whole.items():
                alone[space] = max(alone[space], nbytes)
            return beside

        def most(*roles: str) -> Bytes:
            programs = [getattr(each, role) for each in compiled for role in roles]
            found = [wants(program) for program in programs if program is not None]
            return {space: max((each[space] for each in found), default=0) for space in zero}

        def total(names: set[str]) -> Bytes:
            return {
                space: sum(n for name in names for where, n in [sizes.get(name, (None, 0))]
                           if where is space)
                for space in zero
            }  # fmt: skip

        passing = most("forward", "loss", "backward")
        adding = most("accumulation")
        updating = most("squares", "update")
        self._compiled[first, end, machine] = _Needs(
            total(kept), total(waits - kept), passing, adding, updating, alone
        )

    def _bounds_from(self, first: int, machine: Machine) -> dict[tuple[int, int, Machine], _Needs]:
        """Return the bounds of all intervals that begin with a segment."""
        home = home_space(machine)
        found: dict[tuple[int, int, Machine], _Needs] = {}
        sizes: dict[tuple[ValueType, Space], int] = {}
        zero = dict.fromkeys(machine.shape.spaces, 0)

        def size(kind: ValueType, space: Space) -> int:
            if (kind, space) not in sizes:
                desc = TensorDesc(kind.shape, Layout(kind.data_type, space))
                sizes[kind, space] = room_per_bank(desc, machine.shape)
            return sizes[kind, space]

        def add(sums: Bytes, to: dict[str, ValueType], kinds: Mapping[str, ValueType]) -> Bytes:
            """Add values, each once; return the sums with them."""
            sums = dict(sums)
            for name, kind in kinds.items():
                if name not in to:
                    to[name] = kind
                    space = self._spaces.get(name, home)
                    sums[space] += size(kind, space)
            return sums

        names: list[dict[str, ValueType]] = [{} for _ in range(5)]
        sums = [zero] * 5
        for index in range(first, len(self._segments)):
            segment = self._segments[index]
            kinds, read = types(segment.forward), {
                each.slot for each in segment.arriving if each.source < first
            }  # fmt: skip
            new = segment.update
            sums = [add(*each) for each in zip(sums, names, (
                _persistent(segment),
                saved_types(segment),
                {n: kind for n, kind in kinds.items() if n in self._batch | read},
                {p.gradient: p.type for p in segment.parameters},
                {s.name: new.output_type(i) for i, s in enumerate(new.outputs)} if new else {},
            ), strict=True)]  # fmt: skip
            kept, saved, entering, gradients, updated = sums
            waiting = entering if self._recompute == "all" else saved
            others = {n: kind for n, kind in names[2].items() if n not in names[1]}
            passing = zero if self._recompute == "all" else add(zero, {}, others)
            added = {space: 2 * n for space, n in gradients.items()}
            found[first, index + 1, machine] = _Needs(kept, waiting, passing, added, updated, zero)
        return found


def _roomy(machine: Machine) -> MachineShape:
    """Return the shape of a machine with a home space for any program."""
    home = home_space(machine)
    shape = machine.shape.space(home)
    roomy = replace(shape, limit=shape.base + (shape.capacity << 20))
    if home is Space.DRAM:
        return replace(machine.shape, dram=roomy)
    return replace(machine.shape, host=roomy)


def types(graph: ComputationGraph) -> dict[str, ValueType]:
    """Return the types of inputs and outputs by name."""
    kinds = {slot.name: graph.input_type(i) for i, slot in enumerate(graph.inputs)}
    return kinds | {slot.name: graph.output_type(i) for i, slot in enumerate(graph.outputs)}


def saved_types(segment: Stage[ComputationGraph]) -> dict[str, ValueType]:
    """Return the tensors of a micro-batch that backward reads, by name without `saved.`."""
    return {name.removeprefix(_SAVED): kind for name, kind in _saved(segment).items()}


def _persistent(segment: Stage[ComputationGraph]) -> dict[str, ValueType]:
    """Return the tensors that stay between steps, and the sums of gradients, by name."""
    found = {p.gradient: p.type for p in segment.parameters}
    for graph in filter(None, (segment.forward, segment.update)):
        for i, slot in enumerate(graph.inputs):
            if slot.kind in KEPT_KINDS and not is_rate(slot.name):
                found[slot.name] = graph.input_type(i)
    return found


def _entering(segment: Stage[ComputationGraph]) -> set[str]:
    """Return the inputs of the forward pass that are of a micro-batch."""
    return {slot.name for slot in segment.forward.inputs if slot.kind not in KEPT_KINDS}


def _saved(segment: Stage[ComputationGraph]) -> dict[str, ValueType]:
    """Return the tensors of a micro-batch that backward reads, by name."""
    if segment.backward is None:
        return {}
    gradients = {each.slot for each in segment.returning}
    return {
        slot.name: segment.backward.input_type(i)
        for i, slot in enumerate(segment.backward.inputs)
        if slot.kind not in KEPT_KINDS and slot.name not in gradients
        and not slot.name.endswith(".grad")
    }  # fmt: skip

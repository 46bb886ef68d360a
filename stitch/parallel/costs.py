"""What stages of a training cost: seconds, values that pass between them, bytes in memory.

A training is cut into segments at every place where it may be cut. An interval of segments is a
stage. Its cost is the sum of its segments', priced as they are in a stage: values that only pass
from segment to segment are where the compiler keeps intermediate values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import NamedTuple, TypeAlias

from stitch.compiler import cut_names
from stitch.errors import UsageError
from stitch.graph import ComputationGraph
from stitch.linker import choose_scratch
from stitch.machine import Machine, room_per_bank
from stitch.mesh import MachineSpecification
from stitch.program import InputKind, Layout, OperationList, Space, TensorDesc, ValueType
from stitch.training import (
    KEPT_KINDS,
    LOSS,
    CostEstimator,
    Loss,
    Optimizer,
    PlacedSlots,
    Stage,
    StagedGraphs,
    Trainable,
    TrainingOptions,
    home_space,
    is_rate,
    stage_graph,
    stages_of,
)

#: Segments at most; a graph with more places to cut is cut at the narrowest of them.
MAX_SEGMENTS = 64
_SAVED = "saved."


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of a stage, the largest among its replicas.

    Attributes:
        forward: Seconds of a micro-batch forward, with the loss.
        backward: The same of the first micro-batch backward.
        accumulation: Seconds to add the gradients of a further micro-batch.
        arriving: Seconds in which a link brings the values of earlier stages for a micro-batch.
        returning: Seconds in which a link takes their gradients back.
        update: Seconds after all micro-batches: sums of the replicas, update, copies.
    """

    forward: float
    backward: float
    accumulation: float
    arriving: float
    returning: float
    update: float


#: A memory space, and bytes per bank.
_Room: TypeAlias = tuple[Space, int]


class _Seconds(NamedTuple):
    """The seconds of a segment on a machine."""

    forward: float
    backward: float
    accumulation: float
    update: float
    #: What backward takes longer if it recomputes everything.
    recomputed: float
    #: What each program takes beside its operations.
    launch: float


class _Passed(NamedTuple):
    """What an interval exchanges: bytes of each value that arrives, of each gradient that goes
    back, of each gradient of its own parameters, and of each parameter of an earlier one."""

    arriving: tuple[int, ...]
    returning: tuple[int, ...]
    gradients: tuple[int, ...]
    copies: tuple[int, ...]


class SegmentCosts:
    """The costs of all stages of a training with one kind of recomputation.

    Raises:
        CompileError: The graph has an operator without a gradient.
    """

    def __init__(
        self, model: Trainable, loss: Loss, optimizer: Optimizer, options: TrainingOptions,
        specification: MachineSpecification, estimator: CostEstimator,
    ) -> None:  # fmt: skip
        self.specification, self.estimator, self.spaces = specification, estimator, options.spaces
        self.recompute = options.recompute
        #: The forward graph that is cut.
        self.graph = stage_graph(model, options)
        #: Where each segment but the last ends.
        self.cuts = cut_names(self.graph, MAX_SEGMENTS)
        saving = replace(options, recompute="none")
        self.staged: StagedGraphs = stages_of(model, loss, optimizer, saving, self.cuts)
        segments = self.staged.stages
        self.count = len(segments)
        #: Values that backward passes read, which are in the home space.
        self._read_back = {
            slot.name for segment in segments if segment.backward
            for slot in segment.backward.inputs if not slot.name.endswith(".grad")
        }  # fmt: skip
        self._homes = {p.name: k for k, each in enumerate(segments) for p in each.parameters}
        self._seconds: dict[tuple[Machine, Space], list[_Seconds]] = {}
        #: Where the scratch of the whole graph is: packing it takes long.
        self._scratch_spaces: dict[Machine, Space] = {}
        self._memory: dict[Machine, dict[tuple[int, int], tuple[dict[Space, int], ...]]] = {}
        self._moves: dict[tuple[str, str, int], float] = {}
        self._costs: dict[tuple[object, ...], StageCost] = {}
        #: Links that a plan would need and the specification does not describe.
        self.missing_links: set[tuple[str, str]] = set()

    def stage(
        self, first: int, end: int, devices: Sequence[str], before: Sequence[str] = ()
    ) -> StageCost:
        """Return the cost of the segments `first` to `end - 1`.

        Args:
            devices: The device of each replica.
            before: The device of the stage before, of each replica; none for the first stage.
        """
        key = first, end, *devices, *before
        if key not in self._costs:
            self._costs[key] = self._stage(first, end, devices, before)
        return self._costs[key]

    def _stage(
        self, first: int, end: int, devices: Sequence[str], before: Sequence[str]
    ) -> StageCost:
        machines = [self.specification.devices[device].machine for device in devices]
        parts = [self._on(machine)[first:end] for machine in machines]

        def seconds(field: int, segments: Sequence[_Seconds]) -> float:
            operations = sum(part[field] for part in segments)
            return operations + segments[0].launch if operations else 0.0

        # The slowest replica; the first one updates.
        forward, backward, accumulation = (
            max(seconds(field, each) for each in parts) for field in range(3)
        )
        if self.recompute == "all":
            backward = max(self._recomputing(first, end, machine) for machine in machines)
        own_sum, update = seconds(2, parts[0]), seconds(3, parts[0])
        passed = self.passed[first, end]
        links = list(zip(before, devices, strict=True)) if before else []
        others = devices[1:]
        return StageCost(
            forward, backward, accumulation,
            max((self._moved(a, b, passed.arriving) for a, b in links), default=0.0),
            max((self._moved(b, a, passed.returning) for a, b in links), default=0.0),
            max((self._moved(d, devices[0], passed.gradients) for d in others), default=0.0)
            + len(others) * own_sum + update
            + max((self._moved(devices[0], d, passed.gradients) for d in others), default=0.0)
            + max((self._moved(a, b, passed.copies) for a, b in links[:1]), default=0.0),
        )  # fmt: skip

    def _recomputing(self, first: int, end: int, machine: Machine) -> float:
        """Return the seconds of a backward pass that computes all values of the stage again."""
        space = choose_scratch(
            self.recomputed_nbytes[first, end], machine.shape, l1_slots_per_bank=0
        ).space
        parts = self._in_space(machine, space)[first:end]
        return sum(part.recomputed + part.backward for part in parts) + parts[0].launch

    # -- seconds -----------------------------------------------------------------------------------

    def program(self, machine: Machine, program: OperationList) -> float:
        """Return the seconds of a program; raise `UsageError` for impossible ones."""
        return self._checked(
            self.estimator.program(machine, program), f"program {program.name!r}, {machine.name!r}"
        )

    def graph_seconds(
        self, graph: ComputationGraph, machine: Machine, spaces: Mapping[str, Space],
        scratch_space: Space | None = None,
    ) -> float:  # fmt: skip
        """Return the seconds of a graph with slots in these spaces, else in the home space."""
        slots = PlacedSlots(graph, machine.shape, home_space(machine))
        return self.program(machine, slots.placed(spaces, graph.operations, scratch_space))

    def movement(self, source: str, target: str, nbytes: int) -> float:
        """Return the seconds of a value between devices, infinite without a link.

        A specification that describes no link has default links between all devices.
        """
        key = source, target, nbytes
        if key not in self._moves:
            described = {(link.source, link.target) for link in self.specification.links}
            if described and (source, target) not in described:
                self.missing_links.add((source, target))
                self._moves[key] = math.inf
            else:
                self._moves[key] = self._checked(
                    self.estimator.movement(self.specification, source, target, nbytes),
                    f"{nbytes} bytes from {source!r} to {target!r}",
                )
        return self._moves[key]

    def _moved(self, source: str, target: str, sizes: Iterable[int]) -> float:
        return sum(self.movement(source, target, nbytes) for nbytes in sizes)

    @staticmethod
    def _checked(seconds: float, where: str) -> float:
        is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
        if not is_number or not 0 <= seconds < math.inf:
            raise UsageError(
                "the cost estimator returned an impossible time", where=where,
                expected="seconds of at least 0", got=repr(seconds),
            )  # fmt: skip
        return seconds

    def _on(self, machine: Machine) -> list[_Seconds]:
        """Return the seconds of each segment with values between segments where scratch is."""
        space = self._scratch_spaces.get(machine)
        if space is None:
            whole = PlacedSlots(self.graph, machine.shape, home_space(machine))
            scratch = choose_scratch(whole.scratch_nbytes, machine.shape, l1_slots_per_bank=0)
            space = self._scratch_spaces[machine] = scratch.space
        return self._in_space(machine, space)

    def _in_space(self, machine: Machine, near: Space) -> list[_Seconds]:
        if (machine, near) not in self._seconds:
            self._seconds[machine, near] = [
                self._segment(segment, machine, near) for segment in self.staged.stages
            ]
        return self._seconds[machine, near]

    def _segment(self, segment: Stage[ComputationGraph], machine: Machine, near: Space) -> _Seconds:
        gradients = {parameter.gradient for parameter in self.staged.parameters}
        saved = set[str]() if self.recompute == "all" else self._read_back
        kept = saved | gradients | {
            slot.name for slot in segment.forward.inputs if slot.kind is not InputKind.ACTIVATION
        }  # fmt: skip
        slots = [*_types(segment.forward), *(_types(segment.backward) if segment.backward else ())]
        inside = {name: near for name in slots if name not in kept} | dict(self.spaces)

        def seconds(graph: ComputationGraph | None) -> float:
            if graph is None:
                return 0.0
            return max(0.0, self.graph_seconds(graph, machine, inside, near) - launch)

        empty = replace(segment.forward, operations=(), outputs=())
        launch = self.graph_seconds(empty, machine, inside, near)
        loss = seconds(segment.loss) + launch if segment.loss else 0.0
        forward = seconds(segment.forward)
        return _Seconds(
            forward + loss, seconds(segment.backward), seconds(segment.accumulation),
            seconds(segment.squares) + seconds(segment.update), forward, launch,
        )  # fmt: skip

    # -- what passes between stages ----------------------------------------------------------------

    @cached_property
    def passed(self) -> Mapping[tuple[int, int], _Passed]:
        """What each interval exchanges with the stages before it."""
        segments, found = self.staged.stages, {}
        for first in range(self.count):
            arriving: dict[str, int] = {}
            returning: dict[str, int] = {}
            gradients: dict[str, int] = {}
            copies: dict[str, int] = {}
            for index in range(first, self.count):
                segment = segments[index]
                types = _types(segment.forward)
                arriving |= {
                    each.slot: types[each.slot].nbytes
                    for each in segment.arriving if each.source < first
                }  # fmt: skip
                copies |= {
                    slot.name: types[slot.name].nbytes for slot in segment.forward.inputs
                    if self._homes.get(slot.name, index) < first
                }  # fmt: skip
                gradients |= {p.gradient: p.type.nbytes for p in segment.parameters}
                # The gradient of a value that an earlier part makes goes back, once.
                backward = _types(segment.backward) if segment.backward else {}
                returning |= {
                    name: kind.nbytes for name, kind in backward.items()
                    if name.removesuffix(".grad") in arriving.keys() | copies.keys()
                    and name.endswith(".grad")
                }  # fmt: skip
                found[first, index + 1] = _Passed(*[
                    tuple(sizes.values()) for sizes in (arriving, returning, gradients, copies)
                ])  # fmt: skip
        return found

    @cached_property
    def recomputed_nbytes(self) -> Mapping[tuple[int, int], int]:
        """The bytes of the values that a backward pass of each interval computes again."""
        found = {}
        for first in range(self.count):
            sizes: dict[str, int] = {}
            for index in range(first, self.count):
                kinds = _saved(self.staged.stages[index])
                sizes |= {n.removeprefix(_SAVED): kind.nbytes for n, kind in kinds.items()}
                found[first, index + 1] = sum(sizes.values())
        return found

    # -- memory ------------------------------------------------------------------------------------

    def needed(
        self, first: int, end: int, machine: Machine, micro_batches: int
    ) -> dict[Space, int]:
        """Return the bytes per bank by space that a stage needs on a machine.

        Args:
            micro_batches: Those whose saved values wait for their backward pass at once.
        """
        if machine not in self._memory:
            self._memory[machine] = self._bytes_of_all(machine)
        persistent, saved = self._memory[machine][first, end]
        return {space: n + micro_batches * saved[space] for space, n in persistent.items()}

    def fits(self, first: int, end: int, machine: Machine, micro_batches: int) -> bool:
        """Return whether a stage fits each space of a machine."""
        needed = self.needed(first, end, machine, micro_batches)
        return all(n <= machine.shape.space(space).capacity for space, n in needed.items())

    def _bytes_of_all(
        self, machine: Machine
    ) -> dict[tuple[int, int], tuple[dict[Space, int], ...]]:
        home = home_space(machine)
        found: dict[tuple[int, int], tuple[dict[Space, int], ...]] = {}
        sizes: dict[tuple[ValueType, Space], int] = {}

        def size(name: str, kind: ValueType) -> _Room:
            space = self.spaces.get(name, home)
            if (kind, space) not in sizes:
                desc = TensorDesc(kind.shape, Layout(kind.data_type, space))
                sizes[kind, space] = room_per_bank(desc, machine.shape)
            return space, sizes[kind, space]

        def total(*groups: Mapping[str, _Room]) -> dict[Space, int]:
            sums = dict.fromkeys(machine.shape.spaces, 0)
            for group in groups:
                for space, nbytes in group.values():
                    sums[space] += nbytes
            return sums

        persistent = [
            {name: size(name, kind) for name, kind in _persistent(segment).items()}
            for segment in self.staged.stages
        ]
        saved = [
            {n.removeprefix(_SAVED): size(n, kind) for n, kind in _saved(segment).items()}
            for segment in self.staged.stages
        ]
        passing = [
            total({name: size(name, kind) for name, kind in _passing(segment).items()})
            for segment in self.staged.stages
        ]
        batch = {slot.name for slot in self.graph.inputs if slot.kind not in KEPT_KINDS}

        def entering_at(segment: Stage[ComputationGraph], first: int) -> dict[str, _Room]:
            """Return what a segment reads from before a stage that begins at `first`."""
            kinds = _types(segment.forward)
            names = {v.slot for v in segment.arriving if v.source < first}
            return {n: size(n, kinds[n]) for n in kinds if n in names or n in batch}

        for first in range(self.count):
            entering: dict[str, _Room] = {}
            kept: dict[str, _Room] = {}
            waiting: dict[str, _Room] = {}
            most = dict.fromkeys(machine.shape.spaces, 0)
            for index in range(first, self.count):
                kept |= persistent[index]
                waiting |= saved[index]
                entering |= entering_at(self.staged.stages[index], first)
                most = {space: max(n, passing[index][space]) for space, n in most.items()}
                needed = {space: n + most[space] for space, n in total(kept).items()}
                if self.recompute != "all":
                    found[first, index + 1] = needed, total(waiting)
                    continue
                # Micro-batches save what enters the stage; what one of them recomputes is beside.
                again = total(waiting)
                needed = {space: n + again[space] for space, n in needed.items()}
                found[first, index + 1] = needed, total(entering)
        return found


def _types(graph: ComputationGraph) -> dict[str, ValueType]:
    """Return the types of inputs and outputs by name."""
    kinds = {slot.name: graph.input_type(i) for i, slot in enumerate(graph.inputs)}
    return kinds | {slot.name: graph.output_type(i) for i, slot in enumerate(graph.outputs)}


def _persistent(segment: Stage[ComputationGraph]) -> dict[str, ValueType]:
    """Return the tensors that stay between steps, and the sums of gradients, by name."""
    found = {p.gradient: p.type for p in segment.parameters}
    for graph in filter(None, (segment.forward, segment.update)):
        for i, slot in enumerate(graph.inputs):
            if slot.kind in KEPT_KINDS and not is_rate(slot.name):
                found[slot.name] = graph.input_type(i)
    return found


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


def _passing(segment: Stage[ComputationGraph]) -> dict[str, ValueType]:
    """Return the other tensors of the programs of a segment, by name."""
    skipped = _persistent(segment).keys() | _saved(segment).keys()
    graphs = (segment.forward, segment.loss, segment.backward)
    return {
        name: kind for graph in graphs if graph for name, kind in _types(graph).items()
        if name not in skipped and name != LOSS
    }  # fmt: skip

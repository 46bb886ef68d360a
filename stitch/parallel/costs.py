"""What stages of a training cost: seconds, values that pass between them, bytes in memory.

A training is cut into segments at every place where it may be cut. An interval of segments is a
stage. Its cost is the sum of its segments', priced as they are in a stage: values that only pass
from segment to segment are where the compiler keeps intermediate values.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import NamedTuple

from stitch.compiler import cut_names
from stitch.errors import UsageError
from stitch.graph import ComputationGraph
from stitch.linker import choose_scratch
from stitch.machine import Machine
from stitch.mesh import MachineSpecification
from stitch.parallel.stage_memory import StageMemory, saved_types, types
from stitch.program import InputKind, OperationList, Space
from stitch.training import (
    KEPT_KINDS,
    CostEstimator,
    Loss,
    Optimizer,
    PlacedSlots,
    StagedGraphs,
    Trainable,
    TrainingOptions,
    home_space,
    stage_graph,
    stages_of,
)

#: Segments at most; a graph with more places to cut is cut at the narrowest of them.
MAX_SEGMENTS = 64


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


class _Seconds(NamedTuple):
    """The seconds of an interval on a machine."""

    forward: float
    backward: float
    accumulation: float
    update: float
    #: What backward takes longer if it recomputes everything.
    recomputed: float


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
        self.memory = StageMemory(segments, self.graph, options.spaces, options.recompute)
        self.training = model, loss, optimizer, options
        #: Values in the home space in any interval: what is kept, gradients of parameters, and
        #: what backward passes read.
        self._far = {parameter.gradient for parameter in self.staged.parameters} | {
            slot.name for segment in segments for graph in (segment.forward, segment.update)
            if graph for slot in graph.inputs if slot.kind is not InputKind.ACTIVATION
        }  # fmt: skip
        if options.recompute != "all":
            self._far |= {
                slot.name for segment in segments if segment.backward
                for slot in segment.backward.inputs if not slot.name.endswith(".grad")
            }  # fmt: skip
        self._homes = {p.name: k for k, each in enumerate(segments) for p in each.parameters}
        self._seconds: dict[tuple[Machine, Space, int, int], _Seconds] = {}
        self._graphs: dict[tuple[Machine, Space, int, str, frozenset[str]], float] = {}
        #: Where the scratch of the whole graph is: packing it takes long.
        self._scratch_spaces: dict[Machine, Space] = {}
        self._moves: dict[tuple[str, str, int], float] = {}
        self._costs: dict[tuple[object, ...], StageCost] = {}
        #: The seconds of operations on shards, which `TensorCosts` keeps here.
        self.of_operations: dict[Hashable, float] = {}
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
        parts = [self._on(machine, first, end) for machine in machines]
        # The slowest replica; the first one updates.
        forward, backward, accumulation = (max(each[field] for each in parts) for field in range(3))
        if self.recompute == "all":
            backward = max(self._recomputing(first, end, machine) for machine in machines)
        own_sum, update = parts[0].accumulation, parts[0].update
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
        found = self._interval(machine, space, first, end)
        return found.recomputed + found.backward

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
        number = math.nan
        if isinstance(seconds, Real) and not isinstance(seconds, bool):
            with suppress(OverflowError):  # Also sums of np.int64 or np.float32 may overflow.
                number = float(seconds)
        if not 0 <= number < math.inf:
            raise UsageError(
                "the cost estimator returned an impossible time", where=where,
                expected="a number of seconds of at least 0", got=repr(seconds),
            )  # fmt: skip
        return number

    def _on(self, machine: Machine, first: int, end: int) -> _Seconds:
        """Return the seconds of an interval with values inside it where scratch is."""
        return self._interval(machine, self.scratch_space(machine), first, end)

    def scratch_space(self, machine: Machine) -> Space:
        """Return where the scratch of the whole graph is."""
        if machine not in self._scratch_spaces:
            whole = PlacedSlots(self.graph, machine.shape, home_space(machine))
            scratch = choose_scratch(whole.scratch_nbytes, machine.shape, l1_slots_per_bank=0)
            self._scratch_spaces[machine] = scratch.space
        return self._scratch_spaces[machine]

    def _interval(self, machine: Machine, near: Space, first: int, end: int) -> _Seconds:
        key = machine, near, first, end
        if key not in self._seconds:
            self._seconds[key] = self._interval_seconds(machine, near, first, end)
        return self._seconds[key]

    def _interval_seconds(self, machine: Machine, near: Space, first: int, end: int) -> _Seconds:
        launch = self.launch(machine, near)
        entering, leaving = self._entering[first], self._leaving(end)
        border = entering | leaving
        border |= {f"{name}.grad" for name in border}

        def seconds(role: str, outside: Set[str] = frozenset()) -> float:
            operations = sum(
                self._graph(machine, near, k, role, outside) for k in range(first, end)
            )
            graphs = (getattr(segment, role) for segment in self.staged.stages[first:end])
            return operations + launch if any(each and each.operations for each in graphs) else 0.0

        backward = seconds("backward", border)
        return _Seconds(
            seconds("forward", border) + seconds("loss"), backward, seconds("accumulation"),
            seconds("squares") + seconds("update"),
            max(0.0, seconds("forward", entering) - launch * (backward > 0)),
        )  # fmt: skip

    def launch(self, machine: Machine, near: Space) -> float:
        """Return the seconds of a program without operations."""
        return self._graph(machine, near, 0, "empty", frozenset())

    @cached_property
    def _entering(self) -> Sequence[frozenset[str]]:
        """By first segment: the batch, and the values that segments before make and it or later
        ones read. Intervals that begin there have them in the home space."""
        batch = [slot.name for slot in self.graph.inputs if slot.kind not in KEPT_KINDS]
        return [
            frozenset(batch).union(
                each.slot for segment in self.staged.stages[first:] for each in segment.arriving
                if each.source < first
            )
            for first in range(self.count)
        ]  # fmt: skip

    def _leaving(self, end: int) -> frozenset[str]:
        """Return the values that segments from `end` on read, or the prediction."""
        if end < self.count:
            return self._entering[end]
        return frozenset([slot.name for slot in self.staged.stages[-1].forward.outputs])

    def _graph(
        self, machine: Machine, near: Space, index: int, role: str, outside: Set[str]
    ) -> float:  # fmt: skip
        """Return the seconds of a graph of a segment beside its launch, with the values `outside`
        in the home space."""
        segment = self.staged.stages[index]
        empty = role == "empty"
        graph: ComputationGraph | None = (
            replace(segment.forward, operations=(), outputs=()) if empty else getattr(segment, role)
        )
        if graph is None:
            return 0.0
        slots = types(graph)
        key = machine, near, 0 if empty else index, role, frozenset(slots.keys() & outside)
        if key not in self._graphs:
            # Other programs have all their slots in the home space.
            inside = slots if role in ("forward", "backward") else {}
            far = self._far | outside
            spaces = {name: near for name in inside if name not in far} | dict(self.spaces)
            found = self.graph_seconds(graph, machine, spaces, near)
            if not empty:
                found = max(0.0, found - self.launch(machine, near))
            self._graphs[key] = found
        return self._graphs[key]

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
                kinds = types(segment.forward)
                arriving |= {
                    each.slot: kinds[each.slot].nbytes
                    for each in segment.arriving if each.source < first
                }  # fmt: skip
                copies |= {
                    slot.name: kinds[slot.name].nbytes for slot in segment.forward.inputs
                    if self._homes.get(slot.name, index) < first
                }  # fmt: skip
                gradients |= {p.gradient: p.type.nbytes for p in segment.parameters}
                # The gradient of a value that an earlier part makes goes back, once.
                backward = types(segment.backward) if segment.backward else {}
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
                kinds = saved_types(self.staged.stages[index])
                sizes |= {name: kind.nbytes for name, kind in kinds.items()}
                found[first, index + 1] = sum(sizes.values())
        return found

    # -- memory ------------------------------------------------------------------------------------

    def check_memory(
        self, stages: Sequence[tuple[int, int]], machines: Sequence[Sequence[Machine]],
        waiting: Sequence[int],
    ) -> bool:  # fmt: skip
        """Return whether stages fit, of which those that may not are compiled.

        Args:
            machines: Those of the replicas of each stage.
            waiting: The micro-batches whose values each stage saves at once.
        """
        unsure = [
            (k, machine) for k, (first, end) in enumerate(stages)
            for machine in dict.fromkeys(machines[k])
            if not self.memory.is_sure(first, end, machine, waiting[k])
        ]  # fmt: skip
        if unsure:
            ends = [self.cuts[end - 1] for _, end in stages[:-1]]
            staged = stages_of(*self.training, ends).stages
            for k, machine in unsure:
                self.memory.compile(*stages[k], machine, [staged[k]])
        return all(
            self.memory.fits(first, end, machine, waiting[k])
            for k, (first, end) in enumerate(stages) for machine in machines[k]
        )  # fmt: skip

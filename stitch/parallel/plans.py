"""Search for the stages and replicas of a training on several devices.

A plan has `replicas` copies of `stages`; stage k of a replica is on its k-th device. A step of n
micro-batches for each replica takes, by the schedule,

    gpipe:  sum(f + b + x + y) + (n - 1) * (max(f, x) + max(b, y)) + tail
    1f1b:   sum(f + b + x + y) + (n - 1) * period + tail
            period = the most of f + b, x, y, and for each k with fewer than n micro-batches
            under way behind it, (what these stages take for a micro-batch) / (their number)

for seconds f and b of stages forward and backward, x and y of the values that arrive and of
gradients that go back, and the longest update as the tail. A plan from stage k on is no better
than another if each of these terms is at least as large, so a dynamic program from the last stage
that keeps the undominated ones is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from stitch.machine import Machine
from stitch.mesh import MachineSpecification
from stitch.parallel.costs import SegmentCosts, StageCost

SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages or shards, replicas and schedule of a training.

    Attributes:
        costs: The segments of the stages, with the kind of recomputation.
        order: The names of the devices: those of each replica follow one another.
        ends: The segment after each stage.
        replicas: Copies of all stages.
        schedule: `1f1b` or `gpipe`.
        micro_batches: Those of a step, of all replicas together.
        seconds: The estimated seconds of a step.
        degree: The devices of each replica among which weights are divided; then there is one
            stage.
        axes: The axis of each divided weight by name.
    """

    costs: SegmentCosts
    order: tuple[str, ...]
    ends: tuple[int, ...]
    replicas: int
    schedule: str
    micro_batches: int
    seconds: float
    degree: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """The first segment of each stage, and the one after its last."""
        return tuple(zip((0, *self.ends), self.ends, strict=False))

    @property
    def cuts(self) -> tuple[str, ...]:
        """The nodes after which stages end."""
        return tuple([self.costs.cuts[end - 1] for end in self.ends[:-1]])

    @property
    def places(self) -> int:
        """The number of devices of a replica: of its stages, or of the shards of its weights."""
        return len(self.ends) * self.degree

    def devices(self, place: int) -> tuple[str, ...]:
        """Return the device of a stage or shard in each replica."""
        return devices_of(self.order, self.replicas, self.places, place)

    @property
    def specification(self) -> MachineSpecification:
        """The machine specification with its devices in the order of the plan."""
        whole = self.costs.specification
        names = dict.fromkeys([*self.order, *whole.devices])
        return replace(whole, devices={name: whole.devices[name] for name in names})

    @property
    def waiting(self) -> tuple[int, ...]:
        """The micro-batches whose values each stage saves at once."""
        share, count = self.micro_batches // self.replicas, len(self.ends)
        return tuple([saved_sets(self.schedule, count - 1 - k, share) for k in range(count)])

    @property
    def machines(self) -> tuple[tuple[Machine, ...], ...]:
        """The machines of the replicas of each stage or shard."""
        entries = self.costs.specification.devices
        return tuple([
            tuple([entries[device].machine for device in self.devices(k)])
            for k in range(self.places)
        ])  # fmt: skip


def devices_of(order: Sequence[str], replicas: int, stages: int, stage: int) -> tuple[str, ...]:
    """Return the device of a stage in each replica: each replica has consecutive devices."""
    return tuple([order[replica * stages + stage] for replica in range(replicas)])


class _Terms(NamedTuple):
    """The terms of the seconds of a step, from a stage to the last."""

    #: Of the first micro-batch.
    once: float
    #: Of each further one: the longest of the pipeline, or forward and backward.
    period: float
    period_back: float
    update: float

    def seconds(self, micro_batches: int) -> float:
        further = (micro_batches - 1) * (self.period + self.period_back)
        return self.once + further + self.update


def _extended(
    after: _Terms, stage: StageCost, following: int, schedule: str, micro_batches: int
) -> _Terms:
    """Return the terms with one more stage before `following` ones."""
    f, b, x, y, added = (
        stage.forward, stage.backward, stage.arriving, stage.returning, stage.accumulation
    )  # fmt: skip
    once, update = after.once + f + b + x + y, max(after.update, stage.update)
    if schedule == "gpipe":
        period, back = max(after.period, f, x), max(after.period_back, b + added, y)
        return _Terms(once, period, back, update)
    period = max(after.period, f + b + added, x, y)
    if micro_batches > following + 1:
        # So many micro-batches are under way from here on.
        period = max(period, (after.once + f + b + added) / (following + 1))
    return _Terms(once, period, 0.0, update)


def _places(
    order: Sequence[str], replicas: int, stages: int, stage: int
) -> list[tuple[str, ...]]:  # fmt: skip
    """Return the devices of a stage, and of the one before."""
    return [
        devices_of(order, replicas, stages, k) if k >= 0 else () for k in (stage, stage - 1)
    ]  # fmt: skip


def saved_sets(schedule: str, following: int, micro_batches: int) -> int:
    """Return the micro-batches whose values a stage saves at once."""
    return micro_batches if schedule == "gpipe" else min(micro_batches, following + 1)


L = TypeVar("L")


class _Label(NamedTuple):
    terms: _Terms
    ends: tuple[int, ...]


def best_stages(
    costs: SegmentCosts, stages: int, replicas: int, schedule: str, micro_batches: int,
    limit: float = math.inf, *, order: Sequence[str] | None = None, within_memory: bool = True,
) -> Plan | None:  # fmt: skip
    """Return the fastest plan with so many stages and replicas, None if none fits in memory.

    Args:
        order: The names of the devices; by default those of the specification.
        limit: Plans that take at least as many seconds are left out.
        within_memory: Whether each stage must fit its devices.
    """
    share, count = micro_batches // replicas, costs.count
    order = tuple(costs.specification.devices) if order is None else tuple(order)
    #: By the first segment: the undominated plans from there to the end.
    labels: dict[int, list[_Label]] = {count: [_Label(_Terms(0.0, 0.0, 0.0, 0.0), ())]}
    for k in reversed(range(stages)):
        following = stages - 1 - k
        places = _places(order, replicas, stages, k)
        machines = dict.fromkeys(
            costs.specification.devices[device].machine for device in places[0]
        )
        waiting = saved_sets(schedule, following, share)
        extended: dict[int, list[_Label]] = {}
        for first in [0] if k == 0 else range(k, count):
            found: list[_Label] = []
            for end in sorted(labels):
                if end <= first:
                    continue
                if within_memory and not all(
                    costs.memory.fits(first, end, machine, waiting) for machine in machines
                ):
                    continue
                stage = costs.stage(first, end, *places)
                for terms, ends in labels[end]:
                    longer = _extended(terms, stage, following, schedule, share)
                    if longer.seconds(share) < limit:
                        found.append(_Label(longer, (end, *ends)))
            if found:
                extended[first] = list(undominated(found, lambda label: label.terms))
        labels = extended
    best = min(labels.get(0, ()), key=lambda each: each.terms.seconds(share), default=None)
    if best is None:
        return None
    seconds = best.terms.seconds(share)
    used = order[: replicas * stages]
    return Plan(costs, used, best.ends, replicas, schedule, micro_batches, seconds)


def undominated(labels: Iterable[L], terms_of: Callable[[L], tuple[float, ...]]) -> Iterator[L]:
    """Yield the labels, fewest terms first, that no other one equals or undercuts in each term."""
    smaller: list[tuple[float, ...]] = []
    for label in sorted(labels, key=terms_of):
        terms = terms_of(label)
        if not any(all(a <= b for a, b in zip(other, terms, strict=True)) for other in smaller):
            smaller.append(terms)
            yield label


def shapes_of(
    algorithm: str, devices: int, micro_batches: int, segments: int
) -> list[tuple[int, int, str]]:
    """Return the numbers of replicas and stages, and the schedules, that an algorithm tries.

    `data_parallel` takes as many replicas as divide the micro-batches, `pipeline` one replica,
    `search` all, `tensor` none.
    """
    if algorithm == "tensor":
        return []
    possible = [r for r in range(1, devices + 1) if micro_batches % r == 0]
    if algorithm == "data_parallel":
        return [(possible[-1], 1, "1f1b")]
    return [
        (replicas, stages, schedule)
        for replicas in (possible if algorithm == "search" else [1])
        for stages in range(1, min(devices // replicas, segments) + 1)
        for schedule in (SCHEDULES if stages > 1 else SCHEDULES[:1])
    ]

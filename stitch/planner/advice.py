"""Advice: which slots, compiled with another layout, save copies; by planning what would then
run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Literal, TypeAlias

from stitch.planner.plan import Copy, Execute, Plan
from stitch.program import DataType, Layout, Space, TensorDesc

#: Changes that one piece of advice holds at most, unless more are asked for.
MOST_CHANGES = 3
#: Sets of changes that are planned for one piece of advice, at most.
MOST_TRIALS = 64
#: Types whose every number another type holds as well.
_EXACT_IN = {
    DataType.FLOAT16: (DataType.FLOAT32, DataType.FLOAT64),
    DataType.BFLOAT16: (DataType.FLOAT32, DataType.FLOAT64),
    DataType.FLOAT32: (DataType.FLOAT64,),
}


@dataclass(frozen=True, slots=True)
class Slot:
    """An input or output of a program, by numbers."""

    program: int
    side: Literal["input", "output"]
    index: int


@dataclass(frozen=True, slots=True)
class SlotChange:
    """A program is compiled with a slot in another layout."""

    slot: Slot
    layout: Layout


@dataclass(frozen=True, slots=True)
class Cost:
    """What copies and moves come to: how many, their bytes, and simulated seconds; and the
    simulated seconds of the programs themselves."""

    copies: int
    nbytes: int
    seconds: float
    program_seconds: float = 0.0

    def __sub__(self, other: Cost) -> Cost:
        """What this comes to beyond the other."""
        return Cost(
            self.copies - other.copies, self.nbytes - other.nbytes, self.seconds - other.seconds,
            self.program_seconds - other.program_seconds,
        )  # fmt: skip

    @property
    def order(self) -> tuple[int, int, int]:
        """What is compared: time (in femtoseconds, as sums of floats differ in their last bits),
        then copies, then bytes."""
        return round((self.seconds + self.program_seconds) * 1e15), self.copies, self.nbytes


#: What a set of changes comes to; None where such programs cannot be, or do not run together.
Price: TypeAlias = Callable[[Sequence[SlotChange]], Cost | None]


def possible_changes(
    plans: Iterable[tuple[Plan, int]], programs: Mapping[int, int]
) -> tuple[SlotChange, ...]:
    """The layouts that slots could have instead, of all values that plans copy or move.

    A slot may get the layout of any other slot that makes or reads the same value, of a source or
    target of its copies outside the host, and each of these without its address. Its type changes
    only where no result does: what arrives there is rounded to that type already, or will be by all
    who read it. `plans` come with how often each runs, `programs` numbers programs by the keys of
    their transformations. What carries most simulated seconds comes first.
    """
    plans = tuple(plans)
    makers = _makers(plans, programs)
    users_of = [_users(plan, programs, makers) for plan, _ in plans]
    types = _types_around([plan for plan, _ in plans], users_of, programs)
    worth: dict[SlotChange, float] = {}
    for (plan, times), users in zip(plans, users_of, strict=True):
        for values, seconds, ends in _carried(plan):
            near = [user for value in values for user in users.get(value, ())]
            descs = [*(desc for _, desc in near), *ends]
            for slot, own in near:
                for layout in _others(own, descs):
                    if _keeps_results(own.layout.data_type, layout.data_type, types[slot]):
                        change = SlotChange(slot, layout)
                        worth[change] = worth.get(change, 0.0) + seconds * times
    return tuple(sorted(worth, key=lambda change: -round(worth[change] * 1e15)))


_User: TypeAlias = tuple[Slot, TensorDesc]
_Users: TypeAlias = dict[int, list[_User]]


def _makers(
    plans: Sequence[tuple[Plan, int]], programs: Mapping[int, int]
) -> dict[str, set[_User]]:
    """The slots that decide where a buffer is made, by what it says of its origin: other plans may
    read what one plan makes. A conversion makes it as the programs beside it read it."""
    makers: dict[str, set[_User]] = defaultdict(set)
    for plan, _ in plans:
        users = _users(plan, programs, {})
        for one, _, outputs in plan.request.tasks:
            for index, value in enumerate(outputs):
                near = users.get(value, [])
                origin = f"output {one.output_name(index)!r} of {one.name!r}"
                makers[origin].update(near[:1] if one.key in programs else near)
    return makers


def _users(plan: Plan, programs: Mapping[int, int], makers: Mapping[str, set[_User]]) -> _Users:
    """The slots that make or read each value."""
    users: _Users = defaultdict(list)
    origins = {buffer.number: buffer.origin for buffer in plan.request.buffers}
    for resident in plan.request.residents:
        first = resident.instances[0]
        known = makers.get(origins[first.buffer], set())
        if len(known) == 1 and not first.offset_nbytes:
            users[resident.value] += known
    for transformation, inputs, outputs in plan.request.tasks:
        number = programs.get(transformation.key)
        if number is None:
            continue
        for index, value in enumerate(outputs):
            slot = Slot(number, "output", index)
            users[value].append((slot, transformation.outputs[index]))
        for index, value in enumerate(inputs):
            users[value].append((Slot(number, "input", index), transformation.inputs[index]))
    return users


def _carried(plan: Plan) -> Iterator[tuple[set[int], float, tuple[TensorDesc, ...]]]:
    """For each step that carries bytes: the values, simulated seconds, and where it copies."""
    lying: dict[int, set[int]] = defaultdict(set)
    for resident in plan.request.residents:
        for instance in resident.instances:
            lying[instance.buffer].add(resident.value)
    for step in plan.steps:
        if isinstance(step, Execute):
            for value, instance in zip(plan.request.tasks[step.task].outputs, step.outputs,
                                       strict=True):  # fmt: skip
                lying[instance.buffer].add(value)
        elif isinstance(step, Copy):
            values = {step.value, step.made}
            if step.kind == "evict":
                values |= lying[step.source.buffer]
            lying[step.target.buffer] |= values
            ends = (step.source.desc, step.target.desc)
            yield (
                values,
                step.seconds,
                tuple(desc for desc in ends if desc.layout.space is not Space.HOST),
            )
    for step in plan.copies:
        if not isinstance(step, Copy):
            moved = {value for buffer, _ in step.targets for value in lying[buffer]}
            yield moved, step.seconds, ()


def _others(own: TensorDesc, descs: Sequence[TensorDesc]) -> Iterator[Layout]:
    near = [desc.layout for desc in descs if desc.shape == own.shape]
    for layout in dict.fromkeys([*near, *(layout.without_address() for layout in near)]):
        if layout != own.layout:
            yield layout


def _types_around(
    plans: Sequence[Plan], users_of: Sequence[_Users], programs: Mapping[int, int]
) -> dict[Slot, set[DataType | None]]:
    """For inputs the types of what arrives, for outputs those in which it is read (None: by
    a task that is no program here, or a handle, which may want it as it is)."""
    around: dict[Slot, set[DataType | None]] = defaultdict(set)
    for plan, users in zip(plans, users_of, strict=True):
        request = plan.request
        made = {r.value: r.instances[0].desc.layout.data_type for r in request.residents}
        elsewhere = {*made, *request.kept}
        for task in request.tasks:
            for value, desc in zip(task.outputs, task.transformation.outputs, strict=True):
                made[value] = desc.layout.data_type
            if task.transformation.key not in programs:
                elsewhere.update(task.inputs)
        for value, near in users.items():
            read = {desc.layout.data_type for slot, desc in near if slot.side == "input"}
            for slot, _ in near:
                if slot.side == "input":
                    around[slot].add(made.get(value))
                else:
                    around[slot] |= {None} if value in elsewhere else read
    return around


def _keeps_results(own: DataType, other: DataType, around: set[DataType | None]) -> bool:
    """Whether a slot of the type `own` may be of the other, for what comes before or after it."""
    return own is other or (own in _EXACT_IN.get(other, ()) and around == {other})


def best_changes(
    changes: Sequence[SlotChange], price: Price, *, most: int = MOST_CHANGES,
    trials: int = MOST_TRIALS,
) -> tuple[tuple[SlotChange, ...], Cost, Cost] | None:  # fmt: skip
    """The set of at most so many changes that costs least, what all costs now, and then.

    Every set is tried where they are fewer than `trials`; else changes are added one by one, each
    the best beside those before it. Of equals the smaller set wins, then what stands first in
    `changes`. None where nothing is saved, or has no price now.
    """
    if not changes or trials < 2:
        return None
    now = price(())
    if now is None:
        return None
    most = min(most, len(changes))
    best: tuple[tuple[SlotChange, ...], Cost] = ((), now)
    if sum(comb(len(changes), size) for size in range(1, most + 1)) < trials:
        for size in range(1, most + 1):
            best = _better(best, combinations(changes, size), price)
    else:
        left = trials - 1
        while len(best[0]) < most and left > 0:
            chosen = best[0]
            # No round looks at so many that none is left for the next.
            few = [c for c in changes if c not in chosen][: max(1, left // (most - len(chosen)))]
            best = _better(best, ((*chosen, change) for change in few), price)
            left -= len(few)
            if best[0] == chosen:
                break
    return (best[0], now, best[1]) if best[0] else None


def _better(
    best: tuple[tuple[SlotChange, ...], Cost], sets: Iterable[tuple[SlotChange, ...]], price: Price
) -> tuple[tuple[SlotChange, ...], Cost]:
    """The cheapest of the sets, if it is cheaper than what is known."""
    for chosen in sets:
        if len({change.slot for change in chosen}) < len(chosen):
            continue
        cost = price(chosen)
        if cost is not None and cost.order < best[1].order:
            best = chosen, cost
    return best

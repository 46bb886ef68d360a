"""Find slots whose layout, if compiled differently, would save copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stitch.planner.plan import Copy, Execute, Plan
from stitch.program import DataType, Layout, Space, TensorDesc

#: Types that represent every number of a type.
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
    """Compile a program with another layout of a slot."""

    slot: Slot
    layout: Layout


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of copies and moves, and the simulated seconds of the programs."""

    copies: int
    nbytes: int
    seconds: float
    program_seconds: float = 0.0

    def __sub__(self, other: Cost) -> Cost:
        return Cost(
            self.copies - other.copies, self.nbytes - other.nbytes, self.seconds - other.seconds,
            self.program_seconds - other.program_seconds,
        )  # fmt: skip

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: time in femtoseconds (rounded, as sums of floats differ), copies, bytes."""
        return round((self.seconds + self.program_seconds) * 1e15), self.copies, self.nbytes


def possible_changes(
    plans: Iterable[tuple[Plan, int]], programs: Mapping[int, int]
) -> tuple[SlotChange, ...]:
    """Return the layouts that slots could have instead, for all values that plans copy or move.

    A slot may get the layout of any other slot that writes or reads the same value, or of an end of
    its copies outside the host, each also without its address. Its data type changes only if no
    result does: the value is rounded to that type anyway, before or after.

    Args:
        plans: Plans, and how often each runs.
        programs: Program numbers by transformation key.

    Returns:
        The changes, those of the values with the most seconds of copies first.
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
    """Map the origin of each buffer to the slots that decide its layout in other plans."""
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
    """Return for each copy or move its values, seconds, and layouts outside the host."""
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
    """Return the data types of an input's values, or those in which an output is read (None:
    any).
    """
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
    """Whether changing a slot from type `own` to `other` keeps every result."""
    return own is other or (own in _EXACT_IN.get(other, ()) and around == {other})

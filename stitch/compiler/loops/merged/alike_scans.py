"""Alike scans: which scans of a list of operations run the same cell and need nothing of each
other.

Comes in: operations in run order, bodies. Goes out: groups of scans, and after how many such scans
each operation comes at the soonest, so that what is merged can be put in order. Must not know:
costs, how scans are merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from stitch.compiler.loops.lane_scans import LaneScan, lane_scan_of
from stitch.program import ABSENT, Array, Body, is_scan

#: Constants up to this many bytes are compared by content.
_COMPARED_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class AlikeScans:
    """Groups of scans of one cell, each longest first, by how many scans they come after; and that
    number of each operation."""

    groups: tuple[tuple[int, tuple[LaneScan, ...]], ...]
    stages: tuple[int, ...]


def alike_scans(
    holder: Body, bodies: Sequence[Body], lane_bodies: Collection[int]
) -> AlikeScans:  # fmt: skip
    """The groups of at least two scans of a body, or of a graph as one."""
    names = _equal_values(holder)
    read = {v for o in holder.operations for v in o.inputs} | set(holder.outputs)
    keys: dict[int, Hashable] = {}
    scans: dict[int, LaneScan] = {}
    for number, operation in enumerate(holder.operations):
        if not is_scan(operation):
            continue
        found = lane_scan_of(operation, bodies, lane_bodies)
        if found.form.states and found.form.count and not found.form.has_condition:
            wanted = tuple([v if v in read else ABSENT for v in found.results])
            scans[number] = LaneScan(
                operation, found.body, found.form, found.lanes, found.operands, found.batched,
                wanted,
            )  # fmt: skip
            keys[number] = _cell(found, names)
    many = {key for key, times in Counter(keys.values()).items() if times > 1}
    after: dict[int, int] = {}
    stages: list[int] = []
    groups: dict[tuple[Hashable, int], list[LaneScan]] = {}
    for number, operation in enumerate(holder.operations):
        stage = max((after.get(v, 0) for v in operation.inputs), default=0)
        stages.append(stage)
        is_one = keys.get(number) in many
        after.update({v: stage + is_one for v in operation.outputs if v != ABSENT})
        if is_one:
            groups.setdefault((keys[number], stage), []).append(scans[number])
    listed = [
        (stage, tuple(sorted(group, key=lambda scan: -scan.form.count)))
        for (_, stage), group in groups.items()
        if len(group) > 1
    ]
    return AlikeScans(tuple(listed), tuple(stages))


def _cell(scan: LaneScan, names: Mapping[int, Hashable]) -> Hashable:
    """Equal for scans of one cell: what all their rounds share is the same, where it is the same
    for all lanes."""
    form, first = scan.form, scan.form.states + scan.form.sequences
    shared = [
        None if batched else names.get(v, v) if isinstance(v, int) else data_name(v)
        for v, batched in zip(scan.operands[first:], scan.batched[first:], strict=True)
    ]
    return scan.body, form.states, form.sequences, form.collected, tuple(shared)


def same_operands(scans: Sequence[LaneScan], data: Mapping[int, Array]) -> tuple[bool, ...]:
    """Which operands are one value in all scans of a group; `data`: of constants."""
    form = scans[0].form
    found = []
    for operand in range(len(scans[0].operands)):
        sources = [scan.operands[operand] for scan in scans]
        known = [data.get(v, v) if isinstance(v, int) else v for v in sources]
        names = {v if isinstance(v, int) else data_name(v) for v in known}
        # What all rounds share is of one cell: the same, or computed in the same way.
        is_one = len(names) == 1 or operand >= form.states + form.sequences
        found.append(is_one and not any(scan.batched[operand] for scan in scans))
    return tuple(found)


def data_name(data: Array) -> Hashable:
    """Equal for equal data; large data is compared by identity."""
    content = data.tobytes() if data.nbytes <= _COMPARED_NBYTES else id(data)
    return data.dtype.str, data.shape, content


def _equal_values(holder: Body) -> dict[int, Hashable]:
    """Of values that are computed in the same way, or are the same data, one name."""
    names: dict[int, Hashable] = {c.value: data_name(c.data) for c in holder.constants}
    known: dict[Hashable, int] = {}
    for operation in holder.operations:
        way = (
            operation.op, operation.domain, operation.body,
            tuple([(k, repr(v)) for k, v in sorted(operation.attributes.items())]),
            tuple([names.get(v, v) for v in operation.inputs]), len(operation.outputs),
        )  # fmt: skip
        first = known.setdefault(way, len(known))
        made = [(i, value) for i, value in enumerate(operation.outputs) if value != ABSENT]
        names.update({value: ("made", first, i) for i, value in made})
    return names

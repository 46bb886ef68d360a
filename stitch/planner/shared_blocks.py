"""Views of one block: whether a task reads them in it, or apart, as copies of their own.

Comes in: the picture, and a task. Goes out: the task as it takes the least time, its views read in
their blocks, as copies, or in blocks that came back whole, because the views take more room apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from stitch.errors import LayoutError, OutOfMemoryError, StitchError
from stitch.planner.making_room import RoomDemand, bring_back, make_room
from stitch.planner.plan import Copy, Instance, Relocate, waiting_desc
from stitch.planner.plan_picture import OtherWay, Residency
from stitch.program import Space, TensorDesc
from stitch.tasks import Task

#: Views (value, descriptor) by the block in which they lie, and the space where they are wanted.
_Parts = dict[tuple[int, Space], set[tuple[int, TensorDesc]]]


def run_with_views(state: Residency, task: Task, run: Callable[[Residency, Task], None]) -> None:
    """Runs a task by `run`. Where something leaves for it, the views that it reads are tried out of
    their blocks and in them, and what takes the least time is done.

    Raises what `run` raises where no way has room.
    """
    if not _reads_views(state, task):
        return run(state, task)
    seconds: dict[frozenset[OtherWay], float] = {}
    refused: StitchError | None = None
    way = frozenset[OtherWay]()
    while True:
        take_back, first = state.attempt(), len(state.steps)
        state.begin(state.task, way)
        try:
            run(state, task)
        except (OutOfMemoryError, LayoutError) as error:
            refused, seconds[way] = refused or error, inf
        else:
            copies = [s for s in state.steps[first:] if isinstance(s, Copy | Relocate)]
            leaves = any(isinstance(s, Copy) and s.kind == "evict" for s in copies)
            if way in seconds or not (seconds or leaves):
                return None
            seconds[way] = sum(step.seconds for step in copies)
        wider = way | state.views
        take_back()
        best = min(seconds, key=lambda way: (seconds[way], len(way)))
        # All together, and all but those of one block, which may stay then.
        blocks = {i.buffer for value, _ in best for i in state.values[value]}
        fewer = [frozenset(o for o in best if o[0] not in state.users[b]) for b in sorted(blocks)]
        way = next((way for way in (wider, *fewer) if way not in seconds), best)
        if refused is not None and seconds.get(way) == inf:
            try:
                raise refused
            finally:
                del refused  # Else it would keep itself alive, and all that its callers hold.


def _reads_views(state: Residency, task: Task) -> bool:
    """Whether an input of a task lies in a block that is not its alone."""
    return any(
        len(state.users[i.buffer]) > 1 or i.desc != state.buffers[i.buffer].desc
        for value in task.inputs
        for i in state.values[value]
    )


def bring_back_blocks(state: Residency, task: Task) -> None:
    """Blocks that wait elsewhere come back where the views that a task reads take more room apart.

    Raises what `make_room` raises.
    """
    for value, joins in state.otherwise:
        if joins:
            for copy in _copies_beside(state, value):
                state.detach(value, copy)
    reader, locked = repr(task.transformation.name), set[int]()
    while (found := _block_elsewhere(state, task)) is not None:
        number, space = found
        block, users = state.buffers[number], set(state.users[number])
        room = RoomDemand(space, reader, locked)
        room.floating.append((state.size_of(waiting_desc(block.desc, space)), block.origin))
        addresses = make_room(state, room)
        # The block itself may have gone further away to make that room.
        found = _block_elsewhere(state, task)
        if found is not None and found[1] is space and state.users[found[0]] == users:
            locked.add(bring_back(state, state.buffers[found[0]], space, addresses, reader))


def other_ways(
    state: Residency, task: Task, served: Iterable[tuple[int, Instance]]
) -> frozenset[OtherWay]:
    """How else the views that a task reads could be read in less room.

    `served`: its inputs (value, instance) that lie as it wants them.
    """
    views: dict[int, set[tuple[int, TensorDesc]]] = {}
    for value, instance in served:
        if not state.buffers[instance.buffer].pinned:
            views.setdefault(instance.buffer, set()).add((value, instance.desc))
    apart = (
        (value, False)
        for block, parts in views.items()
        if any(desc.shape != state.buffers[block].desc.shape for _, desc in parts)
        and sum(state.size_of(d) for _, d in parts) < state.buffers[block].size_per_bank
        for value, _ in parts
    )
    joined = (
        (value, True)
        for (block, space), parts in _parts(state, task).items()
        if _is_larger_apart(state, block, space, parts)
        for value, _ in parts
        if _copies_beside(state, value)
    )
    return frozenset((*apart, *joined))


def _block_elsewhere(state: Residency, task: Task) -> tuple[int, Space] | None:
    """A block, and the space where a task had better read views of it together."""
    for (block, space), parts in _parts(state, task).items():
        away = {(v, d) for v, d in parts if state.find(v, d, None) is None}
        if away and _is_larger_apart(state, block, space, away):
            return block, space
    return None


def _parts(state: Residency, task: Task) -> _Parts:
    """The inputs of a task that lie in blocks with others, and could be read in them."""
    parts: _Parts = {}
    given = {i for _, i in task.transformation.aliases}
    for index, (value, desc) in enumerate(
        zip(task.inputs, task.transformation.inputs, strict=False)
    ):
        layout = desc.layout
        near = (layout.space, *state.outlets(layout.space))
        bare = TensorDesc(desc.shape, layout.without_address())
        for instance in () if index in given else _in_blocks(state, value):
            if (
                instance.desc.layout.space in near
                and waiting_desc(instance.desc, layout.space) == bare
                and (layout.address is None or not instance.offset_nbytes)
            ):
                parts.setdefault((instance.buffer, layout.space), set()).add((value, bare))
    return parts


def _in_blocks(state: Residency, value: int) -> list[Instance]:
    """The whole instances of a value that share their buffer with other values."""
    origin = state.values[value][0].desc.layout.data_type
    return [
        i
        for i in state.values[value]
        if len(state.users[i.buffer]) > 1 and i.desc.layout.data_type is origin
    ]


def _copies_beside(state: Residency, value: int) -> list[Instance]:
    """Copies of a value that hold nothing else, where it lies in a block as well."""
    return [
        i
        for i in (state.values[value] if _in_blocks(state, value) else ())
        if state.users[i.buffer] == {value} and not state.buffers[i.buffer].pinned
    ]


def _is_larger_apart(
    state: Residency, block: int, space: Space, parts: Iterable[tuple[int, TensorDesc]]
) -> bool:
    whole = state.size_of(waiting_desc(state.buffers[block].desc, space))
    return sum(state.size_of(desc) for _, desc in parts) > whole

"""Views of one block: decide whether a task reads them from the block or from separate copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

from stitch.errors import LayoutError, OutOfMemoryError, StitchError
from stitch.planner.addresses import NewBuffer
from stitch.planner.eviction import SpaceDemand, carry, is_spare
from stitch.planner.plan import Buffer, Copy, Instance, Relocate, copy_cost, evicted_desc
from stitch.planner.plan_state import PlanState, ViewOption
from stitch.program import Space, TensorDesc
from stitch.tasks import NumberedTask

#: By (block, space where they are read): views (value, descriptor) and their byte offset in the
#: block.
_Parts = dict[tuple[int, Space], dict[tuple[int, TensorDesc], int]]


def run_with_views(
    state: PlanState, task: NumberedTask, run: Callable[[PlanState, NumberedTask], None]
) -> None:
    """Plan a task with `run`. If that evicts something, try reading its views from copies and from
    their blocks, and keep the fastest option.

    Raises what `run` raises if no option fits.
    """
    if not _reads_views(state, task):
        return run(state, task)
    seconds: dict[frozenset[ViewOption], float] = {}
    refused: StitchError | None = None
    option = frozenset[ViewOption]()
    while True:
        undo, first = state.checkpoint(), len(state.steps)
        state.begin(state.task, option)
        try:
            run(state, task)
        except (OutOfMemoryError, LayoutError) as error:
            refused, seconds[option] = refused or error, inf
        else:
            copies = [s for s in state.steps[first:] if isinstance(s, Copy | Relocate)]
            leaves = any(isinstance(s, Copy) and s.kind == "evict" for s in copies)
            if option in seconds or not (seconds or leaves):
                return None
            seconds[option] = sum(step.seconds for step in copies)
        wider = option | state.views
        undo()
        best = min(seconds, key=lambda option: (seconds[option], len(option)))
        # All options together, and without those of one block each.
        blocks = {i.buffer for value, _ in best for i in state.values[value]}
        fewer = [frozenset(o for o in best if o[0] not in state.users[b]) for b in sorted(blocks)]
        option = next((option for option in (wider, *fewer) if option not in seconds), best)
        if refused is not None and seconds.get(option) == inf:
            try:
                raise refused
            finally:
                del refused  # Break the reference cycle with the traceback.


def _reads_views(state: PlanState, task: NumberedTask) -> bool:
    """Whether an input of the task shares its buffer with other values."""
    return any(
        len(state.users[i.buffer]) > 1 or i.desc != state.buffers[i.buffer].desc
        for value in task.inputs
        for i in state.values[value]
    )


@dataclass(frozen=True, slots=True)
class BlockReturn:
    """Bring an evicted block back, for views of it: (value, descriptor) to byte offset."""

    want: NewBuffer
    views: dict[tuple[int, TensorDesc], int]


def blocks_to_return(
    state: PlanState, task: NumberedTask, demands: Mapping[Space, SpaceDemand]
) -> list[BlockReturn]:
    """Return the blocks to bring back whole because their views take more memory separately."""
    for value, joins in state.chosen_views:
        if joins:
            for copy in _copies_beside(state, value):
                state.detach(value, copy)
    found: list[BlockReturn] = []
    for (number, space), parts in _parts(state, task).items():
        views = {
            view: offset
            for view, offset in parts.items()
            if state.find(*view, None) is None and all(view not in r.views for r in found)
        }
        block = state.buffers[number]
        if views and _is_larger_apart(state, block, space, views):
            desc, owner = evicted_desc(block.desc, space), min(state.users[number])
            size = state.size_of(desc)
            want = NewBuffer(block.origin, block.origin, desc, None, size, owner, owner)
            found.append(BlockReturn(want, views))
            if is_spare(state, block):
                # Keep a redundant block until it has been read; others are evicted as a whole.
                demands[block.space].locked.add(number)
                state.locked.add(number)
    return found


def returned_for(
    view: tuple[int, TensorDesc], address: int | None, returns: Iterable[BlockReturn]
) -> tuple[NewBuffer, int] | None:
    """Return the block that is brought back for a view, and the view's byte offset, if any."""
    for back in returns:
        offset, want = back.views.get(view), back.want
        if offset is None or (address is not None and offset):
            continue
        if address is None or want.address in (None, address):
            want.address = want.address if address is None else address
            return want, offset
    return None


def bring_back(state: PlanState, back: BlockReturn) -> None:
    """Copy a block into its new buffer; all its values then have an instance there."""
    values, new = {value for value, _ in back.views}, back.want.buffer
    sources = [
        state.buffers[i.buffer]
        for i in state.values[min(values)]
        if values <= state.users[i.buffer]
    ]
    desc = state.buffers[new].desc
    block = min(sources, key=lambda b: copy_cost(state.machine, b.desc, desc)[1])
    reader = state.request.tasks[state.task].transformation.name
    reason = f"{reader!r} reads values of one block, which takes less room than they do apart"
    carry(state, "return", block, new, (reason, None))
    for user in state.users[block.number]:
        for i in [i for i in state.values[user] if i.buffer == block.number]:
            moved = replace(i, buffer=new, desc=evicted_desc(i.desc, desc.layout.space))
            state.attach(user, moved)


def view_options(
    state: PlanState, task: NumberedTask, served: Iterable[tuple[int, Instance]]
) -> frozenset[ViewOption]:
    """Return further options to read the task's views in less memory.

    `served`: the inputs (value, instance) that are read in place.
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
        if _is_larger_apart(state, state.buffers[block], space, parts)
        for value, _ in parts
        if _copies_beside(state, value)
    )
    return frozenset((*apart, *joined))


def _parts(state: PlanState, task: NumberedTask) -> _Parts:
    """Return the inputs of a task that are stored in shared blocks and can be read from them."""
    parts: _Parts = {}
    given = {i for _, i in task.transformation.aliases}
    for index, (value, desc) in enumerate(
        zip(task.inputs, task.transformation.inputs, strict=False)
    ):
        blocks = () if index in given else _in_blocks(state, value)
        if not blocks:
            continue
        layout, bare = desc.layout, desc.without_address()
        near = (layout.space, *state.outlets[layout.space])
        for instance in blocks:
            if (
                instance.desc.layout.space in near
                and evicted_desc(instance.desc, layout.space) == bare
                and (layout.address is None or not instance.offset_nbytes)
            ):
                views = parts.setdefault((instance.buffer, layout.space), {})
                views[value, bare] = instance.offset_nbytes
    return parts


def _in_blocks(state: PlanState, value: int) -> list[Instance]:
    """Return the exact instances of a value in shared buffers."""
    origin = state.values[value][0].desc.layout.data_type
    return [
        i
        for i in state.values[value]
        if len(state.users[i.buffer]) > 1 and i.desc.layout.data_type is origin
    ]


def _copies_beside(state: PlanState, value: int) -> list[Instance]:
    """Return the separate copies of a value that is also stored in a block."""
    return [
        i
        for i in (state.values[value] if _in_blocks(state, value) else ())
        if state.users[i.buffer] == {value} and not state.buffers[i.buffer].pinned
    ]


def _is_larger_apart(
    state: PlanState, block: Buffer, space: Space, parts: Iterable[tuple[int, TensorDesc]]
) -> bool:
    whole = state.size_of(evicted_desc(block.desc, space))
    return sum(state.size_of(desc) for _, desc in parts) > whole

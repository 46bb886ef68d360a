"""Plan a task batch: tasks and a snapshot of memory in, a `Plan` out.

For each task in order, every input gets an instance in the described layout (and address), the
scratch region is cleared, outputs are allocated, the task runs, and dead values are released.
Tensors stay in L1 until its memory is needed. If something must be evicted, the eviction rules of
`plan_state` are tried in turn. If only moves are needed, the plan is repeated with a `StaticLayout`
that moves fewer bytes. `rebind_plan` reuses the steps of a plan for the same tasks at other
addresses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from stitch.errors import LayoutError, OutOfMemoryError, StitchError, TaskError
from stitch.planner.addresses import NewBuffer, RequiredAddresses, allocate
from stitch.planner.eviction import SpaceDemand
from stitch.planner.plan import (
    Copy,
    Execute,
    Instance,
    Plan,
    PlanRequest,
    Relocate,
    copy_cost,
    predicted_cost,
)
from stitch.planner.plan_state import RULES, PlanState, RepeatedPlan, scratch_in_l1
from stitch.planner.residency import chain_of, choose
from stitch.planner.shared_blocks import (
    BlockReturn,
    blocks_to_return,
    bring_back,
    returned_for,
    run_with_views,
    view_options,
)
from stitch.planner.static_layout import StaticLayout, find_static_layout
from stitch.program import DataType, Layout, Scratch, Space, TensorDesc
from stitch.tasks import NumberedTask, TransformationKind

#: A plan within this factor of the lower bound ends the search. Among plans within this factor of
#: the fastest, the one that carries the fewest bytes is chosen.
NEAR = 1.02
#: Work limit of `choose`, in (tensor, task) pairs per planned task: enough for about 50 tensors
#: with predicted next uses.
LOOKS_PER_TASK = 1 << 17


def plan(request: PlanRequest, *, spills: bool = True) -> Plan:
    """Plan a task batch.

    If something must leave a space, eviction rules are tried until a plan is near the lower bound.
    Among plans within `NEAR` of the fastest (of the time that not every plan needs), the one that
    carries the fewest bytes between spaces is returned.

    Args:
        request: The tasks, and the buffers and values that exist before them.
        spills: Whether tensors may be evicted to the host.

    Raises:
        OutOfMemoryError: The tasks do not fit.
        LayoutError: Required addresses overlap, or the machine has no path.
    """
    found: list[_Candidate] = []
    refused: StitchError | None = None
    away, first, least = frozenset[tuple[int, int]](), 0.0, 0.0
    addresses, state = RequiredAddresses(request), PlanState(request, spills=spills)
    #: The decisions of finished plans, by slack and whether required addresses were considered.
    decisions: defaultdict[tuple[float, bool], list[list[int]]] = defaultdict(list)
    own = request.machine.residency
    for rule in (own,) if own else RULES:
        if rule == "chosen":
            away, first, least = _chosen(request)
        pressed, slack = False, least * (NEAR - 1)
        tries: list[RequiredAddresses | None] = [addresses or None]
        for required in tries:
            known = decisions[slack, required is None]
            undo = state.begin_plan(rule, away, slack, known)
            candidate: Plan | None = None
            try:
                candidate = _plan_by(state, required)
                known.append(state.decisions)
            except RepeatedPlan:
                pass
            except (OutOfMemoryError, LayoutError) as error:
                if not state.used_lookahead:
                    refused = refused or error
            else:
                found.append(_Candidate(candidate, *predicted_cost(candidate), required))
            undo()
            pressed |= state.pressed
            # Addresses chosen for later tasks may have caused the evictions: retry without them.
            gives_way = candidate is None or candidate.is_pressed
            if state.used_lookahead and gives_way and None not in tries:
                tries.append(None)
        if not pressed or (found and min(c.seconds for c in found) <= least * NEAR):
            break
    if not found:
        assert refused is not None
        try:
            raise refused
        finally:
            del refused  # Break the reference cycle with the traceback.
    choice = _preferred(found, first)
    best = choice.plan
    if not pressed:
        best = _with_static_layout(best, choice.required, state)
    if request.machine.has_plugin_policies:
        _check_plugin_policies(best)
    if request.later:
        # The cost of predicted uses is outside the plan, so it has no bound of its own.
        return best
    return replace(best, least_seconds=min(least, best.seconds))


def _check_plugin_policies(made: Plan) -> None:
    """Raise `TaskError` if the checker finds a defect in a plan by a plugin's policies."""
    # Imported here: without plugins no plan is checked.
    from stitch.planner.checker import WARNINGS, check_plan

    defect = next((found for found in check_plan(made) if found.kind not in WARNINGS), None)
    if defect is not None:
        raise TaskError(
            "a plan by a plugin's allocator or eviction rule is wrong", where=defect.where,
            got=f"{defect.kind}: {defect.detail}", remedy="run without the plugin, and report this",
        )  # fmt: skip


@dataclass(frozen=True)
class _Candidate:
    """A plan, its predicted cost, and the required addresses it considered."""

    plan: Plan
    seconds: float
    nbytes: int
    required: RequiredAddresses | None

    @cached_property
    def carrying_seconds(self) -> float:
        """The seconds without moves that stay inside their space."""
        moves = (step for step in self.plan.copies if isinstance(step, Relocate))
        return self.seconds - sum(move.seconds for move in moves if move.stage is None)


def _preferred(found: Sequence[_Candidate], first: float) -> _Candidate:
    """Return the plan with the fewest bytes between spaces among those near the fastest.

    `first` seconds are part of every plan. The time for evictions and returns, or the total, may
    exceed the fastest plan's by `NEAR` of the rest, and the total by `NEAR` of the whole.
    """
    quickest = min(found, key=lambda c: c.seconds)
    more = max(0.0, quickest.seconds - first) * (NEAR - 1)
    near = [
        c
        for c in found
        if c.seconds <= quickest.seconds + more
        or (
            c.seconds <= quickest.seconds * NEAR
            and c.carrying_seconds <= quickest.carrying_seconds + more
        )
    ]
    return min(near, key=lambda c: (c.nbytes, c.seconds))


def _chosen(request: PlanRequest) -> tuple[frozenset[tuple[int, int]], float, float]:
    """Choose what to evict over the whole chain.

    Returns:
        The (value, task) pairs: evict the value before its use by the task; the seconds of the
            copies that every plan makes; a lower bound on the seconds of any plan, including
            predicted reads. Both are 0 if unknown.
    """
    chain, end = chain_of(request), len(request.tasks)
    choice = choose(chain, looks=LOOKS_PER_TASK * end)
    if choice is None:
        return frozenset(), 0.0, 0.0
    away = {
        (value, min(stay.end, end))
        for stay in choice.away
        if stay.first < end
        for value in chain.holders[stay.holder].values
    }
    if not chain.is_exact:
        return frozenset(away), 0.0, 0.0
    return frozenset(away), chain.first_seconds, chain.first_seconds + choice.least_seconds


def _with_static_layout(made: Plan, required: RequiredAddresses | None, state: PlanState) -> Plan:
    """Return the plan with a static layout if that is cheaper, else the plan itself."""
    static_layout = find_static_layout(made)
    if static_layout is None:
        return made
    state.begin_plan()
    try:
        candidate = _plan_by(state, required, static_layout)
    except (OutOfMemoryError, LayoutError):
        return made
    bounces = any(isinstance(s, Relocate) and s.stage is not None for s in candidate.steps)
    if bounces or state.pressed:
        return made
    return candidate if predicted_cost(candidate) < predicted_cost(made) else made


def _plan_by(
    state: PlanState, required: RequiredAddresses | None, static_layout: StaticLayout | None = None
) -> Plan:
    request = state.request
    for index, task in enumerate(request.tasks):
        state.begin(index)
        try:
            run_with_views(
                state, task, partial(_run, required=required, static_layout=static_layout)
            )
        except StitchError as error:
            if error.where is None:
                error.where = f"task {index} ({task.transformation.name})"
            raise
    return Plan(
        request=request,
        steps=tuple(state.steps),
        final_buffers=tuple(buffer for _, buffer in sorted(state.buffers.items())),
        final_values=state.final_values(),
        free_regions=state.free_regions(),
        touched=frozenset(state.touched),
    )


def _run(
    state: PlanState,
    task: NumberedTask,
    required: RequiredAddresses | None,
    static_layout: StaticLayout | None,
) -> None:
    transformation = task.transformation
    demands = {
        space: SpaceDemand(space, repr(transformation.name), set())
        for space in state.machine.shape.spaces
    }
    returns = blocks_to_return(state, task, demands)
    inputs, copies = _choose_inputs(state, task, demands, returns)
    taken = dict(transformation.aliases)
    outputs = [
        NewBuffer.of(state, f"output {transformation.output_name(o)!r}", desc, task.outputs[o])
        for o, desc in enumerate(transformation.outputs)
        if o not in taken
    ]
    scratch = _scratch_wants(state, task, demands)
    wants = [*(back.want for back in returns), *copies, *outputs, *scratch]
    allocate(state, demands, wants, required, static_layout)
    for back in returns:
        bring_back(state, back)
    for want in copies:
        _copy(state, want, task)
    if transformation.kind is TransformationKind.COPY:
        _copy(state, outputs[0], task, source_of=task.inputs[0])
    else:
        _execute(state, task, inputs, outputs, scratch)
    for value in {*task.inputs, *task.outputs}:
        if value in state.values and not state.is_needed(value):
            state.drop(value)


#: An instance used as an input, or (the buffer to be made for it, byte offset).
_Input = Instance | tuple[NewBuffer, int]


def _choose_inputs(
    state: PlanState,
    task: NumberedTask,
    demands: dict[Space, SpaceDemand],
    returns: Sequence[BlockReturn],
) -> tuple[list[_Input], list[NewBuffer]]:
    """Return the instance or new buffer for each input, and the copies to make."""
    transformation = task.transformation
    gives = {source: task.outputs[o] for o, source in transformation.aliases}
    chosen: list[_Input] = []
    #: By (value, descriptor, address, input index if it is overwritten, else -1).
    copies: dict[tuple[int, TensorDesc, int | None, int], NewBuffer] = {}
    for index, desc in enumerate(transformation.inputs):
        value, address, bare = task.inputs[index], desc.layout.address, desc.without_address()
        instance = _serving(state, task, value, bare, address, index in gives, demands)
        if instance is not None:
            state.touch(instance.buffer)
            demands[bare.layout.space].locked.add(instance.buffer)
            state.locked.add(instance.buffer)
            chosen.append(instance)
            continue
        back = None if index in gives else returned_for((value, bare), address, returns)
        if back is not None:
            chosen.append(back)
            continue
        # A copy that an output overwrites serves no other input.
        key = (value, bare, address, index if index in gives else -1)
        if key not in copies:
            what = f"input {transformation.input_name(index)!r}"
            copies[key] = NewBuffer.of(state, what, desc, value, gives.get(index))
        chosen.append((copies[key], 0))
    served = zip(task.inputs, chosen, strict=False)
    state.views = view_options(state, task, [(v, i) for v, i in served if isinstance(i, Instance)])
    return chosen, [*copies.values()]


def _serving(
    state: PlanState,
    task: NumberedTask,
    value: int,
    desc: TensorDesc,
    address: int | None,
    gives: bool,
    demands: dict[Space, SpaceDemand],
) -> Instance | None:
    instance = state.find(value, desc, address) or state.find(value, desc, None)
    if instance is None or (value, False) in state.chosen_views:
        return None
    buffer = state.buffers[instance.buffer]
    if gives and (
        (buffer.pinned and not buffer.shared)
        or state.users[buffer.number] != {value}
        or state.is_needed(value)
        or task.inputs.count(value) > 1
        or instance.offset_nbytes
    ):
        return None
    relocate = demands[buffer.space].relocate
    if address is None:
        return instance
    if buffer.number in relocate:
        return instance if relocate[buffer.number] == address else None
    if buffer.address == address and not instance.offset_nbytes:
        relocate[buffer.number] = address
        return instance
    if buffer.pinned or instance.offset_nbytes or buffer.number in demands[buffer.space].locked:
        return None
    relocate[buffer.number] = address
    return instance


def _scratch_wants(
    state: PlanState, task: NumberedTask, demands: dict[Space, SpaceDemand]
) -> list[NewBuffer]:
    """Reserve scratch: in L1 a fixed region, elsewhere a temporary buffer."""
    scratch = task.transformation.scratch
    promised = scratch_in_l1(scratch, state.machine.shape)
    if promised is not None:
        demands[Space.L1].fixed.append((*promised[1:], "scratch"))
        state.claimed.append(promised)
    elif scratch is not None and scratch.size_per_bank:
        desc = scratch_desc(scratch, state.shape(scratch.space).banks)
        return [NewBuffer.of(state, "scratch", desc, -1)]
    return []


def scratch_desc(scratch: Scratch, banks: int) -> TensorDesc:
    """Return scratch as a tensor: one row of bytes per bank."""
    return TensorDesc((banks, scratch.size_per_bank), Layout(DataType.UINT8, scratch.space))


def _copy(
    state: PlanState, want: NewBuffer, task: NumberedTask, source_of: int | None = None
) -> None:
    value = want.value if source_of is None else source_of
    source = _cheapest_source(state, value, want.desc)
    state.touch(source.buffer)
    target = Instance(want.buffer, 0, want.desc)
    nbytes, seconds = copy_cost(state.machine, source.desc, want.desc)
    reason = f"{want.what} of {task.transformation.name!r} wants {want.desc.layout.text()}"
    reason += f", it is {source.desc.layout.text()}"
    if source.desc == want.desc:
        reason += " elsewhere"
    state.steps.append(Copy("copy", value, want.value, source, target, nbytes, seconds, reason))
    state.attach(want.value, target)


def _cheapest_source(state: PlanState, value: int, desc: TensorDesc) -> Instance:
    origin = state.values[value][0].desc.layout.data_type
    exact = [i for i in state.values[value] if i.desc.layout.data_type is origin]
    return min(exact, key=lambda i: copy_cost(state.machine, i.desc, desc)[1])


def _execute(
    state: PlanState,
    task: NumberedTask,
    chosen: list[_Input],
    outputs: list[NewBuffer],
    scratch: list[NewBuffer],
) -> None:
    transformation = task.transformation
    inputs = tuple(
        choice
        if isinstance(choice, Instance)
        else Instance(choice[0].buffer, choice[1], desc.without_address())
        for choice, desc in zip(chosen, transformation.inputs, strict=False)
    )
    aliased = dict(transformation.aliases)
    placed = iter(outputs)
    instances = []
    for o, desc in enumerate(transformation.outputs):
        buffer = inputs[aliased[o]].buffer if o in aliased else next(placed).buffer
        instance = Instance(buffer, 0, desc.without_address())
        instances.append(instance)
        state.attach(task.outputs[o], instance)
    for o, i in aliased.items():
        name = f"output {transformation.output_name(o)!r} of {transformation.name!r}"
        state.rename(instances[o].buffer, name)
        state.replace_donated(task.inputs[i], inputs[i].buffer, task.outputs[o])
    region = scratch_in_l1(transformation.scratch, state.machine.shape)
    if scratch:
        buffer_of = state.buffers[scratch[0].buffer]
        assert buffer_of.address is not None
        region = (buffer_of.space, buffer_of.address, buffer_of.size_per_bank)
    state.steps.append(Execute(state.task, inputs, tuple(instances), region))
    for want in scratch:
        state.free(want.buffer)

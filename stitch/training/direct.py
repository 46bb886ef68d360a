"""The direct way: the programs of a step, bound once to fixed places and run without the queue.

Comes in: the stitched programs of a training whose tensors have settled. Goes out: the same results
in the same cells, for what the kernels cost and a few microseconds. Every tensor that a step makes
keeps its place; what somebody still holds, and what is read and replaced, takes turns between two.
Nothing is trusted: while the records of the device stand still all places hold; when they have
changed, every place is looked at again, and the queue takes over where one does not hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from stitch.errors import OutOfMemoryError
from stitch.memory import WriteCounter
from stitch.planner import Copy, Execute, Instance, Plan, PlanRequest, Step, copy_cost
from stitch.planner.planner import scratch_desc
from stitch.program import Array, DataType, Scratch, Space, TensorDesc, host_layout
from stitch.runtime import PlanStopped, RuntimeDevice, Tensor
from stitch.runtime.backends import Thunk
from stitch.runtime.executors import as_bytes
from stitch.runtime.history import Tally
from stitch.runtime.recording import straight_code
from stitch.runtime.values import Status
from stitch.tasks import Task
from stitch.training.stitching import Cells, Stitched

#: Tensors that an output takes turns between.
TURNS = 2
#: Tensors of one output that are held at a time before the first is left to its holder.
MAX_TURNS = 4

#: Numbers of stages in the history of a device; plans have those above.
_next_key = itertools.count(-1, -1).__next__


class _Entry:
    """A host array that every run of a stage carries in: where it goes, and how it is counted."""

    def __init__(
        self, device: RuntimeDevice, number: int, tensor: Tensor, dtype: np.dtype[Any], who: str
    ) -> None:
        self.number = number
        instance = tensor._record.instances[0]
        self.tensor, self.dtype, self.shape = tensor, dtype, tensor.shape
        self.counter: WriteCounter = device.backend.spaces[instance.buffer.space].counter
        self.convert: Thunk | None = None
        found = device.dense(instance)
        source = TensorDesc(tensor.shape, host_layout(DataType.from_dtype(dtype)))
        if found is not None and found.dtype == dtype:
            self.into: Array = found
        else:
            self.into = np.zeros(tensor.shape, dtype)
            kernel = device.backend.kernel(source, instance.desc)
            self.convert = kernel.bind(
                as_bytes(self.into), device.region_of(instance), self.counter
            )
        self.staging_nbytes = 0 if self.convert is None else int(self.into.nbytes)
        nbytes, seconds = copy_cost(device.machine, source, instance.desc)
        self.step = Copy(
            "copy", 0, 1, Instance(0, 0, source), Instance(1, 0, instance.desc), nbytes, seconds,
            f"the batch: {who}",
        )  # fmt: skip

    def carry(self, array: Array) -> None:
        """Write an array of the described kind to its place."""
        self.into[...] = array
        if self.convert is not None:
            self.convert()
        else:
            self.counter.count(1, self.step.nbytes)


class _Stage:
    """One program: its entries, and its code for each combination of places that took turns."""

    def __init__(self, direct: Direct, stitched: Stitched, entries: Sequence[_Entry]) -> None:
        self.direct, self.stitched, self.entries = direct, stitched, tuple(entries)
        agent = stitched.agent
        steps: tuple[Step, ...] = (*(e.step for e in entries), Execute(0, (), (), None))
        task = Task(agent.transformation, tuple(range(agent.takes)), ())
        request = PlanRequest(direct.device.machine, (task,), (), (), frozenset())
        plan = Plan(request, steps, (), (), (), frozenset())
        self.tally, self.key = Tally(plan, 0), _next_key()
        self.forms: dict[tuple[int, ...], Any] = {}
        pools = direct.pools
        self.turning_in = tuple(n for n in stitched.inputs if n in direct.turning)
        self.turning_out = tuple(n for n in stitched.outputs if n in direct.turning)
        self.fixed_out = tuple(
            n for n in stitched.outputs if n in pools and n not in direct.turning
        )

    def takes(self, arrays: Sequence[Any]) -> bool:
        """Whether these are host arrays of just the kinds that are carried in."""
        for entry, array in zip(self.entries, arrays, strict=True):
            if type(array) is not np.ndarray or array.dtype != entry.dtype:
                return False
            if array.shape != entry.shape:
                return False
        return True

    def run(self, arrays: Sequence[Array]) -> bool:
        """Run the program; False, and nothing done, where somebody holds what it would write."""
        direct = self.direct
        tensors, device = direct.cells.tensors, direct.device
        chosen = []
        for number in self.turning_out:
            free = direct.free_turn(number)
            if free is None:
                return False
            chosen.append(free)
        key = (*[id(tensors[n]._record) for n in self.turning_in], *[id(t._record) for t in chosen])
        code = self.forms.get(key)
        if code is None:
            code = self.forms[key] = self._bound(dict(zip(self.turning_out, chosen, strict=True)))
        for entry, array in zip(self.entries, arrays, strict=True):
            entry.carry(array)
            tensors[entry.number] = entry.tensor
        try:
            code(())
        except BaseException:
            # The entries are in; the tally counts whole runs.
            plan = self.tally.plan
            device.events.report(PlanStopped(self.key, plan, len(self.entries)))
            raise
        device.history.repeated(self.key, self.tally)
        for number, tensor in zip(self.turning_out, chosen, strict=True):
            # A handle of its own: whoever takes it from the cell is counted.
            tensors[number] = copy(tensor)
        for number in self.fixed_out:
            tensors[number] = direct.pools[number][0]
        return True

    def forget(self, tensor_id: int) -> None:
        """A tensor takes turns no more: code that is bound to its place goes."""
        self.forms = {key: code for key, code in self.forms.items() if tensor_id not in key}

    def _bound(self, chosen: dict[int, Tensor]) -> Any:
        direct, stitched = self.direct, self.stitched
        device, tensors, pools = direct.device, direct.cells.tensors, direct.pools

        def place(number: int) -> Array:
            own = number in pools and number not in direct.turning
            tensor = pools[number][0] if own else tensors[number]
            return device.region_of(tensor._record.instances[0])

        outputs = []
        for number in stitched.outputs:
            if number in chosen:
                outputs.append(device.region_of(chosen[number]._record.instances[0]))
            else:
                outputs.append(place(number))
        agent = stitched.agent
        bound = agent.prepared().bind(
            tuple(map(place, stitched.inputs)),
            tuple(outputs),
            direct.scratch(agent.program.scratch),
        )
        staged = bound.staging_nbytes + sum(entry.staging_nbytes for entry in self.entries)
        self.tally.staging_nbytes = max(self.tally.staging_nbytes, staged)
        return straight_code(bound.steps, [], (), self.tally).run


class Direct:
    """The stages of a training and the tensors that they own.

    `turning`: cells whose outputs take turns. Raises `OutOfMemoryError` where the places do not fit
    beside what is there; nothing is kept then.
    """

    def __init__(
        self, device: RuntimeDevice, cells: Cells,
        stages: Sequence[tuple[Stitched, tuple[int, ...]]],
        kept: frozenset[int], turning: frozenset[int],
    ) -> None:  # fmt: skip
        self.device, self.cells, self.turning = device, cells, turning
        self.kept = tuple(kept)
        self.pools: dict[int, list[Tensor]] = {}
        self._scratches: dict[Space, Tensor] = {}
        self._bottom = 0
        device.flush()
        for stitched, entering in stages:
            for number in (*entering, *stitched.outputs):
                self._make_pool(number)
            self._make_scratch(stitched.agent.program.scratch)
        self.places = {n: self._place(cells.tensors[n]) for n in self.kept}
        self.stages = tuple(
            _Stage(self, stitched, [self._entry(stitched, n) for n in entering])
            for stitched, entering in stages
        )
        own = [(t, n in turning) for n, pool in self.pools.items() for t in pool]
        own += [(scratch, False) for scratch in self._scratches.values()]
        self._own = {id(t): (t, self._place(t, is_shared=s), s) for t, s in own}
        self.epoch = -1

    def _make_pool(self, number: int) -> None:
        if number in self.pools or (number in self.kept and number not in self.turning):
            return
        made = []
        if number in self.kept:
            made.append(copy(self.cells.tensors[number]))
        wanted = TURNS if number in self.turning else 1
        made += [self.device.empty(self.cells.descs[number]) for _ in range(wanted - len(made))]
        self.pools[number] = made

    def _make_scratch(self, scratch: Scratch) -> None:
        if scratch.space is Space.L1:
            self._bottom = max(self._bottom, scratch.size_per_bank)
            return
        before = self._scratches.get(scratch.space)
        if scratch.size_per_bank and (before is None or before.shape[1] < scratch.size_per_bank):
            banks = self.device.machine.shape.space(scratch.space).banks
            self._scratches[scratch.space] = self.device.empty(scratch_desc(scratch, banks))

    def _entry(self, stitched: Stitched, number: int) -> _Entry:
        port = stitched.agent.ports[stitched.inputs.index(number)]
        tensor = self.pools[number][0]
        return _Entry(self.device, number, tensor, port.dtype, port.origin)

    def scratch(self, scratch: Scratch) -> Array | None:
        """The bytes of a program's scratch."""
        if not scratch.size_per_bank:
            return None
        if scratch.space is Space.L1:
            base = self.device.machine.shape.space(Space.L1).base
            return self.device.backend.region(Space.L1, base, scratch.size_per_bank)
        tensor = self._scratches[scratch.space]
        instance = tensor._record.instances[0]
        assert instance.buffer.address is not None
        return self.device.backend.region(
            scratch.space, instance.buffer.address, scratch.size_per_bank
        )

    def free_turn(self, number: int) -> Tensor | None:
        """A tensor of a cell's pool to which the pool's handle is the only one.

        Where there is none another joins them; what is held longest is left to its holder.
        """
        shown, pool = self.cells.tensors[number], self.pools[number]
        for tensor in pool:
            if tensor._record.handles == 1:
                return tensor
        try:
            made = self.device.empty(self.cells.descs[number])
        except OutOfMemoryError:
            return None
        pool.append(made)
        self._own[id(made)] = (made, self._place(made, is_shared=True), True)
        if len(pool) > MAX_TURNS:
            left = next(t for t in pool if shown is None or t._record is not shown._record)
            pool.remove(left)
            del self._own[id(left)]
            for stage in self.stages:
                stage.forget(id(left._record))
        return made

    @staticmethod
    def _place(tensor: Any, *, is_shared: bool = False) -> tuple[Space, int | None] | None:
        """Where a tensor lies, None where it may not be written in place.

        `is_shared`: other handles are allowed, as it is written only when they are gone.
        """
        record = tensor._record
        if record.status is not Status.READY or record.consumed or record.version:
            return None
        if len(record.instances) != 1 or (record.handles != 1 and not is_shared):
            return None
        buffer = record.instances[0].buffer
        if buffer.pins or len(buffer.users) != 1 or buffer.address is None:
            return None
        return (buffer.space, buffer.address)

    def holds(self) -> bool:
        """Whether all places are as they were bound."""
        device, tensors = self.device, self.cells.tensors
        if device.needs_attention():
            return False
        if device.records.epoch == self.epoch:
            return True
        if self._bottom:
            l1 = device.machine.shape.space(Space.L1)
            if not device.records.is_free(Space.L1, l1.base, self._bottom):
                return False
        for number in self.kept:
            tensor = tensors[number]
            if number in self.turning:
                record = None if tensor is None else tensor._record
                if not any(turn._record is record for turn in self.pools[number]):
                    return False
                continue
            bound = self.places[number]
            if tensor is None or bound is None or self._place(tensor) != bound:
                return False
        for mine, place, is_shared in self._own.values():
            if place is None or self._place(mine, is_shared=is_shared) != place:
                return False
        self.epoch = device.records.epoch
        return True


def direct_way(
    device: RuntimeDevice, cells: Cells, stages: Sequence[tuple[Stitched, tuple[int, ...]]],
    kept: frozenset[int], turning: frozenset[int],
) -> Direct | None:  # fmt: skip
    """The direct way, None where the device checks every byte, computes nothing, or has no room."""
    if device.backend.debug or not device.backend.executor.computes:
        return None
    try:
        made = Direct(device, cells, stages, kept, turning)
    except OutOfMemoryError:
        return None
    return made if made.holds() else None

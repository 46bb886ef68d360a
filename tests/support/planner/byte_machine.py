"""Runs a plan on real bytes with random values: the oracle beside the symbolic checker.

It trusts nothing but the steps: what is allocated, freed or used as scratch is filled with noise,
and every input of every program must read back as the value it stands for.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from stitch.memory import prepare_copy as prepare
from stitch.planner import (
    Allocate,
    Buffer,
    Copy,
    Execute,
    Free,
    Instance,
    Plan,
    Relocate,
    check_plan,
)
from stitch.program import DataType, Space, TensorDesc, host_layout

prepare_copy = lru_cache(maxsize=4096)(prepare)


class ByteMachine:
    """Bytes of all spaces, the buffers in them, and the true numbers of every value."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.shape = plan.request.machine.shape
        self.random = np.random.default_rng(seed)
        self.spaces = {s: self.shape.space(s) for s in self.shape.spaces}
        self.bytes = {s: np.zeros(x.banks * x.limit, np.uint8) for s, x in self.spaces.items()}
        self.buffers: dict[int, Buffer] = {}
        self.outside: dict[int, np.ndarray] = {}
        self.truth: dict[int, np.ndarray] = {}
        self.types: dict[int, DataType] = {}
        self.complaints: list[str] = []

    # -- values ----------------------------------------------------------------------------------

    def _make(self, value: int, desc: TensorDesc) -> None:
        kind = desc.layout.data_type
        self.types[value] = kind
        self.truth[value] = self.random.standard_normal(desc.shape).astype(kind.dtype)

    def _expected(self, value: int, kind: DataType) -> np.ndarray:
        return self.truth[value].astype(kind.dtype)

    def _region(self, instance: Instance) -> np.ndarray:
        buffer = self.buffers[instance.buffer]
        if buffer.address is None:
            return self.outside[buffer.number][instance.offset_nbytes :]
        banks = self.spaces[buffer.space].banks
        start = buffer.address * banks
        whole = self.bytes[buffer.space][start : start + buffer.size_per_bank * banks]
        return whole[instance.offset_nbytes :]

    def store(self, instance: Instance, value: int) -> None:
        """Write a value's true numbers in the form that an instance asks for."""
        dense = np.ascontiguousarray(self._expected(value, instance.desc.layout.data_type))
        flat = dense.reshape(-1).view(np.uint8)
        host = TensorDesc(instance.desc.shape, host_layout(instance.desc.layout.data_type))
        prepare_copy(host, instance.desc, self.shape).bind(flat, self._region(instance))()

    def reads_as(self, instance: Instance, value: int) -> bool:
        """Whether an instance holds the value, rounded to its own type."""
        kind = instance.desc.layout.data_type
        if instance.buffer not in self.buffers:
            return False
        into = np.zeros(instance.desc.elements, kind.dtype)
        host = TensorDesc(instance.desc.shape, host_layout(kind))
        try:
            run = prepare_copy(instance.desc, host, self.shape)
            run.bind(self._region(instance), into.view(np.uint8))()
        except ValueError:
            return False
        expected = self._expected(value, kind).reshape(-1)
        return np.array_equal(into.view(np.uint8), expected.view(np.uint8))

    # -- steps -----------------------------------------------------------------------------------

    def _noise(self, space: Space, address: int, size: int) -> None:
        banks = self.spaces[space].banks
        region = self.bytes[space][address * banks : (address + size) * banks]
        region[:] = self.random.integers(0, 256, region.size, np.uint8)

    def _begin(self) -> None:
        request = self.plan.request
        for resident in request.residents:
            self._make(resident.value, resident.instances[0].desc)
        for task in request.tasks:
            for value, desc in zip(task.outputs, task.transformation.outputs, strict=True):
                self._make(value, desc)
        for buffer in request.buffers:
            self.buffers[buffer.number] = buffer
            if buffer.address is None:
                nbytes = buffer.desc.elements * buffer.desc.layout.data_type.itemsize
                self.outside[buffer.number] = np.zeros(nbytes, np.uint8)
        self._store_residents()

    def _store_residents(self) -> None:
        """Views of one buffer must agree: later ones take their numbers from the bytes."""
        written: set[int] = set()
        for resident in self.plan.request.residents:
            first = resident.instances[0]
            if first.buffer in written:
                kind = first.desc.layout.data_type
                into = np.zeros(first.desc.elements, kind.dtype)
                host = TensorDesc(first.desc.shape, host_layout(kind))
                run = prepare_copy(first.desc, host, self.shape)
                run.bind(self._region(first), into.view(np.uint8))()
                self.truth[resident.value] = into.reshape(first.desc.shape)
            for instance in resident.instances:
                if instance.buffer not in written:
                    written.add(instance.buffer)
                    self.store(instance, resident.value)

    def _taken(self, buffer: Buffer) -> bool:
        start, end = buffer.address or 0, (buffer.address or 0) + buffer.size_per_bank
        return any(
            b.space is buffer.space
            and b.address is not None
            and b.address < end
            and start < b.address + b.size_per_bank
            for b in self.buffers.values()
        )

    def run(self) -> list[str]:
        """Run all steps; what went wrong, nothing for a plan that works."""
        self._begin()
        for index, step in enumerate(self.plan.steps):
            try:
                self._step(step)
            except (KeyError, IndexError, ValueError) as error:
                self.complaints.append(f"step {index}: {type(error).__name__}: {error}")
        self._end()
        return self.complaints

    def _step(self, step: object) -> None:
        if isinstance(step, Allocate):
            if step.buffer.number in self.buffers or self._taken(step.buffer):
                self.complaints.append(f"buffer {step.buffer.number} cannot be allocated")
            self.buffers[step.buffer.number] = step.buffer
            assert step.buffer.address is not None
            self._noise(step.buffer.space, step.buffer.address, step.buffer.size_per_bank)
        elif isinstance(step, Free):
            buffer = self.buffers.pop(step.buffer)
            assert buffer.address is not None
            self._noise(buffer.space, buffer.address, buffer.size_per_bank)
        elif isinstance(step, Copy):
            self._copy(step)
        elif isinstance(step, Relocate):
            self._relocate(step)
        elif isinstance(step, Execute):
            self._execute(step)

    def _copy(self, step: Copy) -> None:
        kernel = prepare_copy(step.source.desc, step.target.desc, self.shape)
        kernel.bind(self._region(step.source), self._region(step.target))()
        if step.made != step.value:
            kind = self.types[step.made]
            self.truth[step.made] = self._expected(step.value, kind)

    def _relocate(self, step: Relocate) -> None:
        for t in step.transfers:
            source, target = self.bytes[t.source_space], self.bytes[t.target_space]
            a = t.source_address * self.spaces[t.source_space].banks
            b = t.target_address * self.spaces[t.target_space].banks
            target[b : b + t.nbytes] = source[a : a + t.nbytes].copy()
        for number, address in step.targets:
            old = self.buffers[number]
            self.buffers[number] = Buffer(
                number, old.space, address, old.size_per_bank, old.desc, old.origin, old.pinned
            )

    def _execute(self, step: Execute) -> None:
        task = self.plan.request.tasks[step.task]
        if step.scratch is not None:
            self._noise(*step.scratch)
        for instance, value in zip(step.inputs, task.inputs, strict=True):
            if not self.reads_as(instance, value):
                self.complaints.append(f"task {step.task} reads something else for value {value}")
        for instance, value in zip(step.outputs, task.outputs, strict=True):
            self.store(instance, value)

    def _end(self) -> None:
        plan = self.plan
        for buffer in plan.final_buffers:
            mine = self.buffers.get(buffer.number)
            if mine is None or mine.address != buffer.address:
                self.complaints.append(f"buffer {buffer.number} is not where the plan says")
        if {b.number for b in plan.final_buffers} != {
            n for n, b in self.buffers.items() if b.address is not None
        } | {b.number for b in plan.final_buffers if b.address is None}:
            self.complaints.append("other blocks are alive than the plan says")
        found = {r.value: r.instances for r in plan.final_values}
        for resident in plan.final_values:
            for instance in resident.instances:
                if not self.reads_as(instance, resident.value):
                    self.complaints.append(f"value {resident.value} is lost")
        known = {r.value for r in plan.request.residents}
        known |= {v for task in plan.request.tasks for v in task.outputs}
        for value in plan.request.kept & known:
            lies = found.get(value, ())
            if not any(i.desc.layout.data_type is self.types[value] for i in lies):
                self.complaints.append(f"kept value {value} is lost")


def sound(made: Plan, seed: int = 1) -> Plan:
    """A plan to which neither the checker nor its bytes object."""
    assert check_plan(made) == () and ByteMachine(made, seed).run() == []
    return made

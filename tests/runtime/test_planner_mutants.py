"""The bytes are real: every mutant of a real plan gives wrong numbers or an error.

Real plans are taken where the planner hands them to the device, one step is dropped or led astray,
and the mutant is bound and run on the real backend. Two kinds of mutants would be equivalent, and
are left out by rule: writing over bytes that no later step and no tensor reads, and writing over
constants (executors read those from the file, the device address is only reserved).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import stitch
from stitch.planner import Allocate, Copy, Execute, Plan, Relocate
from stitch.program import TILE_SHAPE, Array, DataType, Layout, Space
from stitch.runtime.recording import TaskBatch
from stitch.runtime.recording.window_plans import Planned, WindowPlans
from tests.support import plans_that_ran
from tests.support.machines import without_path
from tests.support.stitched_models import consuming, integers, one, scaled, tiny

SHAPE = (8, 64)
F32 = DataType.FLOAT32
#: Room for four tensors of 512 bytes per bank.
MACHINE = tiny(l1_nbytes=2048)
IN_L1 = ("input.x.space=l1", "output.y.space=l1")
PROGRAMS = {
    "plain": scaled("plain", 2.0, SHAPE, target=MACHINE, placement=IN_L1).encode(),
    "fixed": scaled("fixed", 3.0, SHAPE, target=MACHINE,
                    placement=(*IN_L1, "input.x.address=0x600")).encode(),
    "dram": scaled("dram", 5.0, SHAPE, target=MACHINE,
                   placement=("input.x.space=dram", "output.y.space=l1")).encode(),
    "tiles": scaled("tiles", 7.0, SHAPE, target=MACHINE,
                    placement=("input.x.space=dram", "input.x.layout=tile",
                            "output.y.space=l1")).encode(),
    "eat": consuming("eat", 4.0, SHAPE, target=MACHINE, placement=("input.x.space=l1",)).encode(),
}  # fmt: skip
Mutation = Callable[[Plan], Plan]


@pytest.fixture(autouse=True)
def memory_comes_back() -> None:
    """Not here: what a mutant leaves behind is not what its plan promised."""


@pytest.fixture(autouse=True)
def plans_are_sound() -> Iterator[None]:
    """Not here: mutants run on purpose."""
    yield
    assert plans_that_ran.defects(plans_that_ran.taken())


def scenario(device: stitch.Device) -> list[tuple[Array, Array]]:
    """Pairs of what was found and what is right; evicts, moves, converts and donates."""
    p = {name: device.load(data) for name, data in PROGRAMS.items()}
    x, y = integers(SHAPE, 3) + 1, integers(SHAPE, 29) + 2
    pairs = []
    first = one(p["plain"](x))
    second = one(p["fixed"](first))
    third = one(p["plain"](y))
    fourth = one(p["fixed"](third))
    tiled = first.to_layout(Layout(F32, Space.DRAM, TILE_SHAPE))
    fifth = one(p["tiles"](second))
    sixth = one(p["dram"](first))
    doomed = one(p["plain"](fourth))
    eaten = one(p["eat"](doomed))
    again = one(p["fixed"](second))
    truth = {
        "first": x * 2 + 1,
        "second": (x * 2 + 1) * 3 + 1,
        "third": y * 2 + 1,
        "fourth": (y * 2 + 1) * 3 + 1,
    }
    late = {
        "tiled": (tiled, truth["first"]),
        "fifth": (fifth, truth["second"] * 7 + 1),
        "sixth": (sixth, truth["first"] * 5 + 1),
        "eaten": (eaten, (truth["fourth"] * 2 + 1) * 4),
        "again": (again, truth["second"] * 3 + 1),
    }
    device.flush()
    early = zip((first, second, third, fourth), truth.values(), strict=True)
    for tensor, right in (*early, *late.values()):
        pairs.append((tensor.numpy(), right))
    return pairs


def is_right(machine: stitch.machine.Machine, mutation: Mutation | None) -> bool:
    """Whether the scenario's numbers come out, with the first plan changed."""

    planned = WindowPlans.planned

    def changed(self: WindowPlans, window: TaskBatch, kept: tuple[bool, ...]) -> Planned:
        chosen = planned(self, window, kept)
        return chosen if mutation is None else replace(chosen, plan=mutation(chosen.plan))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WindowPlans, "planned", changed)
        device = stitch.open_device(machine)
        try:
            return all(np.array_equal(found, right) for found, right in scenario(device))
        except Exception:
            # An error is the other honest answer; which one depends on what was destroyed.
            return False


def without(index: int) -> Mutation:
    return lambda made: replace(made, steps=made.steps[:index] + made.steps[index + 1 :])


def without_transfer(index: int, transfer: int) -> Mutation:
    def mutate(made: Plan) -> Plan:
        step = made.steps[index]
        assert isinstance(step, Relocate)
        left = step.transfers[:transfer] + step.transfers[transfer + 1 :]
        return replaced(made, index, replace(step, transfers=left))

    return mutate


def led_to(index: int, address: int) -> Mutation:
    def mutate(made: Plan) -> Plan:
        step = made.steps[index]
        assert isinstance(step, Allocate)
        return replaced(made, index, Allocate(replace(step.buffer, address=address)))

    return mutate


def with_targets_swapped(index: int) -> Mutation:
    def mutate(made: Plan) -> Plan:
        step = made.steps[index]
        assert isinstance(step, Execute)
        a, b = step.inputs[0], step.outputs[0]
        return replaced(made, index, replace(step, inputs=(b,), outputs=(a,)))

    return mutate


def replaced(made: Plan, index: int, step: Allocate | Execute | Relocate) -> Plan:
    return replace(made, steps=(*made.steps[:index], step, *made.steps[index + 1 :]))


def read_after(made: Plan, index: int) -> set[int]:
    """The buffers that a step after the task at or behind `index` reads, or a tensor keeps."""
    found = {r.instances[0].buffer for r in made.final_values if r.value in made.request.kept}
    seen_task = False
    for step in made.steps[index:]:
        if seen_task and isinstance(step, Copy):
            found.add(step.source.buffer)
        elif isinstance(step, Execute):
            if seen_task:
                found |= {i.buffer for i in step.inputs}
            seen_task = True
    return found


def mutants(made: Plan) -> Iterator[tuple[str, Mutation]]:
    buffers = {b.number: b for b in made.request.buffers if b.address is not None}
    for index, step in enumerate(made.steps):
        name = f"{index} {type(step).__name__}"
        if isinstance(step, Copy | Relocate | Execute):
            yield f"{name} dropped", without(index)
        if isinstance(step, Relocate):
            for i in range(len(step.transfers)):
                yield f"{name} transfer {i} dropped", without_transfer(index, i)
            for number, address in step.targets:
                buffers[number] = replace(buffers[number], address=address)
        elif isinstance(step, Execute):
            if step.inputs[0].buffer != step.outputs[0].buffer:
                yield f"{name} the wrong way round", with_targets_swapped(index)
        elif isinstance(step, Allocate):
            wanted = read_after(made, index)
            for number, buffer in buffers.items():
                if buffer.space is step.buffer.space and number in wanted:
                    assert buffer.address is not None
                    yield f"{name} over block {number}", led_to(index, buffer.address)
            buffers[step.buffer.number] = step.buffer
        elif not isinstance(step, Copy):
            buffers.pop(step.buffer, None)


@pytest.mark.parametrize("bounces", [False, True], ids=["moves", "bounces"])
def test_every_mutant_of_a_real_plan_gives_wrong_numbers_or_an_error(bounces: bool) -> None:
    machine = without_path(MACHINE, Space.L1, Space.L1) if bounces else MACHINE
    taken: list[Plan] = []

    def take(made: Plan) -> Plan:
        taken.append(made)
        return made

    assert is_right(machine, None)
    assert is_right(machine, take)
    (made,) = taken
    kinds = {type(step).__name__ for step in made.steps}
    assert {"Copy", "Relocate", "Execute"} <= kinds
    assert any(isinstance(step, Copy) and step.kind == "evict" for step in made.steps)
    found = list(mutants(made))
    survivors = [name for name, mutation in found if is_right(machine, mutation)]
    assert len(found) > 60
    assert not survivors, survivors

"""Simulated time: the bubbles of schedules, and what holds of every simulated run."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest

from stitch.errors import UsageError
from stitch.machine import load_machine
from stitch.mesh.schedules import schedule
from stitch.mesh.simulation import Step, simulate, simulate_schedule
from stitch.mesh.specification import DeviceEntry, Link, MachineSpecification


def with_links(devices: int, latency: float, rate: float) -> MachineSpecification:
    """Equal devices, each pair joined by links of one kind."""
    names = [f"d{i}" for i in range(devices)]
    entry = DeviceEntry(load_machine("tiny"))
    links = [Link(a, b, latency, rate) for a in names for b in names if a != b]
    return MachineSpecification("test", dict.fromkeys(names, entry), tuple(links))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("m", [4, 8, 32])
def test_the_bubble_of_equal_stages_is_that_of_theory(kind: str, p: int, m: int) -> None:
    free = with_links(p, 0.0, math.inf)
    line = simulate_schedule(schedule(kind, p, m), free, [1.0] * p, [2.0] * p, [1 << 20] * (p - 1))
    wanted = (p - 1) / (m + p - 1)
    assert line.bubble_share == pytest.approx(wanted, rel=0.01)
    assert line.makespan == pytest.approx(3.0 * (m + p - 1))
    assert len(line.transfers) == 2 * m * (p - 1)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, chunks: int) -> None:
    stages, free = p * chunks, with_links(p, 0.0, math.inf)
    orders = schedule("interleaved", stages, 4 * p, chunks)
    line = simulate_schedule(orders, free, [1.0] * stages, [1.0] * stages)
    assert line.bubble_share == pytest.approx((p - 1) / (4 * p * chunks + p - 1), rel=0.01)


def test_links_that_take_time_make_a_pipeline_longer() -> None:
    orders = schedule("1f1b", 2, 4)
    free = simulate_schedule(orders, with_links(2, 0, math.inf), [1, 1], [1, 1])
    line = simulate_schedule(orders, with_links(2, 0.5, 100.0), [1, 1], [1, 1], [50])
    assert all(t.end - t.start == pytest.approx(1.0) for t in line.transfers)
    assert line.makespan >= free.makespan + 2  # The first forward's way there, the last gradient's.


def test_two_values_on_one_link_go_one_after_the_other() -> None:
    two = with_links(2, 1.0, 100.0)
    line = simulate(
        {
            "d0": [Step("a", 1.0, (), (("x", 100), ("y", 300)))],
            "d1": [Step("b", 5.0, ("y",)), Step("c", 5.0, ("x", "y", "elsewhere"))],
        },
        two,
    )
    assert [(t.value, t.start, t.end) for t in line.transfers] == [("x", 1, 3), ("y", 3, 7)]
    assert line.spans == {"a": ("d0", 0, 1), "b": ("d1", 7, 12), "c": ("d1", 12, 17)}
    assert line.makespan == 17
    assert line.busy == {"d0": 1, "d1": 10}


def test_devices_that_wait_for_each_other_are_reported() -> None:
    orders = {
        "d0": [Step("a", 1.0, ("y",), (("x", 1),))],
        "d1": [Step("b", 1.0, ("x",), (("y", 1),))],
    }
    with pytest.raises(UsageError, match="wait for each other: 'd0' at 'a', 'd1' at 'b'"):
        simulate(orders, with_links(2, 0.0, 1.0))


def test_doubled_steps_doubled_values_and_unknown_devices_are_refused() -> None:
    one = with_links(1, 0.0, 1.0)
    with pytest.raises(UsageError, match="two steps are called 'a'"):
        simulate({"d0": [Step("a", 1.0), Step("a", 1.0)]}, one)
    with pytest.raises(UsageError, match="step 'b' makes 'x', as a step before it does"):
        simulate({"d0": [Step("a", 1.0, (), (("x", 1),)), Step("b", 1.0, (), (("x", 1),))]}, one)
    with pytest.raises(UsageError, match="no device 'd1'"):
        simulate({"d1": [Step("a", 1.0)]}, one)


def test_a_schedule_of_more_devices_than_the_specification_has_is_refused() -> None:
    with pytest.raises(UsageError, match="a schedule of 3 devices on 2"):
        simulate_schedule(schedule("1f1b", 3, 2), with_links(2, 0.0, 1.0), [1] * 3, [1] * 3)


@pytest.mark.parametrize("seed", range(30))
def test_every_start_is_explained_by_what_ended_there_and_then(seed: int) -> None:
    """The rules of a simulated run, checked of the finished timeline: they determine it."""
    dice = random.Random(seed)
    devices = dice.randint(1, 4)
    names = [f"d{i}" for i in range(devices)]
    specification = with_links(devices, dice.choice([0.0, 0.3]), dice.choice([50.0, math.inf]))
    orders: dict[str, list[Step[int]]] = {name: [] for name in names}
    maker: dict[Any, tuple[int, str, int]] = {}
    for key in range(25):
        device = dice.choice(names)
        reads = tuple(dice.sample(sorted(maker), min(len(maker), dice.randint(0, 3))))
        makes = tuple((key * 10 + i, dice.randint(0, 100)) for i in range(dice.randint(0, 2)))
        after = tuple(dice.sample(range(key), min(key, dice.choice([0, 0, 0, 1, 2]))))
        seconds = dice.choice([0.0, 0.5, dice.random()])
        orders[device].append(Step(key, seconds, reads, makes, after))
        maker |= {value: (key, device, nbytes) for value, nbytes in makes}
    line = simulate(orders, specification)

    crossing = {(v, maker[v][1], name) for name, order in orders.items() for step in order
                for v in step.reads if maker[v][1] != name}  # fmt: skip
    assert sorted((t.value, t.source, t.target) for t in line.transfers) == sorted(crossing)
    on_link: dict[tuple[str, str], float] = {}
    arrived = {}
    for transfer in line.transfers:
        key, _, nbytes = maker[transfer.value]
        ends = (transfer.source, transfer.target)
        assert transfer.start == max(line.spans[key].end, on_link.get(ends, 0.0))
        assert transfer.nbytes == nbytes
        assert transfer.end == transfer.start + specification.link(*ends).seconds(nbytes)
        on_link[ends] = transfer.end
        arrived[transfer.value, transfer.target] = transfer.end
    for a, b in pairwise(line.transfers):
        assert line.spans[maker[a.value][0]].end <= line.spans[maker[b.value][0]].end
    for name, order in orders.items():
        before = 0.0
        for step in order:
            span = line.spans[step.key]
            there = [arrived.get((v, name), line.spans[maker[v][0]].end) for v in step.reads]
            ended = [line.spans[key].end for key in step.after]
            start = max([before, *there, *ended])
            assert span == (name, start, start + step.seconds)
            before = span.end

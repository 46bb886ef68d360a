"""Random placed graphs on several devices have the bits of one device, whatever order and faults.

The first seeds are in the quick suite, the others in the campaign.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import stitch
from stitch.report import Device
from tests.support.mesh_runs import (
    LocalMesh,
    history,
    outputs_seen,
    random_carry,
    random_faults,
    seen,
)
from tests.support.placed_graphs import MACHINE, by_one_device, placed_case
from tests.support.run_seed import SEED

ORDERS = (None, 1, 2, 3)
QUICK_GRAPHS, GRAPHS = 4, 200
QUICK_KILLS, KILLS = 24, 2000
KILLS_OF_A_GRAPH = 8


@pytest.fixture(scope="module")
def one() -> Iterator[Device]:
    with stitch.open_device(MACHINE) as device:
        yield device


def check_graph(seed: int, one: Device) -> None:
    """A call, and one for each task that can fail, twice, in four orders."""
    case = placed_case(seed)
    calls = 2 * [case.inputs, *[case.stopping(which) for which in range(case.checks)]]
    wanted = []
    for inputs in calls:
        arrays = by_one_device(case.graph, inputs, one)
        wanted.append([arrays[n].tobytes() if n in arrays else None for n in case.graph.outputs])
    for order in ORDERS:
        with LocalMesh(order) as mesh:
            run = mesh.prepare(case.graph)
            pending = [run(**inputs) for inputs in calls]
            assert [outputs_seen(results) for results in pending] == wanted, (seed, order)
            del pending
            run.wait()
            held = mesh.held()
            assert held["log"] == held["ended"] == 0
            assert mesh.carrier.sent["Run"] == len(run.pieces) * len(calls)
            made_on = {n: piece.device for piece in run.pieces for n in piece.outputs}
            links = {
                (n, piece.device) for piece in run.pieces for n in piece.inputs
                if made_on.get(n, piece.device) != piece.device
            }  # fmt: skip
            assert mesh.carrier.crossings == mesh.client.crossed == len(links) * len(calls)
            # Nothing is left in a space: the same calls again find and leave what these did.
            for inputs in calls:
                outputs_seen(run(**inputs))
            run.wait()
            assert mesh.held() == held, (seed, order)
            assert not any(count for name, count in held.items() if name.endswith("kept"))


def test_random_graphs_have_the_bits_and_failures_of_one_device_in_every_order(one: Device) -> None:
    for seed in range(QUICK_GRAPHS):
        check_graph(seed, one)


@pytest.mark.campaign("mesh")
@pytest.mark.parametrize("first", range(QUICK_GRAPHS, GRAPHS, 20))
def test_more_random_graphs_in_every_order(first: int, one: Device) -> None:
    for seed in range(first, min(first + 20, GRAPHS)):
        check_graph(seed + 1000 * SEED, one)


def check_kills(seed: int) -> None:
    """A history without faults, and with faults at random messages: the same is seen."""
    chance = random.Random(seed)
    case = placed_case(seed, 12)
    carry = random_carry(case, chance) if chance.random() < 0.6 else {}
    with LocalMesh() as mesh:
        wanted = history(mesh, case, carry, seed)
        messages = mesh.carrier.messages
    for _ in range(KILLS_OF_A_GRAPH):
        faults = random_faults(chance, messages)
        order = chance.choice((None, chance.randrange(1000)))
        with LocalMesh(order, faults) as mesh:
            assert history(mesh, case, carry, seed) == wanted, (seed, order, faults, carry)
            assert len(mesh.client._log) <= 40 * 12, "the log is bounded by saved buffers"


def test_killed_servers_and_lost_answers_change_no_byte() -> None:
    for seed in range(QUICK_KILLS // KILLS_OF_A_GRAPH):
        check_kills(seed)


@pytest.mark.campaign("mesh")
@pytest.mark.parametrize("first", range(0, KILLS, 200))
def test_more_killed_servers(first: int) -> None:
    for number in range(first, first + 200, KILLS_OF_A_GRAPH):
        check_kills(number + 10_000 * SEED)


def test_a_failed_value_that_is_carried_fails_the_calls_after_it_wherever_it_is() -> None:
    """What a carried input reads after a failure does not depend on where its tasks are."""
    for seed in range(20):
        case = placed_case(seed, 12)
        carry = random_carry(case, random.Random(seed))
        alone = placed_case(seed, 12, ("left",))
        found = []
        for each in (case, alone):
            with LocalMesh() as mesh:
                run = mesh.prepare(each.graph, carry)
                run.write(**{name: case.inputs[name] for name in carry})
                given = {n: a for n, a in case.stopping(0).items() if n not in carry}
                results = [outputs_seen(run(**given)) for _ in range(2)]
                found.append((results, [seen(lambda n=n: run.read(n)) for n in carry]))  # noqa: B023
        assert found[0] == found[1], seed

"""Interrupted calls of a mesh, and many calls: nothing is between two states, nothing grows."""

from __future__ import annotations

import gc
import random
from collections import Counter

import numpy as np
import pytest

from tests.mesh.test_persistent_buffers import Steps
from tests.support.interrupts import interrupted
from tests.support.mesh_runs import LocalMesh, outputs_seen, random_carry
from tests.support.placed_graphs import placed_case
from tests.support.run_seed import SEED

MESH = ("mesh/mesh.py", "mesh/client.py", "mesh/server.py", "mesh/local_carrier.py")


def check_stateless(seed: int, order: int | None, stride: int) -> None:
    """Interrupt a call, and the wait for it, before every `stride`-th line."""
    case = placed_case(seed, 8)
    with LocalMesh(order, in_flight=2) as mesh:
        run = mesh.prepare(case.graph)
        wanted = outputs_seen(run(**case.inputs))
        at = 1
        while interrupted(lambda: outputs_seen(run(**case.inputs)), at, MESH):
            assert outputs_seen(run(**case.inputs)) == wanted, (seed, order, at)
            at += stride
        run.wait()
        assert at > 1 and mesh.held()["log"] == 0


def check_carried(seed: int, order: int | None, stride: int) -> None:
    """Interrupt calls that carry: each has happened wholly, or not at all."""
    case = placed_case(seed, 8)
    carry = random_carry(case, random.Random(seed))
    inputs = {name: array for name, array in case.inputs.items() if name not in carry}
    names = sorted(carry)
    with LocalMesh(order, in_flight=2) as mesh, LocalMesh() as other:
        run, same = mesh.prepare(case.graph, carry), other.prepare(case.graph, carry)
        start = {name: case.inputs[name] for name in carry}
        at, came = 1, True
        while came:
            run.write(**start)
            same.write(**start)
            came = interrupted(lambda: outputs_seen(run(**inputs)), at, MESH)
            before = [same.read(name).tobytes() for name in names]
            outputs_seen(same(**inputs))
            after = [same.read(name).tobytes() for name in names]
            got = [run.read(name).tobytes() for name in names]
            assert got in (before, after), (seed, order, at)
            if got == before:
                outputs_seen(run(**inputs))
            assert outputs_seen(run(**inputs)) == outputs_seen(same(**inputs)), (seed, order, at)
            at += stride


def check_buffers(order: int | None, stride: int, what: str) -> None:
    """Interrupt what waits for a device with state: doing it again gives what it gives alone."""
    with LocalMesh(order) as mesh:
        steps, client = Steps(mesh), mesh.client
        at, came = 1, True
        while came:
            steps.write("left", sum=1.0, last=0.0)
            steps.write("right", other=2.0)
            value = steps.step(0.5)
            acts = {
                "read": lambda: client.read("left", ["sum", "last"]),
                "write": lambda: steps.write("left", sum=4.0),
                "recover": client.recover,
            }
            if what == "recover":
                mesh.carrier._kill("left")
            came = interrupted(acts[what], at, MESH)
            acts[what]()
            assert client.value(value)[0, 0] == 5.0
            sums = 4.0 if what == "write" else 1.5
            assert client.read("left", ["sum"])[0][0, 0] == sums, at
            assert client.value(steps.step(1.0))[0, 0] == sums + 1.0 + 3.5 + sums + 1.0, at
            at += stride


@pytest.mark.parametrize("order", [None, 1])
def test_after_an_interrupt_calls_give_what_they_gave(order: int | None) -> None:
    check_stateless(1, order, 29)
    check_carried(1, order, 97)


@pytest.mark.parametrize("what", ["read", "write", "recover"])
def test_an_interrupted_wait_for_a_device_can_be_repeated(what: str) -> None:
    check_buffers(1, 37, what)


@pytest.mark.campaign("mesh")
@pytest.mark.parametrize("seed", range(4))
def test_more_interrupted_calls(seed: int) -> None:
    for order in (None, 1):
        check_stateless(seed + 100 * SEED, order, 3)
        check_carried(seed + 100 * SEED, order, 7)


@pytest.mark.campaign("mesh")
@pytest.mark.parametrize("what", ["read", "write", "recover"])
def test_more_interrupted_waits(what: str) -> None:
    for order in (None, 1):
        check_buffers(order, 1, what)


def check_flat(calls: int) -> None:
    """Count the objects of client and servers before and after two times so many calls."""
    case = placed_case(3, 8)
    carry = random_carry(case, random.Random(3))
    inputs = {name: array for name, array in case.inputs.items() if name not in carry}
    with LocalMesh(max_records=64) as mesh:
        steps = Steps(mesh)
        plain, carries = mesh.prepare(case.graph), mesh.prepare(case.graph, carry)
        carries.write(**{name: case.inputs[name] for name in carry})
        waits = plain(**case.inputs)  # Nobody waits for it.

        def some(count: int) -> tuple[dict[str, int], Counter[type]]:
            for number in range(count):
                outputs_seen(carries(**inputs))
                value = steps.step(float(np.sin(number)))
                if number % 8 == 0:
                    mesh.client.value(value)
                if number % 200 == 0:
                    mesh.client.recover()
            mesh.client.wait()
            mesh.client._forget_done()
            del value
            gc.collect()
            return mesh.held(), Counter(map(type, gc.get_objects()))

        held, objects = some(96)
        later, more = some(calls)
        assert {name: count for name, count in later.items() if count > held[name]} == {}
        # Others, such as a cluster of another test, may make objects of their own.
        ours = {
            kind: n for kind, n in more.items() if kind.__module__.startswith(("stitch", "numpy"))
        }
        grown = {kind: n - objects[kind] for kind, n in ours.items() if n - objects[kind] > 20}
        assert grown == {}
        outputs_seen(waits)


def test_nothing_grows_with_the_number_of_calls() -> None:
    check_flat(480)


@pytest.mark.campaign("mesh")
def test_nothing_grows_in_ten_thousand_calls() -> None:
    check_flat(5_040)

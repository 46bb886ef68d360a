"""What every carrier does: messages of a device in order, each answered once, closed twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from stitch.mesh import Mesh, open_mesh
from stitch.mesh.carrier import Outcome, Sending
from stitch.mesh.messages import Failure, Report, Run
from tests.mesh.test_mesh import chain


@pytest.fixture(scope="module")
def pair() -> Iterator[Mesh]:
    """A mesh of two devices; `test_ray_carrier` has these tests with another one."""
    with open_mesh(2, machine="host") as opened:
        opened.explain()  # It starts the servers.
        yield opened
    opened.close()


def test_messages_of_a_device_are_handled_in_order_and_answered_once(pair: Mesh) -> None:
    carrier = pair.client.carrier
    sendings = [Sending(Report("clock"))] * 10
    sent = [*carrier.send("device0", *sendings), *carrier.send("device0", *sendings)]
    references = [reference for (reference,) in sent]
    carrier.wait(references)
    assert {carrier.outcome(reference) for reference in references} == {Outcome.READY}
    times = [float(time) for time in carrier.values(references)]
    assert times == sorted(times)
    assert times == [float(time) for time in carrier.values(references)]


def test_a_value_of_the_client_is_there_at_once(pair: Mesh) -> None:
    array = np.arange(8, dtype=np.float32)
    reference = pair.client.carrier.put(array)
    assert pair.client.carrier.outcome(reference) is Outcome.READY
    assert np.array_equal(pair.client.carrier.values([reference])[0], array)


def test_an_error_of_a_message_is_an_answer(pair: Mesh) -> None:
    carrier = pair.client.carrier
    ((answer,), (clock,)) = carrier.send("device1", Sending(Run(999, 1)), Sending(Report("clock")))
    carrier.wait([answer, clock])
    failure, time = carrier.values([answer, clock])
    assert isinstance(failure, Failure) and float(time) and not carrier.has_ended("device1")


def test_values_go_through_several_devices(pair: Mesh) -> None:
    graph, expected = chain()
    run = pair.prepare(graph)
    x = np.full((4, 8), 0.5, np.float32)
    results = [run(x) for _ in range(6)]
    for outputs in results:
        for result, wanted in zip(outputs, expected(x), strict=True):
            assert np.array_equal(result.numpy(), wanted)

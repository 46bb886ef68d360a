"""Persistent buffers of a mesh: turns and snapshots, whatever happens to servers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stitch.errors import StitchError, UsageError
from stitch.mesh.client import KEEP_EVERY, MeshClient, PreparedPiece, RemoteValue, sha256_of
from stitch.mesh.messages import Source, Target
from stitch.program import Array
from stitch.tasks import TaskGraph
from stitch.ttb import encode
from tests.support.mesh_runs import LocalMesh, Seen, random_faults, seen
from tests.support.placed_graphs import DESCS, SHAPE, WIDE, compiled
from tests.support.run_seed import SEED

SENT = Source("sent")


def prepare(
    client: MeshClient, device: str, name: str, sources: list[Source], targets: list[Target]
) -> PreparedPiece:
    """Send a piece of one program to a device."""
    data = encode(compiled(name).binary)
    graph = TaskGraph(name)
    given = [graph.input(DESCS[WIDE], f"v{i}") for i in range(len(sources))]
    results = graph.call(compiled(name), *given)
    for i, result in enumerate(results if isinstance(results, tuple) else (results,)):
        graph.output(result, f"o{i}")
    (program,) = graph.programs
    text = graph.as_json(files={program: (sha256_of(data), 0)})
    return client.prepare(device, text, {sha256_of(data): data}, [], sources, targets)


class Steps:
    """Two devices with state: `left` adds what it is sent to `sum` and sends it on, and keeps the
    sum for a second piece of the run, which reads what `right` answers; both write `last`."""

    def __init__(self, mesh: LocalMesh) -> None:
        self.client = client = mesh.client
        buffer = Source("buffer", "sum")
        self.first = prepare(
            client, "left", "add", [buffer, SENT], [Target(True, buffer="sum", kept="new")]
        )
        self.middle = prepare(
            client, "right", "mixed", [Source("buffer", "other"), SENT],
            [Target(True, buffer="other"), Target(False, buffer="less")],
        )  # fmt: skip
        self.last = prepare(
            client, "left", "add", [Source("kept", "new", is_last=True), SENT],
            [Target(True, buffer="last")],
        )  # fmt: skip
        self.write("left", sum=1.0, last=0.0)
        self.write("right", other=2.0)

    def write(self, device: str, **values: float) -> None:
        put = self.client.put
        arrays = {n: np.full(SHAPE, v, np.float32) for n, v in values.items()}
        self.client.write(device, {name: put(array) for name, array in arrays.items()})

    def step(self, x: float) -> RemoteValue:
        client = self.client
        run = client.begin_run()
        (made,) = client.send(self.first, run, [client.put(np.full(SHAPE, x, np.float32))])
        (other,) = client.send(self.middle, run, [made])
        (result,) = client.send(self.last, run, [other])
        client.end_run(run)
        return result

    def buffers(self) -> list[Seen]:
        read = self.client.read
        return [
            seen(lambda device=device, name=name: read(device, [name])[0])
            for device, names in (("left", ("sum", "last")), ("right", ("other", "less")))
            for name in names
        ]  # fmt: skip


def history(mesh: LocalMesh, seed: int) -> list[Seen]:
    """Steps, some of them written over, and all that is seen of them."""
    chance = random.Random(seed)
    steps, client = Steps(mesh), mesh.client
    found: list[Seen] = []
    for _ in range(chance.randint(2, 5)):
        values = [steps.step(chance.random()) for _ in range(chance.randint(1, 2 * KEEP_EVERY))]
        if chance.random() < 0.7:
            found += [client.value(value).tobytes() for value in values]
        if chance.random() < 0.3:
            steps.write("left", sum=chance.random())
        if chance.random() < 0.5:
            found += steps.buffers()
    return found + steps.buffers()


def check_history(seed: int, kills: int) -> None:
    with LocalMesh() as mesh:
        wanted, messages = history(mesh, seed), mesh.carrier.messages
    chance = random.Random(seed)
    for _ in range(kills):
        faults = random_faults(chance, messages)
        order = chance.choice((None, chance.randrange(1000)))
        with LocalMesh(order, faults) as mesh:
            assert history(mesh, seed) == wanted, (seed, order, faults)


def test_state_is_the_same_whatever_servers_are_killed() -> None:
    for seed in range(6):
        check_history(seed, 4)


@pytest.mark.campaign("mesh")
@pytest.mark.parametrize("first", range(10, 260, 50))
def test_more_state_of_killed_servers(first: int) -> None:
    for seed in range(first, first + 50):
        check_history(seed + 1000 * SEED, 4)


def test_state_follows_numpy() -> None:
    with LocalMesh() as mesh:
        steps = Steps(mesh)
        total, other, less = np.float32(1), np.float32(2), np.float32(0)
        for x in np.linspace(-1, 1, 40, dtype=np.float32):
            result = steps.step(float(x))
            total = total + x
            other, less = other + total, other - total
            assert mesh.client.value(result)[0, 0] == total + other
        values = [total, total + other, other, less]
        assert steps.buffers() == [np.full(SHAPE, v, np.float32).tobytes() for v in values]


def test_the_log_is_cut_at_every_snapshot() -> None:
    with LocalMesh() as mesh:
        steps = Steps(mesh)
        for number in range(10 * KEEP_EVERY):
            mesh.client.value(steps.step(number))
            assert len(mesh.client._log) <= 4 * KEEP_EVERY
        # `left` takes two turns a step, `right` one; each snapshot is one message.
        assert 25 <= mesh.carrier.sent["Read"] <= 31


def test_no_snapshot_is_taken_while_a_run_has_kept_values() -> None:
    with LocalMesh(faults={}) as mesh:
        steps, client = Steps(mesh), mesh.client
        x = client.put(np.zeros(SHAPE, np.float32))
        runs = [client.begin_run() for _ in range(2 * KEEP_EVERY)]
        made = [client.send(steps.first, run, [x])[0] for run in runs]
        assert mesh.carrier.sent["Read"] == 0
        mesh.carrier._kill("left")
        results = [client.send(steps.last, run, [v])[0] for run, v in zip(runs, made, strict=True)]
        assert [client.value(v)[0, 0] for v in results] == [2.0] * len(runs)
        assert mesh.carrier.sent["Read"] == 1


@pytest.mark.parametrize(
    "buffers, what",
    [({"sum": np.zeros((2, 2), np.float32)}, "another type"),
     ({"total": np.zeros(SHAPE, np.float32)}, "no persistent buffer 'total'")],
)  # fmt: skip
def test_a_refused_write_changes_nothing(buffers: dict[str, Array], what: str) -> None:
    with LocalMesh() as mesh:
        steps, client = Steps(mesh), mesh.client
        before = steps.buffers()
        with pytest.raises(UsageError, match=what):
            client.write("left", {name: client.put(array) for name, array in buffers.items()})
        mesh.carrier._kill("left")
        assert steps.buffers() == before


def test_a_buffer_without_a_value_is_an_error_until_it_is_written() -> None:
    with LocalMesh() as mesh:
        steps = Steps(mesh)
        with pytest.raises(StitchError, match="'less' has no value yet"):
            mesh.client.read("right", ["less"])
        mesh.client.value(steps.step(1.0))
        assert mesh.client.read("right", ["less"])[0][0, 0] == 0.0

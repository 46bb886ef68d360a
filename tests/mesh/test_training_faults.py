"""Faults at the messages of trainings in stages: the same final bytes, and nothing left behind."""

from __future__ import annotations

import random
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import stitch
from stitch.errors import StitchError
from stitch.mesh import CompiledStages, Mesh, staged_training
from stitch.mesh.local_carrier import FAULTS, LocalCarrier
from stitch.mesh.server import DeviceServer
from stitch.training import Checkpoint, CheckpointFolder, Trainable, read_checkpoint
from tests.mesh.test_staged_training import compiled_stages
from tests.support.run_seed import SEED
from tests.support.training.staged_models import MODELS, drawn_batches, model_of

#: Each: a model, how it is divided among devices, and options.
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "statistics": ({"stages": 2, "micro_batches": 2}, {"clip_grad_norm": 0.05}),
    "tied": ({"stages": 2, "replicas": 2, "micro_batches": 4}, {}),
    "dropped": ({"stages": 3, "micro_batches": 2, "schedule": "gpipe"}, {}),
    "embedding": ({"stages": 4, "micro_batches": 2, "schedule": "interleaved", "chunks": 2}, {}),
}
KILLS = FAULTS[:3]
QUICK_TRAININGS, TRAININGS = 2, 600


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training told: its losses, and the bytes of its checkpoint.

    `used_nbytes`: of the spaces of each server that lives when the mesh closes; `messages` sent
    until then, and servers that were started again.
    """

    losses: list[list[float]]
    checkpoint: bytes
    used_nbytes: dict[str, int]
    messages: int
    restarts: int


def train(
    compiled: CompiledStages, model: Trainable, folder: Path,
    seed: int | None = None, faults: Mapping[int, str] | None = None,
) -> Trained:  # fmt: skip
    """Load, prepare, train three steps, write and read a checkpoint, train a step from it, write
    another one, and close the mesh while messages are under way."""
    opened: list[DeviceServer] = []

    def open_server(device: str) -> DeviceServer:
        opened.append(DeviceServer(device, stitch.open_device("host")))
        return opened[-1]

    carrier = LocalCarrier(open_server, seed, faults)
    mesh, written = Mesh(compiled.specification, carrier), CheckpointFolder(folder)
    training, losses = compiled.start(mesh), []
    for number in range(4):
        if number == 3:
            written.save(Checkpoint(training.steps, training.state_dict()))
            found = written.newest(pytest.fail)
            assert found is not None
            training.load_state_dict(found[1].state)
        micro_batches = drawn_batches(model, compiled.parallel.micro_batches, number)
        losses.append(training.step(micro_batches))
    path = written.save(Checkpoint(training.steps, training.state_dict()))
    checkpoint = path.read_bytes()
    written.close()
    assert sorted(folder.iterdir()) == [*written.files] and len(written.files) == 2
    assert not any(server._kept for server in carrier._servers.values())
    used = {
        device: sum(use.used_nbytes for use in server.device.memory_use().values())
        for device, server in carrier._servers.items()
    }
    for device in mesh.devices:
        mesh.client.save(device)
    restarts = sum(mesh.client.restarts.values())
    mesh.close()
    assert all(server.device.is_closed for server in opened)
    assert not carrier._servers and not carrier._queues and not mesh.client._log
    for file in written.files:
        file.unlink()
    return Trained(losses, checkpoint, used, carrier.messages, restarts)


def check_faults(name: str, numbers: range, folder: Path) -> tuple[int, int]:
    """Compare trainings with one to three faults, in many orders, with one without.

    The first fault of training `number` is the kill of that number, of all messages and kinds.
    Return the number of servers that were started again, and of these kills.
    """
    parallel, options = PLANS[name]
    model = model_of(MODELS[name]())
    compiled = compiled_stages(model, parallel, **options)
    wanted, restarts = train(compiled, model, folder), 0
    kills = [(at, kill) for kill in KILLS for at in range(wanted.messages)]
    random.Random(name).shuffle(kills)
    for number in numbers:
        draw, (at, kill) = random.Random(f"{name} {number} {SEED}"), kills[number % len(kills)]
        faults = {draw.randrange(wanted.messages): draw.choice(FAULTS)
                  for _ in range(draw.randint(0, 2))} | {at: kill}  # fmt: skip
        order = draw.choice((None, draw.randrange(1000)))
        found = train(compiled, model, folder, order, faults)
        assert found.losses == wanted.losses, (name, number, order, faults)
        assert found.checkpoint == wanted.checkpoint, (name, number, order, faults)
        # A server that was started again just now holds less.
        assert all(n <= wanted.used_nbytes[device] for device, n in found.used_nbytes.items())
        restarts += found.restarts
    return restarts, len(kills)


@pytest.fixture(autouse=True)
def buffers_are_saved_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_training, "SAVE_EVERY", 2)


@pytest.mark.parametrize("name", ["statistics", "tied"])
def test_kills_at_messages_of_a_training_change_no_byte(name: str, tmp_path: Path) -> None:
    check_faults(name, range(QUICK_TRAININGS), tmp_path)


@pytest.mark.campaign("mesh")
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("first", range(0, TRAININGS, 100))
def test_kills_at_every_message_of_a_training_change_no_byte(
    first: int, name: str, tmp_path: Path
) -> None:
    restarts, kills = check_faults(name, range(first, first + 100), tmp_path)
    assert kills <= TRAININGS and restarts >= 50


def test_a_full_disk_leaves_the_last_checkpoint_and_the_training_as_they_were(
    tmp_path: Path,
) -> None:
    parallel, options = PLANS["statistics"]
    model, folder = model_of(MODELS["statistics"]()), CheckpointFolder(tmp_path)
    compiled = compiled_stages(model, parallel, **options)
    batches = [drawn_batches(model, 2, number) for number in range(3)]
    with compiled.start(seed=1) as training:
        wanted = [training.step(batch) for batch in batches]
    with compiled.start(seed=1) as training:
        assert training.step(batches[0]) == wanted[0]
        path = folder.save(Checkpoint(training.steps, training.state_dict()))
        data = path.read_bytes()
        assert training.step(batches[1]) == wanted[1]
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) // 2, limits[1]))
        try:
            with pytest.raises(StitchError, match="step-00000002"):
                folder.save(Checkpoint(training.steps, training.state_dict()))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        folder.close()
        assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == data
        assert training.step(batches[2]) == wanted[2]
        training.load_state_dict(read_checkpoint(path).state)
        assert [training.step(batch) for batch in batches[1:]] == wanted[1:]

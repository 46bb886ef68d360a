"""Meshes of small devices in this process, and random histories of a graph on one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

import stitch
from stitch.errors import StitchError
from stitch.machine import load_machine
from stitch.mesh import Mesh, MeshGraph
from stitch.mesh.client import MAX_RECORDS, MeshClient
from stitch.mesh.local_carrier import FAULTS, LocalCarrier
from stitch.mesh.server import DeviceServer
from stitch.mesh.specification import DeviceEntry, MachineSpecification
from stitch.program import Array
from tests.support import placed_graphs
from tests.support.placed_graphs import DEVICES, MACHINE, SHAPE, PlacedCase

#: Bytes, or None where a failed task would have made them.
Seen = bytes | None
FUNCTIONS = [placed_graphs.__name__]


class LocalMesh(Mesh):
    """A mesh of devices in this process; `carrier` and `servers`, by device, are its own."""

    def __init__(
        self, seed: int | None = None, faults: Mapping[int, str] | None = None, in_flight: int = 4,
        max_records: int = MAX_RECORDS,
    ) -> None:  # fmt: skip
        machine = load_machine(MACHINE)
        self.servers: dict[str, DeviceServer] = {}

        def open_server(name: str) -> DeviceServer:
            self.servers[name] = DeviceServer(name, stitch.open_device(machine), FUNCTIONS)
            return self.servers[name]

        self.carrier = LocalCarrier(open_server, seed, faults)
        specification = MachineSpecification("three", dict.fromkeys(DEVICES, DeviceEntry(machine)))
        super().__init__(specification, self.carrier, in_flight, FUNCTIONS)
        self.client = MeshClient(self.carrier, DEVICES, max_records)

    def held(self) -> dict[str, int]:
        """Return how many runs the client has in its log, and by device what its server holds:
        kept values, and bytes in each space."""
        held = {"log": len(self.client._log), "ended": len(self.client._ended)}
        for name, server in self.servers.items():
            held[f"{name} kept"] = len(server._kept)
            # Answers for runs that cannot be done twice: those of calls that were under way.
            assert len(server._answers) <= self.in_flight * len(server._pieces)
            for space, use in server.device.memory_use().items():
                held[f"{name} {space.value}"] = use.used_nbytes
        return held


def seen(value: Any) -> Seen:
    """Return the bytes of a tensor or of what a function returns; None for an error of Stitch."""
    try:
        found = value() if callable(value) else value.numpy()
    except StitchError:
        return None
    return bytes(found.tobytes())


def outputs_seen(results: Any) -> list[Seen]:
    """Return the bytes of the outputs of a call."""
    return [seen(result) for result in (results if isinstance(results, tuple) else (results,))]


def random_carry(case: PlacedCase, chance: random.Random) -> dict[str, str]:
    """Return inputs of a case with outputs of their types; one output at least is not carried."""
    free = {name: future.desc.layout.data_type for name, future in case.graph.outputs.items()}
    carry: dict[str, str] = {}
    for name, source in case.graph.inputs.items():
        kind = source.desc.layout.data_type
        fitting = [output for output, each in free.items() if each is kind]
        if name != "stop" and fitting and len(free) > 1:
            carry[name] = chance.choice(fitting)
            del free[carry[name]]
    return carry


def history(mesh: Mesh, case: PlacedCase, carry: Mapping[str, str], seed: int) -> list[Seen]:
    """Call a graph several times, write and read what it carries, and return all that is seen.

    Some calls fail. With carried inputs there are up to 40 calls, so that their buffers are saved.
    """
    chance = random.Random(seed)
    run: MeshGraph = mesh.prepare(case.graph, carry)
    if carry:
        run.write(**{name: case.inputs[name] for name in carry})
    found: list[Seen] = []
    pending: list[Any] = []
    for call in range(chance.choice((3, 6, 40 if carry else 6))):
        what, name = chance.random(), chance.choice([*carry, "stop"])
        if name != "stop" and what < 0.06:
            run.write(**{name: case.inputs[name]})
        elif name != "stop" and what < 0.12:
            found.append(seen(lambda name=name: run.read(name)))
        stop = chance.randrange(case.checks) if chance.random() < 0.03 else -1
        inputs: dict[str, Array] = {"stop": np.full(SHAPE, stop, np.float32)}
        for name in case.inputs.keys() - {*carry, "stop"}:
            array = case.inputs[name]
            inputs[name] = (array * np.float32(0.9 + call / 100)).astype(array.dtype)
        pending.append(run(**inputs))
        if chance.random() < 0.3:
            found += [each for results in pending for each in outputs_seen(results)]
            pending.clear()
    found += [each for results in pending for each in outputs_seen(results)]
    found += [seen(lambda name=name: run.read(name)) for name in sorted(carry)]
    run.wait()
    return found


def random_faults(chance: random.Random, messages: int) -> dict[int, str]:
    """Return one fault, two, two at once, or the kill of a server that was just started again."""
    at, kind = chance.randrange(messages), chance.randrange(4)
    first = chance.choice(FAULTS if kind < 2 else FAULTS[:3])
    faults = {at: first}
    if kind == 1:
        faults[chance.randrange(messages)] = chance.choice(FAULTS)
    elif kind == 2:
        faults[at + chance.randint(1, 8)] = chance.choice(FAULTS)
    elif kind == 3:
        faults |= {at + 1: "kill before", at + chance.randint(2, 12): chance.choice(FAULTS[:3])}
    return faults

"""Meshes of small devices in this process, and what random placed graphs give on them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import stitch
from stitch.errors import StitchError
from stitch.machine import load_machine
from stitch.mesh import Mesh, MeshGraph, RemoteTensor
from stitch.mesh.local_carrier import LocalCarrier
from stitch.mesh.server import DeviceServer
from stitch.mesh.specification import DeviceEntry, MachineSpecification
from stitch.program import Array
from tests.support import placed_graphs
from tests.support.placed_graphs import DEVICES, MACHINE, SHAPE, WIDE, PlacedCase

#: What a call gives: arrays by output, and None where the value does not exist.
Results = dict[str, bytes | None]


class LocalMesh(Mesh):
    """A mesh of devices in this process; `carrier` and `servers` are its own."""

    def __init__(
        self, seed: int | None = None, faults: Mapping[int, str] | None = None, in_flight: int = 4
    ) -> None:
        machine = load_machine(MACHINE)
        self.servers: dict[str, DeviceServer] = {}

        def open_server(name: str) -> DeviceServer:
            device = stitch.open_device(machine)
            self.servers[name] = DeviceServer(name, device, [placed_graphs.__name__])
            return self.servers[name]

        self.carrier = LocalCarrier(open_server, seed, faults)
        specification = MachineSpecification("three", dict.fromkeys(DEVICES, DeviceEntry(machine)))
        super().__init__(specification, self.carrier, in_flight, [placed_graphs.__name__])

    def left_over(self) -> dict[str, int]:
        """Return what the servers hold for runs, and the log of the client."""
        held = {"log": len(self.client._log), "ended": len(self.client._ended)}
        for name, server in self.servers.items():
            held |= {f"{name} kept": len(server._kept), f"{name} answers": len(server._answers)}
        return held


def bytes_of(outputs: Any, names: Sequence[str]) -> Results:
    """Return the bytes of the outputs of a call; an error of Stitch is None."""
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    found: Results = {}
    for name, tensor in zip(names, tensors, strict=True):
        assert isinstance(tensor, RemoteTensor)
        try:
            found[name] = tensor.numpy().tobytes()
        except StitchError:
            found[name] = None
    return found


def results_of(run: MeshGraph, case: PlacedCase, inputs: Mapping[str, Array]) -> Results:
    """Call a graph that carries nothing, and wait."""
    return bytes_of(run(**inputs), list(case.graph.outputs))


def random_carry(case: PlacedCase, seed: int) -> dict[str, str]:
    """Return inputs of a case with outputs of their types, some or all that can be."""
    chance = random.Random(seed)
    free = {name: future.desc for name, future in case.graph.outputs.items()}
    carry: dict[str, str] = {}
    for name, source in case.graph.inputs.items():
        kind = source.desc.layout.data_type
        fitting = [out for out, desc in free.items() if desc.layout.data_type is kind]
        if name != "stop" and fitting and chance.random() < 0.8:
            carry[name] = chance.choice(fitting)
            del free[carry[name]]
    return carry if free else {}


__all__ = [
    "SHAPE", "WIDE", "LocalMesh", "Results", "bytes_of", "random_carry", "results_of",
]  # fmt: skip

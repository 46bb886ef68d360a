"""Machines of real system descriptors: what they say is the machine's, the rest is as shipped."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from stitch.machine import derived_machine, load_machine
from stitch.machine.systems import machines_in

FILES = Path(__file__).resolve().parents[1] / "conformance" / "tenstorrent"
#: Descriptors of the very devices that are shipped.
SAME = {"n150": "wormhole_n150", "p150": "blackhole_p150"}


@pytest.mark.parametrize("name", SAME)
def test_the_shipped_machines_are_as_the_devices_say(name: str) -> None:
    found, shipped = load_machine(FILES / f"{name}.ttsys"), load_machine(SAME[name])
    assert found.name == name
    assert dataclasses.replace(found.shape, name=shipped.name) == shipped.shape
    assert (found.paths, found.noc, found.compute) == (shipped.paths, shipped.noc, shipped.compute)


def test_each_chip_of_a_system_is_a_machine_with_a_number() -> None:
    path = FILES / "n300-llmbox.ttsys"
    machines = machines_in(path.read_bytes(), str(path))
    assert [m.name for m in machines] == [f"n300-llmbox:{i}" for i in range(8)]
    limits = [m.shape.dram.limit for m in machines if m.shape.dram is not None]
    assert limits == [1_073_136_064] * 4 + [1_073_153_376] * 4
    assert load_machine(path) == machines[0]
    assert load_machine(f"{path}:7") == machines[7]


def test_a_machine_may_be_as_another_but_for_some_figures() -> None:
    mine = derived_machine("tiny", "mine", {"l1.granule": (64, "chosen")}, "mine")
    assert mine.shape.l1 is not None and mine.shape.l1.granule == 64
    assert mine.paths == load_machine("tiny").paths

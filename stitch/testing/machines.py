"""What every machine must do: inherit `MachineSuite` and name the machine."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np

from stitch import api
from stitch.graph import ComputationGraphBuilder
from stitch.machine import Machine, load_machine
from stitch.program import DataType, Layout, Space
from stitch.testing.small_models import integers, model, one

SHAPE = (64, 96)


class MachineSuite:
    """The tests of machines.

    Attributes:
        machine: A name, the path of a description, or a `Machine`.
    """

    machine: ClassVar[str | Machine]

    def test_bytes_reach_every_space_and_more_bytes_take_no_less_time(self) -> None:
        machine = load_machine(self.machine)
        for source in machine.shape.spaces:
            for target in machine.shape.spaces:
                times = [machine.seconds(source, target, 1 << n, 1 << n) for n in range(24)]
                assert times[0] > 0, (source, target)
                for less, more in pairwise(times):
                    # The measured rates of a curve are rounded: to 1 % in the shipped machines.
                    assert more >= 0.99 * less, (source, target)

    def test_programs_of_every_space_run_one_after_another(self, tmp_path: Path) -> None:
        """A program for each space doubles and adds one; files hold the machine's name."""
        machine = load_machine(self.machine)

        def build(b: ComputationGraphBuilder) -> None:
            b.output("y", b.input("x", SHAPE, "float32") * 2 + 1)

        with api.open_device(self.machine, debug=True) as device:
            value: object = integers(SHAPE)
            expected = integers(SHAPE)
            for space in (*machine.shape.spaces, *machine.shape.spaces[::-1]):
                placement = [f"{side}.space={space.value}" for side in ("input.x", "output.y")]
                path = tmp_path / f"{space.value}.ttb"
                model(space.value, build, target=machine, placement=placement).save(path)
                assert api.load(path).machine.name == machine.name
                value, expected = device.load(path)(value), expected * 2 + 1
                assert one(value).space is space
            np.testing.assert_array_equal(one(value).numpy(), expected)

    def test_a_full_space_evicts_to_the_next(self) -> None:
        """With more tensors than L1, or else DRAM, holds, each is still what it was."""
        shape = load_machine(self.machine).shape
        scarce = Space.L1 if shape.l1 is not None else Space.DRAM
        if scarce not in shape.spaces or shape.space(scarce).capacity > 1 << 21:
            return  # On the host alone nothing is evicted; a larger space would take long to fill.
        rows = shape.space(scarce).banks * shape.space(scarce).capacity // 4 // 1024 // 3
        with api.open_device(self.machine, executor="numpy") as device:
            tensors = []
            for start in range(5):
                array = integers((rows, 1024), start)
                layout = Layout(DataType.FLOAT32, scarce)
                tensors.append((array, device.tensor(array).to_layout(layout)))
            assert "evict" in device.explain()
            for array, tensor in tensors:
                np.testing.assert_array_equal(tensor.numpy(), array)

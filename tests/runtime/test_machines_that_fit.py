"""A binary runs on a machine that has room for what it uses, whatever its compiler was told of the
usable addresses; what has no place there is named before anything runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import stitch
from stitch.errors import IncompatibleError
from stitch.machine import Machine, Policy, footprint, load_machine
from stitch.program import DataType, Layout, Space, TensorDesc
from tests.support.stitched_models import integers, one, scaled

IN_L1 = ("input.x.space=l1", "output.y.space=l1")
#: As the shipped n150 was before its descriptor was read.
TOLD_BEFORE = {"base": 103_712, "granule": 16}


def n150(**figures: int) -> Machine:
    """The shipped n150 with other figures of L1."""
    machine = load_machine("wormhole_n150")
    assert machine.shape.l1 is not None
    l1 = dataclasses.replace(machine.shape.l1, **figures)  # type: ignore[arg-type]
    return dataclasses.replace(machine, shape=dataclasses.replace(machine.shape, l1=l1))


def file_for(machine: Machine, *placement: str) -> bytes:
    return scaled("a", 0.5, target=machine, placement=(*IN_L1, *placement)).encode()


def test_a_binary_runs_where_the_usable_addresses_begin_higher() -> None:
    x = integers()
    with stitch.open_device("wormhole_n150") as device:
        y = one(device.load(file_for(n150(**TOLD_BEFORE)))(x))
        np.testing.assert_array_equal(y.numpy(), x * np.float32(0.5) + 1)


def test_an_address_in_what_is_reserved_is_named() -> None:
    told = n150(base=65_536)
    with stitch.open_device("wormhole_n150") as device:
        before = device.memory_report()
        with pytest.raises(IncompatibleError) as caught:
            device.load(file_for(told, "input.x.address=0x18000"))
        assert device.memory_report() == before
    text = str(caught.value)
    assert caught.value.exit_code == 4
    assert all(w in text for w in ("input 'x'", "0x18000", "l1", "[0x0, 0x195a0) is reserved"))


@pytest.mark.parametrize(
    ("figures", "option", "said"),
    [
        (
            {"limit": 1_499_136},
            "output.y.address=0x16d000",
            "from 0x166000 on is reserved",
        ),
        (TOLD_BEFORE, "input.x.address=0x40010", r"input 'x' at \[0x40010.*multiples of 32"),
    ],
)
def test_an_address_above_what_is_usable_or_off_the_granule_is_named(
    figures: dict[str, int], option: str, said: str
) -> None:
    with (
        stitch.open_device("wormhole_n150") as device,
        pytest.raises(IncompatibleError, match=said),
    ):
        device.load(file_for(n150(**figures), option))


def test_what_is_larger_than_a_space_is_named() -> None:
    small = n150(limit=n150().shape.l1.base + 64)  # type: ignore[union-attr]
    with stitch.open_device(small) as device, pytest.raises(IncompatibleError) as caught:
        device.load(scaled("a", 0.5, (4096, 64), target="wormhole_n150", placement=IN_L1).encode())
    assert "is larger than l1" in str(caught.value)


@pytest.mark.parametrize("policy", Policy)
def test_tensors_smaller_than_a_granule_take_one_each(policy: Policy) -> None:
    machine = load_machine("blackhole_p150")
    l1 = machine.shape.l1
    assert l1 is not None and footprint_of(machine) == 16
    shape = dataclasses.replace(machine.shape, l1=dataclasses.replace(l1, policy=policy))
    x = integers((4, 4))
    with stitch.open_device(dataclasses.replace(machine, shape=shape)) as device:
        small = scaled("a", 0.5, (4, 4), target=machine, placement=IN_L1).encode()
        loaded = device.load(small)
        held = [one(loaded(x)) for _ in range(4)]
        for tensor in held:
            np.testing.assert_array_equal(tensor.numpy(), x * np.float32(0.5) + 1)
        lying = [tensor.address for tensor in held]
    assert len(set(lying)) == 4 and all(at is not None and at % 64 == 0 for at in lying)


def footprint_of(machine: Machine) -> int:
    """Bytes per bank of the tensors of that program: one page of one row."""
    desc = TensorDesc((4, 4), Layout(DataType.FLOAT32, Space.L1))
    return footprint(desc, machine.shape).size_per_bank

"""When L1 is full: a move, an eviction and a bounce on a machine with four cores of 15 KiB.

Each time the runtime picks the cheapest remedy, gives its reason, and proves what had to leave L1.
The tensors themselves do not notice: their handles follow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

import stitch
from stitch import DataType, Layout, Space, TensorDesc
from stitch.program import Array

MACHINE = "tiny"
WIDTH = 128
#: L1 holds 120 rows of 512 bytes: 30 in each of four banks, from 0x400 on.
HALF, QUARTER = 60, 28
LOWER, UPPER = "0x400", "0x2200"


def rows(count: int) -> TensorDesc:
    """A float32 tensor of that many rows."""
    return TensorDesc((count, WIDTH), Layout(DataType.FLOAT32, Space.HOST))


def filled(count: int, value: float) -> Array:
    """Rows of one number."""
    return np.full((count, WIDTH), value, np.float32)


def loaded(
    device: stitch.Device,
    name: str,
    function: Callable[..., object],
    inputs: int,
    count: int,
    *placement: str,
) -> Callable[..., stitch.Tensor]:
    """A function of tensors of `count` rows, as a program of one output."""
    program = device.load(
        stitch.compile(
            function, [rows(count)] * inputs, target=MACHINE, name=name, placement=placement
        )
    )

    def call(*arguments: object) -> stitch.Tensor:
        result = program(*arguments)
        assert isinstance(result, stitch.Tensor)  # Of several outputs it would be a tuple.
        return result

    return call


def doubler(
    device: stitch.Device, name: str, count: int, *placement: str
) -> Callable[..., stitch.Tensor]:
    """A program that reads from the host and leaves twice as much in L1."""
    asked = ("input.x.space=host", "output.0.space=l1", *placement)
    return loaded(device, name, lambda x: x + x, 1, count, *asked)


def move() -> None:
    """Two holes that are too small one by one: what lies between them slides."""
    with stitch.open_device(MACHINE) as device:
        quarter, half = doubler(device, "quarter", QUARTER), doubler(device, "half", HALF)
        kept = [quarter(filled(QUARTER, i)) for i in range(4)]
        stitch.wait(kept)
        del kept[3], kept[1]
        large = half(filled(HALF, 5))
        assert np.array_equal(large.numpy(), filled(HALF, 10))
        assert np.array_equal(kept[1].numpy(), filled(QUARTER, 4))
        print(device.explain())
        print(device.memory_report())


def evict() -> None:
    """Three quarters are alive, a half is wanted: it cannot be, so the oldest waits in DRAM."""
    with stitch.open_device(MACHINE) as device:
        quarter, half = doubler(device, "quarter", QUARTER), doubler(device, "half", HALF)
        kept = [quarter(filled(QUARTER, i)) for i in range(3)]
        large = half(filled(HALF, 5))
        assert np.array_equal(large.numpy(), filled(HALF, 10))
        for i, tensor in enumerate(kept):
            assert np.array_equal(tensor.numpy(), filled(QUARTER, 2 * i))
        print(device.explain())


def bounce() -> None:
    """Two tensors fill L1 and have to change places: a piece of one has to step out."""
    with stitch.open_device(MACHINE) as device:
        lower = doubler(device, "lower", HALF, f"output.0.address={LOWER}")
        upper = doubler(device, "upper", HALF, f"output.0.address={UPPER}")
        crosswise = (f"input.x.address={UPPER}", f"input.y.address={LOWER}", "output.0.space=dram")
        difference = loaded(device, "difference", lambda x, y: x - y, 2, HALF, *crosswise)
        first, second = lower(filled(HALF, 4)), upper(filled(HALF, 1))
        stitch.wait((first, second))
        print(f"before: {first.address:#x} and {second.address:#x}")
        assert np.array_equal(difference(first, second).numpy(), filled(HALF, 6))
        print(f"after:  {first.address:#x} and {second.address:#x}")
        print(device.explain())


def main() -> int:
    """Run all three."""
    for example in (move, evict, bounce):
        title = (example.__doc__ or "").splitlines()[0]
        print(f"\n== {example.__name__}. {title}\n")
        example()
    return 0


if __name__ == "__main__":
    sys.exit(main())

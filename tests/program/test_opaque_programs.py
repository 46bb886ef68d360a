"""Programs whose operations are names only: known as such wherever these stand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stitch.errors import FormatError
from stitch.machine import load_machine
from stitch.program import (
    OPAQUE_DOMAIN,
    Body,
    DataType,
    InputSlot,
    Operation,
    OutputSlot,
    Program,
    Scratch,
    Space,
    Value,
    ValueType,
    host_layout,
)
from stitch.runtime import RuntimeDevice
from stitch.ttb import Binary, encode, load

KIND = ValueType((2,), DataType.FLOAT32)


def program(operation: Operation, bodies: tuple[Body, ...] = ()) -> Program:
    """One operation between an input and an output."""
    layout = host_layout(DataType.FLOAT32)
    values = Value("x", KIND, layout), Value("y", KIND, layout)
    return Program(
        "p", (InputSlot("x", 0),), (OutputSlot("y", 1),), values, (operation,), (),
        Scratch(Space.HOST, 0), bodies=bodies,
    )  # fmt: skip


def alone() -> Program:
    """An opaque operation."""
    return program(Operation("Op", (0,), (1,), domain=OPAQUE_DOMAIN))


def within() -> Program:
    """An opaque operation inside an operation of ours."""
    inner = Operation("Op", (0,), (1,), domain=OPAQUE_DOMAIN)
    body = Body((0,), (1,), (Value("x", KIND), Value("y", KIND)), (inner,))
    return program(Operation("f", (0,), (1,), domain="mine", body=0), (body,))


@pytest.mark.parametrize("made", [within, alone])
def test_a_file_of_ours_with_opaque_operations_is_never_computed(
    made: Callable[[], Program],
) -> None:
    machine = load_machine("tiny")
    binary = load(encode(Binary((made(),), machine.shape, "test")))
    device = RuntimeDevice(machine, executor="numpy")
    with device, pytest.raises(FormatError, match="is opaque"):
        device.load(binary)

"""The sound files that hostile tests start from."""

from __future__ import annotations

import numpy as np

from stitch.machine.shape import MachineShape, SpaceShape
from stitch.program import (
    TILE_SHAPE,
    Body,
    Constant,
    DataType,
    InputKind,
    InputSlot,
    Layout,
    MemoryLayout,
    Operation,
    OutputSlot,
    Ownership,
    Program,
    Role,
    Scratch,
    Seam,
    ShardSpec,
    Space,
    Value,
    ValueType,
)
from stitch.ttb import Binary

F32 = DataType.FLOAT32
HOST = Layout(F32)
TILED = Layout(DataType.BFP8, Space.DRAM, TILE_SHAPE, address=4096)
SHARDED = Layout(
    F32, Space.L1, None, MemoryLayout.HEIGHT_SHARDED, ShardSpec((2, 3), (4, 8)), address=64
)
MACHINE = MachineShape(
    "specimen", (2, 3), SpaceShape(1, 0, 2**40, 64), SpaceShape(6, 1024, 2**20, 16, 32),
    SpaceShape(2, 0, 2**30, 32),
)  # fmt: skip


def rich_bodies() -> tuple[Body, ...]:
    """A body with a constant, an absent operand and a result that few want, inside another."""
    kind, mask, small = (
        ValueType((4, 8), F32), ValueType((4, 8), DataType.BOOL), ValueType((8,), F32),
    )  # fmt: skip
    half = np.full(8, 0.5, np.float32)
    halved = Body(
        (0, -1), (2, 3), (Value("x", kind), Value("half", small), *map(Value, "yz", (kind, kind))),
        (Operation("Mul", (0, 1), (2,)), Operation("Neg", (2,), (3,))), (Constant(1, half),),
    )  # fmt: skip
    chosen = Body(
        (0, 1, 2), (4,),
        (Value("which", mask), *(Value(name, kind) for name in ("a", "b", "halved", "y"))),
        (
            Operation("Halve", (2, -1), (3, -1), {"by": 2}, "stitch", "inner", 0),
            Operation("Where", (0, 1, 3), (4,)),
        ),
    )  # fmt: skip
    return halved, chosen


def rich_program(
    name: str = "main", seams: tuple[Seam, ...] = (), bodies: tuple[Body, ...] = ()
) -> Program:
    """Every kind of slot, layout, attribute and constant in a few lines."""
    kind = ValueType((4, 8), F32)
    values = (
        Value("x", kind, SHARDED),
        Value("state", kind, HOST),
        Value("weight", kind, TILED),
        Value("shape", ValueType((2,), DataType.INT64), Layout(DataType.INT64)),
        Value("mask", ValueType((4, 8), DataType.BOOL), Layout(DataType.BOOL)),
        Value("bias", ValueType((8,), DataType.BFLOAT16), Layout(DataType.BFLOAT16)),
        Value("hidden", kind, Layout(F32, Space.L1, address=128)),
        Value("next", kind, HOST),
        Value("y", kind, SHARDED),
    )
    bias = np.arange(8).astype(DataType.BFLOAT16.dtype)
    return Program(
        name,
        (
            InputSlot("x", 0),
            InputSlot("state", 1, InputKind.STATE, Ownership.DONATE),
            InputSlot("weight", 2, InputKind.PARAMETER),
        ),
        (OutputSlot("next", 7, 1), OutputSlot("y", 8)),
        values,
        (
            Operation("Gemm", (0, 2, -1), (6,), {"alpha": 0.5, "transA": 1}, location="m.py:1"),
            Operation(
                "Choose", (4, 6, 1), (7,), {"perm": (1, 0), "scales": (0.5, 2.0)}, "own", body=1
            ) if bodies
            else Operation("Where", (4, 6, 1), (7,), {"perm": (1, 0), "scales": (0.5, 2.0)}),
            Operation("Mix", (7, 5, 3), (8,), {"mode": "né", "names": ("a", "b")}, "stitch"),
        ),
        (
            Constant(3, np.array([4, 8])),
            Constant(4, np.arange(32).reshape(4, 8) % 2 == 0),
            Constant(5, bias),
        ),
        Scratch(Space.L1, 4096),
        Role.UPDATE,
        seams,
        bodies=bodies,
    )  # fmt: skip


def rich_binary() -> Binary:
    """Two programs of every kind of part."""
    linked = rich_program("second", (Seam(0, (6,)), Seam(2)), rich_bodies())
    return Binary((rich_program(), linked), MACHINE, "specimens 1")

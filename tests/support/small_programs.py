"""Programs of one operator, for what only looks at slots and descriptors."""

from __future__ import annotations

from stitch.program import (
    DataType,
    InputSlot,
    Layout,
    Operation,
    OutputSlot,
    Ownership,
    Program,
    Scratch,
    Space,
    TensorDesc,
    Value,
    ValueType,
)

SHAPE = (4, 8)
#: Where the slots of a program lie, and the same on the host.
DRAM = TensorDesc(SHAPE, Layout(DataType.FLOAT32, Space.DRAM))
HOST = TensorDesc(SHAPE, Layout(DataType.FLOAT32))


def program(
    name: str = "p",
    op: str = "Add",
    inputs: int = 2,
    *,
    donated: tuple[int, ...] = (),
    outputs: int = 1,
    desc: TensorDesc = DRAM,
) -> Program:
    """A program whose operands are all inputs (`x0`, `x1`, ...); each output is the same again."""
    kind = ValueType(desc.shape, desc.layout.data_type)
    names = [f"x{i}" for i in range(inputs)] + [f"y{i}" for i in range(outputs)]
    given_away = [Ownership.DONATE if i in donated else Ownership.BORROW for i in range(inputs)]
    return Program(
        name,
        tuple(InputSlot(f"x{i}", i, ownership=owner) for i, owner in enumerate(given_away)),
        tuple(OutputSlot(f"y{i}", inputs + i) for i in range(outputs)),
        tuple(Value(name, kind, desc.layout) for name in names),
        tuple(Operation(op, tuple(range(inputs)), (inputs + i,)) for i in range(outputs)),
        (),
        Scratch(Space.L1, 0),
    )

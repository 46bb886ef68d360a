"""Hypothesis strategies for whole programs: well formed, of every type, layout and attribute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from stitch.machine.shape import MachineShape, SpaceShape
from stitch.program import (
    ABSENT,
    TILE_SHAPE,
    AttributeValue,
    Body,
    Constant,
    DataType,
    InputKind,
    InputSlot,
    Layout,
    MathFidelity,
    MemoryLayout,
    Operation,
    Orientation,
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

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
ATTRIBUTES: st.SearchStrategy[AttributeValue] = st.one_of(
    INT64,
    FLOATS,
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.lists(INT64, max_size=20).map(tuple),
    st.lists(FLOATS, min_size=1, max_size=20).map(tuple),
    st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=5).map(tuple),
)
PLAIN = [t for t in DataType if not t.is_block]


@st.composite
def layouts(draw: st.DrawFn, data_type: DataType) -> Layout:
    """A legal layout for a value of a logical type."""
    stored = data_type
    if data_type.is_floating:
        stored = draw(st.sampled_from([t for t in DataType if t.is_floating]))
    space = draw(st.sampled_from(Space))
    tile = TILE_SHAPE if stored.is_block else draw(st.sampled_from([None, TILE_SHAPE]))
    address = None
    if space is not Space.HOST:
        address = draw(st.none() | st.integers(0, 2**63 - 1))
    memory_layout, spec = MemoryLayout.INTERLEAVED, None
    if space is not Space.HOST and draw(st.booleans()):
        memory_layout = draw(st.sampled_from([m for m in MemoryLayout if m is not memory_layout]))
        rows, columns = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
        step = 32 if tile else 1
        grid = draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
        orientation = draw(st.sampled_from(Orientation))
        spec = ShardSpec(grid, (rows * step, columns * step), orientation)
    return Layout(stored, space, tile, memory_layout, spec, address)


@st.composite
def values(draw: st.DrawFn, data_types: list[DataType]) -> Value:
    """A placed value."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    data_type = draw(st.sampled_from(data_types))
    return Value(draw(NAMES), ValueType(shape, data_type), draw(layouts(data_type)))


@st.composite
def constants(draw: st.DrawFn, index: int, value: Value) -> Constant:
    """Data for a value, any bits that its type allows."""
    dtype = value.type.data_type.dtype
    nbytes = int(np.prod(value.type.shape, dtype=np.int64)) * dtype.itemsize
    raw = draw(st.binary(min_size=nbytes, max_size=nbytes))
    bits = 1 if value.type.data_type is DataType.BOOL else value.type.data_type.bits
    if bits < 8:
        raw = bytes(byte % (1 << bits) for byte in raw)
    return Constant(index, np.frombuffer(raw, np.uint8).view(dtype).reshape(value.type.shape))


@st.composite
def programs(draw: st.DrawFn, name: str = "main") -> Program:
    """A program that obeys every rule of structure and placement."""
    inputs = draw(st.lists(values(list(DataType)), max_size=4))
    held = draw(st.lists(values(PLAIN), max_size=4))
    made = draw(st.lists(values(list(DataType)), min_size=1, max_size=6))
    every = [*inputs, *held, *made]
    slots = [
        InputSlot(
            f"{value.name}.{i}",
            i,
            draw(st.sampled_from(InputKind)),
            draw(st.sampled_from(Ownership)),
        )
        for i, value in enumerate(inputs)
    ]
    data = [draw(constants(len(inputs) + i, value)) for i, value in enumerate(held)]
    operations = []
    bodies: list[Body] = []
    first = len(inputs) + len(held)
    for index in range(first, len(every)):
        operands = st.integers(0, index - 1) if index else st.just(ABSENT)
        reads = draw(st.lists(st.just(ABSENT) | operands, max_size=3))
        attributes = draw(st.dictionaries(NAMES, ATTRIBUTES, max_size=4))
        domain = draw(st.sampled_from(["", "stitch"]))
        location = draw(st.text(st.characters(codec="utf-8"), max_size=10))
        fidelity = draw(st.sampled_from(MathFidelity))
        operation = Operation(draw(NAMES), tuple(reads), (index,), attributes, domain, location,
                              math_fidelity=fidelity)  # fmt: skip
        kinds = [every[v].type for v in (*reads, index) if v != ABSENT]
        if domain and not any(k.data_type.is_block for k in kinds) and draw(st.booleans()):
            bodies.append(draw(bodies_of(operation, every)))
            operation = replace(operation, body=len(bodies) - 1)
        operations.append(operation)
    results = draw(st.sets(st.integers(first, len(every) - 1), min_size=1, max_size=3))
    outputs = tuple(OutputSlot(f"result {index}", index) for index in sorted(results))
    scratch = Scratch(draw(st.sampled_from(Space)), draw(st.integers(0, 2**40)))
    return Program(
        name, tuple(slots), outputs, tuple(every), tuple(operations), tuple(data), scratch,
        draw(st.sampled_from(Role)), draw(seams(tuple(operations))), bodies=tuple(bodies),
    )  # fmt: skip


@st.composite
def bodies_of(draw: st.DrawFn, operation: Operation, every: list[Value]) -> Body:
    """A body for an operation: one other operation, which reads its operands and a constant."""
    reads = [v for v in operation.inputs if v != ABSENT]
    count = iter(range(len(reads)))
    places = tuple(v if v == ABSENT else next(count) for v in operation.inputs)
    held = draw(st.lists(values(PLAIN), max_size=1))
    described = [*(every[v] for v in reads), *held, every[operation.outputs[0]]]
    made = len(described) - 1
    return Body(
        places, (made,), tuple(Value(draw(NAMES), v.type) for v in described),
        (Operation(draw(NAMES), (*places, *range(len(reads), made)), (made,)),),
        tuple(draw(constants(len(reads) + i, v)) for i, v in enumerate(held)),
    )  # fmt: skip


@st.composite
def seams(draw: st.DrawFn, operations: tuple[Operation, ...]) -> tuple[Seam, ...]:
    """None, or parts of some of the operations each, and any of the values that they make."""
    firsts = sorted(draw(st.sets(st.integers(1, len(operations) - 1)))) if operations[1:] else []
    if not firsts:
        return ()
    ends = [*firsts, len(operations)]
    return tuple([
        Seam(first, tuple(sorted(draw(st.sets(st.sampled_from(
            [operation.outputs[0] for operation in operations[first:end]]))))))
        for first, end in zip([0, *firsts], ends, strict=True)
    ])  # fmt: skip


@st.composite
def binaries(draw: st.DrawFn) -> Binary:
    """A binary of one to three programs."""
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    space = st.builds(
        SpaceShape,
        banks=st.integers(1, 2**32 - 1),
        base=st.integers(0, 2**20),
        limit=st.integers(2**20, 2**64 - 1),
        alignment=st.sampled_from([1, 16, 32, 64]),
    )
    machine = MachineShape(
        draw(NAMES),
        draw(st.tuples(st.integers(1, 99), st.integers(1, 99))),
        draw(space),
        draw(st.none() | space),
        draw(st.none() | space),
    )
    return Binary(tuple(draw(programs(name)) for name in names), machine, draw(NAMES))

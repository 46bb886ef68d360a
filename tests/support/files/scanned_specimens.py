"""Sound files with scans, and programs that no constructor would let through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from stitch.machine.shape import MachineShape, SpaceShape
from stitch.program import (
    Array,
    Body,
    Constant,
    DataType,
    InputSlot,
    Layout,
    Operation,
    OutputSlot,
    Program,
    Scratch,
    Space,
    Value,
    ValueType,
)
from stitch.ttb import Binary

F32 = DataType.FLOAT32
ROW, MATRIX, ALL = (ValueType(shape, F32) for shape in ((8,), (3, 8), (5, 3, 8)))
BIAS = np.arange(8, dtype=np.float32) - 3
MACHINE = MachineShape("host", (1, 1), SpaceShape(1, 0, 2**34, 64))


def scanned_bodies() -> tuple[Body, ...]:
    """What halves; a round that adds a row, halved; a round of such rounds over a matrix."""
    halve = Body(
        (0,), (2,), tuple(map(Value, ("x", "half", "y"), (ROW, ValueType((), F32), ROW))),
        (Operation("Mul", (0, 1), (2,)),), (Constant(1, np.array(0.5, np.float32)),),
    )  # fmt: skip
    row = Body(
        (0, 1, 2), (4, 5),
        tuple(Value(name, ROW) for name in ("sum", "row", "bias", "more", "after", "given")),
        (
            Operation("Add", (0, 1), (3,)),
            Operation("Halve", (3,), (4,), {}, "own", "rounds.py:1", 0),
            Operation("Mul", (4, 2), (5,)),
        ),
    )  # fmt: skip
    matrix = Body(
        (0, 1, 2), (5, 6),
        tuple(map(Value, ("sum", "matrix", "bias", "last", "rows", "after", "given"),
                  (ROW, MATRIX, ROW, ROW, MATRIX, ROW, MATRIX))),
        (
            Operation("Scan", (0, 1, 2), (3, 4), {
                "count": 3, "num_states": 1, "num_scan_inputs": 1,
                "scan_output_directions": (1,)}, "stitch", "rounds.py:2", 1),
            Operation("Tanh", (3,), (5,)),
            Operation("Neg", (4,), (6,)),
        ),
    )  # fmt: skip
    return halve, row, matrix


def scanned_program() -> Program:
    """A scan over matrices, from the last one on, of scans over their rows."""
    names, kinds = ("first", "xs", "bias", "last", "all"), (ROW, ALL, ROW, ROW, ALL)
    scan = Operation(
        "Scan", (0, 1, 2), (3, 4),
        {"count": 5, "num_states": 1, "num_scan_inputs": 1, "scan_input_directions": (1,)},
        "stitch", "rounds.py:3", 2,
    )  # fmt: skip
    return Program(
        "rounds",
        (InputSlot("first", 0), InputSlot("xs", 1)),
        (OutputSlot("last", 3), OutputSlot("all", 4)),
        tuple(Value(n, k, Layout(F32)) for n, k in zip(names, kinds, strict=True)),
        (scan,), (Constant(2, BIAS),), Scratch(Space.HOST, 0), bodies=scanned_bodies(),
    )  # fmt: skip


def scanned_binary() -> Binary:
    """A program of scans within a scan."""
    return Binary((scanned_program(),), MACHINE, "specimens 1")


def conditional_binary() -> Binary:
    """A program that halves a row for as long as its sum is above one, from the second time on."""
    flag, number = ValueType((), DataType.BOOL), ValueType((), F32)
    halve = Body(
        (0, 1), (6, 4),
        tuple(map(Value, ("goes_on", "x", "one", "half", "after", "sum", "further"),
                  (flag, ROW, number, number, ROW, number, flag))),
        (
            Operation("Mul", (1, 3), (4,)),
            Operation("ReduceSum", (4,), (5,), {"keepdims": 0}),
            Operation("Greater", (5, 2), (6,)),
        ),
        (Constant(2, np.array(1, np.float32)), Constant(3, np.array(0.5, np.float32))),
    )  # fmt: skip
    scan = Operation(
        "Scan", (1, 0), (3, 2), {"count": 100, "num_states": 2, "has_condition": 1}, "stitch",
        "loop.py:1", 0,
    )  # fmt: skip
    values = zip(("x", "goes_on", "last", "ended"), (ROW, flag, ROW, flag), strict=True)
    program = Program(
        "halved", (InputSlot("x", 0), InputSlot("goes_on", 1)),
        (OutputSlot("last", 2), OutputSlot("ended", 3)),
        tuple(Value(name, kind, Layout(kind.data_type)) for name, kind in values),
        (scan,), (), Scratch(Space.HOST, 0), bodies=(halve,),
    )  # fmt: skip
    return Binary((program,), MACHINE, "specimens 1")


def by_hand(first: Array, xs: Array) -> tuple[Array, Array]:
    """What the program gives."""
    state, collected = first, np.empty_like(xs)
    for step, matrix in enumerate(xs[::-1]):
        rows = []
        for row in matrix:
            state = np.float32(0.5) * (state + row)
            rows.append(state * BIAS)
        collected[step], state = -np.stack(rows[::-1]), np.tanh(state)
    return state, collected


def unchecked(program: Program, **changes: Any) -> Program:
    """A program with other fields, which nobody has looked at: only a file can bring it."""
    made = object.__new__(Program)
    for field in fields(Program):
        object.__setattr__(made, field.name, changes.get(field.name, getattr(program, field.name)))
    return made


def scan_changed(
    program: Program, body: int | None = None, *, body_carried: int | None = None, **changes: Any
) -> dict[str, Any]:
    """Other fields of the scan of a program, or of the first operation of one of its bodies."""
    if body_carried is not None:
        changes["body"] = body_carried
    if body is None:
        return {"operations": (replace(program.operations[0], **changes),)}
    held = list(program.bodies)
    first, *others = held[body].operations
    held[body] = replace(held[body], operations=(replace(first, **changes), *others))
    return {"bodies": tuple(held)}


def scans_within_scans(
    levels: int, many: int = 1, count: int = 1, make: Callable[..., Program] = replace
) -> Program:
    """Scans of `count` rounds on a state, `many` one after the other on each level."""
    kind = ValueType((4,), F32)
    words = {"count": count, "num_states": 1}
    bodies: list[Body] = []
    for level in range(levels):
        done = tuple(
            Operation("Relu", (v,), (v + 1,)) if not level
            else Operation("Scan", (v,), (v + 1,), words, "stitch", body=level - 1)
            for v in range(many if level else 1)
        )  # fmt: skip
        values = tuple(Value(f"v{i}", kind) for i in range(len(done) + 1))
        bodies.append(Body((0,), (len(done),), values, done))
    values = tuple(Value(f"v{i}", kind, Layout(F32)) for i in range(many + 1))
    scans = tuple(
        Operation("Scan", (v,), (v + 1,), words, "stitch", body=levels - 1) for v in range(many)
    )
    if many > 1:
        layouts = [Layout(F32, address=64 * (v % 2)) for v in range(1, many)]
        inner = [replace(values[v], layout=layouts[v - 1]) for v in range(1, many)]
        values = (values[0], *inner, values[-1])
    simple = scanned_program()
    return make(
        simple, inputs=(InputSlot("x", 0),), outputs=(OutputSlot("y", many),), values=values,
        operations=scans, constants=(), bodies=tuple(bodies), scratch=Scratch(Space.HOST, 128),
    )  # fmt: skip


def foreign_binary() -> Binary:
    """A program whose only operation is of a foreign operator, with attributes of each kind that it
    may have and a result that is left out."""
    values = tuple(
        Value(name, kind, Layout(F32)) for name, kind in (("x", ROW), ("y", ROW))
    )  # fmt: skip
    attributes: dict[str, Any] = {
        "mode": "linear", "alpha": 0.5, "count": 3, "sizes": (1, 2), "rates": (0.5, 1.0),
        "labels": ("a", "b"),
    }  # fmt: skip
    operation = Operation(
        "Blend", (0,), (1, -1), attributes, "com.example", "specimen", opset=7
    )  # fmt: skip
    program = Program(
        "blended", (InputSlot("x", 0),), (OutputSlot("y", 1),), values, (operation,), (),
        Scratch(Space.HOST, 0),
    )  # fmt: skip
    return Binary((program,), MACHINE, "a specimen")

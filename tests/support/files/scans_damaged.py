"""Programs with scans, damaged where only a reader that knows scans can see it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stitch.program import Body, DataType, Operation, Program, Value, ValueType
from tests.support.files.scanned_specimens import unchecked

#: Counts and numbers of states that break things.
NUMBERS = (-(2**63), -1, 0, 1, 2, 3, 4, 5, 6, 2**31, 2**31 + 1, 2**62)
DIRECTIONS: tuple[Any, ...] = ((), (0,), (1,), (2,), (-1,), (0, 1), (0.0,), ("1",), "1", 1, 0.5)
SHAPES = ((), (8,), (3, 8), (5, 3, 8), (5, 8), (0, 8), (3, 0), (2**40, 2**20), (1,) * 40)
TYPES = (DataType.FLOAT32, DataType.BFLOAT16, DataType.INT64, DataType.BOOL, DataType.INT4,
         DataType.BFP8)  # fmt: skip
NAMES = ("count", "num_states", "num_scan_inputs", "scan_input_directions",
         "scan_output_directions")  # fmt: skip


def _numbers(draw: random.Random, held: tuple[int, ...], least: int) -> tuple[int, ...]:
    """One more, one fewer, or one another."""
    changed, kind = list(held), draw.randrange(3)
    if kind == 0 or not changed:
        changed.insert(draw.randrange(len(changed) + 1), draw.randrange(least, 8))
    elif kind == 1:
        del changed[draw.randrange(len(changed))]
    else:
        changed[draw.randrange(len(changed))] = draw.randrange(least, 8)
    return tuple(changed)


def _operation(draw: random.Random, operation: Operation) -> Operation:
    kind = draw.randrange(6)
    if kind == 0:
        return replace(operation, inputs=_numbers(draw, operation.inputs, -1))
    if kind == 1:
        return replace(operation, outputs=_numbers(draw, operation.outputs, -1))
    if kind == 2:
        return replace(operation, body=draw.randrange(-1, 5))
    if kind == 3:
        op, domain = draw.choice((("Scan", "stitch"), ("Scan", ""), ("Add", ""), ("Halve", "own")))
        return replace(operation, op=op, domain=domain)
    name = draw.choice((*NAMES, "axis"))
    value = draw.choice(NUMBERS if name in NAMES[:3] else DIRECTIONS)
    kept = {k: v for k, v in operation.attributes.items() if k != name}
    return replace(operation, attributes=kept if kind == 4 else kept | {name: value})


def _value(draw: random.Random, value: Value) -> Value:
    shape, kind = value.type.shape, value.type.data_type
    if draw.random() < 0.7:
        shape = draw.choice(SHAPES)
    else:
        kind = draw.choice(TYPES)
    return replace(value, type=ValueType(shape, kind))


def _one_of(draw: random.Random, held: tuple[Any, ...], change: Callable[..., Any]) -> Any:
    at = draw.randrange(len(held))
    return (*held[:at], change(draw, held[at]), *held[at + 1 :])


def _part(draw: random.Random, part: Program | Body) -> dict[str, Any]:
    if draw.random() < 0.75:
        return {"operations": _one_of(draw, part.operations, _operation)}
    return {"values": _one_of(draw, part.values, _value)}


def _body(draw: random.Random, body: Body) -> Body:
    kind = draw.randrange(6)
    if kind == 0:
        return replace(body, inputs=_numbers(draw, body.inputs, -1))
    if kind == 1:
        return replace(body, outputs=_numbers(draw, body.outputs, 0))
    return replace(body, **_part(draw, body))


def damaged(draw: random.Random, program: Program) -> Program:
    """One to three changes."""
    for _ in range(draw.randint(1, 3)):
        kind = draw.randrange(8)
        if kind == 0 and len(program.bodies) > 1:
            order = list(program.bodies)
            draw.shuffle(order)
            program = unchecked(program, bodies=tuple(order))
        elif kind == 1:
            program = unchecked(program, bodies=program.bodies[:-1] or program.bodies)
        elif kind < 6:
            program = unchecked(program, bodies=_one_of(draw, program.bodies, _body))
        else:
            program = unchecked(program, **_part(draw, program))
    return program

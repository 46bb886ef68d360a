"""Graphs whose operations carry bodies, and the same graphs written by hand without any."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import (
    ABSENT,
    Body,
    Constant,
    DataType,
    InputSlot,
    Operation,
    OutputSlot,
    Value,
    ValueType,
)

SHAPE = (6, 8)
HALF = np.full(8, 0.5, np.float32)


def scaled_body(kind: ValueType) -> Body:
    """(x, nothing) to 0.5 x, and to exp(x), which few want."""
    values = (Value("x", kind), Value("half", ValueType((8,), kind.data_type)),
              Value("scaled", kind), Value("rare", kind))  # fmt: skip
    half = Constant(1, HALF.astype(kind.data_type.dtype))
    return Body((0, ABSENT), (2, 3), values, (
        Operation("Exp", (0,), (3,)), Operation("Mul", (0, 1), (2,)),
    ), (half,))  # fmt: skip


def gate_body(kind: ValueType) -> Body:
    """(x, y) to tanh(0.5 x) y + x, with the body before it for the half."""
    values = tuple(Value(name, kind) for name in ("x", "y", "half", "tanh", "product", "gate"))
    return Body((0, 1), (5,), values, (
        Operation("Scale", (0, ABSENT), (2, ABSENT), {}, "own", body=0),
        Operation("Tanh", (2,), (3,)), Operation("Mul", (3, 1), (4,)),
        Operation("Add", (4, 0), (5,)),
    ))  # fmt: skip


def bodied_graph(
    data_type: DataType = DataType.FLOAT32, shape: tuple[int, ...] = SHAPE
) -> ComputationGraph:
    """y = gate(gate(x, w), x) W and z = exp(x): three operations with a body, one body twice."""
    kind, out = ValueType(shape, data_type), ValueType((shape[0], 4), data_type)
    weights = _weights(data_type)
    names = ("x", "w", "first", "second", "matrix", "y", "z")
    kinds = (kind, kind, kind, kind, ValueType(weights.shape, data_type), out, kind)
    return ComputationGraph(
        "bodied",
        (InputSlot("x", 0), InputSlot("w", 1)),
        (OutputSlot("y", 5), OutputSlot("z", 6)),
        tuple(map(Value, names, kinds)),
        (
            Operation("Gate", (0, 1), (2,), {}, "own", "first.py:1", 1),
            Operation("Gate", (2, 0), (3,), {"how": "again"}, "own", "first.py:2", 1),
            Operation("MatMul", (3, 4), (5,)),
            Operation("Scale", (0, ABSENT), (ABSENT, 6), {}, "own", "first.py:3", 0),
        ),
        (Constant(4, weights),),
        bodies=(scaled_body(kind), gate_body(kind)),
    )


def plain_graph(
    data_type: DataType = DataType.FLOAT32, shape: tuple[int, ...] = SHAPE
) -> ComputationGraph:
    """The same without bodies."""
    b = ComputationGraphBuilder("plain")
    x, w = b.input("x", shape, data_type), b.input("w", shape, data_type)
    half = b.constant(HALF.astype(data_type.dtype))
    first = b.add(b.mul(b.op("Tanh", b.mul(x, half)), w), x)
    second = b.add(b.mul(b.op("Tanh", b.mul(first, half)), x), first)
    b.output("y", b.matmul(second, b.constant(_weights(data_type))))
    b.output("z", b.op("Exp", x))
    return b.build()


def bomb(levels: int) -> tuple[tuple[Body, ...], Operation]:
    """Bodies that each carry the one before twice, and an operation that carries the last."""
    kind = ValueType((2,), DataType.FLOAT32)
    values = tuple(Value(name, kind) for name in "xyz")
    first = Body((0,), (1,), values[:2], (Operation("Relu", (0,), (1,)),))
    twice = Body((0,), (2,), values, tuple(
        Operation("Twice", (v,), (v + 1,), {}, "own") for v in range(2)
    ))  # fmt: skip
    bodies = [first]
    for level in range(levels):
        carried = tuple(replace(o, body=level) for o in twice.operations)
        bodies.append(replace(twice, operations=carried))
    return tuple(bodies), Operation("Twice", (0,), (1,), {}, "own", body=levels)


def _weights(data_type: DataType) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    drawn = np.random.default_rng(3).standard_normal((8, 4), np.float32)
    return drawn.astype(data_type.dtype)

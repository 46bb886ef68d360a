"""Random parallel graphs: operators on shards that were divided at random, kept if accepted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stitch.errors import CompileError, TaskError
from stitch.graph import ComputationGraph
from stitch.ops import COPIES, SUMS, evaluate_operation, infer_operation
from stitch.parallel import ParallelComputationGraph, ParallelShape
from stitch.program import Array, Constant, DataType, InputSlot, Operation, OutputSlot, Value
from stitch.program import ValueType as Kind

SIZES = (4, 8)


@dataclass
class DrawnDivision:
    """A parallel graph under construction, and the whole of each of its values."""

    rng: np.random.Generator
    inputs: list[InputSlot] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    shapes: list[ParallelShape] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    whole: list[Array] = field(default_factory=list)
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def graph(self, outputs: list[int] | None = None) -> ComputationGraph:
        slots = [OutputSlot(f"o{v}", v) for v in outputs or []]
        return ComputationGraph(
            "drawn", tuple(self.inputs), tuple(slots), tuple(self.values), tuple(self.operations),
            constants=tuple(self.constants),
        )  # fmt: skip

    def pcg(self, outputs: list[int] | None = None) -> ParallelComputationGraph:
        return ParallelComputationGraph(self.graph(outputs), tuple(self.shapes))

    def _value(self, array: Array, shape: ParallelShape) -> int:
        self.values.append(Value(f"v{len(self.values)}", shape.type))
        self.shapes.append(shape)
        self.whole.append(array)
        return len(self.values) - 1

    def _array(self, *sizes: int) -> Array:
        return self.rng.standard_normal(sizes).astype(np.float32)

    def input(self, *sizes: int) -> int:
        shape = ParallelShape.whole(Kind(sizes, DataType.FLOAT32))
        value = self._value(self._array(*sizes), shape)
        self.inputs.append(InputSlot(f"v{value}", value))
        return value

    def constant(self, array: Array) -> int:
        shape = ParallelShape.whole(Kind(array.shape, DataType.from_dtype(array.dtype)))
        value = self._value(array, shape)
        self.constants.append(Constant(value, array))
        return value

    def try_operation(self, operation: Operation, array: Array, shape: ParallelShape) -> bool:
        """Append an operation if the parallel graph is accepted."""
        self._value(array, shape)
        self.operations.append(operation)
        try:
            self.pcg()
        except CompileError:
            self.refused[operation.op] += 1
            self.operations.pop()
            for kept in (self.values, self.shapes, self.whole):
                kept.pop()
            return False
        self.accepted[operation.op] += 1
        return True

    def try_parallel(self, op: str, value: int, **words: int) -> bool:
        operation = Operation(op, (value,), (len(self.values),), words, "stitch")
        try:
            shape = self.shapes[value].after(operation)
        except CompileError:
            return False
        return self.try_operation(operation, self.whole[value], shape)

    def try_operator(self, op: str, operands: list[int], **words: Any) -> bool:
        """Append an operator whose result is divided as the shards say, or else at random."""
        operation = Operation(op, tuple(operands), (len(self.values),), words)
        shards: list[Array | None] = [None] * len(operands)
        data = {c.value: c.data for c in self.constants}
        shards = [data.get(v) for v in operands]
        read = [self.whole[v] for v in operands]
        if op == "Reshape":
            # The sizes that the operation has are those of a shard.
            factor = self.whole[operands[0]].size // int(
                np.prod(self.shapes[operands[0]].shard.shape)
            )
            sizes = list(shards[1]) if shards[1] is not None else []
            at = int(self.rng.integers(len(sizes)))
            sizes[at] *= factor
            read[1] = np.array(sizes, np.int64)
        try:
            (kind,) = infer_operation(operation, [self.shapes[v].shard for v in operands], shards)
            (array,) = evaluate_operation(operation, read)
        except (CompileError, TaskError):
            return False
        pairs = list(zip(array.shape, kind.shape, strict=False))
        count = max([self.shapes[v].count for v in operands if v not in data], default=1)
        if len(kind.shape) != array.ndim or any(a % b for a, b in pairs):
            return False
        degrees = tuple([a // b for a, b in pairs])
        left, over = divmod(count, int(np.prod(degrees)))
        if over or not left:
            return False
        sums, copies = (left, 1) if self.rng.integers(2) else (1, left)
        logical = Kind(array.shape, kind.data_type)
        return self.try_operation(operation, array, ParallelShape(logical, degrees, sums, copies))

    def step(self) -> None:
        """Try one operation, drawn at random."""
        rng, n = self.rng, len(self.values)
        a, b = (int(v) for v in rng.integers(n, size=2))
        alike = [v for v in range(n) if self.shapes[v].count == self.shapes[a].count]
        b = int(rng.choice(alike)) if rng.integers(4) else b
        rank = len(self.shapes[a].degrees)
        axis, degree = int(rng.integers(max(1, rank))), int(rng.choice([2, 4], p=[0.8, 0.2]))
        kind = rng.integers(10)
        if kind < 3 and rank:
            op = str(rng.choice(["Repartition", "Combine"], p=[0.7, 0.3]))
            self.try_parallel(op, a, axis=axis, degree=degree)
        elif kind == 3:
            op = str(rng.choice(["Replicate", "Reduction"]))
            self.try_parallel(op, a, degree=degree)
        elif kind < 7:
            self.try_operator(str(rng.choice(["MatMul", "Add", "Mul", "Div", "Max"])), [a, b])
        elif kind == 7:
            self.try_operator(str(rng.choice(["Relu", "Neg", "Exp", "Identity"])), [a])
        elif rank:
            op = str(rng.choice(
                ["Softmax", "Concat", "Transpose", "ReduceSum", "ReduceMax", "Reshape", "Gemm",
                 "Gather", "Unsqueeze"]
            ))  # fmt: skip
            self._structured(op, a, b, axis, rank)

    def _structured(self, op: str, a: int, b: int, axis: int, rank: int) -> None:
        rng, shard = self.rng, self.shapes[a].shard.shape
        if op in ("Softmax", "Concat"):
            self.try_operator(op, [a] if op == "Softmax" else [a, b], axis=axis)
        elif op == "Transpose":
            self.try_operator(op, [a], perm=tuple(int(i) for i in rng.permutation(rank)))
        elif op == "Gemm":
            c = b if rng.integers(2) else a
            self.try_operator(
                op, [a, b, c], transA=int(rng.integers(2)), transB=int(rng.integers(2))
            )
        elif op == "Reshape":
            flat = int(np.prod(shard))
            choices = [(flat,), (2, flat // 2), (*shard[:-2], int(np.prod(shard[-2:])))]
            choices += [(*shard[:-1], 2, shard[-1] // 2)] if shard[-1] % 2 == 0 else []
            sizes = choices[int(rng.integers(len(choices)))]
            if int(np.prod(sizes)) == flat:
                self.try_operator(op, [a, self.constant(np.array(sizes, np.int64))])
        else:
            numbers = [axis] if op != "Gather" else [0, 1]
            listed = self.constant(np.array(numbers, np.int64))
            words = {"Gather": {"axis": axis}, "Unsqueeze": {}}.get(op, {"keepdims": 1})
            self.try_operator(op, [a, listed], **words)

    def join_all(self) -> list[int]:
        """Undo the divisions of all values that have no copies; return the values that are whole.

        Joins are also tried in other orders: those that are accepted must be right too.
        """
        for value in range(len(self.values)):
            order = list(self.pcg().orders[value])
            if not order or any(part == COPIES for part, _ in order):
                continue
            at = value
            for part, degree in reversed(order):
                wrong = [d.part for d in order if d.part != part and isinstance(d.part, int)]
                for axis in wrong[:1]:
                    assert isinstance(axis, int)
                    if self.try_parallel("Combine", at, axis=axis, degree=2):
                        break
                words = {"degree": degree} if part == SUMS else {"degree": degree, "axis": part}
                op = "Reduction" if part == SUMS else "Combine"
                assert self.try_parallel(op, at, **words), (op, order)
                at = len(self.values) - 1
        made = {v for o in self.operations for v in o.outputs}
        return [v for v in sorted(made) if self.shapes[v].count == 1]


def drawn_division(seed: int, steps: int = 40) -> DrawnDivision:
    """Return a random parallel graph."""
    drawn = DrawnDivision(np.random.default_rng(seed))
    for sizes in ((8, 4), (4, 8), (8,), (4, 4), (2, 4, 8)):
        drawn.input(*sizes)
    drawn.constant(drawn._array(4))
    for _ in range(steps):
        drawn.step()
    return drawn

"""Random nests of If and Loop that data decide: as ONNX Runtime computes them."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import stitch
from stitch.program import Array
from tests.support.onnx.models import BOOL, INT64, info, model, runtime
from tests.support.run_seed import SEED
from tests.support.stitched_models import one

node = helper.make_node
WEIGHTS: dict[str, Array] = {
    "zero": np.array(0, np.float32), "low": np.array(-0.7, np.float32),
    "high": np.array(1, np.float32), "three": np.array(3), "seven": np.array(7),
    "w": np.array([0.5, -1, 2], np.float32),
}  # fmt: skip


class Nest:
    """Draws nodes on vectors of three; `count`, `rounds` and `flag` are inputs."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self._names = 0

    def model(self) -> onnx.ModelProto:
        """A model of five such nodes."""
        nodes, result = self.block(["x"], depth=3, count=5)
        inputs = [info("x", [3]), info("rounds", [1]), info("count", [], INT64),
                  info("flag", [], BOOL)]  # fmt: skip
        return model(nodes, inputs, [result], WEIGHTS)

    def block(self, known: list[str], depth: int, count: int) -> tuple[list[Any], str]:
        """Nodes, and the name of what the last one makes."""
        nodes: list[Any] = []
        values = list(known)
        for _ in range(count):
            kind = self.rng.random() if depth else self.rng.uniform(0.55, 1)
            if kind < 0.3:
                values.append(self.choice(nodes, values, depth - 1))
            elif kind < 0.55:
                values.append(self.loop(nodes, values, depth - 1))
            elif kind < 0.8:
                op, other = self.rng.choice(["Add", "Sub", "Mul"]), self.rng.choice([*values, "w"])
                joined = self.written(nodes, op, self.rng.choice(values), other)
                values.append(self.written(nodes, "Tanh", joined))
            else:
                op = self.rng.choice(["Neg", "Sin"])
                values.append(self.written(nodes, op, self.rng.choice(values)))
        return nodes, values[-1]

    def choice(self, nodes: list[Any], values: list[str], depth: int) -> str:
        asked = self.asked(nodes, values) if self.rng.random() < 0.85 else "flag"
        sides = {}
        for side in ("then_branch", "else_branch"):
            inner, result = self.block(values, depth, self.rng.randint(1, 3))
            sides[side] = helper.make_graph(inner, self.name(), [], [info(result, [3])])
        return self.written(nodes, "If", asked, **sides)

    def loop(self, nodes: list[Any], values: list[str], depth: int) -> str:
        index, going, state = self.name(), self.name(), self.name()
        inner, result = self.block([*values, state], depth, self.rng.randint(1, 3))
        asked = self.asked(inner, [result, state])
        if self.rng.random() < 0.3:
            result = self.written(inner, "Add", result, self.written(inner, "Cast", index, to=1))
        if self.rng.random() < 0.2:
            asked = self.written(inner, "Identity", going)
        body = helper.make_graph(
            inner, self.name(), [info(index, [], INT64), info(going, [], BOOL), info(state, [3])],
            [info(asked, [], BOOL), info(result, [3])],
        )  # fmt: skip
        limit = self.rng.choice(["three", "seven", "count"])
        if self.rng.random() < 0.3:
            most = self.written(nodes, "ReduceMax", "rounds", keepdims=0)
            limit = self.written(nodes, "Cast", most, to=INT64)
        first = "" if self.rng.random() < 0.6 else self.asked(nodes, values)
        return self.written(nodes, "Loop", limit, first, self.rng.choice(values), body=body)

    def asked(self, nodes: list[Any], values: list[str]) -> str:
        """The name of a truth value."""
        total = self.written(nodes, "ReduceSum", self.rng.choice(values), keepdims=0)
        bound = self.rng.choice(["zero", "low", "high"])
        return self.written(nodes, self.rng.choice(["Less", "Greater"]), total, bound)

    def written(self, nodes: list[Any], op: str, *operands: str, **attributes: Any) -> str:
        """Adds a node; gives the name of its result."""
        result = self.name()
        nodes.append(node(op, operands, [result], **attributes))
        return result

    def name(self) -> str:
        self._names += 1
        return f"t{self._names}"


def check(seed: int) -> int:
    """One program for four draws of inputs, on all executors; gives how many scans it has."""
    proto, rng = Nest(seed).model(), np.random.default_rng(seed)
    draws: list[list[Array]] = [
        [rng.standard_normal(3).astype(np.float32), rng.integers(0, 5, 1).astype(np.float32),
         np.array(rng.integers(0, 6)), np.array(rng.random() < 0.5)]
        for _ in range(4)
    ]  # fmt: skip
    compiled = stitch.compile(proto, tuple(draws[0]), target="host")
    for executor in ("numpy", "onnxruntime", "auto"):
        with stitch.open_device("host", executor=executor) as device:
            program = device.load(compiled)
            for arrays in draws:
                (wanted,) = runtime(proto, arrays)
                np.testing.assert_allclose(
                    one(program(*arrays)).numpy(), wanted, rtol=1e-4, atol=1e-5
                )
    return sum(operation.op == "Scan" for operation in compiled.graph.operations)


def test_nests_that_data_decide_are_what_onnx_runtime_makes_of_them() -> None:
    assert sum(check(seed) for seed in range(4)) >= 4


@pytest.mark.campaign("onnx")
@pytest.mark.parametrize("seed", range(SEED * 100, SEED * 100 + 60))
def test_many_nests_that_data_decide_are_what_onnx_runtime_makes_of_them(seed: int) -> None:
    check(seed)

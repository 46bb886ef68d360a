"""Determinism: the same graph gives the same program, whatever seeds Python's hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import hashlib
import numpy as np
from stitch.compiler import CompileOptions, compile_graph
from stitch.graph.computation_graph import ComputationGraph
from stitch.graph.placement import parse_placement
from stitch.machine import load_machine
from stitch.program import *

kind = ValueType((64, 64), DataType.FLOAT32)
values, operations, constants = [], [], []
def value(name, of=kind):
    values.append(Value(name, of))
    return len(values) - 1
def op(name, *inputs):
    made = value("t")
    operations.append(Operation(name, inputs, (made,)))
    return made
inputs = [InputSlot(n, value(n)) for n in ("x", "y", "z")]
for i in range(3):
    c = value(f"c{i}")
    constants.append(Constant(c, np.full((64, 64), i, np.float32)))
scale = op("Exp", op("Add", 3, 4))
a = op("Softmax", op("Mul", 0, scale))
b = op("Softmax", op("Mul", 0, scale))
c = op("Tanh", op("Add", a, op("MatMul", b, op("Add", 1, 2))))
outputs = tuple(OutputSlot(f"o{i}", v) for i, v in enumerate((c, a, 0, c)))
graph = ComputationGraph("g", tuple(inputs), outputs, tuple(values), tuple(operations),
                         tuple(constants))
options = CompileOptions(placement=(parse_placement("input.x.layout=tile"),))
program = compile_graph(graph, load_machine("wormhole_n150"), options).program
print(program.text())
for constant in program.constants:
    print(constant.value, hashlib.sha256(constant.data.tobytes()).hexdigest())
"""


def _compile(seed: str) -> str:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout


def test_processes_with_different_hash_seeds_compile_the_same_program() -> None:
    first = _compile("1")
    assert "program @g" in first
    assert "scratch l1" in first
    assert _compile("2") == first

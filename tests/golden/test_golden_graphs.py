"""The text and the JSON form of graphs, and the error of a bad YAML module, as users see them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch.errors import FormatError
from stitch.frontend import load_module, module_from_text
from stitch.graph import ComputationGraph, as_json, parse_placement, trace
from stitch.program import DataType, InputKind, ValueType

Golden = Callable[[str, str], None]
FOLDER = Path(__file__).parent

BAD_MODULE = """\
nmae: bad
inputs:
  x: {shape: [4, -1], tpye: float32, space: l3}
  q: {shape: [3], type: flot32}
  q: {shape: [3], type: float32}
parameters:
  w: {file: wights.npz, name: w1}
  b: {shape: [48], init: {kind: rand, seed: 0}}
operations:
  - h = Gemm(q, w) {transB: 0}
  - h = Gemm(q,
  - h = Rleu(q)
  - j = Relu(p)
  - k = Relu(j)
  - {op: Relu, inptus: [q], outputs: [r]}
outputs: [r, s]
"""


def traced() -> ComputationGraph:
    weight = np.eye(3, 4, dtype=np.float32)

    def block(x: Any, state: Any) -> dict[str, Any]:
        hidden = np.tanh(x @ weight) * 2 + state
        return {"hidden": hidden, "top": hidden.builder.topk(hidden, 2)[1], "last": hidden[:, -1]}

    kind = ValueType((2, 3), DataType.FLOAT32)
    graph = trace(block, kind, ValueType((4,), DataType.FLOAT32), kinds={"state": InputKind.STATE})
    return graph.with_placement(
        parse_placement("input.x.space=l1"), parse_placement("output.0.layout=tile")
    )


def test_the_text_of_a_traced_graph(golden: Golden) -> None:
    golden("traced_graph.txt", traced().text())


def test_the_json_form_of_a_graph(golden: Golden) -> None:
    graph = trace(lambda x: x.builder.op("Elu", x * 2, alpha=0.5), np.zeros(3, np.float32))
    text = as_json(graph)
    for operation in graph.operations:
        text = text.replace(operation.location, "test_golden_graphs.py:0")
    golden("small_graph.json", text)


def test_the_text_of_a_yaml_module(golden: Golden) -> None:
    golden("features.txt", load_module(FOLDER / "features.yaml").text())


def test_the_error_of_a_bad_yaml_module(golden: Golden) -> None:
    with pytest.raises(FormatError) as caught:
        module_from_text(BAD_MODULE, FOLDER, "bad.yaml")
    text = re.sub(r"one of \d+ operators", "one of N operators", str(caught.value))
    golden("bad_module_error.txt", text + "\n")

"""What executors promise of linked programs: equal bits or why not, and when linking pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import stitch
from stitch.errors import LinkError
from stitch.graph import ComputationGraphBuilder
from stitch.program import DataType, Program
from stitch.runtime.executors import LinkTerms, make_executor
from tests.support.executors.calling import CallingExecutor


def program(name: str, *operators: str, rows: int = 4, stored: str = "float32") -> Program:
    """Operators one after the other behind a product."""
    b = ComputationGraphBuilder(name)
    y = b.input("x", (rows, 8), "float32") @ b.constant(np.eye(8, dtype=np.float32))
    for operator in operators:
        y = b.op(operator, y)
    b.output("y", y)
    option = f"output.y.data_type={stored}"
    return stitch.compile(b.build(), target="wormhole_n150", placement=[option]).binary.programs[0]


def terms(executor: str, *programs: Program) -> LinkTerms:
    return make_executor(executor).link_terms(programs)


def test_an_executor_without_link_terms_promises_nothing() -> None:
    found = CallingExecutor(print).link_terms([program("a"), program("b")])
    assert "does not promise equal bits" in found.obstacle and found.repeats is None


def test_onnx_runtime_gains_nothing_by_one_program_or_by_long_ones() -> None:
    pytest.importorskip("onnxruntime")
    assert terms("onnxruntime", program("a", "Relu")) == LinkTerms()
    long = [program(name, "Relu", rows=1 << 18) for name in "ab"]
    assert terms("onnxruntime", *long) == LinkTerms()


def test_denormals_are_an_obstacle_where_only_some_programs_flush_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxruntime")
    from stitch.runtime.executors.onnx import onnxruntime_executor

    pair = [program("scores", "Softmax"), program("plain", "Relu")]
    monkeypatch.setattr(onnxruntime_executor, "has_effect", lambda: True)
    found = terms("onnxruntime", *pair)
    assert found.obstacle == "'scores' takes denormal numbers as zero, 'plain' does not"
    assert found.repeats is None
    assert terms("onnxruntime", pair[0], pair[0]).obstacle == ""
    monkeypatch.setattr(onnxruntime_executor, "has_effect", lambda: False)
    assert terms("onnxruntime", *pair).obstacle == ""


def test_an_output_that_is_read_before_it_is_rounded_is_an_obstacle() -> None:
    pytest.importorskip("onnxruntime")
    made = program("a", "Relu", "Tanh")
    first = made.operations[-2].outputs[0]
    values = list(made.values)
    home = replace(values[made.outputs[0].value].desc.layout, data_type=DataType.BFLOAT16)
    values[first] = replace(values[first], layout=home)
    twice = replace(
        made,
        values=tuple(values),
        outputs=(*made.outputs, replace(made.outputs[0], name="h", value=first)),
    )
    found = terms("onnxruntime", twice, program("b"))
    assert found.obstacle == "'a' reads its output 'h' before rounding it to bfloat16"
    assert terms("onnxruntime", program("c", "Relu", stored="bfloat16"), made).obstacle == ""


def test_constants_that_a_form_cannot_hold_are_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    from stitch.runtime.executors.onnx import onnxruntime_executor

    monkeypatch.setattr(onnxruntime_executor, "MAX_CONSTANT_NBYTES", 8 * 8 * 4 - 1)
    found = terms("onnxruntime", program("a"), program("b"))
    assert found.obstacle == "'a' has more than 255 bytes of constants"


def test_the_automatic_executor_promises_what_one_kind_of_kernels_computes() -> None:
    small = [program(name, "Relu") for name in "ab"]
    assert terms("auto", *small) == LinkTerms()
    pytest.importorskip("onnxruntime")
    assert "other kernels" in terms("auto", *small, program("c", "Gelu")).obstacle


def test_the_torch_executor_does_not_promise_equal_bits() -> None:
    pytest.importorskip("torch")
    assert "2e-7" in terms("torch", program("a"), program("b")).obstacle


def test_block_formats_are_not_linked_at_all() -> None:
    b = ComputationGraphBuilder("a")
    b.output("y", b.op("Relu", b.input("x", (32, 32), "float32")))
    placement = ["output.y.data_type=bfp8", "output.y.space=dram"]
    model = stitch.compile(b.build(), target="wormhole_n150", placement=placement)
    with pytest.raises(LinkError, match="block format"):
        stitch.link([model, model])

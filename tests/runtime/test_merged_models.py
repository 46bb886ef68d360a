"""The merged ONNX model of a linked program, and what optimising its parts leaves behind."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError
from stitch.graph import ComputationGraphBuilder
from stitch.linker import Port, Wire, link_programs
from stitch.machine import load_machine
from stitch.program import Array, Constant, Operation, OutputSlot, Program, Seam, Value
from stitch.ttb import Binary
from tests.support.stitched_models import one

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from stitch.runtime.executors.onnx import onnxruntime_executor  # noqa: E402
from stitch.runtime.executors.onnx.onnxruntime_executor import merge_models  # noqa: E402

TARGET = "wormhole_n150"
MACHINE = load_machine(TARGET).shape
RNG = np.random.default_rng(0)


def table(*shape: int) -> Array:
    made: Array = (RNG.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32)
    return made


def dense(name: str, weights: Array, *, given: bool = False) -> Program:
    """y = Relu(Gemm(x)); the product goes out as well, if it is `given`."""
    b = ComputationGraphBuilder(name)
    h = b.op("Gemm", b.input("x", (16, 64), "float32"), b.constant(weights), b.constant(weights[0]))
    b.output("y", b.op("Relu", h))
    if given:
        b.output("h", h)
    return stitch.compile(b.build(), target=TARGET).program


def linked(programs: Sequence[Program], kept: Sequence[Port] | None = None) -> Program:
    """A chain by first outputs and inputs."""
    wires = [Wire(p, 0, p + 1, 0) for p in range(len(programs) - 1)]
    return link_programs(programs, wires, machine=MACHINE, name="whole", keep=kept)


def model_of(program: Program) -> stitch.LinkedModel:
    return stitch.LinkedModel(Binary((program,), MACHINE, "test"), TARGET)


def operators(program: Program) -> Counter[str]:
    model = onnx.load_from_string(merge_models(program).serialized)
    onnx_nodes: Counter[str] = Counter(node.op_type for node in model.graph.node)
    return onnx_nodes


def test_each_part_is_fused_and_nothing_across_them() -> None:
    b = ComputationGraphBuilder("after")
    b.output("y", b.op("Relu", b.input("x", (16, 64), "float32")))
    relu = stitch.compile(b.build(), target=TARGET).program
    c = ComputationGraphBuilder("before")
    y = c.op("Gemm", c.input("x", (16, 64), "float32"), c.constant(table(64, 64)))
    c.output("y", y)
    gemm = stitch.compile(c.build(), target=TARGET).program
    assert operators(linked([dense("a", table(64, 64)), gemm, relu])) == {
        "FusedGemm": 1, "Gemm": 1, "Relu": 1,
    }  # fmt: skip


def test_an_output_that_was_dropped_still_stands_between_what_could_be_fused() -> None:
    programs = [dense("a", table(64, 64), given=True), dense("b", table(64, 64))]
    whole = linked(programs, kept=[(1, 0)])
    assert operators(whole) == {"Gemm": 1, "Relu": 1, "FusedGemm": 1}
    forgetful = replace(whole, seams=tuple(Seam(seam.first) for seam in whole.seams))
    assert operators(forgetful) == {"FusedGemm": 2}


def test_what_only_served_a_dropped_output_is_not_computed() -> None:
    b = ComputationGraphBuilder("image")
    image = b.input("x", (1, 16, 8, 8), "float32")
    made = b.op("Conv", image, b.constant(table(16, 16, 3, 3)), pads=(1, 1, 1, 1))
    b.output("y", b.op("Conv", made, b.constant(table(16, 16, 3, 3)), pads=(1, 1, 1, 1)))
    b.output("between", made)
    program = stitch.compile(b.build(), target=TARGET).program
    whole = linked([program, program], kept=[(1, 0)])
    # Four convolutions in ONNX Runtime's own layout: only what goes out is put back from it.
    found = operators(whole)
    assert found["Conv"] == 4 and found["ReorderOutput"] == 2


def test_a_long_run_of_arithmetic_gets_its_shape_back_between_parts() -> None:
    b = ComputationGraphBuilder("run")
    y = b.input("x", (512, 256), "float32")
    for name in ("Tanh", "Exp", "Abs", "Sqrt", "Neg", "Sigmoid"):
        y = b.op(name, y)
    b.output("y", y)
    program = stitch.compile(b.build(), target=TARGET).program
    whole = linked([program, program], kept=[(0, 0), (1, 0)])
    assert operators(whole)["Scan"] == 2
    model = merge_models(whole)
    assert all(np.prod(model.chunked[v]) == 512 * 256 for v in model.outputs)


def test_nothing_is_left_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    whole = linked([dense("a", table(64, 64)), dense("b", table(64, 64))])
    merge_models(whole)
    assert list(tmp_path.iterdir()) == []

    def fail(model: object, path: str, *words: object) -> None:
        Path(path).write_bytes(b"a part of it")
        raise OSError("no space left")

    monkeypatch.setattr(onnxruntime_executor, "write_optimised", fail)
    with pytest.raises(CompileError, match="no space left") as caught:
        merge_models(whole)
    assert "TMPDIR" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_temporary_folder_is_named_and_the_device_works_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model_of(linked([dense("a", table(64, 64)), dense("b", table(64, 64))]))
    x = table(16, 64)
    with stitch.open_device(TARGET, executor="onnxruntime") as device:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        with pytest.raises(CompileError, match="cannot write the optimised ONNX model"):
            one(device.load(whole)(x)).numpy()
        monkeypatch.undo()
        assert np.isfinite(one(device.load(whole)(x)).numpy()).all()


def test_a_part_of_constants_alone_gives_them() -> None:
    """ONNX Runtime folds such a part to nothing."""
    data = table(16, 64)
    first = dense("a", table(64, 64))
    made = replace(first.values[first.outputs[0].value], name="y")
    held = Value("c", made.type, first.values[first.constants[0].value].layout)
    constants = Program(
        "constants", (), (OutputSlot("y", 1),), (held, made), (Operation("Relu", (0,), (1,)),),
        (Constant(0, data),), first.scratch,
    )  # fmt: skip
    b = ComputationGraphBuilder("sum")
    b.output("y", b.input("x", (16, 64), "float32") + b.input("z", (16, 64), "float32"))
    whole = linked([constants, stitch.compile(b.build(), target=TARGET).program])
    assert operators(whole) == {"Identity": 1, "Add": 1}
    with stitch.open_device(TARGET, executor="onnxruntime") as device:
        found = one(device.load(model_of(whole))(np.ones((16, 64), np.float32))).numpy()
    assert found.tobytes() == (np.maximum(data, 0) + np.float32(1)).tobytes()

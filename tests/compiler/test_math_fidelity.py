"""The math fidelity of programs: asked for, kept in files, shown, and of no effect on results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch import CompiledModel, ComputationGraphBuilder, DataType
from stitch.errors import FormatError, UsageError
from stitch.graph import ComputationGraph, SymbolicTensor, scan
from stitch.program import MathFidelity, Program
from stitch.ttb import load
from tests.support.files.surgery import Surgery

F32 = DataType.FLOAT32
BY_TYPE, HIFI4 = MathFidelity.BY_TYPE, MathFidelity.HIFI4


def layer(kind: DataType = DataType.BFLOAT16) -> ComputationGraph:
    builder = ComputationGraphBuilder("layer")
    x = builder.input("x", (64, 64), kind)
    w = builder.input("w", (64, 64), kind)
    builder.output("y", builder.op("Relu", builder.op("MatMul", x, w)))
    return builder.build()


def told(program: Program) -> list[MathFidelity]:
    return [operation.math_fidelity for operation in program.operations]


def test_sums_of_products_get_the_fidelity_that_is_asked_for_and_others_none() -> None:
    model = stitch.compile(layer(), math_fidelity="hifi4")
    assert [operation.op for operation in model.program.operations] == ["MatMul", "Relu"]
    assert told(model.program) == [HIFI4, BY_TYPE]
    assert told(stitch.compile(layer(), math_fidelity=HIFI4).program) == [HIFI4, BY_TYPE]
    assert told(stitch.compile(layer()).program) == [BY_TYPE, BY_TYPE]


def test_products_in_the_rounds_of_a_scan_get_it_too() -> None:
    builder = ComputationGraphBuilder("rounds")
    state, rows = builder.input("state", (4, 4), F32), builder.input("rows", (5, 4, 4), F32)

    def product(
        states: Sequence[SymbolicTensor], elements: Sequence[SymbolicTensor]
    ) -> tuple[Sequence[SymbolicTensor], Sequence[SymbolicTensor]]:
        return [states[0] @ elements[0]], []

    (last,), _ = scan(builder, product, [state], [rows])
    builder.output("y", last)
    model = stitch.compile(builder.build(), schedule="rounds", math_fidelity="hifi4")
    (body,) = model.program.bodies
    assert [o.math_fidelity for o in body.operations if o.op == "MatMul"] == [HIFI4]


def test_files_keep_it(tmp_path: Path) -> None:
    model = stitch.compile(layer(), math_fidelity="lofi")
    model.save(tmp_path / "layer.ttb")
    (program,) = stitch.load(tmp_path / "layer.ttb").programs
    assert told(program) == [MathFidelity.LOFI, BY_TYPE]


@pytest.mark.parametrize("code", [5, 128, 255])
def test_a_fidelity_that_is_none_is_damage(code: int) -> None:
    surgery = Surgery(stitch.compile(layer(), math_fidelity="lofi").encode())
    surgery.put(surgery.place(("programs", 0, "operations", 0, "math_fidelity")), "B", code)
    with pytest.raises(FormatError, match=r"operations\[0\].*math_fidelity"):
        load(surgery.file())


def seconds(model: CompiledModel, machine: str) -> float:
    with stitch.open_device(machine, executor="null") as device:
        (x, w) = (np.zeros((64, 64), np.float32) for _ in range(2))
        stitch.wait(device.load(model)(x, w))
        return device.account().total.program_seconds


@pytest.mark.parametrize("machine", ["tiny", "wormhole_n150"])
def test_it_changes_the_simulated_time(machine: str) -> None:
    times = [
        seconds(stitch.compile(layer(), target=machine, math_fidelity=fidelity), machine)
        for fidelity in ("by_type", "hifi2", "hifi4")
    ]
    assert times[0] == times[1] < times[2]


def test_it_changes_no_bit_of_a_result() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    with stitch.open_device("wormhole_n150") as device:
        low, high = (
            device.load(stitch.compile(layer(F32), math_fidelity=fidelity))
            for fidelity in ("lofi", "hifi4")
        )
        assert np.asarray(low(x, w)).tobytes() == np.asarray(high(x, w)).tobytes()


def test_linked_programs_keep_that_of_each_part() -> None:
    first = stitch.compile(layer(), math_fidelity="lofi", name="first")
    second = stitch.compile(layer(), math_fidelity="hifi4", name="second")
    linked = stitch.link([first, second], wiring=["first.y=second.x"])
    by_op = [o.math_fidelity for o in linked.program.operations if o.op == "MatMul"]
    assert by_op == [MathFidelity.LOFI, HIFI4]


def test_a_cache_tells_fidelities_apart(tmp_path: Path) -> None:
    for fidelity in ("lofi", "hifi4"):
        model = stitch.compile(layer(), math_fidelity=fidelity, cache=tmp_path)
        assert told(model.program)[0].value == fidelity
        assert not model.is_from_cache


def test_an_unknown_fidelity_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="lofi, hifi2, hifi3, hifi4"):
        stitch.compile(layer(), math_fidelity="hifi5")

"""What users of runtimes like this one have reported as failures, and what happens here."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.program import DataType, InputKind, Layout, Space, TensorDesc
from stitch.report import copy_lines
from tests.support.machines import without_path
from tests.support.stitched_models import integers, model, one, tiny

F32 = DataType.FLOAT32


def kinds(device: stitch.Device) -> set[str]:
    return {line.kind for line in copy_lines(device.history.plans)}


@pytest.mark.parametrize("bounces", [False, True], ids=["moves", "bounces"])
def test_a_tensor_in_the_way_of_a_programs_scratch_moves_first(bounces: bool) -> None:
    machine = tiny()
    if bounces:
        machine = without_path(machine, Space.L1, Space.L1)

    def build(b: stitch.ComputationGraphBuilder) -> None:
        x = b.input("x", (8, 64), "float32")
        b.output("y", b.reshape(b.softmax(b.reshape(x, (4, 128)) + 1.0), (8, 64)))

    compiled = model("reshape", build, target=machine)
    scratch = compiled.binary.programs[0].scratch
    assert scratch.space is Space.L1
    assert scratch.size_per_bank > 0
    with stitch.open_device(machine, debug=True) as device:
        base = machine.shape.space(Space.L1).base
        low = device.empty(TensorDesc((4, 64), Layout(F32, Space.L1, address=base)))
        device.write(low, integers())
        program = device.load(compiled)
        for i in range(3):
            found = one(program(integers((8, 64), i))).numpy()
            x = integers((8, 64), i).reshape(4, 128) + 1
            e = np.exp(x - x.max(-1, keepdims=True))
            np.testing.assert_allclose(
                found, (e / e.sum(-1, keepdims=True)).reshape(8, 64), rtol=1e-5, atol=1e-9
            )
            np.testing.assert_array_equal(low.numpy(), integers())
        assert low.address is not None
        assert low.address >= base + scratch.size_per_bank
        assert ("bounce" if bounces else "move") in kinds(device)


def test_forward_backward_and_optimizer_each_get_the_weights_in_their_own_layout() -> None:
    def forward(b: stitch.ComputationGraphBuilder) -> None:
        x, w = b.input("x", (8, 8), "float32"), b.input("w", (8, 8), "float32", InputKind.PARAMETER)
        b.output("y", b.matmul(x, w))

    def backward(b: stitch.ComputationGraphBuilder) -> None:
        x, g = b.input("x", (8, 8), "float32"), b.input("g", (8, 8), "float32")
        b.output("dw", b.matmul(b.transpose(x), g))

    def update(b: stitch.ComputationGraphBuilder) -> None:
        w = b.input("w", (8, 8), "float32", InputKind.PARAMETER,
                    stitch.program.Ownership.DONATE)  # fmt: skip
        b.output("next", w - b.input("dw", (8, 8), "float32") * 0.125)

    sources = (
        model("forward", forward, placement=("input.w.layout=tile", "input.w.space=l1")),
        model("backward", backward, placement=("input.g.layout=tile", "output.dw.space=dram")),
        model("update", update, placement=("input.w.space=dram", "input.dw.space=l1")),
    )
    with stitch.open_device("tiny", debug=True) as device:
        f, g, u = (device.load(source) for source in sources)
        weight = np.eye(8, dtype=np.float32)
        w = device.tensor(weight)
        for i in range(4):
            x = integers((8, 8), i) % 3
            y = one(f(x, w))
            dw = one(g(x, y))
            w = one(u(w, dw))
            weight = weight - x.T @ (x @ weight) * np.float32(0.125)
            np.testing.assert_array_equal(w.numpy(), weight)

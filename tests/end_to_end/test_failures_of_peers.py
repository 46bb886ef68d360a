"""What users of runtimes like this one have reported as failures, and what happens here."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.program import TILE_SHAPE, Array, DataType, InputKind, Layout, Space, TensorDesc
from stitch.report import copy_lines
from tests.support.machines import without_path
from tests.support.stitched_models import binary_op, integers, model, one, scaled, tiny

F32 = DataType.FLOAT32
N150 = "wormhole_n150"


def kinds(device: stitch.Device) -> set[str]:
    return {line.kind for line in copy_lines(device.history.plans)}


def test_a_layer_runs_where_the_largest_hole_is_too_small_but_all_holes_together_are_not() -> None:
    """786,432 B live, 305,152 B needed, the largest hole 254,912 B: phi-2's failure."""
    live, needed, hole = 786_432, 305_152, 254_912
    with stitch.open_device(N150) as device:
        l1 = device.machine.shape.space(Space.L1)
        layer = model(
            "layer",
            lambda b: b.output(
                "y", b.neg(b.input("x", (needed // 2048 * l1.banks, 512), "float32"))
            ),
            target=N150,
            placement=("input.x.space=dram", "output.y.space=l1"),
        )
        free = l1.capacity - live
        gaps = -(-free // hole)
        sizes = [live // gaps // 2048 * 2048] * gaps
        sizes[0] += live - sum(sizes)
        held: list[tuple[stitch.Tensor, Array]] = []
        at = l1.base
        for i, size in enumerate(sizes):
            desc = TensorDesc((size // 2048 * l1.banks, 512), Layout(F32, Space.L1, address=at))
            numbers = np.full(desc.shape, float(i + 1), np.float32)
            held.append((device.empty(desc), numbers))
            device.write(held[-1][0], numbers)
            at += size + (hole if i < gaps - 1 else 0)
        view = device.memory_views()["l1"]
        assert view["total_bytes_allocated_per_bank"] == live
        assert view["largest_contiguous_bytes_free_per_bank"] <= hole < needed
        x = np.ones((needed // 2048 * l1.banks, 512), np.float32)
        y = one(device.load(layer)(x))
        np.testing.assert_array_equal(y.numpy(), -x)
        assert y.space is Space.L1
        assert kinds(device) == {"copy", "move"}
        for tensor, numbers in held:
            assert tensor.space is Space.L1
            np.testing.assert_array_equal(tensor.numpy(), numbers)


def test_tensors_that_fit_by_size_but_clash_by_address_are_moved_apart() -> None:
    fixed = ("input.x.space=l1", "input.x.address=0x1000", "output.y.space=l1",
             "output.y.address=0x1800")  # fmt: skip
    with stitch.open_device("tiny", debug=True) as device:
        a, b = (device.load(scaled(n, f, placement=fixed)) for n, f in (("a", 2.0), ("b", 3.0)))
        first = one(a(integers()))
        second = one(a(integers(start=9)))
        third = one(b(second))
        fourth = one(b(first))
        for tensor, right in (
            (first, integers() * 2 + 1),
            (second, integers(start=9) * 2 + 1),
            (third, (integers(start=9) * 2 + 1) * 3 + 1),
            (fourth, (integers() * 2 + 1) * 3 + 1),
        ):
            np.testing.assert_array_equal(tensor.numpy(), right)
        assert fourth.address == 0x1800


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


def test_a_device_tensor_feeds_an_input_on_the_host_and_the_reverse() -> None:
    placement = ("input.x.space=host", "output.y.space=host")
    with stitch.open_device("tiny", debug=True) as device:
        there, here = (
            device.load(scaled("there", 2.0)),
            device.load(scaled("here", 3.0, placement=placement)),
        )
        h = one(here(one(there(integers()))))
        assert h.space is Space.HOST
        y = one(there(h))
        assert y.space is Space.L1
        np.testing.assert_array_equal(y.numpy(), ((integers() * 2 + 1) * 3 + 1) * 2 + 1)


def test_weights_in_another_layout_are_converted_once_not_on_every_run() -> None:
    compiled = binary_op("add", "Add", (32, 32), placement=("input.w.layout=tile",))
    with stitch.open_device("tiny", debug=True) as device:
        add = device.load(compiled)
        w = device.tensor(integers((32, 32))).to_layout(Layout(F32, Space.DRAM))
        for i in range(10):
            np.testing.assert_array_equal(
                one(add(integers((32, 32), i), w)).numpy(), integers((32, 32), i) + w.numpy()
            )
        conversions = [
            line for line in copy_lines(device.history.plans) if "input 'w'" in line.reason
        ]
        assert [line.times for line in conversions] == [1]


def test_a_tensor_is_saved_and_loaded_from_every_space(tmp_path: object) -> None:
    with stitch.open_device("tiny") as device:
        for i, layout in enumerate(
            (Layout(F32), Layout(F32, Space.DRAM), Layout(F32, Space.L1, TILE_SHAPE))
        ):
            path = f"{tmp_path}/{i}.npy"
            np.save(path, device.tensor(integers((32, 32), i)).to_layout(layout))
            back = device.tensor(np.load(path)).to_layout(layout)
            assert stitch.has_layout(back, layout)
            np.testing.assert_array_equal(back.numpy(), integers((32, 32), i))


def test_a_caller_who_keeps_every_result_needs_few_plans() -> None:
    with stitch.open_device("tiny") as device:
        a, b = device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))
        kept = []
        for i in range(50):
            kept.append(one(b(one(a(integers(start=i))))))
            stitch.wait(kept[-1])
        for i, tensor in enumerate(kept):
            np.testing.assert_array_equal(tensor.numpy(), (integers(start=i) * 2 + 1) * 3 + 1)
        assert device.statistics().plans_made <= 8


def test_a_second_model_loads_beside_the_first_and_a_third_is_refused_with_the_facts() -> None:
    """Where nothing may leave DRAM; else constants, which lie in their file too, take turns."""

    def times(factor: int) -> stitch.CompiledModel:
        weight = np.full((256, 1024), factor, np.float32)

        def build(b: stitch.ComputationGraphBuilder) -> None:
            b.output("y", b.matmul(b.input("x", (1, 256), "float32"), b.parameter("w", weight)))

        return model("net", build)

    compiled = [times(factor) for factor in range(1, 10)]
    with stitch.open_device("tiny", spill=False) as device:
        x = np.ones((1, 256), np.float32)
        first = device.load(compiled[0].encode())
        one(first(x)).numpy()
        with pytest.raises(stitch.OutOfMemoryError) as refused:
            loaded = [device.load(each.encode()) for each in compiled]
            del loaded
        assert refused.value.exit_code == 5
        message = str(refused.value)
        assert "free" in message
        assert "largest hole" in message
        np.testing.assert_array_equal(one(first(x)).numpy(), np.full((1, 1024), 256, np.float32))
    with stitch.open_device("tiny") as device:
        loaded = [device.load(each.encode()) for each in compiled]
        for factor, program in (*enumerate(loaded, 1), *enumerate(loaded, 1)):
            result = one(program(x)).numpy()
            np.testing.assert_array_equal(result, np.full((1, 1024), 256 * factor, np.float32))

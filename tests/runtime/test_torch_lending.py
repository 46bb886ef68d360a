"""Tensors of PyTorch on devices whose memory is PyTorch's: read in place, without copies."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.errors import LayoutError, LinkError, TaskError, UsageError
from stitch.graph import ComputationGraphBuilder
from stitch.memory import LENT_ADDRESSES
from stitch.program import DataType, Layout, Space, TensorDesc
from stitch.runtime import lending
from tests.support.stitched_models import consuming, one

W = np.arange(64, dtype=np.float32).reshape(8, 8) % 5


class Elsewhere(torch.Tensor):  # type: ignore[misc]  # torch has no types here
    """A tensor that says that it lies on a card which is not there."""

    device = torch.device("cuda:1")


def product(name: str = "product", kind: str = "float32") -> stitch.CompiledModel:
    b = ComputationGraphBuilder(name)
    x = b.input("x", (4, 8), kind)
    b.output("y", b.op("Relu", b.op("MatMul", x, W.astype(kind))))
    compiled: stitch.CompiledModel = stitch.compile(b.build(), target="cuda")
    return compiled


def expected(x: Any) -> np.ndarray:
    return np.maximum(np.asarray(x) @ W, 0)


@pytest.fixture(name="device")
def open_device() -> Iterator[stitch.Device]:
    with stitch.open_device("torch:cpu") as device:
        yield device


def lent(device: stitch.Device) -> dict[int, Any]:
    """The bytes that are lent to DRAM, by address."""
    found: dict[int, Any] = device.backend.spaces[Space.DRAM]._lent
    return found


def numbers(first: int = -16) -> torch.Tensor:
    return torch.arange(first, first + 32, dtype=torch.float32).reshape(4, 8)


def test_a_program_reads_a_tensor_at_its_own_address(device: stitch.Device) -> None:
    program, x = device.load(product()), numbers()
    before = device.account().total.nbytes
    with stitch.forbid_copies(device):
        y = program(x)
    ((region, _),) = lent(device).values()
    assert region.data_ptr() == x.data_ptr()
    assert device.account().total.nbytes == before
    np.testing.assert_array_equal(y.numpy(), expected(x))


def test_a_tensor_may_be_written_after_the_call(device: stitch.Device) -> None:
    program, x = device.load(product()), numbers()
    wanted = expected(x)
    y = program(x)
    x.zero_()
    np.testing.assert_array_equal(y.numpy(), wanted)


def test_a_pipeline_follows_writes_and_keeps_its_plan(device: stitch.Device) -> None:
    pipe = stitch.Pipeline([device.load(product("a")), device.load(product("b"))])
    x, other = numbers(), numbers(3)
    for turn in range(8):
        x += turn
        for each in (x, other):
            np.testing.assert_array_equal(pipe(each).numpy(), expected(expected(each)))
        if turn == 3:
            made = device.statistics().bindings_made
    assert device.statistics().bindings_made == made
    assert len(lent(device)) == 2


def test_a_borrowed_tensor_lives_as_long_as_its_device_tensor(device: stitch.Device) -> None:
    program, x = device.load(product()), numbers()
    there, gone = device.tensor(x, borrow=True), weakref.ref(x.untyped_storage())
    wanted = expected(x)
    address = x.data_ptr()
    assert there.space is Space.DRAM and (there.address or 0) >= LENT_ADDRESSES
    del x
    np.testing.assert_array_equal(program(there).numpy(), wanted)
    seen = torch.from_dlpack(there)
    assert seen.data_ptr() == address
    seen[0] = 1
    np.testing.assert_array_equal(program(there).numpy(), expected(seen))
    del there, seen
    device.wait()
    gc.collect()
    assert not lent(device) and gone() is None


def test_a_tensor_with_strides_is_refused_where_it_may_not_be_copied(device: stitch.Device) -> None:
    program, x = device.load(product()), numbers()
    strided = x.t().contiguous().t()
    with pytest.raises(UsageError, match=r"in place\n.*borrow=True\)\n.*strides \(1, 4\)"):
        device.tensor(strided, borrow=True)
    with (
        pytest.raises(TaskError, match=r"needs a copy, which forbid_copies\(\) forbids"),
        stitch.forbid_copies(device),
    ):
        program(strided)
    np.testing.assert_array_equal(program(strided).numpy(), expected(x))
    held = device.tensor(strided)
    with stitch.forbid_copies(device):
        np.testing.assert_array_equal(program(held).numpy(), expected(x))


def test_a_copy_is_made_on_the_device_and_goes_with_its_tensor(device: stitch.Device) -> None:
    program, x = device.load(product()), numbers()
    copied = device.tensor(x)
    wanted = expected(x)
    x.zero_()
    assert copied.space is Space.DRAM
    y = program(copied)
    del copied
    np.testing.assert_array_equal(y.numpy(), wanted)
    device.wait()
    assert not lent(device)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x.t().contiguous().t(), id="transposed"),
        pytest.param(lambda x: x.repeat_interleave(2, 0)[::2], id="strided"),
        pytest.param(lambda x: torch._neg_view(-x), id="negated"),
        pytest.param(lambda x: x.double(), id="double"),
        pytest.param(lambda x: torch.nn.Parameter(x), id="parameter"),
        pytest.param(lambda x: torch.cat([x.new_zeros(1, 8), x])[1:], id="part"),
        pytest.param(lambda x: x.tolist(), id="list"),
        pytest.param(lambda x: x.numpy(), id="array"),
    ],
)
def test_tensors_of_any_form_give_the_same_result(device: stitch.Device, change: Any) -> None:
    program, pipe = device.load(product()), stitch.Pipeline([device.load(product("a"))])
    for turn in range(3):
        x = numbers(turn)
        given = change(x)
        np.testing.assert_array_equal(program(given).numpy(), expected(x))
        np.testing.assert_array_equal(pipe(given).numpy(), expected(x))
    device.wait()
    # Copies of what is not dense are gone.
    assert len(lent(device)) <= 3 and len(lent(device)) == len(device.lent)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_narrow_types_are_read_in_place(device: stitch.Device, kind: str) -> None:
    program, x = device.load(product(kind=kind)), numbers().to(getattr(torch, kind))
    np.testing.assert_array_equal(
        program(x).numpy().astype(np.float32),
        torch.from_numpy(expected(x.float())).to(x.dtype).float(),
    )
    assert len(lent(device)) == 1


def test_empty_tensors_and_numbers_are_arguments(device: stitch.Device) -> None:
    b = ComputationGraphBuilder("scaled")
    x, factor = b.input("x", (0, 3), "float32"), b.input("factor", (), "float32")
    b.output("y", b.op("Mul", x, factor))
    b.output("z", b.op("Neg", factor))
    program = device.load(stitch.compile(b.build(), target="cuda"))
    y, z = program(torch.empty(0, 3), torch.tensor(2.0))
    assert y.numpy().shape == (0, 3) and z.item() == -2


def test_a_wrong_shape_or_type_is_refused(device: stitch.Device) -> None:
    program = device.load(product())
    with pytest.raises(LinkError, match="4x8"):
        program(torch.zeros(3, 8))
    with pytest.raises(LinkError):
        program(torch.zeros(4, 8, dtype=torch.int32))
    with pytest.raises(LayoutError, match="to_dense"):
        program(torch.zeros(4, 8).to_sparse())
    np.testing.assert_array_equal(program(numbers()).numpy(), expected(numbers()))


def test_a_tensor_of_another_card_is_refused(device: stitch.Device) -> None:
    program, pipe = device.load(product()), stitch.Pipeline([device.load(product("a"))])
    elsewhere = numbers().as_subclass(Elsewhere)
    for call in (program, pipe, device.tensor):
        with pytest.raises(UsageError, match="on cuda:1") as caught:
            call(elsewhere)
        assert "tensor.to('cpu')" in str(caught.value)


def test_a_donated_tensor_is_not_overwritten(device: stitch.Device) -> None:
    program, x = device.load(consuming("eat", 2.0, (4, 8), target="cuda")), numbers()
    graph = stitch.TaskGraph("loop")
    given = graph.input(TensorDesc((4, 8), Layout(DataType.FLOAT32)), "x")
    graph.output(graph.call(program, given), "y")
    prepared = device.prepare(graph)
    for call in (program, prepared, program, prepared):
        np.testing.assert_array_equal(one(call(x)).numpy(), x * 2)
    with pytest.raises(TaskError, match="donated"):
        program(device.tensor(x, borrow=True))
    np.testing.assert_array_equal(x, numbers())


def test_many_tensors_do_not_accumulate(
    device: stitch.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "MAX_LENT", 4)
    program = device.load(product())
    held = [numbers(first) for first in range(12)]
    for x in (*held, *held):
        np.testing.assert_array_equal(program(x).numpy(), expected(x))
    device.wait()
    assert len(device.lent) == 4 and len(lent(device)) == 4


def test_memory_that_is_used_again_is_read_anew(device: stitch.Device) -> None:
    program = device.load(product())
    for turn in range(40):
        x = numbers(turn)
        np.testing.assert_array_equal(program(x).numpy(), expected(x))
        del x


def test_a_host_function_gets_a_copy(device: stitch.Device) -> None:
    program, found = device.load(product()), list[Any]()

    @stitch.task
    def queues(array: np.ndarray) -> None:
        found.append(program(torch.from_numpy(array.copy())))

    device.call(queues, numbers().numpy())
    device.wait()
    np.testing.assert_array_equal(found[0].numpy(), expected(numbers()))


def test_a_closed_device_refuses_and_keeps_nothing() -> None:
    device = stitch.open_device("torch:cpu")
    program, x = device.load(product()), numbers()
    program(x)
    device.close()
    assert not device.lent
    with pytest.raises(TaskError, match="closed"):
        program(x)
    with pytest.raises(TaskError, match="closed"):
        device.tensor(x, borrow=True)


def test_other_machines_in_memory_of_pytorch_copy_as_before() -> None:
    b = ComputationGraphBuilder("tiny")
    b.output("y", b.op("Neg", b.input("x", (4, 8), "float32")))
    with stitch.open_device("tiny", executor="torch:cpu") as device:
        program = device.load(stitch.compile(b.build(), target="tiny"))
        np.testing.assert_array_equal(program(numbers()).numpy(), -numbers())


def test_a_training_keeps_its_state_on_the_device() -> None:
    def losses(
        machine: str, executor: str | None, *, is_lent: bool
    ) -> tuple[list[float], list[int]]:
        random = np.random.default_rng(0)
        b = ComputationGraphBuilder("net")
        x = b.input("x", (4, 8), "float32")
        weight = b.parameter("weight", random.standard_normal((2, 8)).astype(np.float32))
        b.output("y", b.linear(x, weight))
        loss, optimizer = stitch.losses.MSELoss(), stitch.AdamW(lr=0.05)
        model = stitch.compile(b.build(), target="cuda", optimizer=optimizer, loss=loss)
        assert model.training is not None
        given, wanted = numbers() / 16, np.ones((4, 2), np.float32)
        with stitch.open_device(machine, executor=executor) as device:
            batch: Any = device.tensor(given, borrow=True) if is_lent else given.numpy()
            with model.training.start(device) as instance:
                found, copies = list[float](), list[int]()
                for _ in range(6):
                    found += instance.step([(batch, wanted)])
                    copies.append(device.account().total.copies)
        return found, copies

    expected, _ = losses("cuda", "numpy", is_lent=False)
    for is_lent in (False, True):
        found, copies = losses("torch:cpu", None, is_lent=is_lent)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        # A step copies the batch and its label, and no state.
        assert copies[-1] - copies[-2] == 2 and copies[-2] - copies[-3] == 2


def test_a_lent_tensor_whose_owner_takes_other_bytes_keeps_its_own() -> None:
    with stitch.open_device("torch:cpu") as device:
        program, x = device.load(product()), torch.ones(4, 8)
        lent = device.tensor(x, borrow=True)
        storage = weakref.ref(x.untyped_storage())
        x.data = torch.full((4, 8), 2.0)  # As `module.to()` does.
        gc.collect()
        assert storage() is not None
        np.testing.assert_array_equal(one(program(lent)).numpy(), expected(np.ones((4, 8))))
        del lent

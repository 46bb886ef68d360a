"""Tensors: getters, layouts, host arrays of every kind, reading and writing (after tt-mlir)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import stitch
from stitch.errors import StitchError, UsageError
from stitch.program import TILE_SHAPE, Array, DataType, Layout, Space, TensorDesc
from stitch.program import host_layout as host
from tests.support.stitched_models import integers, one, scaled

F32, BF16 = DataType.FLOAT32, DataType.BFLOAT16
SHAPES = ((64, 128), (4, 4))
LAYOUTS = {
    "dram": Layout(F32, Space.DRAM),
    "l1": Layout(F32, Space.L1),
    "l1 tiles": Layout(F32, Space.L1, TILE_SHAPE),
    "dram bf16 tiles": Layout(BF16, Space.DRAM, TILE_SHAPE),
    "host space": Layout(F32, Space.HOST),
}
DTYPES = (
    np.float32, np.float16, np.float64, ml_dtypes.bfloat16, np.int8, np.int16, np.int32, np.int64,
    np.uint8, np.uint16, np.uint32, np.uint64, np.bool_,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_getters_tell_type_shape_stride_volume_and_description(dtype: Any) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    with stitch.open_device("tiny", debug=True) as device:
        tensor = device.tensor(array)
        assert tensor.data_type.dtype == array.dtype
        assert tensor.shape == (2, 3, 4)
        assert tensor.stride == (12, 4, 1)
        assert tensor.volume == 24
        assert len(tensor) == 2
        assert tensor.desc == TensorDesc((2, 3, 4), host(tensor.data_type))
        assert tensor.is_allocated
        assert not tensor.is_pending
        assert tensor.device is device
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize(
    "array",
    [
        np.ones(3, np.complex64),
        np.ones(3, np.complex128),
        np.array([object()]),
        np.array(["a", "b"]),
        np.array(["2024-01-01"], "datetime64[D]"),
        np.zeros(3, np.void(b"ab").dtype),
    ],
    ids=["complex64", "complex128", "object", "str", "datetime", "void"],
)
def test_arrays_of_unsupported_types_are_refused_by_name(array: Array) -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(scaled("a", 2.0, (3,)))
        for attempt in (device.tensor, program):
            with pytest.raises(StitchError, match="array") as refused:
                attempt(array)
            assert str(array.dtype) in str(refused.value) or "not numeric" in str(refused.value)
        device.flush()
        assert device.statistics().plans_made == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_to_layout_keeps_shape_volume_and_numbers_there_and_back(
    name: str, shape: tuple[int, ...]
) -> None:
    array = integers(shape)
    with stitch.open_device("wormhole_n150", debug=True) as device:
        there = device.tensor(array).to_layout(LAYOUTS[name], copy=True)
        assert (there.shape, there.volume) == (shape, array.size)
        assert there.layout.without_address() == LAYOUTS[name]
        back = there.to_layout(host(F32))
        np.testing.assert_array_equal(there.numpy().astype(np.float32), array)
        np.testing.assert_array_equal(back.numpy(), array)
        assert there.address is not None


def test_to_layout_with_an_address_lies_there() -> None:
    wanted = Layout(F32, Space.L1, address=0x2000)
    with stitch.open_device("tiny", debug=True) as device:
        tensor = device.tensor(integers()).to_layout(wanted)
        assert tensor.address == 0x2000
        assert stitch.has_layout(tensor, wanted)
        assert not stitch.has_layout(tensor, Layout(F32, Space.L1, address=0x2400))
        np.testing.assert_array_equal(tensor.numpy(), integers())


def test_to_layout_refuses_another_shape_and_layouts_the_machine_cannot_hold() -> None:
    with stitch.open_device("host") as device:
        tensor = device.tensor(integers())
        with pytest.raises(stitch.LayoutError, match="cannot change the shape"):
            tensor.to_layout(TensorDesc((64, 4), host(F32)))
        with pytest.raises(stitch.LayoutError, match="has no l1"):
            tensor.to_layout(LAYOUTS["l1"])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["dram", "l1", "l1 tiles"])
def test_has_layout_is_true_for_its_own_layout_alone(name: str, shape: tuple[int, ...]) -> None:
    with stitch.open_device("wormhole_n150") as device:
        tensor = device.tensor(integers(shape)).to_layout(LAYOUTS[name])
        for pending in (True, False):
            assert tensor.is_pending is pending
            for other, layout in LAYOUTS.items():
                assert stitch.has_layout(tensor, layout) is (other == name)
                assert stitch.has_layout(tensor, TensorDesc(shape, layout)) is (other == name)
            assert not stitch.has_layout(tensor, TensorDesc((1, *shape), LAYOUTS[name]))
            stitch.wait(tensor)


@pytest.mark.parametrize("source", [F32, BF16], ids=["from f32", "from bf16"])
@pytest.mark.parametrize("target", [F32, BF16], ids=["to f32", "to bf16"])
@pytest.mark.parametrize("space", [Space.DRAM, Space.L1], ids=["dram", "l1"])
def test_row_major_typecasts_happen_on_the_device(
    space: Space, source: DataType, target: DataType
) -> None:
    with stitch.open_device("tiny", debug=True) as device:
        tensor = device.tensor(integers()).to_layout(Layout(source, space))
        cast = tensor.to_layout(Layout(target, space))
        assert cast.data_type is target
        np.testing.assert_array_equal(cast.numpy().astype(np.float32), integers())


@pytest.mark.parametrize(
    "strided",
    [
        lambda a: a,
        lambda a: np.asfortranarray(a),
        lambda a: np.ascontiguousarray(a.T).T,
        lambda a: np.repeat(np.repeat(a, 2, 0), 3, 1)[::2, ::3],
        lambda a: np.ascontiguousarray(a[::-1, ::-1])[::-1, ::-1],
    ],
    ids=["contiguous", "fortran", "transposed", "sliced", "reversed"],
)
@pytest.mark.parametrize("borrow", [False, True], ids=["copied", "borrowed"])
def test_strided_host_arrays_keep_their_elements(strided: Any, borrow: bool) -> None:
    array = strided(integers())
    np.testing.assert_array_equal(array, integers())
    with stitch.open_device("tiny", debug=True) as device:
        program = device.load(scaled("a", 2.0))
        tensor = device.tensor(array, borrow=borrow)
        np.testing.assert_array_equal(tensor.numpy(), integers())
        np.testing.assert_array_equal(one(program(tensor)).numpy(), integers() * 2 + 1)
        np.testing.assert_array_equal(one(program(array)).numpy(), integers() * 2 + 1)
        tiled = tensor.to_layout(LAYOUTS["l1 tiles"])
        np.testing.assert_array_equal(tiled.numpy(), integers())


def test_a_borrowed_array_is_its_owner_and_a_copied_one_is_not() -> None:
    array = integers()
    with stitch.open_device("tiny") as device:
        borrowed, copied = device.tensor(array, borrow=True), device.tensor(array)
        array[0, 0] = 99
        assert borrowed.numpy()[0, 0] == 99
        assert copied.numpy()[0, 0] == 0
        device.write(borrowed, integers(start=5))
        assert array[0, 0] == 5


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_empty_tensor_takes_what_is_written_and_feeds_programs(name: str) -> None:
    with stitch.open_device("tiny", debug=True) as device:
        program = device.load(scaled("a", 2.0, (8, 8)))
        tensor = device.empty(TensorDesc((8, 8), LAYOUTS[name]))
        device.write(tensor, integers((8, 8)))
        np.testing.assert_array_equal(tensor.numpy().astype(np.float32), integers((8, 8)))
        np.testing.assert_array_equal(one(program(tensor)).numpy(), integers((8, 8)) * 2 + 1)
        device.write(tensor, integers((8, 8), 3))
        np.testing.assert_array_equal(one(program(tensor)).numpy(), integers((8, 8), 3) * 2 + 1)
        tensor.deallocate()


def test_a_tensor_can_be_copied_onto_another_through_dlpack() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        source = device.tensor(integers()).to_layout(LAYOUTS["l1"])
        target = device.empty(TensorDesc((4, 64), LAYOUTS["dram"]))
        device.write(target, source)
        np.testing.assert_array_equal(target.numpy(), integers())


def test_get_layout_says_what_a_program_of_a_binary_wants() -> None:
    compiled = scaled("a", 2.0, placement=("input.x.space=dram", "input.x.layout=tile"))
    layout = stitch.get_layout(compiled, "a", "x")
    assert layout == LAYOUTS["dram bf16 tiles"].__class__(F32, Space.DRAM, TILE_SHAPE)
    assert stitch.get_layout(compiled.encode(), 0, 0) == layout
    with pytest.raises(UsageError, match="no input 'z'"):
        stitch.get_layout(compiled, 0, "z")
    with pytest.raises(UsageError, match="has no input 1"):
        stitch.get_layout(compiled, 0, 1)
    with pytest.raises(StitchError, match="no program 'b'"):
        stitch.get_layout(compiled, "b", 0)


def test_scalars_and_empty_tensors_pass_through_programs() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        scalar = device.load(scaled("scalar", 3.0, ()))
        nothing = device.load(scaled("nothing", 3.0, (0, 4)))
        assert one(scalar(np.float32(2))).item() == 7.0
        assert one(nothing(np.zeros((0, 4), np.float32))).numpy().shape == (0, 4)
        with pytest.raises(TypeError, match="no length"):
            len(one(scalar(1.0)))


@pytest.mark.parametrize("value", [0.0, 2.5, -1.0])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_is_a_truth_and_a_number(value: float, shape: tuple[int, ...]) -> None:
    with stitch.open_device("tiny") as device:
        tensor = device.tensor(np.full(shape, value, np.float32))
        assert bool(tensor) is bool(value)
        assert (float(tensor), int(tensor)) == (value, int(value))


@pytest.mark.parametrize("convert", [bool, float, int])
@pytest.mark.parametrize("shape", [(2,), (1, 3), (0,)])
def test_several_elements_are_no_truth_and_no_number(convert: Any, shape: tuple[int, ...]) -> None:
    with stitch.open_device("tiny") as device:
        tensor = device.tensor(np.zeros(shape, np.float32))
        with pytest.raises(UsageError, match=r"of one element(.|\n)*tensor\.numpy\(\)"):
            convert(tensor)


@pytest.mark.parametrize("name", ["argmax", "tolist", "size", "detach", "logits"])
def test_what_arrays_have_and_tensors_have_not_is_named_with_what_has_it(name: str) -> None:
    with stitch.open_device("tiny") as device:
        tensor = device.tensor(np.ones(3, np.float32))
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': use tensor\.numpy\(\)"):
            getattr(tensor, name)
        assert not hasattr(tensor, name) and not hasattr(tensor, "__array_interface__")


@pytest.mark.parametrize("call", ["relu", "cat", "copy"])
def test_functions_of_torch_tell_how_a_device_tensor_becomes_one_of_torch(call: str) -> None:
    calls: dict[str, Any] = {
        "relu": torch.relu, "cat": lambda tensor: torch.cat([tensor, tensor]),
        "copy": lambda tensor: torch.zeros(3).copy_(tensor),
    }  # fmt: skip
    with stitch.open_device("tiny") as device:
        tensor = device.tensor(np.ones(3, np.float32))
        with pytest.raises(TypeError, match=r"takes no device tensor: pass torch\.as_tensor"):
            calls[call](tensor)
        assert torch.equal(calls[call](torch.as_tensor(tensor))[:3], torch.ones(3))


def test_tensors_are_compared_with_tensors_only_and_are_equal_to_themselves() -> None:
    with stitch.open_device("tiny") as device:
        one_tensor, other = device.tensor(np.zeros(3)), device.tensor(np.zeros(3))
        assert one_tensor in [other, one_tensor] and one_tensor not in [None, other]
        assert len({one_tensor, other, one_tensor}) == 2
        for stranger in (0, 0.0, np.zeros(3), [0.0], "x"):
            with pytest.raises(TypeError, match=r"tensor\.numpy\(\) =="):
                assert one_tensor == stranger
            with pytest.raises(TypeError, match=r"tensor\.numpy\(\) =="):
                assert one_tensor != stranger
        assert (np.zeros(3) == one_tensor).all(), "an array reads it"


@pytest.mark.parametrize("name", LAYOUTS)
def test_to_the_layout_that_it_has_a_tensor_is_itself_unless_a_copy_is_asked_for(name: str) -> None:
    layout, array = LAYOUTS[name], np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    with stitch.open_device("tiny", debug=True) as device:
        given = device.tensor(array)
        with stitch.forbid_copies(device):
            assert stitch.to_layout(given, given.layout) is given
        tensor = stitch.to_layout(given, layout, copy=True)
        assert stitch.to_layout(tensor, layout) is tensor  # While it is pending, too.
        stitch.wait(tensor)
        with stitch.forbid_copies(device):
            assert stitch.to_layout(tensor, layout) is tensor
            assert tensor.to_layout(tensor.desc) is tensor
            assert tensor.to_layout(tensor.layout, retain=False) is tensor
        copied = stitch.to_layout(tensor, layout, copy=True)
        tensor.deallocate()
        assert copied is not tensor
        assert copied.numpy()[0, 1] == 1

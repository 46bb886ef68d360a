"""Tensors that are evicted from a full DRAM to the host are read there and come back for use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import stitch
from stitch.machine import Machine, load_machine
from stitch.planner import Certificate, check_certificate
from stitch.program import Array, Layout, Space
from tests.support.stitched_models import integers, one, scaled

WAITS = Space.HOST


def cramped() -> Machine:
    """The tiny machine with room for a few tensors in DRAM."""
    tiny = load_machine("tiny")
    assert tiny.shape.dram is not None
    dram = replace(tiny.shape.dram, base=0, limit=4096)
    return replace(tiny, shape=replace(tiny.shape, dram=dram))


def crowd(device: stitch.Device, count: int = 24) -> tuple[list[stitch.Tensor], list[Array]]:
    """Tensors that were placed in DRAM, more than have room there, and their elements."""
    arrays = [integers() + np.float32(i) for i in range(count)]
    tensors = []
    for array in arrays:
        there = Layout(device.tensor(array).layout.data_type, Space.DRAM)
        tensors.append(device.to_layout(device.tensor(array), there))
    device.flush()
    return tensors, arrays


def waiting(tensors: list[stitch.Tensor]) -> list[int]:
    return [i for i, tensor in enumerate(tensors) if tensor.layout.space is WAITS]


@pytest.mark.parametrize("window", [1, 8, 64])
def test_tensors_without_room_in_dram_are_read_from_the_host(window: int) -> None:
    with stitch.open_device(cramped(), debug=True, window=window) as device:
        tensors, arrays = crowd(device)
        out = waiting(tensors)
        assert out and len(out) < len(tensors)
        for tensor, array in zip(tensors, arrays, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
        assert waiting(tensors) == out, "reading carries nothing back"
        use = device.memory_report()
        assert f"{WAITS.value}" in use
        assert "evict" in device.explain() and "[capacity" in device.explain()


def test_what_waits_comes_back_when_a_program_reads_it() -> None:
    with stitch.open_device(cramped(), debug=True) as device:
        double = device.load(scaled("double", 2.0, target=cramped()))
        tensors, arrays = crowd(device)
        for i in waiting(tensors):
            np.testing.assert_array_equal(one(double(tensors[i])).numpy(), arrays[i] * 2 + 1)
        for tensor, array in zip(tensors, arrays, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)


def test_a_view_of_what_waits_shares_its_bytes() -> None:
    with stitch.open_device(cramped()) as device:
        tensors, arrays = crowd(device, 4)
        rows = tensors[0][1:3]
        more = [crowd(device) for _ in range(3)]
        assert more and waiting(tensors)[:1] == [0] and rows.layout.space is WAITS
        device.write(tensors[0], arrays[0] + np.float32(7))
        np.testing.assert_array_equal(rows.numpy(), arrays[0][1:3] + 7)


def test_without_spilling_a_full_dram_is_an_error_that_loses_nothing() -> None:
    with stitch.open_device(cramped(), spill=False, window=1) as device:
        kept: list[stitch.Tensor] = []
        with pytest.raises(stitch.OutOfMemoryError, match="dram cannot hold") as refused:
            for i in range(24):
                there = Layout(device.tensor(integers()).layout.data_type, Space.DRAM)
                kept.append(device.to_layout(device.tensor(integers() + np.float32(i)), there))
        assert refused.value.certificate is not None
        assert "spill=True" in str(refused.value)
        for i, tensor in enumerate(kept):
            assert tensor.layout.space is Space.DRAM
            np.testing.assert_array_equal(tensor.numpy(), integers() + np.float32(i))


def test_out_of_memory_names_what_an_exported_array_pins_and_its_proof_is_confirmed() -> None:
    with stitch.open_device(cramped(), spill=False, window=1) as device:
        there = Layout(device.tensor(integers()).layout.data_type, Space.DRAM)
        large = np.vstack([integers(), integers()])
        kept = [device.to_layout(device.tensor(large), there)]
        exported = np.from_dlpack(kept[0])
        with pytest.raises(stitch.OutOfMemoryError) as refused:
            kept.extend(device.to_layout(device.tensor(integers()), there) for _ in range(24))
        said = str(refused.value)
        pinned = "allocated before, referenced by a handle, pinned by an exported array"
        assert f"(1024 B, {pinned})" in said
        assert "(512 B, allocated before, referenced by a handle)" in said
        certificate = refused.value.certificate
        assert isinstance(certificate, Certificate) and check_certificate(certificate) is None
        np.testing.assert_array_equal(exported, large)
        del exported

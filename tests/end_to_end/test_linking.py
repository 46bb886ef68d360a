"""`stitch.link`: programs of any source become one, with the same bits, that is saved and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import IncompatibleError, UsageError
from stitch.program import Array
from tests.support.stitched_models import integers, model, one, scaled


def _apart(*models: Any) -> Array:
    with stitch.open_device("tiny") as device:
        found: Any = integers()
        for each in models:
            found = one(device.load(each)(found))
        result: Array = found.numpy()
        return result


def test_sources_of_every_kind_are_linked_to_one_program(tmp_path: Path) -> None:
    a, b = scaled("a", 2.0), scaled("b", 3.0)
    a.save(tmp_path / "front.ttb")
    expected = _apart(a, b, a)
    with stitch.open_device("tiny") as device:
        sources: list[Any] = [
            tmp_path / "front.ttb", str(tmp_path / "front.ttb"), a.encode(), a, a.binary,
            a.binary.programs[0], device.load(a), stitch.link([a]),
        ]  # fmt: skip
        for source in sources:
            linked = stitch.link([source, b, source])
            assert isinstance(linked, stitch.LinkedModel)
            np.testing.assert_array_equal(one(device.load(linked)(integers())).numpy(), expected)
        linked.save(tmp_path / "aba.ttb")
        for again in (tmp_path / "aba.ttb", linked.encode(), stitch.load(linked)):
            found = device.load(again)
            assert found.name == "a_b_a"
            np.testing.assert_array_equal(one(found(integers())).numpy(), expected)
    np.testing.assert_array_equal(one(linked(integers())).numpy(), expected)
    assert "program @a_b_a" in linked.text() and repr(linked).startswith("<LinkedModel for tiny:")


def test_nothing_is_copied_between_what_was_linked_and_types_still_change() -> None:
    a = scaled("a", 1.7, placement=("output.y.data_type=bfloat16", "output.y.layout=tile"))
    b = scaled("b", 0.3, placement=("input.x.space=dram",))
    with stitch.open_device("tiny") as device:
        linked = device.load(stitch.link([a, b], name="ab"))
        x = device.tensor(integers()).to_layout(linked.program.input_desc(0))
        with stitch.forbid_copies(device):
            found = one(linked(x))
        np.testing.assert_array_equal(found.numpy(), _apart(a, b))
    casts = [o.op for o in linked.program.operations].count("Cast")
    assert casts == 2  # to bfloat16 and back


def test_a_wiring_says_what_feeds_what_and_what_stays() -> None:
    def cell(b: stitch.ComputationGraphBuilder) -> None:
        x, h = b.input("x", (4, 64), "float32"), b.input("h", (4, 64), "float32")
        b.output("y", x - h)

    a, minus = scaled("a", 2.0), model("minus", cell)
    linked = stitch.link(
        [a, a, minus],
        {("minus", "x"): (0, "y"), ("minus", "h"): (1, "y"), (1, "x"): (0, "y")},
        keep=[(1, "y")],
    )
    once, twice = integers() * 2 + 1, (integers() * 2 + 1) * 2 + 1
    results = linked(integers())
    assert isinstance(results, tuple)
    found = dict(zip([slot.name for slot in linked.program.outputs], results, strict=True))
    np.testing.assert_array_equal(found["y"].numpy(), twice)
    np.testing.assert_array_equal(found["minus.y"].numpy(), once - twice)
    texts = stitch.link([a, a, minus], ["0.y=1.x", "0.y=minus.x", "1.y=minus.h"], keep="1.y")
    assert texts.encode() == linked.encode()
    free = stitch.link([a, minus], [])
    assert [slot.name for slot in free.program.inputs] == ["x", "minus.x", "h"]


@pytest.mark.parametrize(
    ("wiring", "said"),
    [
        ("a.q=b.x", "'a' has no output 'q' (it has y)"),
        ({("b", "q"): ("a", "y")}, "'b' has no input 'q' (it has x)"),
        ("b.y=a.x", "leads backwards"),
        (["a.y=b.x", "0.0=1.0"], "fed twice"),
        (3, "link takes a text or a mapping or a list"),
    ],
)
def test_a_wiring_that_cannot_be_is_said(wiring: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        stitch.link([scaled("a", 2.0), scaled("b", 3.0)], wiring)
    assert said in str(caught.value)


def test_what_cannot_be_linked_is_said(tmp_path: Path) -> None:
    a, alone = scaled("a", 2.0), scaled("a", 2.0).binary.programs[0]
    with pytest.raises(UsageError, match="without programs"):
        stitch.link([])
    wrong: Any
    for wrong in (a, "a.ttb", 5, [a, 5]):
        with pytest.raises(UsageError, match="link takes a list of paths"):
            stitch.link(wrong)
    with pytest.raises(UsageError, match=r"several modules are called 'a'(.|\n)*indices"):
        stitch.link([a, a], "a.y=a.x")
    with pytest.raises(UsageError, match=r"target=NAME"):
        stitch.link([alone, alone])
    assert stitch.link([alone, alone], target="tiny").encode() == stitch.link([a, a]).encode()
    other = stitch.compile(a.graph, target="wormhole_n150")
    with pytest.raises(IncompatibleError, match=r"'wormhole_n150'(.|\n)*'tiny'"):
        stitch.link([a, other])
    with pytest.raises(UsageError, match="'a' has no output 'z'"):
        stitch.link([a], keep=["a.z"])
    with pytest.raises(stitch.StitchError, match=r"none\.ttb"):
        stitch.link([tmp_path / "none.ttb"])


def test_damaged_constants_do_not_become_sound_by_linking() -> None:
    def build(b: stitch.ComputationGraphBuilder) -> None:
        b.output("y", b.input("x", (4, 64), "float32") + b.parameter("w", integers()))

    data = bytearray(model("m", build).encode())
    data[-3] ^= 0x40
    with pytest.raises(stitch.FormatError, match="damaged"):
        stitch.link([bytes(data), scaled("a", 2.0)])
    with stitch.open_device("tiny") as device:
        loaded = device.load(bytes(data))
        with pytest.raises(stitch.FormatError, match="damaged"):
            stitch.link([loaded])


def test_many_programs_have_a_short_name_and_names_that_differ() -> None:
    many = stitch.link([scaled("layer", 0.5)] * 40)
    assert many.program.name == "layer_and_39_more"
    names = [value.name for value in many.program.values]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("wiring", [None, "a.y=wide.x"])
def test_programs_that_do_not_fit_are_one_error_with_both_descriptors(wiring: Any) -> None:
    def build(b: stitch.ComputationGraphBuilder) -> None:
        b.output("y", b.input("x", (8, 8), "float32") + 1.0)

    a, wide = scaled("a", 2.0), model("wide", build)
    with pytest.raises(stitch.LinkError) as caught:
        stitch.link([a, wide], wiring)
    descriptors = (a.program.output_desc(0), wide.program.input_desc(0))
    assert all(desc.text() in str(caught.value) for desc in descriptors)
    assert "'a'" in str(caught.value) and "'wide'" in str(caught.value)

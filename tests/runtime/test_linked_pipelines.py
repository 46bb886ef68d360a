"""`Pipeline(link=True)`: one program with the bits of several, where the executor promises that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import FormatError, LinkError, OutOfMemoryError, UsageError
from stitch.graph import ComputationGraphBuilder
from stitch.program import Array, InputKind, Ownership, Program
from stitch.runtime.executors import make_executor
from tests.support.executors.calling import CallingExecutor
from tests.support.stitched_models import (
    binary_op,
    integers,
    memory_comes_back,
    model,
    one,
    scaled,
    tiny,
)

__all__ = ["memory_comes_back"]


def arrays(results: Any) -> list[Array]:
    return [t.numpy() for t in (results if isinstance(results, tuple) else (results,))]


def equal(some: Sequence[Array], others: Sequence[Array]) -> bool:
    return [a.tobytes() for a in some] == [a.tobytes() for a in others]


def dense(name: str, *more: str, target: str = "host") -> stitch.CompiledModel:
    """A product and a function, as executors fuse them; and what `more` names."""

    def build(b: ComputationGraphBuilder) -> None:
        weights = np.random.default_rng(len(name)).standard_normal((64, 64)) / 8
        y = b.input("x", (16, 64), "float32") @ b.constant(weights.astype(np.float32))
        for operator in ("Relu", *more):
            y = b.op(operator, y)
        b.output("y", y)

    return model(name, build, target=target)


@pytest.mark.parametrize("machine", ["tiny", "host"])
def test_a_linked_pipeline_runs_one_program_and_gives_the_same_bits(machine: str) -> None:
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    with stitch.open_device(machine) as device:
        programs = [device.load(dense(name, "Tanh", target=machine)) for name in ("a", "bb", "ccc")]
        wanted = arrays(stitch.Pipeline(programs)(x))
        pipe = stitch.Pipeline(programs, link=True)
        del programs
        (whole,) = pipe.programs
        assert whole.name == "a_bb_ccc"
        before = device.account().total.programs
        seen = []
        for _ in range(3):
            assert equal(arrays(pipe(x)), wanted)
        assert device.account().total.programs == before + 3
        with device.hooks.registered({"before_program": lambda c: seen.append(c.program.name)}):
            assert equal(arrays(pipe(x)), wanted)
    assert seen == ["a_bb_ccc"]


@pytest.mark.parametrize("executor", ["auto", "onnxruntime", "torch"])
def test_link_is_refused_without_a_promise_of_equal_bits_and_fuse_links(executor: str) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    with stitch.open_device("host", executor=executor) as device:
        programs = [device.load(dense(name, "Gelu")) for name in ("a", "bb")]
        with pytest.raises(LinkError, match="would not give the same bits") as caught:
            stitch.Pipeline(programs, link=True)
        assert "fuse=True" in str(caught.value)
        pipe = stitch.Pipeline(programs, fuse=True)
        assert [p.name for p in pipe.programs] == ["a_bb"]
        for ours, theirs in zip(arrays(pipe(x)), arrays(stitch.Pipeline(programs)(x)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_slots_have_the_order_and_the_names_of_the_pipeline_that_is_not_linked() -> None:
    def first(b: ComputationGraphBuilder) -> None:
        x, mask = b.input("x", (4, 64), "float32"), b.input("scale", (4, 64), "float32")
        b.output("state", b.input("state", (4, 64), "float32", InputKind.STATE) + x)
        b.output("h", x * mask)

    def last(b: ComputationGraphBuilder) -> None:
        h = b.input("h", (4, 64), "float32", ownership=Ownership.DONATE)
        weight = b.input("w", (4, 64), "float32", InputKind.PARAMETER)
        b.output("state", b.input("state", (4, 64), "float32", InputKind.STATE) - h)
        b.output("y", h + weight)

    given = [integers(start=n) for n in range(5)]
    with stitch.open_device("tiny") as device:
        programs = [device.load(model("first", first)), device.load(model("last", last))]
        apart, linked = [stitch.Pipeline(programs, link=link) for link in (False, True)]
        assert linked.input_names == apart.input_names
        assert linked.output_names == apart.output_names
        assert {"first.state", "last.state"} <= {*linked.input_names}
        wanted = arrays(apart(*given))
        assert len(wanted) == 3 and equal(arrays(linked(*given)), wanted)
        named = dict(zip(apart.input_names, given, strict=True))
        assert equal(arrays(linked(**named)), wanted)


def test_wires_by_name_skip_programs_and_change_types_in_a_linked_pipeline() -> None:
    def split(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (4, 64), "float32")
        b.output("a", x * 2.0)
        b.output("rest", x * 0.3)

    def double(b: ComputationGraphBuilder) -> None:
        b.output("b", b.input("a", (4, 64), "float32") * 1.7)

    def add(b: ComputationGraphBuilder) -> None:
        b.output("y", b.input("b", (4, 64), "float32") + b.input("rest", (4, 64), "float32"))

    x = integers()
    with stitch.open_device("tiny") as device:
        programs = [
            device.load(model("split", split)),
            device.load(model("double", double, placement=["output.b.data_type=bfloat16"])),
            device.load(model("add", add)),
        ]
        wanted = arrays(stitch.Pipeline(programs)(x))
        linked = stitch.Pipeline(programs, link=True)
        assert equal(arrays(linked(x)), wanted)
    with stitch.open_device("tiny", strict_types=True) as device:
        again = [device.load(stitch.link([p.program], target="tiny")) for p in programs]
        for link in (False, True):
            with pytest.raises(LinkError, match="strict_types is set"):
                stitch.Pipeline(again, link=link)


def test_programs_that_cannot_be_linked_are_refused() -> None:
    tile = ("input.x.data_type=bfp8", "output.y.data_type=bfp8")
    blocks = [scaled(n, 2.0, (32, 32), target="wormhole_n150", placement=tile) for n in "ab"]
    with stitch.open_device("wormhole_n150") as device:
        programs = [device.load(block) for block in blocks]
        with pytest.raises(LinkError, match="block format"):
            stitch.Pipeline(programs, link=True)
    placement = ("input.x.space=l1", "input.w.space=l1", "output.y.space=l1")
    machine = tiny(l1_nbytes=12 * 1024)
    ends = [binary_op(n, "Add", (64, 64), target=machine, placement=placement) for n in "ab"]
    with stitch.open_device(machine) as device:
        programs = [device.load(end) for end in ends]
        with pytest.raises(OutOfMemoryError, match="program 'a_b'"):
            stitch.Pipeline(programs, link=True)
    damaged = bytearray(scaled("b", 3.0).encode())
    damaged[damaged.rfind(np.float32(3).tobytes())] ^= 1
    with stitch.open_device("tiny") as device, stitch.open_device("tiny") as other:
        a, b = device.load(scaled("a", 2.0)), device.load(bytes(damaged))
        with pytest.raises(FormatError, match="damaged"):
            stitch.Pipeline([a, b], link=True)
        with pytest.raises(UsageError, match="loaded on another device"):
            stitch.Pipeline([a, other.load(scaled("b", 3.0))], link=True)
        options: dict[str, Any]
        for options in ({"link": "yes"}, {"fuse": 1}):
            with pytest.raises(UsageError, match=r"Pipeline takes .* as (link|fuse)"):
                stitch.Pipeline([a], **options)
        assert one(stitch.Pipeline([a], link=True)(integers())).shape == (4, 64)


# What executors promise.


def program(name: str, *operators: str) -> Program:
    """Operators one after the other behind a product."""
    b = ComputationGraphBuilder(name)
    y = b.input("x", (4, 8), "float32") @ b.constant(np.eye(8, dtype=np.float32))
    for operator in operators:
        y = b.op(operator, y)
    b.output("y", y)
    return stitch.compile(b.build(), target="wormhole_n150").binary.programs[0]


def obstacle(executor: str, *programs: Program) -> str:
    return make_executor(executor).link_obstacle(programs)


def test_an_executor_of_the_users_promises_nothing() -> None:
    found = CallingExecutor(print).link_obstacle([program("a"), program("b")])
    assert "does not promise equal bits" in found


def test_the_automatic_executor_promises_what_one_kind_of_kernels_computes() -> None:
    small = [program(name, "Relu") for name in "ab"]
    assert obstacle("auto", *small) == ""
    pytest.importorskip("onnxruntime")
    assert "other kernels" in obstacle("auto", *small, program("c", "Gelu"))


def test_the_torch_executor_does_not_promise_equal_bits() -> None:
    pytest.importorskip("torch")
    assert "2e-7" in obstacle("torch", program("a"), program("b"))

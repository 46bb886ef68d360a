"""What every executor must do: inherit `ExecutorSuite`, name the executor, and run.

A program leaves its output in one layout, the next wants its input in another; whatever the two
are, the numbers are those of whole-number arithmetic, exactly where the storage type can hold them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from functools import cache
from typing import ClassVar

import numpy as np
import pytest

import stitch
from stitch.machine import Machine, shard_layout
from stitch.program import TILE_SHAPE, Array, DataType, Layout, MemoryLayout, Space
from stitch.runtime.executors import Executor
from tests.support.stitched_models import integers, model, one, tiny

SHAPE = (64, 96)
F32, BF16, BFP8 = DataType.FLOAT32, DataType.BFLOAT16, DataType.BFP8
#: 2 x 3 cores: no power of two anywhere but in the tiles.
MACHINE = tiny(core_grid=(2, 3), l1_nbytes=65_536, name="six")


def _layouts() -> Iterator[Layout]:
    for data_type, tile in itertools.product((F32, BF16, BFP8), (None, TILE_SHAPE)):
        if data_type.is_block and tile is None:
            continue
        for space in Space:
            yield Layout(data_type, space, tile)
        for space, memory_layout in itertools.product((Space.L1, Space.DRAM), MemoryLayout):
            if memory_layout is not MemoryLayout.INTERLEAVED:
                yield shard_layout(
                    SHAPE,
                    memory_layout,
                    MACHINE.shape,
                    data_type=data_type,
                    space=space,
                    tile_shape=tile,
                )


LAYOUTS = {layout.text(): layout for layout in _layouts()}


def wishes_for(slot: str, layout: Layout) -> tuple[str, ...]:
    """The wishes that place a slot exactly so."""
    made = [f"{slot}.space={layout.space.value}", f"{slot}.data_type={layout.data_type.value}"]
    made.append(f"{slot}.layout={'tile' if layout.is_tiled else 'row_major'}")
    if layout.is_sharded:
        made.append(f"{slot}.memory_layout={layout.memory_layout.value}")
    return tuple(made)


@cache
def compiled(name: str, factor: int, source: str, target: str, machine: Machine) -> bytes:
    """y = factor * x + 1, x and y in the layouts that were asked for."""

    def build(b: stitch.ComputationGraphBuilder) -> None:
        x = b.input("x", SHAPE, "float32")
        b.output("y", x * factor + 1)

    wishes = wishes_for("input.x", LAYOUTS[source]) + wishes_for("output.y", LAYOUTS[target])
    return model(name, build, target=machine, wishes=wishes).encode()


def stored(array: Array, layout: Layout) -> Array:
    """What is left of an array after it lay in a layout."""
    with stitch.open_device(MACHINE) as device:
        back = device.tensor(array).to_layout(layout).numpy()
    return back.astype(np.float32)


class ExecutorSuite:
    """The tests; `executor` is what `open_device` takes, tolerance what the executor may differ."""

    executor: ClassVar[str | Executor]
    relative_tolerance: ClassVar[float] = 0.0

    def same(self, found: Array, expected: Array) -> None:
        np.testing.assert_allclose(found, expected, rtol=self.relative_tolerance, atol=0)

    @pytest.mark.parametrize("made", LAYOUTS)
    def test_every_output_placement_feeds_every_input_placement(self, made: str) -> None:
        x = integers(SHAPE)
        first = compiled("a", 2, "f32:l1:row_major:interleaved", made, MACHINE)
        between = stored(x * 2 + 1, LAYOUTS[made])
        with stitch.open_device(MACHINE, executor=self.executor, debug=True) as device:
            a = device.load(first)
            h = one(a(x))
            self.same(h.numpy().astype(np.float32), between)
            for wanted in LAYOUTS:
                b = device.load(compiled("b", 3, wanted, "f32:l1:row_major:interleaved", MACHINE))
                expected = stored(between, LAYOUTS[wanted]) * 3 + 1
                self.same(one(b(h)).numpy(), expected)
            self.same(h.numpy().astype(np.float32), between)

    @pytest.mark.parametrize("made", LAYOUTS)
    def test_whole_numbers_are_exact_wherever_floats_of_32_bits_lie(self, made: str) -> None:
        if LAYOUTS[made].data_type is not F32:
            small = integers(SHAPE) % 7
            np.testing.assert_array_equal(stored(small, LAYOUTS[made]), small)
            return
        x = integers(SHAPE)
        with stitch.open_device(MACHINE, executor=self.executor, debug=True) as device:
            a = device.load(compiled("a", 2, made, made, MACHINE))
            value: object = x
            for _ in range(3):
                value = a(value)
            self.same(one(value).numpy(), ((x * 2 + 1) * 2 + 1) * 2 + 1)

    @pytest.mark.parametrize("window", [1, 64])
    def test_a_pipeline_equals_the_calls_and_the_window_does_not_matter(self, window: int) -> None:
        names = list(LAYOUTS)
        with stitch.open_device(MACHINE, executor=self.executor, window=window) as device:
            loaded = [
                device.load(compiled(f"p{i}", 1, names[i], names[-1 - i], MACHINE))
                for i in range(3)
            ]
            pipeline = stitch.Pipeline(loaded)
            for start in range(3):
                x = integers(SHAPE, start) % 5
                value: object = x
                for program in loaded:
                    value = program(value)
                self.same(one(pipeline(x)).numpy(), one(value).numpy())
                self.same(one(value).numpy(), x + 3)

    def test_operators_of_every_kind_of_type_run(self) -> None:
        def build(b: stitch.ComputationGraphBuilder) -> None:
            x, i = b.input("x", (8, 8), "float32"), b.input("i", (8,), "int64")
            weight = b.parameter("w", integers((8, 8)))
            chosen = b.gather(x, i)
            b.output("product", b.matmul(chosen, weight))
            b.output("whole", i + 1)
            b.output("flag", x > 3.0)
            b.output("softly", b.cast(b.softmax(x), "float16"))

        x, i = integers((8, 8)), np.arange(8)[::-1].copy()
        with stitch.open_device("tiny", executor=self.executor, debug=True) as device:
            made = device.load(model("kinds", build))(x, i)
            assert isinstance(made, tuple)
            product, whole, flag, softly = (t.numpy() for t in made)
        self.same(product, x[i] @ integers((8, 8)))
        np.testing.assert_array_equal(whole, i + 1)
        np.testing.assert_array_equal(flag, x > 3)
        exact = np.exp(x - x.max(-1, keepdims=True))
        exact /= exact.sum(-1, keepdims=True)
        assert softly.dtype == np.float16
        np.testing.assert_allclose(softly, exact, rtol=2e-3, atol=1e-6)

    def test_constants_come_from_a_file_and_stay_as_they_are(self, tmp_path: object) -> None:
        weight = integers((64, 32), 5)

        def build(b: stitch.ComputationGraphBuilder) -> None:
            x = b.input("x", (4, 64), "float32")
            b.output("y", b.matmul(x, b.parameter("w", weight)))

        path = f"{tmp_path}/m.ttb"
        model("m", build).save(path)
        with stitch.open_device("tiny", executor=self.executor) as device:
            m = device.load(path)
            for start in range(3):
                x = integers((4, 64), start)
                self.same(one(m(x)).numpy(), x @ weight)

    def test_infinities_divisions_by_zero_and_nan_follow_ieee(self) -> None:
        def build(b: stitch.ComputationGraphBuilder) -> None:
            x, y = b.input("x", (4,), "float32"), b.input("y", (4,), "float32")
            b.output("q", b.div(x, y))

        x = np.array([1, -1, 0, np.inf], np.float32)
        zero = np.zeros(4, np.float32)
        with stitch.open_device("tiny", executor=self.executor) as device:
            q = one(device.load(model("q", build))(x, zero)).numpy()
        np.testing.assert_array_equal(q, [np.inf, -np.inf, np.nan, np.inf])

    def test_two_programs_and_two_bindings_never_share_what_they_stage(self) -> None:
        tile = "bf16:dram:tile:interleaved"
        with stitch.open_device(MACHINE, executor=self.executor, debug=True) as device:
            a = device.load(compiled("a", 2, tile, tile, MACHINE))
            x = integers(SHAPE) % 7
            results = [one(a(x + i)) for i in range(4)]
            again = one(a(results[0]))
            for i, result in enumerate(results):
                np.testing.assert_array_equal(result.numpy().astype(np.float32), (x + i) * 2 + 1)
            np.testing.assert_array_equal(again.numpy().astype(np.float32), (x * 2 + 1) * 2 + 1)

    def test_a_machine_without_device_memory_runs_on_the_host(self) -> None:
        shape = MACHINE.shape
        bare = dataclasses.replace(shape, name="bare", l1=None, dram=None)
        machine = dataclasses.replace(
            MACHINE, shape=bare, paths=tuple(p for p in MACHINE.paths if p[0] is p[1] is Space.HOST)
        )

        def build(b: stitch.ComputationGraphBuilder) -> None:
            b.output("y", b.input("x", (4, 4), "float32") * 2)

        with stitch.open_device(machine, executor=self.executor, debug=True) as device:
            a = device.load(model("a", build, target=machine))
            y = one(a(integers((4, 4))))
            assert y.space is Space.HOST
            self.same(y.numpy(), integers((4, 4)) * 2)

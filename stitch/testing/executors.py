"""What every executor must do: inherit `ExecutorSuite` and name the executor.

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

from stitch import api
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.machine import Machine, shard_layout
from stitch.program import TILE_SHAPE, Array, DataType, Layout, MemoryLayout, Space
from stitch.runtime import Executor
from stitch.testing.small_models import integers, model, one, several, tiny

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


def placement_for(slot: str, layout: Layout) -> tuple[str, ...]:
    """The placement options that place a slot exactly so."""
    made = [f"{slot}.space={layout.space.value}", f"{slot}.data_type={layout.data_type.value}"]
    made.append(f"{slot}.layout={'tile' if layout.is_tiled else 'row_major'}")
    if layout.is_sharded:
        made.append(f"{slot}.memory_layout={layout.memory_layout.value}")
    return tuple(made)


@cache
def compiled(
    name: str, factor: int, source: str, target: str, machine: Machine
) -> api.CompiledModel:
    """y = factor * x + 1, x and y in the layouts that were asked for."""

    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", SHAPE, "float32")
        b.output("y", x * factor + 1)

    placement = placement_for("input.x", LAYOUTS[source]) + placement_for(
        "output.y", LAYOUTS[target]
    )
    return model(name, build, target=machine, placement=placement)


def stored(device: api.Device, array: Array, layout: Layout) -> Array:
    """What is left of an array after it lay in a layout."""
    return device.tensor(array).to_layout(layout).numpy().astype(np.float32)


def _heads(b: ComputationGraphBuilder, x: SymbolicTensor, size: int) -> SymbolicTensor:
    return b.transpose(b.reshape(x, (3, 48, 4, size)), (0, 2, 1, 3))


def _attention(b: ComputationGraphBuilder) -> None:
    """Heads are views into one product, and one of its products is with itself."""
    x = b.input("x", (3, 48, 64), "float32")
    parts = b.split(b.matmul(x, b.parameter("w", _drawn(64, 192))), 64, axis=2)
    query, key, value = (_heads(b, part, 16) for part in parts)
    scores = b.softmax(b.matmul(query, b.transpose(key, (0, 1, 3, 2))) * 0.1)
    mixed = b.transpose(b.matmul(scores, value), (0, 2, 1, 3))
    own = _heads(b, x, 16)
    b.output("mixed", b.reshape(mixed, (3, 48, 64)) + x)
    b.output("own", b.matmul(own, b.transpose(own, (0, 1, 3, 2))))


def _long(b: ComputationGraphBuilder) -> None:
    """Long elementwise operations, which are computed by chunks, between products."""
    x = b.input("x", (3, 48, 64), "float32")
    wide = b.matmul(x, b.parameter("w", _drawn(64, 1024)))
    chain = b.op("Exp", b.op("Neg", b.op("Abs", wide * 0.5 - 1.0)))
    b.output("chain", chain)
    b.output("y", b.matmul(b.op("Sqrt", chain) * wide, b.parameter("u", _drawn(1024, 8))))


def _layers(b: ComputationGraphBuilder) -> None:
    """Functions, sums, pieces put together, and numbers rounded in between."""
    x = b.input("x", (3, 48, 64), "float32")
    normal = b.op("LayerNormalization", x, b.parameter("s", _drawn(64)), axis=-1)
    flat = b.reshape(b.gelu(normal), (144, 64))
    dense = b.op("Gemm", flat, b.parameter("w", _drawn(32, 64)), transB=1)
    joined = b.concat([dense, b.op("Tanh", dense)], axis=1)
    b.output("y", joined + flat)
    b.output("rounded", b.cast(joined, "bfloat16"))
    b.output("sums", b.op("ReduceSum", b.op("Sigmoid", x), [1]))


def _drawn(*shape: int) -> Array:
    return np.random.default_rng(7).standard_normal(shape, np.float32)


#: Programs in which what is computed together, or lies in another value's bytes, is many things.
OBSERVED = {"attention": _attention, "long": _long, "layers": _layers}


class PlacementSuite:
    """Results lie in every layout, and are read from every layout.

    Attributes:
        executor: What `open_device` takes.
        relative_tolerance: How much results may differ from those in exact arithmetic.
        left_out: How many placements are left out between two that a placement feeds.
    """

    executor: ClassVar[str | Executor]
    relative_tolerance: ClassVar[float] = 0.0
    left_out: ClassVar[int] = 4

    def same(self, found: Array, expected: Array) -> None:
        np.testing.assert_allclose(found, expected, rtol=self.relative_tolerance, atol=0)

    @pytest.mark.parametrize("made", LAYOUTS)
    def test_output_placements_feed_input_placements(self, made: str) -> None:
        """Of some pairs, or all with `left_out = 0`; each placement feeds and is fed."""
        apart = 1 + self.left_out
        x = integers(SHAPE)
        first = compiled("a", 2, "f32:l1:row_major:interleaved", made, MACHINE)
        with (
            api.open_device(MACHINE) as plain,
            api.open_device(MACHINE, executor=self.executor, debug=True) as device,
        ):
            between = stored(plain, x * 2 + 1, LAYOUTS[made])
            h = one(device.load(first)(x))
            self.same(h.numpy().astype(np.float32), between)
            for wanted in list(LAYOUTS)[list(LAYOUTS).index(made) % apart :: apart]:
                b = device.load(compiled("b", 3, wanted, "f32:l1:row_major:interleaved", MACHINE))
                expected = stored(plain, between, LAYOUTS[wanted]) * 3 + 1
                self.same(one(b(h)).numpy(), expected)
            self.same(h.numpy().astype(np.float32), between)


class ExecutorSuite(PlacementSuite):
    """The tests of executors.

    Attributes:
        same_bits_with_hooks: Whether one operation at a time gives the bits of the whole program.
    """

    same_bits_with_hooks: ClassVar[bool] = False

    @pytest.mark.parametrize("made", LAYOUTS)
    def test_whole_numbers_are_exact_wherever_floats_of_32_bits_lie(self, made: str) -> None:
        if LAYOUTS[made].data_type is not F32:
            small = integers(SHAPE) % 7
            with api.open_device(MACHINE) as plain:
                np.testing.assert_array_equal(stored(plain, small, LAYOUTS[made]), small)
            return
        x = integers(SHAPE)
        with api.open_device(MACHINE, executor=self.executor, debug=True) as device:
            a = device.load(compiled("a", 2, made, made, MACHINE))
            value: object = x
            for _ in range(3):
                value = a(value)
            self.same(one(value).numpy(), ((x * 2 + 1) * 2 + 1) * 2 + 1)

    @pytest.mark.parametrize("window", [1, 64])
    def test_a_pipeline_equals_the_calls_and_the_window_does_not_matter(self, window: int) -> None:
        names = list(LAYOUTS)
        with api.open_device(MACHINE, executor=self.executor, window=window) as device:
            loaded = [
                device.load(compiled(f"p{i}", 1, names[i], names[-1 - i], MACHINE))
                for i in range(3)
            ]
            pipeline = api.Pipeline(loaded)
            for start in range(3):
                x = integers(SHAPE, start) % 5
                value: object = x
                for program in loaded:
                    value = program(value)
                self.same(one(pipeline(x)).numpy(), one(value).numpy())
                self.same(one(value).numpy(), x + 3)

    def test_operators_of_every_kind_of_type_run(self) -> None:
        def build(b: ComputationGraphBuilder) -> None:
            x, i = b.input("x", (8, 8), "float32"), b.input("i", (8,), "int64")
            weight = b.parameter("w", integers((8, 8)))
            chosen = b.gather(x, i)
            b.output("product", b.matmul(chosen, weight))
            b.output("whole", i + 1)
            b.output("flag", x > 3.0)
            b.output("softly", b.cast(b.softmax(x), "float16"))

        x, i = integers((8, 8)), np.arange(8)[::-1].copy()
        with api.open_device("tiny", executor=self.executor, debug=True) as device:
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

    @pytest.mark.parametrize("name", OBSERVED)
    def test_operation_hooks_see_each_operation_and_change_no_result(self, name: str) -> None:
        compiled = model(name, OBSERVED[name], target="host")
        x = np.random.default_rng(3).standard_normal((3, 48, 64), np.float32)
        seen: list[str] = []
        with api.open_device("host", executor=self.executor) as device:
            program = device.load(compiled)
            bare = [t.numpy() for t in several(program(x))]
            undo = device.hooks.register(
                after_operation=lambda c: seen.append(c.operation.op if c.operation else "")
            )
            hooked = [t.numpy() for t in several(program(x))]
            undo()
            again = [t.numpy() for t in several(program(x))]
        assert seen == [o.op for o in compiled.binary.programs[0].operations]
        for first, watched, second in zip(bare, hooked, again, strict=True):
            assert first.tobytes() == second.tobytes()
            if self.same_bits_with_hooks:
                assert first.tobytes() == watched.tobytes()
            relative = 1e-4 if first.dtype == np.float32 else 2.0**-7
            exact, other = first.astype(np.float32), watched.astype(np.float32)
            largest = float(np.abs(exact).max())
            np.testing.assert_allclose(other, exact, rtol=relative, atol=largest * relative / 10)

    def test_constants_come_from_a_file_and_stay_as_they_are(self, tmp_path: object) -> None:
        weight = integers((64, 32), 5)

        def build(b: ComputationGraphBuilder) -> None:
            x = b.input("x", (4, 64), "float32")
            b.output("y", b.matmul(x, b.parameter("w", weight)))

        path = f"{tmp_path}/m.ttb"
        model("m", build).save(path)
        with api.open_device("tiny", executor=self.executor) as device:
            m = device.load(path)
            for start in range(3):
                x = integers((4, 64), start)
                self.same(one(m(x)).numpy(), x @ weight)

    def test_infinities_divisions_by_zero_and_nan_follow_ieee(self) -> None:
        def build(b: ComputationGraphBuilder) -> None:
            x, y = b.input("x", (4,), "float32"), b.input("y", (4,), "float32")
            b.output("q", b.div(x, y))

        x = np.array([1, -1, 0, np.inf], np.float32)
        zero = np.zeros(4, np.float32)
        with api.open_device("tiny", executor=self.executor) as device:
            q = one(device.load(model("q", build))(x, zero)).numpy()
        np.testing.assert_array_equal(q, [np.inf, -np.inf, np.nan, np.inf])

    def test_two_programs_and_two_bindings_never_share_what_they_stage(self) -> None:
        tile = "bf16:dram:tile:interleaved"
        with api.open_device(MACHINE, executor=self.executor, debug=True) as device:
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

        def build(b: ComputationGraphBuilder) -> None:
            b.output("y", b.input("x", (4, 4), "float32") * 2)

        with api.open_device(machine, executor=self.executor, debug=True) as device:
            a = device.load(model("a", build, target=machine))
            y = one(a(integers((4, 4))))
            assert y.space is Space.HOST
            self.same(y.numpy(), integers((4, 4)) * 2)

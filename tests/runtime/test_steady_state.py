"""Plans are made once: replays, held results, full windows, pipelines in turn."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import stitch
from stitch.errors import UsageError
from stitch.program import Array, InputKind
from stitch.runtime import LoadedProgram
from stitch.runtime.executors import BoundProgram
from tests.support.stitched_models import (
    binary_op,
    integers,
    model,
    one,
    scaled,
    used,
)

FACTORS = (2.0, 3.0, 5.0)


def programs(device: stitch.Device, *, placement: tuple[str, ...] = ()) -> list[LoadedProgram]:
    return [
        device.load(scaled(name, factor, placement=placement))
        for name, factor in zip("abc", FACTORS, strict=True)
    ]


def through(x: Array, count: int = 3) -> Array:
    for factor in FACTORS[:count]:
        x = x * np.float32(factor) + 1
    return x


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
@pytest.mark.parametrize("window", [1, 2, 64])
def test_lazy_calls_stop_planning_after_three_iterations(window: int, debug: bool) -> None:
    with stitch.open_device("tiny", window=window, debug=debug) as device:
        chain = programs(device)
        made = 0
        for i in range(20):
            value: object = integers(start=i)
            for program in chain:
                value = program(value)
            np.testing.assert_array_equal(one(value).numpy(), through(integers(start=i)))
            made = device.statistics().plans_made if i == 2 else made
        assert device.statistics().plans_made == made


def test_feeding_a_state_back_stops_planning() -> None:
    def build(b: stitch.ComputationGraphBuilder) -> None:
        state = b.input("state", (4, 64), "float32", InputKind.STATE)
        b.output("next", state + 1.0)

    with stitch.open_device("tiny", debug=True) as device:
        step = device.load(model("step", build))
        state = device.tensor(integers())
        made = 0
        for i in range(20):
            state = one(step(state))
            stitch.wait(state)
            made = device.statistics().plans_made if i == 4 else made
        np.testing.assert_array_equal(state.numpy(), integers() + 20)
        assert device.statistics().plans_made == made


def test_a_window_that_fills_again_and_again_learns_the_period() -> None:
    with stitch.open_device("tiny", window=16) as device:
        chain = programs(device)
        made = 0
        for i in range(120):
            value: object = integers(start=i)
            for program in chain:
                value = program(value)
            if i == 40:
                made = device.statistics().plans_made
        np.testing.assert_array_equal(one(value).numpy(), through(integers(start=119)))
        assert device.statistics().plans_made <= made + 1, (
            "only the last, shorter window may be new"
        )


def test_weights_are_converted_once_and_again_only_after_a_write() -> None:
    placement = (
        "input.w.layout=tile",
        "input.w.space=dram",
        "input.x.space=l1",
        "output.y.space=l1",
    )
    compiled = binary_op("add", "Add", (32, 32), placement=placement)
    x = integers((32, 32))
    with stitch.open_device("tiny", debug=True) as device:
        add = device.load(compiled)
        w = device.tensor(x)
        stitch.wait(one(add(x, w)))
        writes = device.account().writes_seen
        for _ in range(5):
            np.testing.assert_array_equal(one(add(x, w)).numpy(), x * 2)
        assert device.account().writes_seen - writes == 5, "only the activation is written"
        device.write(w, x + 1)
        np.testing.assert_array_equal(one(add(x, w)).numpy(), x * 2 + 1)


# -- pipelines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
@pytest.mark.parametrize("window", [1, 2, 64])
def test_a_pipeline_gives_the_numbers_of_calls_without_planning(window: int, debug: bool) -> None:
    with stitch.open_device("tiny", window=window, debug=debug) as device:
        pipeline = stitch.Pipeline(programs(device))
        made = 0
        for i in range(20):
            found = one(pipeline(integers(start=i))).numpy()
            np.testing.assert_array_equal(found, through(integers(start=i)))
            made = device.statistics().plans_made if i == 3 else made
        assert device.statistics().plans_made == made


def test_unheld_results_are_reused_and_held_ones_keep_their_numbers() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        pipeline = stitch.Pipeline(programs(device))
        places = [one(pipeline(integers(start=i))).address for i in range(5)]
        assert len(set(places)) == 1
        held = one(pipeline(integers(start=100)))
        others = [one(pipeline(integers(start=i))) for i in range(5)]
        assert len({t.address for t in (held, *others)}) == 6
        np.testing.assert_array_equal(held.numpy(), through(integers(start=100)))
        for i, other in enumerate(others):
            np.testing.assert_array_equal(other.numpy(), through(integers(start=i)))


def test_the_previous_result_may_be_held_for_ever_in_two_buffers() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        pipeline = stitch.Pipeline(programs(device))
        previous, places, made = None, set(), 0
        for i in range(30):
            result = one(pipeline(integers(start=i)))
            if previous is not None:
                np.testing.assert_array_equal(previous.numpy(), through(integers(start=i - 1)))
            previous = result
            if i:  # The first may lie where values in between lay.
                places.add(result.address)
            made = device.statistics().plans_made if i == 5 else made
        assert device.statistics().plans_made == made
        assert len(places) == 2


def test_views_exports_and_queued_readers_hold_a_result_as_well() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        chain = programs(device)
        pipeline = stitch.Pipeline(chain)
        one(pipeline(integers()))
        expected = through(integers(start=1))
        view = one(pipeline(integers(start=1)))[1]
        np.testing.assert_array_equal(
            one(pipeline(integers(start=2))).numpy(), through(integers(start=2))
        )
        np.testing.assert_array_equal(view.numpy(), expected[1])
        outside = np.from_dlpack(one(pipeline(integers(start=1))))
        one(pipeline(integers(start=2)))
        np.testing.assert_array_equal(outside, expected)
        pending = one(chain[0](one(pipeline(integers(start=1)))))
        one(pipeline(integers(start=2)))
        np.testing.assert_array_equal(pending.numpy(), expected * 2 + 1)
        del view, outside
        gc.collect()


def test_a_result_that_was_freed_written_or_evicted_does_not_confuse_the_pipeline() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        pipeline = stitch.Pipeline(programs(device))
        for i in range(8):
            result = one(pipeline(integers(start=i)))
            np.testing.assert_array_equal(result.numpy(), through(integers(start=i)))
            if i % 3 == 0:
                result.deallocate()
            elif i % 3 == 1:
                device.write(result, integers())
        big = device.load(
            scaled("big", 2.0, (48, 64), placement=("input.x.space=l1", "output.y.space=l1"))
        )
        held = one(pipeline(integers()))
        np.testing.assert_array_equal(
            one(big(integers((48, 64)))).numpy(), integers((48, 64)) * 2 + 1
        )
        for i in range(4):
            np.testing.assert_array_equal(
                one(pipeline(integers(start=i))).numpy(), through(integers(start=i))
            )
        np.testing.assert_array_equal(held.numpy(), through(integers()))


def test_a_pipeline_takes_tensors_lists_names_and_other_types() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        pipeline = stitch.Pipeline(programs(device))
        expected = through(integers())
        for x in (
            integers(),
            device.tensor(integers()),
            integers().tolist(),
            integers().astype(np.float64),
            np.asfortranarray(integers()),
            np.repeat(integers(), 2, 1)[:, ::2],
        ):
            for _ in range(2):
                np.testing.assert_array_equal(one(pipeline(x)).numpy(), expected)
                np.testing.assert_array_equal(one(pipeline(x=x)).numpy(), expected)


def test_inputs_that_no_output_feeds_are_inputs_of_the_pipeline() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        add, sub = (device.load(binary_op(op.lower(), op, (4, 64))) for op in ("Add", "Sub"))
        pipeline = stitch.Pipeline([add, sub])
        assert pipeline.input_names == ("x", "add.w", "sub.w")
        for i in range(4):
            x, v, w = integers(start=i), integers(start=2 * i), integers(start=3 * i)
            np.testing.assert_array_equal(one(pipeline(x, v, w)).numpy(), x + v - w)
            named = pipeline(x, **{"sub.w": w, "add.w": v})
            np.testing.assert_array_equal(one(named).numpy(), x + v - w)
        kept = device.tensor(v)
        np.testing.assert_array_equal(one(pipeline(x, kept, w)).numpy(), x + v - w)


def test_a_pipeline_gives_its_buffers_back_when_it_is_dropped() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        chain = programs(device)
        base = used(device)
        pipeline = stitch.Pipeline(chain)
        results = [one(pipeline(integers(start=i))) for i in range(4)]
        assert used(device) != base
        del pipeline, results
        gc.collect()
        assert used(device) == base


def test_wrong_pipelines_and_wrong_inputs_are_refused() -> None:
    with stitch.open_device("tiny") as device, stitch.open_device("tiny") as other:
        a, b, _ = programs(device)
        with pytest.raises(UsageError, match="at least one program"):
            stitch.Pipeline([])
        with pytest.raises(UsageError, match="one device"):
            stitch.Pipeline([a, other.load(scaled("b", 2.0))])
        with pytest.raises(stitch.LinkError, match="'a' does not fit program 'narrow'") as unfit:
            stitch.Pipeline([a, device.load(scaled("narrow", 2.0, (8, 8)))])
        assert "order" not in str(unfit.value)
        flat = stitch.compile(lambda x: x.reshape(-1), [integers()], target="tiny", name="flat")
        with pytest.raises(stitch.LinkError, match="order that fits: a, flat"):
            stitch.Pipeline([device.load(flat), a])
        pipeline = stitch.Pipeline([a, b])
        for arguments, named, said in (
            ((), {}, "missing: x"),
            ((0,), {"z": 0}, "surplus: z"),
            ((0, 0), {}, "2 by position"),
            ((0,), {"x": 0}, "given twice: x"),
        ):
            with pytest.raises(UsageError, match="wrong inputs for the pipeline") as refused:
                pipeline(*arguments, **named)
            assert said in str(refused.value)
        with pytest.raises(stitch.LinkError, match="another shape"):
            pipeline(integers((8, 8)))
        with pytest.raises(stitch.LinkError, match="another type"):
            pipeline(integers().astype(np.int32))


def test_inputs_of_programs_of_one_name_are_numbered() -> None:
    def less(b: stitch.ComputationGraphBuilder) -> None:
        x, w = b.input("x", (4, 64), "float32"), b.input("w", (4, 64), "float32", InputKind.STATE)
        b.output("x", x - w)

    file = model("p", less, target="tiny")
    with stitch.open_device("tiny") as device:
        pipeline = stitch.Pipeline([device.load(file), device.load(file)])
        assert pipeline.input_names == ("x", "p.0.w", "p.1.w")
        x, first, second = integers(), integers(start=1), integers(start=2)
        with pytest.raises(UsageError, match=r"missing: p\.1\.w"):
            pipeline(x, first)
        np.testing.assert_array_equal(
            one(pipeline(x, **{"p.1.w": second, "p.0.w": first})).numpy(), x - first - second
        )


def bound_programs() -> int:
    """How many programs are bound to memory, in this process."""
    gc.collect()
    return sum(isinstance(thing, BoundProgram) for thing in gc.get_objects())


def test_plans_go_with_the_program_that_they_run() -> None:
    model = scaled("a", 2.0)
    with stitch.open_device("tiny") as device:
        before = bound_programs()
        for _ in range(3):
            program = device.load(model)
            one(program(integers())).numpy()
            del program
            gc.collect()
        device.flush()
        assert device.statistics().plans_made == 3
        assert bound_programs() <= before


@pytest.mark.parametrize("target", ["host", "tiny", "wormhole_n150"])
def test_a_host_tensor_that_is_given_again_is_carried_in_once(target: str) -> None:
    with stitch.open_device(target) as device:
        program = device.load(scaled("a", 2.0, target=target))
        x, made = device.tensor(integers()), 0
        for i in range(8):
            np.testing.assert_array_equal(one(program(x)).numpy(), integers() * 2 + 1)
            made = device.statistics().plans_made if i == 2 else made
        assert device.statistics().plans_made == made


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 4)], ids=str)
def test_a_pipeline_on_tensors_gives_results_of_any_length(shape: tuple[int, ...]) -> None:
    def build(b: stitch.ComputationGraphBuilder) -> None:
        b.output("y", b.input("x", shape, "float32") * 2.0)

    with stitch.open_device("tiny") as device:
        pipeline = stitch.Pipeline([device.load(model("double", build))])
        x = np.full(shape, 3.0, np.float32)
        tensor = device.tensor(x)
        for _ in range(5):
            np.testing.assert_array_equal(one(pipeline(tensor)).numpy(), x * 2)
            np.testing.assert_array_equal(one(pipeline(x)).numpy(), x * 2)
        assert device.statistics().plans_made <= 4

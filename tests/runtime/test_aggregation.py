"""Programs of the queue that feed each other run as one: when, which, and what stays as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import StitchError, UsageError
from stitch.graph import ComputationGraphBuilder
from stitch.program import Program
from stitch.report import Device
from stitch.runtime import aggregation
from stitch.runtime.events import PlanMade
from stitch.runtime.executors import LinkTerms
from stitch.runtime.executors.host import NumpyExecutor
from tests.support.short_threads import shorten
from tests.support.stitched_models import (
    binary_op,
    consuming,
    integers,
    model,
    one,
    scaled,
    several,
    tiny,
)


class Counting(NumpyExecutor):
    """NumPy's kernels on terms of its own."""

    def __init__(self, terms: LinkTerms) -> None:
        super().__init__()
        self.terms = terms

    def link_terms(self, programs: Sequence[Program]) -> LinkTerms:
        return self.terms


def chain(device: Device) -> list[Any]:
    return [
        device.load(scaled(name, factor))
        for name, factor in zip("abc", (2.0, 3.0, 0.5), strict=True)
    ]


def run_names(device: Device) -> list[list[str]]:
    """The names of the tasks of each plan that is made from now on."""
    made: list[list[str]] = []

    def note(event: Any) -> None:
        if isinstance(event, PlanMade):
            made.append([task.transformation.name for task in event.plan.request.tasks])

    device.events.subscribe(note)
    return made


def expected(x: np.ndarray, *factors: float) -> np.ndarray:
    for factor in factors:
        x = x * np.float32(factor) + np.float32(1)
    return x


def test_a_chain_runs_as_one_program_with_the_same_result() -> None:
    x = integers()
    with stitch.open_device("tiny", aggregate="always") as device:
        a, b, c = chain(device)
        np.testing.assert_array_equal(one(c(b(a(x)))).numpy(), expected(x, 2, 3, 0.5))
        total = device.account().total
        assert total.programs == 1
        assert "'a', 'b', 'c' run as one program, 'a+b+c'" in device.explain()
    with stitch.open_device("tiny", aggregate="never") as device:
        a, b, c = chain(device)
        one(c(b(a(x)))).numpy()
        apart = device.account().total
        assert apart.programs == 3
        assert total.copies <= apart.copies
        assert "run as one" not in device.explain()


def test_held_results_and_results_that_were_read_stay_when_programs_are_linked() -> None:
    x = integers()
    with stitch.open_device("tiny", aggregate="always") as device:
        a, b, c = chain(device)
        held = one(a(x))
        last = one(c(b(held)))
        np.testing.assert_array_equal(last.numpy(), expected(x, 2, 3, 0.5))
        np.testing.assert_array_equal(held.numpy(), expected(x, 2))
        assert device.account().total.programs == 1
        # What was read before is a source of what comes after.
        again = one(b(held))
        np.testing.assert_array_equal(again.numpy(), expected(x, 2, 3))


def test_host_functions_stay_tasks_in_the_order_of_their_calls() -> None:
    called: list[str] = []
    x = integers()

    @stitch.task
    def note(name: str) -> None:
        called.append(name)

    @stitch.task(returns=stitch.TensorDesc((4, 64), stitch.Layout(stitch.DataType.FLOAT32)))
    def halved(values: Any) -> Any:
        called.append("halved")
        return values * np.float32(0.5)

    with stitch.open_device("tiny", aggregate="always") as device:
        a, b, c = chain(device)
        made = run_names(device)
        for _ in range(3):
            called.clear()
            first = one(a(x))
            device.call(note, "before")
            half = halved(first)
            device.call(note, "after")
            last = one(c(b(half)))
            np.testing.assert_array_equal(
                last.numpy(), expected(expected(x, 2) * np.float32(0.5), 3, 0.5)
            )
            del first, half, last
            assert called == ["before", "halved", "after"]
    assert made == [["a", "note", "halved", "note", "b+c"]]


def test_a_program_that_takes_an_input_over_stays_a_task_of_its_own() -> None:
    x = integers()
    with stitch.open_device("tiny", aggregate="always") as device:
        a, c = device.load(scaled("a", 2.0)), device.load(scaled("c", 0.5))
        taking = device.load(consuming("t", 3.0))
        made = run_names(device)
        wanted = expected(expected(x, 2) * np.float32(3), 0.5)
        np.testing.assert_array_equal(one(c(taking(a(x)))).numpy(), wanted)
        assert made == [["a", "t", "c"]]


def test_only_sets_that_no_path_leaves_and_enters_again_are_linked() -> None:
    x = integers()

    @stitch.task(returns=stitch.TensorDesc((4, 64), stitch.Layout(stitch.DataType.FLOAT32)))
    def negated(values: Any) -> Any:
        return -values

    with stitch.open_device("tiny", aggregate="always") as device:
        a, b, _ = chain(device)
        total = device.load(binary_op("total", "Add", (4, 64)))
        made = run_names(device)
        first = one(a(x))
        result = total(b(first), negated(first))
        del first
        np.testing.assert_array_equal(one(result).numpy(), expected(x, 2, 3) - expected(x, 2))
        assert made == [["a+b", "negated", "total"]]


@pytest.mark.parametrize("repeats", [1, 5])
def test_auto_links_at_a_run_that_counts_tell(repeats: int) -> None:
    x = integers()
    terms = LinkTerms(repeats=repeats)
    programs = []
    for _ in range(2):
        with stitch.open_device("tiny", executor=Counting(terms), aggregate="auto") as device:
            a, b, c = chain(device)
            before, counts = 0, []
            for _ in range(8):
                np.testing.assert_array_equal(one(c(b(a(x)))).numpy(), expected(x, 2, 3, 0.5))
                now = device.account().total.programs
                counts.append(now - before)
                before = now
            programs.append(counts)
    assert programs == [[3] * (repeats - 1) + [1] * (9 - repeats)] * 2


@pytest.mark.parametrize(
    "terms, said",
    [
        (LinkTerms("sums differ", 3), "'a', 'b' run apart, and 1 more sets: sums differ"),
        (LinkTerms(), "'a', 'b', 'c' run apart: linked, the executor 'numpy' would be no faster"),
    ],
)
def test_auto_keeps_apart_what_would_change_or_gains_nothing(terms: LinkTerms, said: str) -> None:
    x = integers()
    with stitch.open_device("tiny", executor=Counting(terms), aggregate="auto") as device:
        a, b, c = chain(device)
        for _ in range(4):
            one(c(b(a(x)))).numpy()
        assert device.account().total.programs == 12
        explained = device.explain()
        assert said in explained
        assert "as one program" not in explained
        assert explained.count("run apart") == 1


def test_a_prepared_graph_is_linked_by_the_same_counts() -> None:
    x = integers()
    a, b, c = [scaled(name, factor) for name, factor in zip("abc", (2.0, 3.0, 0.5), strict=True)]
    graph = stitch.TaskGraph()
    first = graph.call(a, graph.input(a.program.input_desc(0), "x"))
    graph.output(graph.call(c, graph.call(b, first)), "z")
    graph.output(first, "y")
    with stitch.open_device("tiny", executor=Counting(LinkTerms(repeats=4))) as device:
        prepared = device.prepare(graph)
        for turn in range(8):
            z, y = several(prepared(x + turn))
            np.testing.assert_array_equal(z.numpy(), expected(x + turn, 2, 3, 0.5))
            np.testing.assert_array_equal(y.numpy(), expected(x + turn, 2))
            programs = device.account().total.programs
            assert programs == (3 * (turn + 1) if turn < 3 else 9 + turn - 2)
        # From then on it runs past the queue.
        windows = device.statistics().windows
        prepared(x)
        assert device.statistics().windows == windows


def test_after_a_failure_the_members_that_can_run_do() -> None:
    x = integers()
    fails = True

    @stitch.task(returns=stitch.TensorDesc((4, 64), stitch.Layout(stitch.DataType.FLOAT32)))
    def failing(values: Any) -> Any:
        if fails:
            raise ValueError("told to")
        return values

    with stitch.open_device("tiny", aggregate="always") as device:
        a, b, c = chain(device)
        total = device.load(binary_op("total", "Add", (4, 64)))
        made = run_names(device)
        for fails in (False, True):
            first = one(a(x))
            second = one(b(first))
            third = one(total(second, failing(first)))
            fourth = one(c(first))
            if fails:
                with pytest.raises(ValueError, match="told to"):
                    device.wait()
                with pytest.raises(StitchError, match="told to"):
                    third.numpy()
            else:
                np.testing.assert_array_equal(third.numpy(), expected(x, 2, 3) + expected(x, 2))
            np.testing.assert_array_equal(first.numpy(), expected(x, 2))
            np.testing.assert_array_equal(second.numpy(), expected(x, 2, 3))
            np.testing.assert_array_equal(fourth.numpy(), expected(x, 2, 0.5))
            del first, second, third, fourth
        assert any("+" in name for name in made[0])


@pytest.mark.parametrize(
    "kib, why", [(12, "does not fit l1"), (16, "as one program they would make something give way")]
)
def test_programs_whose_linked_form_does_not_fit_run_separately(kib: int, why: str) -> None:
    """All slots of a linked program lie in L1 at once; of four cores, where a tensor has 16 KiB."""
    placement = ("input.x.space=l1", "output.y.space=l1")
    shape = (64, 64)
    machine = tiny(l1_nbytes=kib * 1024)
    models = [scaled(name, 2.0, shape, target=machine, placement=placement) for name in "abcd"]
    x = integers(shape)
    copies = {}
    for how in ("never", "always"):
        with stitch.open_device(machine, aggregate=how) as device:
            a, b, c, d = [device.load(model) for model in models]
            for _ in range(3):
                first, other = one(a(x)), one(d(x))
                second = one(b(first))
                third = one(c(second))
                np.testing.assert_array_equal(third.numpy(), expected(x, 2, 2, 2))
                np.testing.assert_array_equal(other.numpy(), expected(x, 2))
                np.testing.assert_array_equal(first.numpy(), expected(x, 2))
                np.testing.assert_array_equal(second.numpy(), expected(x, 2, 2))
                del first, second, third, other
            copies[how] = device.account().total.copies
            if how == "always":
                explained = device.explain()
                assert why in explained and "run as one" not in explained
                assert "'a', 'b', 'c' run apart" in explained
    assert copies["always"] <= copies["never"]


def test_hooks_see_each_program_that_was_called() -> None:
    x, seen = integers(), []
    with stitch.open_device("tiny", aggregate="always") as device:
        a, b, c = chain(device)
        one(c(b(a(x)))).numpy()
        with device.hooks.registered({"before_program": lambda c: seen.append(c.program.name)}):
            one(c(b(a(x)))).numpy()
        one(c(b(a(x)))).numpy()
    assert seen == ["a", "b", "c"]


@pytest.mark.parametrize("word", ["sometimes", "Always", None, True])
def test_a_word_that_is_none_of_the_three_is_refused(word: Any) -> None:
    with pytest.raises(UsageError, match='"auto", "never" or "always" as aggregate'):
        stitch.open_device("tiny", aggregate=word)


def test_onnx_runtime_computes_a_repeated_chain_as_one_with_the_same_bits() -> None:
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    with stitch.open_device("tiny", executor="onnxruntime") as device:
        a, b, c = chain(device)
        results = [one(c(b(a(x)))).numpy() for _ in range(102)]
        assert device.account().total.programs == 99 * 3 + 3
        assert "run as one program" in device.explain()
    for result in results:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime"])
def test_operations_of_an_unread_output_fail_as_in_separate_runs(executor: str) -> None:
    def gathering(b: ComputationGraphBuilder) -> None:
        x, at = b.input("x", (4, 64), "float32"), b.input("at", (4,), "int64")
        b.output("y", b.op("Gather", x, at, axis=0) + 1.0)
        b.output("z", x * 2.0)

    x = integers()
    with stitch.open_device("tiny", executor=executor, aggregate="always") as device:
        a, _, c = chain(device)
        gather = device.load(model("gather", gathering))
        for at in (np.arange(4), np.array([0, 1, 2, 99])):
            first = one(a(x))
            unread, second = several(gather(first, at))
            last = one(c(second))
            del unread, second
            if at[-1] == 3:
                np.testing.assert_array_equal(last.numpy(), expected(expected(x, 2) * 2, 0.5))
                assert device.account().total.programs == 1
                continue
            with pytest.raises(StitchError, match=r"bounds|out of range"):
                device.wait()
            with pytest.raises(StitchError, match="task 'c' was cancelled: task 'gather' failed"):
                last.numpy()
            np.testing.assert_array_equal(first.numpy(), expected(x, 2))


def test_denormals_are_flushed_as_in_separate_runs() -> None:
    """By the Softmax of an output that nobody reads, both programs flush; linked they still do."""

    def scaling(factor: float) -> Any:
        def build(b: ComputationGraphBuilder) -> None:
            x = b.input("x", (16, 64), "float32")
            b.output("y", x * factor)
            b.output("s", b.op("Softmax", x, axis=-1))

        return build

    x = np.full((16, 64), 1e-15, np.float32)
    with stitch.open_device("tiny", executor="onnxruntime") as device:
        p, q = [device.load(model(n, scaling(f))) for n, f in (("p", 1e-25), ("q", 1e10))]
        seen = []
        for _ in range(102):
            y = several(p(x))[0]
            z = several(q(y))[0]
            del y
            seen.append(z.numpy())
            del z
        assert "run as one program" in device.explain()
    assert not np.any(seen[0])
    for array in seen:
        np.testing.assert_array_equal(array, seen[0])


def test_programs_on_inter_op_threads_are_linked_only_by_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shorten(monkeypatch)
    for how, linked in (("auto", False), ("always", True)):
        executor = Counting(LinkTerms(repeats=3))
        with stitch.open_device(
            "tiny", executor=executor, inter_op_threads=2, aggregate=how
        ) as device:
            a, b, c = chain(device)
            add = device.load(binary_op("add", "Add", (4, 64)))
            for _ in range(6):
                x = integers()
                result = one(add(b(a(x)), c(a(x)))).numpy()
                del x
            assert result is not None
            assert device.linking is not None
            told = " ".join(device.linking.notes)
            assert ("run as one program" in told) is linked
            assert ("run beside each other on threads" in told) is not linked


def test_an_unlinkable_pair_is_explained() -> None:
    def storing(name: str, option: str) -> stitch.CompiledModel:
        builder = ComputationGraphBuilder(name)
        builder.output("y", builder.input("x", (32, 32), "float32") * 2.0)
        return stitch.compile(builder.build(), target="wormhole_n150", placement=[option])

    with stitch.open_device("wormhole_n150", aggregate="always") as device:
        a = device.load(storing("a", "output.y.data_type=bfp8"))
        b = device.load(storing("b", "input.x.data_type=bfp8"))
        one(b(a(np.ones((32, 32), np.float32)))).numpy()
        assert device.linking is not None
        (note,) = device.linking.notes
        assert "linked into one: program 'a' output 'y' feeds" in note


def test_no_function_overtakes_another_though_linking_would_let_it() -> None:
    desc = stitch.TensorDesc((4, 64), stitch.Layout(stitch.DataType.FLOAT32))
    called: list[str] = []

    @stitch.task(returns=desc)
    def first() -> Any:
        called.append("first")
        return integers()

    @stitch.task
    def look(x: Any) -> None:
        called.append("look")

    @stitch.task(returns=desc)
    def last() -> Any:
        called.append("last")
        return integers()

    with stitch.open_device("tiny", aggregate="always") as device:
        a, total = device.load(scaled("a", 2.0)), device.load(binary_op("total", "Add", (4, 64)))
        made = one(a(device.call(first)))
        device.call(look, made)
        result = one(total(made, device.call(last)))
        del made
        result.numpy()
    assert called == ["first", "look", "last"]


@pytest.mark.parametrize("aggregate", ["never", "always"])
def test_damaged_constants_are_found_in_linked_and_separate_runs(aggregate: str) -> None:
    damaged = bytearray(scaled("b", 3.0).encode())
    damaged[damaged.rfind(np.float32(3).tobytes())] ^= 1
    with stitch.open_device("tiny", aggregate=aggregate) as device:
        a = device.load(scaled("a", 2.0))
        b = device.load(stitch.load(bytes(damaged), verify="metadata"))
        with pytest.raises(StitchError, match="constants of the file are damaged"):
            one(b(a(integers()))).numpy()


def test_what_was_linked_is_not_taken_for_that_of_programs_that_came_later() -> None:
    x, held = integers(), list[object]()
    with stitch.open_device("tiny", aggregate="always") as device:
        for turn in range(12):
            a, b = device.load(scaled("a", turn + 1.0)), device.load(scaled("b", turn + 2.0))
            made = one(b(a(x)))
            np.testing.assert_array_equal(made.numpy(), expected(x, turn + 1, turn + 2))
            # Somebody may still run it, whose parts are gone.
            assert device.linking is not None
            held += device.linking._programs.values()
            del a, b, made


def test_more_kinds_of_work_than_are_remembered_are_not_linked_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aggregation, "MAX_KINDS", 4)
    x: Any = integers()
    with stitch.open_device("tiny", aggregate="always") as device:
        programs = chain(device) * 2
        made = []
        for _ in range(4):
            for kind in range(7):
                held, h = [], x
                for step, program in enumerate(programs[: kind + 2 if kind < 4 else 6]):
                    h = one(program(h))
                    if step == kind - 4:
                        held.append(h)
                h.numpy()
                del h, held
            made.append(device.statistics().plans_made)
        assert made[1] == made[3]
        assert "kinds of work are linked" in device.explain()


def test_work_that_repeats_is_remembered_among_work_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aggregation, "MAX_KINDS", 16)
    executor = Counting(LinkTerms(repeats=100))
    with stitch.open_device("tiny", executor=executor) as device:
        programs = [device.load(scaled(f"p{i}", 1 + i * 0.01)) for i in range(12)]
        x = integers()
        for i in range(120):
            one(programs[2](programs[1](programs[0](x)))).numpy()
            one(programs[i % 12](programs[i // 12](x))).numpy()
        assert device.linking is not None
        assert any("run as one program" in note for note in device.linking.notes)

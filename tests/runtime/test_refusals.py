"""Errors of wrong use: what, expected, got, and a remedy that works."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import UsageError
from stitch.runtime import HookContext
from tests.support.stitched_models import consuming, one, scaled

X = np.ones((4, 64), np.float32)


def interrupt(context: HookContext | None) -> None:
    raise KeyboardInterrupt


def give_up(context: HookContext) -> None:
    raise MemoryError


@pytest.mark.parametrize(("hook", "said"), [
    (interrupt, ("task 'a' was interrupted by KeyboardInterrupt", "cancelled after an interrupt")),
    (give_up, ("task 'a' failed: MemoryError", "cancelled after a failure")),
])  # fmt: skip
def test_a_tensor_of_a_stopped_run_names_the_exception(
    hook: Callable[[HookContext], object], said: tuple[str, str]
) -> None:
    with stitch.open_device("tiny") as device:
        a, b = device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))
        first = one(a(X))
        second = one(b(first))
        unregister = device.hooks.register(before_program=hook)
        with pytest.raises((KeyboardInterrupt, MemoryError)):
            device.flush()
        unregister()
        for tensor, words in zip((first, second), said, strict=True):
            with pytest.raises(stitch.TaskError) as refused:
                tensor.numpy()
            assert words in str(refused.value)


def test_a_tensor_of_another_threads_run_names_the_interrupted_thread() -> None:
    with stitch.open_device("tiny") as device:
        a, b = device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))
        queued = []
        thread = threading.Thread(target=lambda: queued.extend([first := one(a(X)), one(b(first))]))
        thread.start()
        thread.join()
        unregister = device.hooks.register(before_program=interrupt)
        with pytest.raises(KeyboardInterrupt):
            device.flush()
        unregister()
        for tensor in queued:
            with pytest.raises(stitch.TaskError, match=r"(of|in) the thread that ran it"):
                tensor.numpy()


def test_the_remedy_for_a_donated_tensor_works() -> None:
    with stitch.open_device("tiny") as device:
        eat = device.load(consuming("eat", 3.0))
        given = device.tensor(X)
        given.retain = True  # It speaks of submit: what is donated is gone all the same.
        kept = copy.deepcopy(given)
        eaten = one(eat(given))
        assert repr(given).endswith("donated>")
        with pytest.raises(stitch.TaskError, match=r"copy\.deepcopy\(tensor\)"):
            given.numpy()
        np.testing.assert_array_equal(eaten.numpy(), X * 3)
        np.testing.assert_array_equal(kept.numpy(), X)
        assert repr(given).endswith("donated>")
        pending, freed = one(device.load(scaled("a", 2.0))(X)), device.tensor(X)
        eat(pending)
        freed.deallocate()
        assert (repr(pending)[-8:], repr(freed)[-6:]) == ("donated>", "freed>")
    with pytest.raises(stitch.TaskError, match=r"is closed\n  try: .*open another device"), device:
        pass


def test_errors_of_another_devices_objects_name_both_devices() -> None:
    with stitch.open_device("tiny") as here, stitch.open_device("tiny") as there:
        mine, theirs = here.load(scaled("a", 2.0)), there.load(scaled("a", 2.0))
        assert repr(here) != repr(there)
        tensor, pending = there.tensor(X), one(theirs(X))
        in_l1 = stitch.Layout(stitch.DataType.FLOAT32, stitch.Space.L1)
        uses: list[Callable[[], object]] = [
            lambda: mine(tensor),
            lambda: mine(pending),
            lambda: here.to_layout(tensor, in_l1),
            lambda: stitch.Pipeline([mine])(tensor),
            lambda: stitch.Pipeline([mine, theirs]),
            lambda: here.write(tensor, X),
            lambda: here.submit(theirs, (X,)),
            lambda: stitch.submit(here, theirs, 0, [X]),
        ]
        for use in uses:
            with pytest.raises(UsageError) as refused:
                use()
            error = refused.value
            assert repr(here) in str(error.expected)
            assert repr(there) in str(error.got)
            assert error.remedy


def test_errors_of_wrong_arguments_name_call_and_value() -> None:
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0))
        wrong: Any = X
        with pytest.raises(UsageError, match=r"Device\.write takes a tensor"):
            device.write(wrong, X)
        with pytest.raises(stitch.LinkError, match=r"try: pass an array of the tensor's shape"):
            device.write(device.tensor(X), X[:3])
        wrongs: list[tuple[Any, str]] = [
            ([], "list: []"), (["a.ttb", "b.ttb"], "str: 'a.ttb'"), (a, "LoadedProgram: <"),
            ([a, None], "NoneType: None"),
        ]  # fmt: skip
        for given, got in wrongs:
            with pytest.raises(UsageError, match="loaded on a device") as refused:
                stitch.Pipeline(given)
            assert str(refused.value.got).startswith(got)
        with pytest.raises(UsageError, match="surplus: argument 1") as refused:
            stitch.Pipeline([a])(X, X)
        assert refused.value.expected == "x: 4x64xf32"


def test_a_misspelt_keyword_names_the_nearest_and_the_known_ones() -> None:
    wrong: list[tuple[Any, str, str]] = [
        (stitch.open_device, "executer", "executor"), (stitch.open_mesh, "bakend", "backend"),
        (stitch.task, "retruns", "returns"), (stitch.Pipeline, "lnik", "link"),
        (stitch.link, "wirings", "wiring"), (stitch.SGD, "momentun", "momentum"),
        (stitch.Device.prepare, "take", "takes"),
    ]  # fmt: skip
    for call, given, meant in wrong:
        with pytest.raises(UsageError) as refused:
            call(**{given: "numpy"})
        assert refused.value.what == f"{call.__qualname__} takes no {given}"
        assert refused.value.remedy == f"did you mean {meant!r}?"
        assert meant in str(refused.value.expected)
        assert "self" not in str(refused.value.expected)


@pytest.mark.parametrize("option", ["debug", "strict_types", "spill"])
@pytest.mark.parametrize("given", [3, 1, "no", None], ids=repr)
def test_an_option_of_a_device_that_is_on_or_off_takes_nothing_else(
    option: str, given: object
) -> None:
    options: dict[str, Any] = {option: given}
    with pytest.raises(UsageError, match=f"open_device takes True or False as {option}"):
        stitch.open_device("tiny", **options)


def test_devices_and_pipelines_have_a_repr_and_cannot_be_copied() -> None:
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0))
        pipeline = stitch.Pipeline([a, a])
        assert repr(device) == f"<Device {device.number} tiny executor=numpy>"
        shown = repr(pipeline)
        assert shown.startswith("<Pipeline(x: 4x64xf32) -> 4x64xf32:")
        assert shown.endswith(f"; 2 tasks on {device!r}>")
        for what in (device, a, pipeline):
            for copied in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match="belongs to its"):
                    copied(what)
    assert repr(device) == f"<Device {device.number} tiny executor=numpy closed>"
    with pytest.raises(stitch.TaskError, match="open another device"):
        device.load(scaled("a", 2.0))


def test_a_listener_that_uses_a_device_during_a_plan_is_refused() -> None:
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0))
        unsubscribe = device.events.subscribe(lambda event: device.tensor(X))
        with pytest.raises(stitch.TaskError, match="by an event listener that handles PlanMade"):
            one(a(X)).numpy()
        unsubscribe()
        np.testing.assert_array_equal(one(a(X)).numpy(), X * 2 + 1)


@pytest.mark.parametrize("way", ["call", "pipeline", "read"])
def test_a_listener_that_recurses_into_its_own_runs_is_refused(way: str) -> None:
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0))
        pipeline, ready = stitch.Pipeline([a]), one(a(X))
        uses: dict[str, Callable[[], object]] = {
            "call": lambda: one(a(X)).numpy(),
            "pipeline": lambda: pipeline(X),
            "read": ready.numpy,
        }
        for _ in range(3):
            uses[way]()
        end = device.events.subscribe(lambda event: uses[way]())
        for _ in range(2):
            with pytest.raises(stitch.TaskError, match="an event listener"):
                uses[way]()
        end()
        np.testing.assert_array_equal(one(pipeline(X)).numpy(), X * 2 + 1)

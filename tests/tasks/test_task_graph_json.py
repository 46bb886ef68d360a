"""Task graphs as text: JSON comes back as an equal graph, or one error says all that is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.errors import FormatError, UsageError
from stitch.program import (
    TILE_SHAPE,
    DataType,
    Layout,
    MemoryLayout,
    Orientation,
    ShardSpec,
    Space,
    TensorDesc,
)
from stitch.tasks import TaskGraph, aggregate, host_function, task
from tests.support.grids import every
from tests.support.placed_graphs import placed
from tests.support.small_programs import HOST, program
from tests.support.task_graphs import random_graph


def back(graph: TaskGraph, text: str | None = None) -> TaskGraph:
    """The graph by way of its JSON."""
    return TaskGraph.from_json(
        graph.as_json() if text is None else text,
        programs=graph.programs, functions=graph.functions,
    )  # fmt: skip


def small() -> TaskGraph:
    """x -> a -> bump -> y, with a plain argument."""

    @task(updates="x")
    def bump(x: Any, by: Any) -> None: ...

    graph = TaskGraph("small")
    graph.output(bump(graph.call(program("a", "Abs", 1), graph.input(HOST, "x")), 2), "y")
    return graph


def changed(graph: TaskGraph, *path: Any, to: Any) -> str:
    """Its JSON with one field changed."""
    body = json.loads(graph.as_json())
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return json.dumps(body)


def refusal(graph: TaskGraph, text: str) -> str:
    with pytest.raises(FormatError) as caught:
        back(graph, text)
    return str(caught.value)


@given(st.integers(0, 10**6))
@settings(deadline=None)
def test_any_graph_comes_back_equal(seed: int) -> None:
    graph = random_graph(seed)
    on_devices = placed(graph, seed)
    forms = (graph, on_devices)
    for form in (*forms, *map(aggregate, forms), *[aggregate(form, "keep") for form in forms]):
        again = back(form)
        assert again == form and again.as_json() == form.as_json()
        assert again.table() == form.table()


def test_every_part_of_a_descriptor_comes_back() -> None:
    graph = TaskGraph()
    spec = ShardSpec((1, 2), (32, 32), Orientation.COL_MAJOR)
    layouts = [
        Layout(DataType.BFP8, Space.DRAM, TILE_SHAPE, address=4096),
        Layout(DataType.INT32, Space.L1, TILE_SHAPE, MemoryLayout.HEIGHT_SHARDED, spec),
    ]
    for layout in layouts:
        graph.input(TensorDesc((64, 32), layout))
    assert back(graph).table().descs == graph.table().descs


def test_plain_arguments_come_back_as_they_were() -> None:
    plain = [
        None, True, 3, 2.5, math.inf, "text", Path("a/b.npy"), (1, (2, "x")), [1, [2]],
        {"k": (1,), "input": 2},
    ]  # fmt: skip

    def shown(x: Any, *rest: Any, **named: Any) -> None: ...

    graph = TaskGraph()
    x = graph.input(HOST, "x")
    graph.host(shown, x, *plain, path=Path("p"), other=x)
    assert back(graph) == graph
    nan = TaskGraph()
    nan.host(shown, 1, math.nan)
    assert "(1, nan)" in str(back(nan))
    for wrong in ({1: 2}, {1}, b"bytes", np.float32(1)):
        odd = TaskGraph("odd")
        odd.host(shown, odd.input(HOST), wrong)
        with pytest.raises(UsageError, match=r"holds no such argument\n  where: task 0 \(shown\)"):
            odd.as_json()


def test_programs_and_functions_of_one_name_are_told_apart() -> None:
    graph = TaskGraph()
    x = graph.input(HOST)
    graph.output(graph.call(program("a", "Sub"), x, graph.call(program("a"), x, x)))
    assert list(graph.programs) == ["a", "a#2"]
    first, second = (lambda x: x), (lambda x: -x)
    graph.host(first, x, returns=HOST)
    graph.host(second, x, returns=HOST)
    assert list(graph.functions) == ["<lambda>", "<lambda>#2"]
    assert back(graph) == graph


def test_text_has_a_line_for_each_task() -> None:
    assert str(small()) == (
        'task graph "small" {\n'
        "  input x: %0 4x8xf32:host:row_major:interleaved\n"
        "  %1 = a(x0=%0) : 4x8xf32:dram:row_major:interleaved\n"
        "  %2 = host bump(%1!, 2) : 4x8xf32:dram:row_major:interleaved\n"
        "  output y: %2\n"
        "}\n"
    )
    merged = str(aggregate(small()))
    assert "  %1 = merged(%0) :" in merged and "\n    %2 = host bump(%1!, 2)\n" in merged


def test_a_task_has_its_device_in_the_text_and_the_lines() -> None:
    graph = TaskGraph.of(replace(small().table(), devices=("left", None)))
    tasks = json.loads(graph.as_json())["tasks"]
    assert tasks[0]["device"] == "left" and "device" not in tasks[1]
    assert back(graph) == graph and back(graph).tasks[0].device == "left"
    assert "  %1 = a(x0=%0) on left : 4x8xf32" in str(graph)
    assert "host bump(%1!, 2) : 4x8xf32" in str(graph)


def test_a_text_without_devices_and_files_has_no_keys_for_them() -> None:
    body = json.loads(small().as_json())
    assert list(body["programs"][0]) == ["name", "inputs", "outputs"]
    assert [list(task) for task in body["tasks"]] == [
        ["inputs", "outputs", "program"],
        ["inputs", "outputs", "function", "arguments", "named"],
    ]


HASH = "0123456789abcdef" * 4


def test_a_program_may_be_named_by_its_file() -> None:
    graph = small()
    text = graph.as_json(files={"a": (HASH, 1)})
    (said,) = json.loads(text)["programs"]
    assert (said["name"], said["sha256"], said["index"]) == ("a", HASH, 1)
    assert back(graph, text) == graph
    programs = [program("b"), graph.programs["a"]]
    again = TaskGraph.from_json(text, programs={HASH: programs}, functions=graph.functions)
    assert again == graph and again.programs["a"] is programs[1]
    for found, message in (
        ({HASH: programs[:1]}, "the file of program 'a' has 1 programs"),
        ({HASH: programs[::-1]}, "the program that is given is another one"),
        ({HASH[::-1]: programs}, "program 'a' is not given"),
    ):
        with pytest.raises(FormatError, match=message):
            TaskGraph.from_json(text, programs=found, functions=graph.functions)
    with pytest.raises(UsageError, match="the programs of a file as a list"):
        TaskGraph.from_json(text, programs={HASH: programs[1]}, functions=graph.functions)


def test_a_file_that_is_named_otherwise_is_refused_when_the_text_is_written() -> None:
    files: list[tuple[Any, str]] = [
        ({"b": (HASH, 0)}, "calls no program 'b'"),
        ({"a": HASH}, "the file of program 'a' has no such name"),
        ({"a": (HASH.upper(), 0)}, "64 lower-case hexadecimal digits"),
        ({"a": (HASH, -1)}, "has no such name"),
        ([("a", HASH)], "as files"),
    ]
    for wrong, message in files:
        with pytest.raises(UsageError, match=message):
            small().as_json(files=wrong)


# -- bad text --------------------------------------------------------------------------------------


def test_a_cyclic_graph_is_refused() -> None:
    graph = small()
    told = refusal(graph, changed(graph, "tasks", 0, "inputs", to=[2]))
    assert "task 0 (a), 'x0': it reads what the later task 1 (bump) makes" in told
    assert "tasks wait for each other" in told


DEEP: list[Any] = []
for _ in range(50):
    DEEP = [{"inputs": [], "outputs": [], "merged": DEEP, "kept": []}]
WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    (("tasks", 0, "program"), "ab", "program 'ab' is not given"),
    (("tasks", 0, "inputs"), [0, 0], "it takes 1 inputs, not 2"),
    (("tasks", 0, "inputs"), [9], "value 9 is no input, and no task makes it"),
    (("tasks", 0, "outputs"), [7], "expected: [1]\n  got: [7]"),
    (("tasks", 0, "outputs"), [], "expected: [1]\n  got: [2]"),
    (("tasks", 0, "copy"), {"shape": []}, "Desc has no 'data_type', no 'space'"),
    (("tasks", 1, "program"), "a", "a task has one of program or function or copy"),
    (("tasks", 1, "arguments"), [{"input": 1}, 2], "places of task 'bump' are not one for"),
    (("tasks", 1, "arguments"), [3, {"input": 0}], "updates x, which needs"),
    (("tasks", 1, "arguments"), [{"put": 1}], "a plain value, or an object with one of"),
    (("tasks", 1, "arguments"), [{"input": "0"}], "got: '0'"),
    (("tasks", 1, "named"), {"z": 1}, "unexpected keyword argument 'z'"),
    (("tasks", 1, "named"), {"x": 1}, "multiple values for argument 'x'"),
    (("tasks", 1, "named"), 3, "graph.tasks[1].named\n  expected: an object\n  got: 3"),
    (("functions", 0, "updates"), [], 'expected: []\n  got: ["x"]'),
    (("functions", 0, "name"), "bmp", "function 'bmp' is not given"),
    (("programs", 0, "inputs", 0, "donate"), True, "the program that is given is another one"),
    (("inputs", 0, "desc", "space"), "l2", "inputs[0].desc.space\n  expected: host or dram or l1"),
    (("inputs", 0, "desc", "shape"), [-1], "none of them negative"),
    (("inputs", 0, "desc", "tile_shape"), [1], "expected: a list of 2"),
    (("inputs", 0, "desc", "shard_spec"), {}, "Shards has no 'core_grid'"),
    (("inputs", 0, "desc", "data_type"), "bfp8", "exists only in tiles"),
    (("inputs", 0, "desc"), None, "expected: Desc\n  got: None"),
    (("inputs", 0, "desc", "shape"), [4, 9], "shape [4, 9] is not [4, 8]"),
    (("inputs", 0, "name"), "", "it has no name"),
    (("outputs", 0, "value"), 1, "has taken its value over"),
    (("outputs", 0, "value"), True, "expected: an integer of 64 bits"),
    (("other",), 1, "a surplus 'other'"),
    (("tasks", 0, "device"), 3, "graph.tasks[0].device\n  expected: a string\n  got: 3"),
    (("tasks", 0, "device"), "", "the name of a device is empty"),
    (("programs", 0, "sha256"), "0" * 64, "a file of programs has no such name"),
    (("programs", 0, "index"), 0, "got: (None, 0)"),
    (("tasks", 0, "merged"), DEEP, "nested deeper than 40 levels"),
]
WRONG_MERGED: list[tuple[tuple[Any, ...], Any, str]] = [
    (("tasks", 0, "merged", 0, "inputs"), [3], "and 1 are known before it"),
    (("tasks", 0, "merged", 1, "outputs"), [7], "expected: [2]\n  got: [7]"),
    (("tasks", 0, "merged", 1, "outputs"), [], "it makes 1 values, not 0"),
    (("tasks", 0, "merged", 0, "device"), "left", "a member of a merged task names a device"),
    (("tasks", 0, "kept"), [5], "it keeps values [5] of 3"),
    (("tasks", 0, "kept"), [], "it makes 0 values, not 1"),
]


def test_what_is_wrong_is_said_with_its_place() -> None:
    for graph, cases in ((small(), WRONG), (aggregate(small()), WRONG_MERGED)):
        for path, to, message in cases:
            assert message in refusal(graph, changed(graph, *path, to=to)), path


def test_another_form_or_version_is_refused() -> None:
    graph = small()
    for path, to in (("version", 2), ("format", "stitch.computation_graph")):
        with pytest.raises(FormatError, match="no task graph, or of another version"):
            back(graph, changed(graph, path, to=to))
    for text in ("[]", "3", '{"format": 1, "format": 2}', "[" * 100_000):
        with pytest.raises(FormatError):
            back(graph, text)


def test_what_is_no_program_or_function_is_the_callers_mistake() -> None:
    graph = small()
    with pytest.raises(UsageError, match="calls a Program"):
        TaskGraph.from_json(
            graph.as_json(), programs={"a": 3}, functions=graph.functions  # type: ignore[dict-item]
        )  # fmt: skip
    with pytest.raises(UsageError, match="takes a text as text"):
        TaskGraph.from_json(3)  # type: ignore[arg-type]
    other = host_function(lambda y: None, name="bump")
    with pytest.raises(FormatError, match="the function that is given is another one"):
        TaskGraph.from_json(graph.as_json(), programs=graph.programs, functions={"bump": other})
    with pytest.raises(FormatError, match="has no parameter 'by', which reads= names"):
        TaskGraph.from_json(
            graph.as_json(), programs=graph.programs, functions={"bump": lambda y: None}
        )


LONG = "n" * 100_000


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("tasks", 0, "outputs"), [*range(1, 50_000)]), (("tasks", 1, "function"), LONG),
        (("functions", 0, "name"), LONG), ((LONG,), 0),
        (("outputs", 0), {"name": LONG, "value": 9}),
        (("inputs", 0, "desc", "shape"), [-1] * 100_000),
        (("inputs", 0, "desc", "shape"), [1] * 100_000),
    ],
    ids=["numbers", "call", "function", "key", "output", "bad shape", "other shape"],
)  # fmt: skip
def test_what_an_error_repeats_of_the_text_is_short(path: tuple[Any, ...], to: Any) -> None:
    graph = small()
    assert len(refusal(graph, changed(graph, *path, to=to))) < 1_000


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of a JSON value."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield (*at, key)
        yield from _paths(value[key], (*at, key))


@pytest.mark.parametrize("seed", every(40, range(40)))
def test_a_text_with_any_part_replaced_or_missing_is_a_graph_or_a_format_error(seed: int) -> None:
    graph = placed(random_graph(seed), seed)
    for form in (aggregate(graph), graph):
        files = dict.fromkeys(form.programs, (HASH, 0))
        body = json.loads(form.as_json(files=files))
        for *way, last in list(_paths(body)):
            part = body
            for key in way:
                part = part[key]
            sound = part[last]
            replacements: tuple[Any, ...] = (-2, 10**30, "text", None, [], {}, KeyError)
            for new in replacements:
                if new is KeyError:
                    del part[last]
                else:
                    part[last] = new
                damaged = json.dumps(body)
                if new is KeyError and isinstance(part, list):
                    part.insert(last, sound)
                else:
                    part[last] = sound
                try:
                    again = TaskGraph.from_json(
                        damaged, programs=form.programs, functions=form.functions
                    )
                except FormatError:
                    continue
                again.validate()
                assert again.text() and again.as_json()

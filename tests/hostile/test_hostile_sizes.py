"""Damaged and hostile files with named sizes: they load and are placed, or are refused."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from onnx import helper

import stitch
from stitch.errors import CompileError, FormatError, StitchError
from stitch.program import Dim, Expression, ExpressionRows, expressions_of
from stitch.program.expression_rows import MAX_DEPTH, MAX_PARTS
from stitch.ttb import encode, load_any
from stitch.ttb.encoding import _Encoder
from tests.hostile.test_mutations import mutated
from tests.support import run_seed
from tests.support.files.symbolic_specimens import rich_model
from tests.support.onnx.models import INT64, info
from tests.support.onnx.models import model as onnx_model

MODEL = rich_model()
FILE = MODEL.encode()
X = np.ones((6, 5), np.float32)


def survive(count: int, seed: int) -> tuple[int, int, int]:
    """Load `count` mutations and place what is taken; how many were placed, taken and refused."""
    draw, placed, taken, refused = random.Random(seed), 0, 0, 0
    for _ in range(count):
        try:
            model = stitch.load(mutated(draw, FILE))
        except FormatError as error:
            refused += 1
            assert str(error)
            continue
        taken += 1
        if not isinstance(model, stitch.DynamicModel):
            continue
        written = model.encode()
        assert stitch.load(written).encode() == written
        assert model.text()
        for n, m in ((6, 5), (2, 2), (40, 9)):
            try:
                static = model.at(n=n, m=m)
                stitch.load(static.encode())
                static(np.ones((n, m), np.float32))
                placed += 1
            except StitchError as error:
                assert str(error)
    return placed, taken, refused


def test_mutations_load_and_are_placed_or_are_refused() -> None:
    placed, taken, refused = survive(60, 2)
    assert taken + refused == 60 and placed > 3 and refused > 30


@pytest.mark.campaign("hostile")
def test_two_thousand_mutations_load_and_are_placed_or_are_refused() -> None:
    placed, taken, refused = survive(2_000, run_seed.SEED)
    assert taken + refused == 2_000 and placed > 20 and refused > 1_000


def test_every_truncation_is_refused() -> None:
    for length in range(0, len(FILE), 13):
        with pytest.raises(FormatError):
            load_any(FILE[:length])


def edited(
    monkeypatch: pytest.MonkeyPatch, table: str, change: Callable[[list[Any]], None]
) -> bytes:
    """The file as an encoder writes it that changes the values of the first row of a table."""
    whole = _Encoder._table
    seen: list[str] = []

    def changed(self: Any, name: str, *values: Any) -> int:
        listed = list(values)
        if name == table and not seen:
            seen.append(name)
            change(listed)
        return whole(self, name, *listed)

    with monkeypatch.context() as context:
        context.setattr(_Encoder, "_table", changed)
        file = MODEL.encode()
    assert seen
    return file


def put(at: int, value: Any) -> Callable[[list[Any]], None]:
    def change(values: list[Any]) -> None:
        values[at] = value

    return change


WRONG: list[tuple[str, Callable[[list[Any]], None], str]] = [
    ("NamedSize", put(1, 41), "no sizes within its bounds"),
    ("NamedSize", put(2, 1 << 60), "no sizes within its bounds"),
    ("NamedSize", put(3, 1), "the example of size 'n' is out of its bounds"),
    ("NamedSize", put(3, -5), "the example of size 'n' is out of its bounds"),
    ("SizeExpression", put(1, 0), "divisor is row 0, expected a row before it"),
    ("SizeExpression", put(1, 99), "divisor is row 99, expected a row before it"),
    ("SizeGuard", put(0, 99), r"guards\[0\] names expression 99 of"),
    ("SizeGuard", put(2, 99), r"guards\[0\] names expression 99 of"),
    ("SymbolicConstant", put(0, 999), "value 999 of"),
    ("SymbolicConstant", put(1, 999), "segment 999 of"),
    ("SymbolicProgram", put(8, 0), "value 1 of 0"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "change", "message"), WRONG)
def test_a_wrong_part_is_named(
    monkeypatch: pytest.MonkeyPatch, table: str, change: Callable[[list[Any]], None], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        load_any(edited(monkeypatch, table, change))


def test_two_sizes_of_one_name_are_refused() -> None:
    file = bytearray(FILE)
    at = FILE.index(b"\x01\x00\x00\x00n\x00")
    file[at + 4] = ord("m")
    end = 4 + struct.unpack_from("<I", file)[0]
    struct.pack_into("<I", file, end, crc32(file[:end]))
    with pytest.raises(FormatError, match="two sizes are called 'm'"):
        load_any(bytes(file))


ROWS: list[tuple[list[Any], str]] = [
    ([([(1, [7])], -1)], "factor is row 6, expected a row before it"),
    ([([(1, [0])], -1), ([(1, [1])], -1)], "which has no divisor"),
    ([([], -1), ([(1, [0])], 0)], "divides by 0"),
    ([([(2, [])], -1), ([(1, [0])], 0), *(([(1, [k])], 0) for k in range(2, 60))], "levels"),
    ([([(2, [])], -1), ([(1, [0])], 0),
      *(([(1, [k, k, k, k])], 0) for k in range(2, 12))], f"at most {MAX_PARTS}"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "message"), ROWS)
def test_unsound_rows_are_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(StitchError, match=message):
        expressions_of(rows, ["n"])


def test_what_no_reader_takes_is_not_written() -> None:
    n = Expression.of_name("n")
    deep = n
    for _ in range(MAX_DEPTH + 2):
        deep = (deep * 2 + 1) // 3
    rows = ExpressionRows(["n"])
    rows.number(deep)
    with pytest.raises(StitchError, match=f"expected at most {MAX_PARTS} in {MAX_DEPTH}"):
        expressions_of(rows.rows, ["n"])

    def powers(x: Any) -> Any:
        size = x.shape[0]
        for _ in range(7):
            size = size * size
        return x.reshape(size // size, -1)

    # Degree 128 cancels; the file holds what is left.
    axes = {"x": {0: Dim("n", 2, 9)}}
    model = stitch.compile(powers, (np.zeros((4, 2), np.float32),), dynamic_shapes=axes)
    assert stitch.load(model.encode()).at(n=3).encode() == model.at(n=3).encode()


def placed_with(change: Callable[[Any], Any]) -> Any:
    """The model of a file whose first value's first size was replaced by an expression of n."""
    n = Expression.of_name("n")
    graph, sizes = MODEL.program.graph, MODEL.program.sizes
    value = graph.values[graph.inputs[0].value]
    size: Any = sizes.size(change(n))
    kind = replace(value.type, shape=(size, value.type.shape[1]))
    values = tuple(replace(v, type=kind) if v is value else v for v in graph.values)
    program = replace(MODEL.program, graph=replace(graph, values=values))
    return stitch.load(stitch.DynamicModel(program, "wormhole_n150").encode())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: n - 40, "has no shapes at these sizes: x, .*would be .-34, 5"),
        (lambda n: n * (1 << 50), "has no shapes at these sizes"),
        (lambda n: n // (n - 6), "has no shapes at these sizes: .*zero"),
    ],
)
def test_expressions_without_a_size_are_refused_at_it(change: Any, message: str) -> None:
    model = placed_with(change)
    with pytest.raises(CompileError, match=message):
        model.at(n=6, m=5)


def test_a_shape_that_does_not_fit_its_operations_is_refused_where_it_runs() -> None:
    model = placed_with(lambda n: n + 1)
    with pytest.raises(StitchError):
        model.at(n=6, m=5)(np.ones((7, 5), np.float32))


def test_types_that_agree_at_some_sizes_only_are_refused_at_others_after_those() -> None:
    """Also where the passes do not run again: what they folded has another shape there."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Expand", ["c", "s"], ["e"]),
        helper.make_node("Concat", ["x", "e"], ["y"], axis=0),
    ]  # fmt: skip
    proto = onnx_model(nodes, [info("x", ["n", 5], INT64)], ["y"], {"c": np.arange(5)})
    made = stitch.compile(proto, dynamic_shapes={"n": Dim("n", 2, 40)})
    graph, n = made.program.graph, Expression.of_name("n")
    expand, concat = (o.outputs[0] for o in graph.operations if o.op in ("Expand", "Concat"))
    sizes: Any = made.program.sizes  # They agree at 6.
    changed = {expand: sizes.size(n * 2 - 6), concat: sizes.size(n * 3 - 6)}
    values = [
        replace(v, type=replace(v.type, shape=(changed[i], 5)))
        if i in changed else v
        for i, v in enumerate(graph.values)
    ]  # fmt: skip
    program = replace(made.program, graph=replace(graph, values=tuple(values)))
    model = stitch.load(stitch.DynamicModel(program, "wormhole_n150").encode())
    assert np.asarray(model(X.astype(np.int64))).shape == (12, 5)
    for _ in range(2):
        with pytest.raises(CompileError, match=r"types of computation graph .* do not agree"):
            model.at(n=7)


def test_files_take_no_more_memory_than_a_sound_one_of_their_size() -> None:
    load_any(FILE)
    draw, peaks = random.Random(3), []
    for file in [FILE, *(mutated(draw, FILE) for _ in range(15))]:
        tracemalloc.start()
        with contextlib.suppress(FormatError):
            load_any(file)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 3 * peaks[0] + 100_000


def test_types_are_checked_before_what_has_them_is_folded() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Expand", ["c", "s"], ["e"]),
        helper.make_node("Reshape", ["e", "r"], ["y"]),
    ]  # fmt: skip
    weights = {"c": np.arange(5), "r": np.array([-1])}
    proto = onnx_model(nodes, [info("x", ["n", 5], INT64)], ["y"], weights)
    made = stitch.compile(proto, dynamic_shapes={"n": Dim("n", 2, 40)})
    graph = made.program.graph
    values = list(graph.values)
    last = graph.outputs[0].value
    values[last] = replace(values[last], type=replace(values[last].type, shape=(30,)))
    program = replace(made.program, graph=replace(graph, values=tuple(values)))
    model = stitch.load(stitch.DynamicModel(program, "wormhole_n150").encode())
    assert np.asarray(model(X.astype(np.int64))).shape == (30,)
    with pytest.raises(CompileError, match="do not agree"):
        model.at(n=3)


def test_foreign_operators_are_refused() -> None:
    """Their types, which are declared, may be equal at some sizes only."""
    binary = MODEL.stored()
    first, *others = binary.graph.operations
    first = replace(first, op="Foo", domain="com.acme", opset=1)
    graph = replace(binary.graph, operations=(first, *others))
    with pytest.raises(FormatError, match=r"a foreign operator, .*Foo"):
        load_any(encode(replace(binary, graph=graph)))

"""Generated kernels on tiles: which operations join one, and its text. `test_triton_kernels` runs
them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch import fractal as ops
from stitch.graph import ComputationGraphBuilder, scan
from stitch.linker import program_of_body
from stitch.program import Program, is_scan
from stitch.runtime.executors import triton_kernels, triton_tiles
from stitch.runtime.executors.triton_tiles import TileWriter, tile_runs

BLOCKS, BLOCK, WIDTH = 3, 4, 8


def attention() -> tuple[Any, list[Any]]:
    """A map over blocks of queries, in it a fold over blocks of keys and values."""
    zeros, wide = np.zeros((BLOCK, 1), np.float32), np.zeros((BLOCK, WIDTH), np.float32)

    def step(state: Any, key: Any, value: Any, *, query: Any) -> Any:
        largest, total, weighed = state
        scores = query @ key.T
        new = np.maximum(largest, scores.max(axis=1, keepdims=True))
        before, powers = np.exp(largest - new), np.exp(scores - new)
        total = total * before + powers.sum(axis=1, keepdims=True)
        return new, total, weighed * before + powers @ value

    def block(query: Any, *, keys: Any, values: Any) -> Any:
        start = zeros - np.float32(1e30), zeros, wide
        _, total, weighed = ops.fold(step, ops.zip(keys, values), start, query=query)
        return weighed / total

    arrays = np.random.default_rng(0).standard_normal((3, BLOCKS, BLOCK, WIDTH), np.float32)
    return lambda q, k, v: ops.map(block, q, keys=k, values=v), [*map(ops.FractalTensor, arrays)]


def cell(hidden: int, kind: str = "float32") -> Program:
    """The body of a scan over a recurrent cell, of whose two gates the states are made."""
    b = ComputationGraphBuilder("cell")
    w = b.input("w", (hidden, 2 * hidden), kind)
    xs, start = b.input("xs", (2, 3, 2 * hidden), kind), b.input("h", (3, hidden), kind)

    def round_of(states: Any, elements: Any) -> Any:
        both = states[0] @ w + elements[0]
        new = np.tanh(both[:, :hidden]) * np.tanh(both[:, hidden:])
        return [new], [new]

    (last,), (said,) = scan(b, round_of, [start], [xs])
    b.output("last", last)
    b.output("said", said)
    program = stitch.compile(b.build(), target="cuda", schedule="rounds").program
    (operation,) = (o for o in program.operations if is_scan(o))
    return program_of_body(program, operation.body, 1)


def written(program: Program, result: int) -> TileWriter:
    """A kernel that computes a value of a program."""
    from stitch.ops import attributes_of

    makers = {v: (o, attributes_of(o)) for o in program.operations for v in o.outputs}
    known, tensors = program.constant_data(), dict[int, torch.Tensor]()

    def read(value: int) -> torch.Tensor:
        return tensors.setdefault(value, torch.zeros(program.values[value].type.shape))

    writer = TileWriter(program.values, makers, known, read, bodies=program.bodies)
    writer.store(result, torch.zeros(program.values[result].type.shape))
    return writer


def test_a_fold_over_blocks_is_one_kernel_with_what_is_around_it() -> None:
    network, given = attention()
    program = ops.compile(network, *given, target="cuda").binary.program(0)
    runs = tile_runs(program, program.constant_data(), (), in_round=False)
    assert runs == {0: len(program.operations)}
    text = written(program, program.outputs[0].value).text()
    loop = text[text.index("for r in range(3):") :]
    assert loop.count("tl.dot(") == 2 and text.count("tl.store(") == 1
    # What it reads may lie where it writes.
    assert loop.index("tl.debug_barrier()") < loop.index("tl.store(")
    assert "input_precision='ieee'" in loop and "tl.reduce(tl.where(j16 < 4" in loop
    # Queries, keys and values are read where they lie, each by one pointer.
    assert text.count("def kernel(p0, p1, p2, p3, p4, p5, p6, ROWS") == 1


def test_a_product_with_few_terms_joins_the_kernel_of_its_round() -> None:
    few, many = cell(24), cell(300)
    (span,) = tile_runs(few, few.constant_data(), (), in_round=True).items()
    assert "MatMul" in {o.op for o in few.operations[slice(*span)]}
    assert not tile_runs(many, many.constant_data(), (), in_round=True)
    narrow = cell(300, "float16")
    assert tile_runs(narrow, narrow.constant_data(), (), in_round=True)
    # Each gate is a product with its own columns.
    text = written(few, few.outputs[0].value).text()
    assert text.count("tl.dot(") == 2 and "(j32 + 24)" in text and "(j32 + 0)" in text


def test_in_blocks_of_columns_a_kernel_writes_nothing_that_others_read() -> None:
    program = cell(40)
    writer = written(program, program.outputs[0].value)
    state = next(load for load in writer.loads if load.shape == (3, 40))
    assert not writer.allows(state) and writer.allows(torch.zeros(3, 40))


def test_rows_of_another_program_are_refused() -> None:
    """A round that turns its state needs all rows at once."""

    def step(state: Any, x: Any) -> Any:
        return np.maximum(state.T, x.max(axis=1, keepdims=True))

    xs = ops.FractalTensor(np.ones((3, 4, 4), np.float32))
    nest = ops.compile(
        lambda xs: ops.fold(step, xs, np.zeros((4, 4), np.float32)), xs, target="cuda"
    )
    program = nest.binary.program(0)
    with pytest.raises(RuntimeError, match="rows are in another program"):
        written(program, program.outputs[0].value)


def test_what_a_kernel_on_tiles_cannot_compute_becomes_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(text: str) -> None:
        asked.append("ROWS" in text)
        raise RuntimeError("no kernel")

    asked: list[bool] = []
    network, given = attention()
    binary = ops.compile(network, *given, target="cuda").binary
    with stitch.open_device("torch:cpu") as device:
        expected = device.load(binary)(*[g.leaves() for g in given]).numpy()
    monkeypatch.setattr("stitch.runtime.executors.tensor_programs.can_run", lambda device: True)
    for module in (triton_tiles, triton_kernels):
        monkeypatch.setattr(module, "compiled", refused)
    with stitch.open_device("torch:cpu") as device:
        found = device.load(binary)(*[g.leaves() for g in given]).numpy()
    assert asked[:2] == [True, False]
    np.testing.assert_array_equal(found, expected)

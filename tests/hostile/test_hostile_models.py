"""Models in JSON, numbers of modules, bytes of programs, damaged: a result, or an error of ours."""

from __future__ import annotations

import copy
import io
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError, FormatError, StitchError
from stitch.frontend import module_from_text
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.ttb import encode, load
from tests.support import run_seed

SEED = 20261122
LINEAR = """\
inputs:
  x: {shape: [4, 3], type: float32, space: l1}
parameters:
  w: {shape: [3, 2], init: {kind: randn}}
operations:
  - h = MatMul(x, w)
  - y = LeakyRelu(h, alpha=0.1)
outputs: [y]
"""
MANY = """\
inputs:
  x: {shape: [1, 2, 6, 6], type: float16}
  i: {shape: [3], type: int64}
parameters:
  w: {shape: [3, 2, 3, 3], init: {kind: randn}}
  lo: {values: -1.0, type: float16}
  step: {values: 0.05, type: float32}
  k: {values: [0, 2, 1], type: int64}
operations:
  - a = Clip(x, lo, 6.0)
  - f = Cast(a, to=float32)
  - c = Conv(f, w, pads=[1,1,1,1], strides=[1,2])
  - p = MaxPool(c, kernel_shape=[2,2])
  - q = Pad(p, [0,0,1,1,0,0,1,1], 0.5, mode=constant)
  - g = Gather(q, k, axis=1)
  - t = Transpose(g, perm=[0,2,1,3])
  - s = Softmax(t, axis=-1)
  - e = Elu(s, alpha=0.5)
  - u = QuantizeLinear(e, step, _)
  - d = DequantizeLinear(u, step)
  - n = Cast(d, to=int8)
  - b = Cast(n, to=bfloat16)
  - r = ReduceSum(b, [1, 2], keepdims=0)
  - y, j = TopK(r, [2], axis=-1)
  - z = CumSum(i, 0)
outputs: [y, j, z]
"""
#: What stands where something else should.
STRANGERS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**63, 10**30, 1e308, 1.5, "", "x", "l1", "nan", "float32",
    [], {}, [None], ["x"], {"a": 1}, [[1]],
)  # fmt: skip
WORDS = (0, 1, 2, 4, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 4)
NUMBERS = (1e9, -1e9, float("nan"), float("inf"), 1e300, 70000.0, 300.0, 0.0, -1.0)


def graph(text: str) -> ComputationGraph:
    return module_from_text(text, Path())


# -- JSON ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"graph": ' + "[" * 200_000, "", "nul", "[]", "null", "1", '{"stitch": 1}'],
)
def test_text_that_is_no_model_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match=r"no (JSON of a )?compiled model"):
        stitch.CompiledModel.load(io.StringIO(text))


@pytest.mark.parametrize("field", ["stitch", "name", "target", "role", "placement", "graph"])
@pytest.mark.parametrize("stranger", [None, True, 7, [1], {"a": 1}], ids=str)
def test_a_field_of_another_type_is_named(field: str, stranger: Any) -> None:
    body = json.loads(stitch.compile(graph(LINEAR)).as_json()) | {field: stranger}
    with pytest.raises(FormatError, match=field):
        stitch.CompiledModel.load(io.StringIO(json.dumps(body)))


def test_a_model_that_is_dumped_loads() -> None:
    model = stitch.compile(graph(LINEAR))
    again = stitch.CompiledModel.load(io.StringIO(model.as_json()))
    assert again.encode() == model.encode()


def places(body: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    items = body if isinstance(body, list) else ()
    parts = body.items() if isinstance(body, dict) else enumerate(items)
    for key, part in parts:
        yield from places(part, (*place, key))


def survive_json(rounds: int, seed: int) -> int:
    """Load models with one or two fields replaced or gone; how many loaded."""
    draw, loaded = random.Random(seed), 0
    training = stitch.compile(graph(LINEAR), optimizer="adamw", loss="mse")
    for model in (stitch.compile(graph(LINEAR)), training):
        body = json.loads(model.as_json())
        known = list(places(body))
        for _ in range(rounds):
            damaged = copy.deepcopy(body)
            for *path, key in draw.sample(known, draw.choice((1, 2))):
                at = damaged
                for step in path:
                    inside = isinstance(at, dict) and step in at
                    inside = inside or (isinstance(at, list) and type(step) is int
                                        and step < len(at))  # fmt: skip
                    at = at[step] if inside else {}
                if isinstance(at, dict) and draw.random() < 0.15:
                    at.pop(key, None)
                elif isinstance(at, dict) or (
                    isinstance(at, list) and type(key) is int and key < len(at)
                ):
                    # A copy: the next damage may lie inside it.
                    at[key] = copy.deepcopy(draw.choice(STRANGERS))
            try:
                stitch.CompiledModel.load(io.StringIO(json.dumps(damaged)))
                loaded += 1
            except StitchError as error:
                assert str(error)
    return loaded


def test_models_with_strange_fields_load_or_are_refused() -> None:
    assert 0 < survive_json(120, SEED) < 240


@pytest.mark.campaign("hostile")
def test_many_models_with_strange_fields_load_or_are_refused() -> None:
    survive_json(5000, run_seed.SEED)


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize("number", [1e9, -1e9, [1.0, 1e9]], ids=str)
def test_a_number_beyond_a_narrow_type_is_refused_by_name(kind: str, number: Any) -> None:
    b = ComputationGraphBuilder("g")
    x = b.input("x", (2,), kind)
    with pytest.raises(CompileError, match="does not fit a tensor of"):
        b.apply("Add", [x, number], 1, {})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.1, 1e-30])
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64"])
def test_what_a_type_holds_or_rounds_is_taken_without_a_warning(kind: str, number: float) -> None:
    b = ComputationGraphBuilder("g")
    b.output("y", b.op("Add", b.input("x", (2,), kind), number))
    assert b.build().constants[0].data.dtype.name.startswith(kind)


# -- bytes -----------------------------------------------------------------------------------------


def mutated(draw: random.Random, sound: bytes) -> bytes:
    """One to three changes to the metadata, and its CRC mended."""
    file = bytearray(sound)
    end = 4 + struct.unpack_from("<I", file)[0]
    for _ in range(draw.randint(1, 3)):
        kind, at, word = draw.randrange(5), draw.randrange(end), draw.randrange(end // 4 - 1) * 4
        if kind == 0:
            file[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            struct.pack_into("<I", file, word, draw.choice(WORDS))
        elif kind == 2:
            struct.pack_into("<d", file, word, draw.choice(NUMBERS))
        elif kind == 3:
            struct.pack_into("<f", file, word, float(np.clip(draw.choice(NUMBERS), -3e38, 3e38)))
        else:
            near = struct.unpack_from("<I", file, word)[0] + draw.choice((-8, -4, -1, 1, 4, 8))
            struct.pack_into("<I", file, word, near % 2**32)
    end = min(4 + struct.unpack_from("<I", file)[0], len(file) - 4)
    struct.pack_into("<I", file, end, crc32(file[:end]))
    return bytes(file)


def survive_runs(rounds: int, seed: int) -> int:
    """Verify, load and run damaged programs; how many gave results."""
    draw, ran = random.Random(seed), 0
    sound = encode(stitch.compile(graph(MANY)).binary)
    original = load(sound).programs
    with stitch.open_device("wormhole_n150") as device:
        for _ in range(rounds):
            try:
                binary = load(mutated(draw, sound), verify="full")
                if binary.programs == original:
                    continue
                program = device.load(binary)
                arrays = [np.ones(port.shape).astype(port.dtype) for port in program.ports]
                made = program(*arrays)
                for tensor in made if isinstance(made, tuple) else (made,):
                    tensor.numpy()
                ran += 1
            except StitchError as error:
                assert str(error)
    return ran


def test_damaged_programs_that_verify_run_or_are_refused() -> None:
    assert survive_runs(150, SEED) > 0


@pytest.mark.campaign("hostile")
def test_many_damaged_programs_that_verify_run_or_are_refused() -> None:
    survive_runs(5000, run_seed.SEED)

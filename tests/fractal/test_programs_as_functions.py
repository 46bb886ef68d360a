"""Programs as functions over nests, and nests as programs of another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from examples.fractal import stacked_lstm
from stitch import fractal as ops
from stitch.errors import CompileError, LinkError, UsageError
from stitch.fractal import FractalTensor
from stitch.fractal.modes import MODES
from stitch.graph import ComputationGraphBuilder
from stitch.program import Array
from stitch.runtime import LoadedProgram
from tests.support.grids import in_turn, named

RUN = "import sys; from stitch.cli import run_main; sys.exit(run_main(sys.argv[1:]))"
Build = Callable[[ComputationGraphBuilder], None]


@pytest.fixture(
    params=[pytest.param(p.values, marks=p.marks)
            for p in in_turn(["numpy", "onnxruntime"], MODES)],
    ids="-".join,
)  # fmt: skip
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """An executor and a mode."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def device(place: tuple[str, str]) -> Iterator[stitch.Device]:
    with stitch.open_device("host", executor=place[0]) as opened:
        yield opened


@pytest.fixture
def within(place: tuple[str, str], device: stitch.Device) -> Iterator[str]:
    """A mode, on the device."""
    with ops.mode(place[1], device=device):
        yield place[1]


def real(*shape: int, seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    return random.standard_normal(shape, np.float32) * np.float32(0.4)


def program(
    device: stitch.Device, build: Build, *placement: str, name: str = "cell"
) -> LoadedProgram:
    """A program that was compiled by itself, for the device."""
    builder = ComputationGraphBuilder(name)
    build(builder)
    compiled = stitch.compile(builder.build(), target=device.machine, placement=placement)
    return device.load(compiled.binary)


def cell(b: ComputationGraphBuilder) -> None:
    """tanh(s @ w + x @ w), with weights of 16 KiB."""
    s, x = b.input("s", (2, 64), "float32"), b.input("x", (2, 64), "float32")
    w = b.parameter("w", real(64, 64, seed=3) / 4)
    b.output("y", b.tanh(s @ w + x @ w))


def states(one: Any, xs: Any, first: Any) -> Array:
    """The loop that a scan is, each round a call."""
    found = []
    for x in xs:
        first = np.array(one(first, x))
        found.append(first)
    return np.stack(found)


def written_loops(f: Any, *example: Any) -> Any:
    """The graph of a nest into which programs have to be written: it asks for no data."""
    return ops.compile(f, *example).graph


# Nests as programs of another process ---------------------------------------------------------


def lstm(xs: Any, ws: Any, us: Any, bs: Any) -> Any:
    return stacked_lstm.network(xs, ws=ws, us=us, bs=bs)


def ragged(rows: Any) -> Any:
    return ops.map(lambda row: ops.scan(lambda s, x: ops.tanh(s + x), row), rows)


def nests(name: str) -> tuple[Any, list[Any]]:
    if name == "lstm":
        given = stacked_lstm.inputs()
        return lstm, [given[key] for key in ("xs", "ws", "us", "bs")]
    return ragged, [FractalTensor([list(real(n, 3, seed=n)) for n in (3, 1, 4)])]


@pytest.mark.parametrize(
    ("name", "executor"), in_turn(["lstm", "ragged"], ["numpy", "onnxruntime"])
)
def test_a_compiled_nest_is_run_by_another_process(
    tmp_path: Path, name: str, executor: str
) -> None:
    function, given = nests(name)
    compiled = ops.compile(function, *given)
    with stitch.open_device("host", executor=executor) as device:
        compiled.on(device)
        wanted = compiled(*given)
        np.testing.assert_allclose(wanted.leaves(), function(*given).leaves(), rtol=1e-5, atol=1e-6)
        bits = np.asarray(wanted.leaves())
    compiled.save(tmp_path / "net.ttb")
    words = [f"--module={tmp_path / 'net.ttb'}", f"--executor={executor}"]
    for number, nest in enumerate(given):
        np.save(tmp_path / f"{number}.npy", np.asarray(nest.leaves()))
        words.append(f"--input=input_{number}=@{tmp_path / f'{number}.npy'}")
    words.append(f"--output=@{tmp_path / 'found.npy'}")
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), bits)


# Programs --------------------------------------------------------------------------------------


def test_a_program_is_the_cell_of_a_scan(device: stitch.Device, within: str) -> None:
    one, xs, first = program(device, cell), real(5, 2, 64), real(2, 64, seed=1)
    wanted = states(one, xs, first)
    found = ops.scan(one, FractalTensor(xs), first)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-6)
    back = ops.scanr(one, FractalTensor(xs), first)
    np.testing.assert_allclose(back.numpy(), states(one, xs[::-1], first)[::-1], 1e-5, 1e-6)
    last = ops.fold(one, FractalTensor(xs), first)
    np.testing.assert_allclose(last.numpy(), wanted[-1], rtol=1e-5, atol=1e-6)


def test_a_program_is_the_function_of_ragged_and_zipped_nests(
    device: stitch.Device, within: str
) -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x, y = b.input("x", (3,), "float32"), b.input("y", (3,), "float32")
        b.output("less", x - y * 2)
        b.output("most", b.maximum(x, y))

    two = program(device, build)
    xss = [list(real(n, 3, seed=n)) for n in (3, 1, 4)]
    yss = [list(real(n, 3, seed=n + 9)) for n in (3, 1, 4)]
    zipped = ops.zip(FractalTensor(xss), FractalTensor(yss))
    less, most = ops.map(lambda xs, ys: ops.map(two, ops.zip(xs, ys)), zipped)
    given = ops.map(lambda xs: ops.map(two, xs, y=yss[0][0]), FractalTensor(xss))
    for k, (xs, ys) in enumerate(zip(xss, yss, strict=True)):
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            np.testing.assert_allclose(less[k][i], x - y * 2, rtol=1e-6)
            np.testing.assert_array_equal(most[k][i], np.maximum(x, y))
            np.testing.assert_allclose(given[0][k][i], x - yss[0][0] * 2, rtol=1e-6)


def storing(*placement: str) -> Callable[[stitch.Device], LoadedProgram]:
    """A cell of which inputs, weights and results are stored otherwise than they are computed."""

    def build(b: ComputationGraphBuilder) -> None:
        s, x = b.input("s", (32, 32), "float32"), b.input("x", (32, 32), "float32")
        y = s * 0.7 + x * b.parameter("w", real(32, 32, seed=8))
        b.output("y", y)
        # It reads what is stored of its own output.
        b.output("z", y * 3)

    return lambda device: program(device, build, *placement)


@pytest.mark.parametrize(
    ("placement", "target"),
    in_turn(
        named(
            lambda placement: f"{len(placement)} {placement[0]}",
            [
                ("input.x.data_type=bfloat16",),
                ("output.z.data_type=float16",),
                ("output.y.data_type=bfloat16",),
                (
                    "input.s.data_type=bfloat16",
                    "input.x.data_type=float16",
                    "output.y.data_type=bfloat16",
                ),
            ],
        ),
        ["host", "wormhole_n150"],
    ),
)
def test_what_is_stored_otherwise_is_rounded_as_a_run_rounds_it(
    target: str, placement: tuple[str, ...]
) -> None:
    xs, ss = real(4, 32, 32), real(4, 32, 32, seed=2)
    with stitch.open_device(target) as device:
        two = storing(*placement)(device)
        calls = [two(s, x) for s, x in zip(ss, xs, strict=True)]
        pair = ops.zip(FractalTensor(ss), FractalTensor(xs))
        with ops.mode("sequential", device=device):
            plain = ops.map(two, pair)
        with ops.mode("parallel", device=device):
            found = ops.map(two, pair)
        for k in range(2):
            wanted = np.stack([np.array(call[k]) for call in calls])
            assert found[k].dtype == plain[k].dtype == wanted.dtype
            np.testing.assert_array_equal(plain[k].numpy(), wanted)
            np.testing.assert_array_equal(found[k].numpy(), wanted)
        written_loops(
            lambda ss, xs: ops.map(two, ops.zip(ss, xs)), FractalTensor(ss), FractalTensor(xs)
        )


def test_where_a_program_lies_does_not_matter() -> None:
    placement = ("input.x.layout=tile", "input.x.space=l1", "input.s.memory_layout=height_sharded",
              "output.y.memory_layout=height_sharded", "output.z.layout=tile")  # fmt: skip
    xs, ss = real(4, 32, 32), real(4, 32, 32, seed=2)
    with stitch.open_device("wormhole_n150") as device:
        two = storing(*placement)(device)
        assert two.input_layout("s").is_sharded and two.input_layout("x").is_tiled
        wanted = [two(s, x) for s, x in zip(ss, xs, strict=True)]
        for mode in MODES:
            with ops.mode(mode, device=device):
                found = ops.map(two, ops.zip(FractalTensor(ss), FractalTensor(xs)))
            for k in range(2):
                each = np.stack([np.array(one[k]) for one in wanted])
                np.testing.assert_allclose(found[k].numpy(), each, rtol=1e-6, atol=1e-6)


def test_what_stores_in_blocks_is_run_element_by_element() -> None:
    xs, first = real(4, 32, 32), real(32, 32, seed=2)

    def build(b: ComputationGraphBuilder) -> None:
        s, x = b.input("s", (32, 32), "float32"), b.input("x", (32, 32), "float32")
        b.output("y", s * 0.7 + x)

    with stitch.open_device("wormhole_n150") as device:
        one = program(device, build, "output.y.data_type=bfp8", "output.y.layout=tile")
        wanted = states(one, xs, first)
        for mode in MODES:
            with ops.mode(mode, device=device):
                found = ops.scan(one, FractalTensor(xs), first)
            np.testing.assert_array_equal(found.numpy(), wanted)
        with pytest.raises(CompileError, match=r"stores 'y' in the block format bfp8"):
            ops.compile(lambda xs: ops.scan(one, xs, first), FractalTensor(xs))


def test_a_program_with_loops_is_the_function_of_a_map(device: stitch.Device, within: str) -> None:
    def sums(row: Any) -> Any:
        return ops.stack(ops.scan(lambda s, x: ops.tanh(s + x), row))

    example = FractalTensor(real(6, 3))
    nest = ops.compile(sums, example)
    assert nest.graph.bodies
    one, many = nest.on(device), real(4, 6, 3, seed=5)
    wanted = np.stack([np.array(one(x)) for x in many])
    found = ops.map(one, FractalTensor(many))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-6)
    # The nest itself, which takes and gives nests.
    whole = ops.map(nest, FractalTensor([list(x) for x in many]))
    np.testing.assert_allclose(whole.numpy(), wanted, rtol=1e-5, atol=1e-6)
    graph = written_loops(lambda xs: ops.map(one, xs), FractalTensor(many))
    assert any(operation.op == "Scan" for body in graph.bodies for operation in body.operations)


def test_what_does_not_fit_a_program_is_said_in_every_mode(
    device: stitch.Device, within: str
) -> None:
    one = program(device, cell)
    with pytest.raises(LinkError, match="another shape") as caught:
        ops.scan(one, FractalTensor(real(3, 2, 63)), real(2, 64))
    assert (caught.value.expected, caught.value.got) == ("[2, 64]", "[2, 63]")
    with pytest.raises(LinkError):
        ops.scan(one, FractalTensor(np.ones((3, 2, 64), np.int64)), real(2, 64))
    with pytest.raises(UsageError, match="missing: x"):
        ops.map(one, FractalTensor(real(3, 2, 64)))
    xs = real(3, 2, 64).astype(np.float64)
    found = ops.scan(one, FractalTensor(xs), real(2, 64))
    np.testing.assert_allclose(found.numpy(), states(one, xs, real(2, 64)), rtol=1e-5, atol=1e-6)


def test_a_module_of_torch_is_told_to_be_compiled(within: str) -> None:
    with pytest.raises(UsageError, match=r"torch modules(.|\n)*device\.load\(stitch\.compile"):
        ops.map(torch.nn.Linear(4, 3), FractalTensor(real(7, 4)))

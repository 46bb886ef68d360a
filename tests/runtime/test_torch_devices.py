"""Devices whose memory PyTorch allocates: `torch:cpu` runs the code of a CUDA card."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import stitch
from stitch.budget import BUDGET
from stitch.errors import OutOfMemoryError, TaskError, UsageError
from stitch.graph import ComputationGraphBuilder
from stitch.program import DataType, Layout, Space, TensorDesc
from stitch.runtime.executors.card import machine_of_card
from stitch.runtime.executors.cuda_executor import CudaExecutor
from stitch.runtime.executors.torch_bytes import PIECE_NBYTES, TorchBytes
from stitch.testing import ExecutorSuite, PlacementSuite
from tests.support.random_scripts import run, script
from tests.support.run_seed import SEED

ROOT = Path(__file__).parents[2]
X = np.arange(32, dtype=np.float32).reshape(4, 8)
W = np.arange(64, dtype=np.float32).reshape(8, 8) % 5


class TestTorchCpu(ExecutorSuite):
    executor: ClassVar[str] = "torch:cpu"
    left_out: ClassVar[int] = 8


@pytest.mark.campaign("torch_devices")
class TestTorchCpuWithAllPlacements(PlacementSuite):
    executor: ClassVar[str] = "torch:cpu"
    left_out: ClassVar[int] = 0


def product(name: str = "product") -> stitch.CompiledModel:
    b = ComputationGraphBuilder(name)
    x = b.input("x", X.shape, "float32")
    b.output("y", b.op("Relu", b.op("MatMul", x, W) - 300))
    compiled: stitch.CompiledModel = stitch.compile(b.build(), target="cuda")
    return compiled


def expected(x: np.ndarray) -> np.ndarray:
    return np.maximum(x @ W - 300, 0)


def test_programs_compiled_apart_pass_their_results_on_without_a_copy() -> None:
    with stitch.open_device("torch:cpu") as device:
        first, second = device.load(product("first")), device.load(product("second"))
        x = first(X)
        device.wait()
        for _ in range(4):
            with stitch.forbid_copies(device):
                y = second(first(x))
            assert y.space is Space.DRAM
            np.testing.assert_array_equal(y.numpy(), expected(expected(expected(X))))
        pipe = stitch.Pipeline([first, second])
        for turn in range(6):
            found = pipe(X + turn)
            np.testing.assert_array_equal(found.numpy(), expected(expected(X + turn)))
        assert device.machine.name == "cuda"
        del x, y, found


def test_pytorch_reads_and_writes_a_tensor_in_place() -> None:
    with stitch.open_device("torch:cpu") as device:
        program = device.load(product())
        y = program(X)
        shared = torch.from_dlpack(y)
        np.testing.assert_array_equal(shared.numpy(), expected(X))
        shared[0, 0] = 7
        np.testing.assert_array_equal(y.numpy()[0, :2], [7, expected(X)[0, 1]])
        wanted = y.numpy()
        np.testing.assert_array_equal(program(y).numpy(), expected(wanted))
        address = y.address
        del y
        others = [program(X + i) for i in range(9)]
        assert all(other.address != address for other in others)
        np.testing.assert_array_equal(shared.numpy(), wanted)


def test_a_write_is_read_and_what_the_processor_cannot_read_is_said() -> None:
    with stitch.open_device("torch:cpu", debug=True) as device:
        y = device.empty(TensorDesc((3, 5), Layout(DataType.BFLOAT16, Space.DRAM)))
        device.write(y, np.arange(15).reshape(3, 5).astype(DataType.BFLOAT16.dtype))
        np.testing.assert_array_equal(y.numpy().astype(int), np.arange(15).reshape(3, 5))
        np.testing.assert_array_equal(y[1:].numpy().astype(int), np.arange(5, 15).reshape(2, 5))
        with pytest.raises(UsageError, match="cannot read the bytes of dram in place"):
            device.memory("dram")
        assert device.memory("host").dtype == np.uint8


@pytest.mark.parametrize(
    ("name", "said"),
    [("cuda:0", "finds no CUDA card"), ("torch:gpu", "torch:cpu"), ("cuda:x", "torch:cpu")],
)
def test_devices_that_are_not_there_are_named(name: str, said: str) -> None:
    if torch.cuda.is_available() and name == "cuda:0":
        stitch.open_device(name).close()
        return
    with pytest.raises(UsageError) as caught:
        stitch.open_device(name)
    assert name in str(caught.value) and said in str(caught.value)
    assert ("CUDA" in str(caught.value)) == name.startswith("cuda:")


def test_a_card_with_too_little_memory_says_how_to_take_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object, **options: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 8.00 GiB\nmore lines")

    monkeypatch.setattr(torch, "empty", refused)
    with pytest.raises(OutOfMemoryError, match="cuda:0 cannot allocate 64 bytes") as caught:
        TorchBytes(Space.DRAM, 64, torch.device("cuda:0"))
    assert "executor='cuda:0'" in str(caught.value)
    assert "more lines" not in str(caught.value)


@pytest.mark.parametrize("name", ["onnxruntime", "numpy", ""])
def test_an_executor_beside_the_device_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"executor={name!r}\\n.*leave the executor out"):
        stitch.open_device("torch:cpu", executor=name)


def test_hard_swish_of_huge_numbers_is_finite_as_by_numpy() -> None:
    b = ComputationGraphBuilder("huge")
    b.output("y", b.op("HardSwish", b.input("x", (8,), "float32")))
    x = np.array([3e38, -3e38, 6e37, np.inf, -np.inf, np.nan, -2.5, 2.9], np.float32)
    with stitch.open_device("torch:cpu") as device:
        found = device.load(stitch.compile(b.build(), target="cuda"))(x).numpy()
    wanted = [3e38, 0, 6e37, np.inf, np.nan, np.nan, -2.5 / 12, 2.9 * 5.9 / 6]
    np.testing.assert_allclose(found, np.array(wanted, np.float32), rtol=1e-6)


def rows_of(op: str) -> stitch.CompiledModel:
    b = ComputationGraphBuilder("words")
    rows = b.input("rows", (2, 3), "int64")
    if op == "Gather":
        b.output("y", b.op("Gather", X, rows, axis=0))
    else:
        added = np.ones((2, 3, *X.shape[1:]), np.float32)
        places = b.reshape(rows, (2, 3, 1))
        b.output("y", b.op("ScatterND", X, places, added, reduction="add"))
    return stitch.compile(b.build(), target="cuda")


@pytest.mark.parametrize("op", ["Gather", "ScatterND"])
@pytest.mark.parametrize("is_read", [False, True])
def test_indices_out_of_range_are_said_at_the_next_wait(op: str, is_read: bool) -> None:
    good, bad = np.array([[0, 3, -4], [-1, 1, 1]]), np.array([[0, 3, 4], [1, -5, 1]])
    wanted = X.copy()
    np.add.at(wanted, good, np.ones((2, 3, 8), np.float32))
    wanted = X[good] if op == "Gather" else wanted
    with stitch.open_device("torch:cpu") as device:
        program = device.load(rows_of(op))
        for turn in range(5):
            with pytest.raises(TaskError, match=f"an index of {op} in program 'words'") as caught:
                found = program(bad)
                found.numpy() if is_read else device.wait()
            assert "-4 to 3" in str(caught.value)
            device.wait()
            for _ in range(turn):
                np.testing.assert_array_equal(program(good).numpy(), wanted)
        device.wait()
        assert "by way of the host" not in device.explain()
        del found


@pytest.mark.parametrize("tf32", [False, True])
def test_products_are_in_tf32_only_if_asked_whatever_the_flags_say(
    tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    products, convolutions, matmul = (
        torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.matmul,
    )  # fmt: skip
    original = products.fp32_precision
    products.fp32_precision = "ieee" if tf32 else "tf32"
    before = products.fp32_precision, convolutions.fp32_precision
    seen: list[tuple[str, str]] = []

    def watched(*operands: Any, out: Any) -> Any:
        seen.append((products.fp32_precision, convolutions.fp32_precision))
        return matmul(*operands, out=out)

    monkeypatch.setattr(torch, "matmul", watched)
    try:
        with stitch.open_device("torch:cpu", tf32=tf32) as device:
            program = device.load(product())
            for turn in range(3):
                np.testing.assert_array_equal(program(X + turn).numpy(), expected(X + turn))
                assert (products.fp32_precision, convolutions.fp32_precision) == before
    finally:
        products.fp32_precision = original
    assert seen == [("tf32", "tf32") if tf32 else ("ieee", "ieee")] * 3


def test_tf32_is_of_devices_of_pytorch() -> None:
    with pytest.raises(UsageError, match="'numpy' has no TF32"):
        stitch.open_device("tiny", tf32=True)


@pytest.mark.parametrize("shift", [-100, -1, 1, 100, PIECE_NBYTES + 5, -PIECE_NBYTES - 5])
def test_moves_that_overlap_keep_the_bytes(shift: int) -> None:
    nbytes, start = 2 * PIECE_NBYTES + 123, 2 * PIECE_NBYTES
    data = TorchBytes(Space.DRAM, 6 * PIECE_NBYTES + 200, torch.device("cpu"))
    wanted = torch.arange(nbytes, dtype=torch.int32).to(torch.uint8)
    data.region(start, start + nbytes)[:] = wanted
    for call in data.moves(start, data, start + shift, nbytes):
        call()
    assert torch.equal(data.region(start + shift, start + shift + nbytes), wanted)


@pytest.mark.parametrize(
    "shapes", [((4,), (4, 1)), ((1,), (1, 2)), ((2, 3), (3,)), ((3,), (3,)), ((2, 1, 3), (2, 3, 2))]
)
def test_products_of_vectors_are_written_in_place(shapes: tuple[tuple[int, ...], ...]) -> None:
    a, b = (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for shape in shapes)
    graph = ComputationGraphBuilder("product")
    x, y = graph.input("x", a.shape, "float32"), graph.input("y", b.shape, "float32")
    graph.output("z", graph.op("MatMul", x, y))
    with stitch.open_device("torch:cpu") as device:
        found = device.load(stitch.compile(graph.build(), target="cuda"))(a, b)
        np.testing.assert_array_equal(found.numpy(), np.matmul(a, b))


def test_a_double_stored_in_half_precision_is_rounded_once() -> None:
    given = np.array([1 + 2**-11 + 2**-40, 1 + 2**-11, -1 - 2**-11 - 2**-40])
    graph = ComputationGraphBuilder("halves")
    graph.output("y", graph.op("Neg", graph.input("x", given.shape, "float64")))
    model = stitch.compile(graph.build(), target="cuda", placement=["output.y.data_type=float16"])
    with stitch.open_device("torch:cpu") as device:
        found = device.load(model)(given).numpy()
        np.testing.assert_array_equal(found, (-given).astype(np.float16))


def test_the_limit_of_host_memory_holds_where_pytorch_has_it_from_the_host() -> None:
    graph = ComputationGraphBuilder("negated")
    graph.output("y", graph.op("Neg", graph.input("x", (1024, 1024), "float32")))
    given = np.ones((1024, 1024), np.float32)
    # What other tests keep, such as shared devices, counts too.
    limit = BUDGET.taken_nbytes + (96 << 20)
    with stitch.open_device("torch:cpu", max_memory=limit) as device:
        program = device.load(stitch.compile(graph.build(), target="cuda"))
        held: list[Any] = []
        with pytest.raises(OutOfMemoryError, match="host memory"):
            for _ in range(30):
                held.append(program(given))
                device.wait()
        assert len(held) > 5
        held.clear()
        program(given)
        device.wait()


def test_constants_are_read_in_their_places() -> None:
    with stitch.open_device("torch:cpu") as device:
        loaded = device.load(product())
        np.testing.assert_array_equal(loaded(X).numpy(), expected(X))
        (weight, *_) = (c for c in loaded.constants if c.desc.shape == W.shape)
        assert weight.placed is not None
        memory = device.backend.in_place(weight.placed)
        np.testing.assert_array_equal(memory.numpy(), W)
        memory.zero_()
        np.testing.assert_array_equal(loaded(X).numpy(), expected(np.zeros_like(X)))


def test_explain_shows_the_time_of_the_first_runs_by_the_clock_of_the_device() -> None:
    executor, asked = CudaExecutor(torch.device("cpu")), list[float]()

    def clock() -> float:
        # A step of the first run takes 5 ms, one of the second 1 ms.
        asked.append(asked[-1] + (0.005 if len(asked) <= 3 else 0.001) if asked else 0.0)
        return asked[-1]

    executor.clock = clock  # type: ignore[method-assign]
    with stitch.open_device("cuda", executor=executor) as device:
        pipe = stitch.Pipeline([device.load(product("first")), device.load(product("second"))])
        assert "measured" not in device.explain()
        for _ in range(5):
            pipe(X).numpy()
        # A copy and two programs, and the begin of a run; later runs ask for no time.
        assert len(asked) == 2 * 4
        line = "measured, launched call by call: 15000.0 us (5 runs as long as the shortest that"
        assert line in device.explain()
    with stitch.open_device("cuda") as device:
        device.load(product())(X).numpy()
        assert "measured" not in device.explain()


def test_explain_names_what_goes_by_way_of_the_host() -> None:
    b = ComputationGraphBuilder("sorted")
    b.output(
        "y", b.op("CumSum", b.input("x", X.shape, "float32"), np.array(0, np.int64), reverse=1)
    )
    with stitch.open_device("torch:cpu") as device:
        device.load(product())(X).numpy()
        assert "by way of the host" not in device.explain()
        found = device.load(stitch.compile(b.build(), target="cuda"))(X)
        np.testing.assert_array_equal(found.numpy(), X[::-1].cumsum(0)[::-1])
        assert "by NumPy's kernels, by way of the host: CumSum" in device.explain()
        del found


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(0, 12, id="short"),
        *(
            pytest.param(
                1000 * SEED + part * 100,
                100,
                id=f"long {part}",
                marks=pytest.mark.campaign("torch_devices"),
            )
            for part in range(5)
        ),
    ],
)
def test_random_scripts_have_the_results_of_numpy(first: int, count: int) -> None:
    for seed in range(first, first + count):

        def opens(machine: Any, executor: str, **options: Any) -> stitch.Device:
            return stitch.open_device(machine, executor="torch:cpu", **options)

        try:
            run(script(seed), opens=partial(opens))
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error


#: Suites of the runtime that hold on any memory (see `tests.support.torch.device_memory`).
SUITES = (
    "calls", "carries", "constant_eviction", "deallocation", "failures", "failures_at_every_step",
    "fixed_addresses", "full_spaces", "held_results", "hooks", "interrupts", "kept_results",
    "lending", "loop_stages", "next_uses", "observed_runs", "output_slots", "overwriting_runs",
    "prepared_graphs", "queued_views", "refusals", "remembered_results", "replacing_in_hooks",
    "replay", "scans_observed", "spilled_tensors", "split_batches", "stale_copies", "steady_state",
    "tensors", "views",
)  # fmt: skip


@pytest.mark.campaign("torch_devices")
@pytest.mark.timeout(1200)
def test_the_suites_of_the_runtime_pass_on_memory_of_pytorch() -> None:
    files = [f"tests/runtime/test_{name}.py" for name in SUITES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
               "-p", "tests.support.torch.device_memory", *files]  # fmt: skip
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:]


@pytest.mark.parametrize(("limit", "nbytes"), [(None, 3 << 29), (1 << 20, 1 << 20)])
def test_a_card_is_a_machine_with_its_free_memory_and_measured_rates(
    limit: int | None, nbytes: int
) -> None:
    described = stitch.machine.load_machine("cuda")
    made = machine_of_card(described, torch.device("cpu"), 2 << 30, limit)
    assert made.shape.dram is not None
    assert made.shape.dram.limit == nbytes
    assert made.shape.host == described.shape.host
    for (source, target, path), (_, _, before) in zip(made.paths, described.paths, strict=True):
        is_measured = Space.DRAM in (source, target)
        assert (path != before) is is_measured
        assert path.latency_seconds >= 0
    with stitch.open_device(made) as device:
        loaded = device.load(product())
        np.testing.assert_array_equal(loaded(X).numpy(), expected(X))

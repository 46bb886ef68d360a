"""Programs whose operations inductor compiles together: `torch:cpu` stands in for a card.

The quick tests take a graph as it is traced for the function that inductor makes of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

import stitch
from stitch.errors import TaskError, UsageError
from stitch.graph import ComputationGraphBuilder
from stitch.program import DataType, Ownership, Space
from stitch.runtime.executors import inductor_functions
from stitch.runtime.executors.cuda_executor import CudaExecutor
from stitch.runtime.executors.cuda_kernels import KERNELS, with_precision
from tests.support.operators.drawn_operands import operands_of
from tests.support.operators.drawn_operations import draw_row, drawn_operators
from tests.support.operators.draws_by_executors import difference, magnification
from tests.support.operators.one_operation import Row
from tests.support.random_scripts import run, script
from tests.support.run_seed import SEED
from tests.support.torch.agreement import tensors_of
from tests.support.torch.architectures import made

ROOT = Path(__file__).parents[2]
ERROR = 2e-6
RNG = np.random.default_rng(35)
X, W = (RNG.standard_normal(shape, np.float32) for shape in ((4, 8), (8, 8)))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are compiled in a test, which compute in the place of compiled code.

    That code may write a result before it has read everything, so results are overwritten first.
    """
    graphs: list[Any] = []

    def kept(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        copies = [n for n in graph.graph.nodes if n.target is torch.ops.aten.copy_.default]
        places = [n for n in graph.graph.nodes if n.op == "placeholder"]
        written = [i for i, n in enumerate(places) if any(c.args[0] is n for c in copies)]
        assert written

        def compiled(*tensors: torch.Tensor) -> None:
            for i in written:
                tensors[i].fill_(-77)
            graph(*tensors)

        return compiled

    monkeypatch.setattr(inductor_functions, "compiled_by_inductor", kept)
    return graphs


def opened(**options: Any) -> stitch.Device:
    return stitch.open_device("torch:cpu", executor="cuda-inductor", **options)


def layers(name: str = "layers") -> stitch.CompiledModel:
    b = ComputationGraphBuilder(name)
    x = b.input("x", X.shape, "float32")
    for _ in range(2):
        x = b.op("Tanh", b.op("Add", b.op("MatMul", x, W), b.op("Abs", x)))
    b.output("y", x)
    b.output("z", b.op("MatMul", x, W))
    compiled: stitch.CompiledModel = stitch.compile(b.build(), target="cuda")
    return compiled


def expected(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    for _ in range(2):
        x = np.tanh(x @ W + abs(x))
    return x, x @ W


def close(found: Any, wanted: np.ndarray) -> bool:
    ours, theirs = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    usual = np.isfinite(theirs)
    np.testing.assert_array_equal(ours[~usual], theirs[~usual])
    most = abs(theirs[usual]).max(initial=0.0)
    return bool(abs(ours[usual] - theirs[usual]).max(initial=0.0) <= ERROR * max(most, 1e-30))


def test_a_program_is_a_function_and_its_last_product(traced: list[Any]) -> None:
    with opened() as device:
        first, second = device.load(layers("first")), device.load(layers("second"))
        for turn in range(5):
            x = device.tensor(X + turn)
            y, _ = first(x)
            with stitch.forbid_copies(device) if turn else ExitStack():
                y, z = second(y)
            wanted = expected(expected(X + turn)[0])
            assert close(y.numpy(), wanted[0]) and close(z.numpy(), wanted[1])
            assert (y.space, z.space) == (Space.DRAM, Space.DRAM)
        # Traced once for a program; a product is left to its kernel, which writes into its place.
        assert [str(graph.code).count("aten.mm.out") for graph in traced] == [2, 2]
        assert device.statistics().graphs_captured > 0 == device.statistics().graphs_failed
        assert "by way of the host" not in device.explain()
        del x, y, z


def test_what_needs_the_host_splits_a_program(traced: list[Any]) -> None:
    b = ComputationGraphBuilder("split")
    x, rows = b.input("x", X.shape, "float32"), b.input("rows", (3,), "int64")
    y = b.op("Exp", b.op("Neg", x))
    y = b.op("CumSum", y, np.array(0), reverse=1)  # By NumPy.
    y = b.op("Gather", b.op("Sqrt", b.op("Abs", y)), rows)  # Its indices are known in a run.
    b.output("y", b.op("Relu", b.op("Sub", y, np.float32(1))))
    with opened() as device:
        program = device.load(stitch.compile(b.build(), target="cuda"))
        for rows_of in ([0, 3, -1], [1, 1, 2]):
            found = program(X, np.array(rows_of)).numpy()
            wanted = np.sqrt(np.exp(-X)[::-1].cumsum(0)[::-1])[rows_of] - 1
            assert close(found, np.maximum(wanted, 0))
        assert len(traced) == 3
        with pytest.raises(TaskError, match="an index of Gather in program 'split'"):
            program(X, np.array([0, 4, 0])).numpy()
        assert close(program(X, np.array(rows_of)).numpy(), np.maximum(wanted, 0))


def test_a_result_in_the_place_of_an_operand_is_computed_beside_it(traced: list[Any]) -> None:
    b = ComputationGraphBuilder("turned")
    x = b.input("x", (6, 6), "float32", ownership=Ownership.DONATE)
    turned = b.op("Add", b.op("Transpose", x, perm=(1, 0)), b.op("Exp", x))
    b.output("y", b.op("Add", b.op("Mul", turned, turned), x))
    given = RNG.standard_normal((6, 6), np.float32) / 4
    with opened() as device:
        program = device.load(stitch.compile(b.build(), target="cuda"))
        y = program(device.tensor(given))
        wanted = (given.T + np.exp(given)) ** 2 + given
        address = y.address
        y = program(y)
        assert close(y.numpy(), (wanted.T + np.exp(wanted)) ** 2 + wanted)
        assert y.address == address
        del y


def test_what_inductor_refuses_is_said_and_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("C++ compile error\n\ng++ -O3 ...\nf.cpp:1: error: no such kernel\nmore")

    monkeypatch.setattr(inductor_functions, "compiled_by_inductor", refuses)
    with opened() as device:
        program = device.load(layers())
        with pytest.warns(RuntimeWarning, match="operations 0 to .* of program 'layers'") as caught:
            found = program(X)
            device.wait()
        (said,) = {str(one.message) for one in caught}
        assert "C++ compile error; f.cpp:1: error: no such kernel\n  try: " in said
        assert cache_dir() in said and "more" not in said
        assert all(map(close, (f.numpy() for f in found), expected(X)))
        assert close(program(X + 1)[0].numpy(), expected(X + 1)[0])
        del found


def test_an_interrupt_ends_a_compilation(
    traced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = threading.Event(), threading.Event()

    def compile_for_long(*_: object) -> None:
        began.set()
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.set()

    def interrupt() -> None:
        began.wait()
        os.kill(os.getpid(), signal.SIGINT)

    with opened() as device:
        program = device.load(layers())
        with monkeypatch.context() as patch:
            patch.setattr(inductor_functions, "compiled_by_inductor", compile_for_long)
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                program(X)
                device.wait()
        assert ended.wait(10)
        assert all(map(close, (f.numpy() for f in program(X)), expected(X)))
        assert traced


def test_an_interrupt_does_not_end_the_import_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, imported = threading.Event(), threading.Event()

    def import_for_long(name: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        goes_on.wait()
        imported.set()

    monkeypatch.setattr(inductor_functions, "import_module", import_for_long)
    with pytest.raises(KeyboardInterrupt):
        opened()
    goes_on.set()
    assert imported.wait(10)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_missing_compiler_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(UsageError, match=f"inductor cannot compile for '{kind}'") as caught:
        CudaExecutor(torch.device(kind), inductor=True)
    assert {"cpu": "g++", "cuda": "Triton"}[kind] in str(caught.value)


def test_it_is_chosen_by_name_only() -> None:
    with pytest.raises(UsageError, match="open_device\\('cuda:0', executor='cuda-inductor'\\)"):
        stitch.open_device("tiny", executor="cuda-inductor")
    with stitch.open_device("torch:cpu") as device:
        assert device.backend.executor.name == "torch:cpu"
    with stitch.open_device("tiny", executor="torch:cpu-inductor") as device:
        assert (device.backend.executor.name, device.machine.name) == ("torch:cpu-inductor", "tiny")


@pytest.mark.campaign("torch_devices")
@pytest.mark.parametrize("part", range(4))
def test_random_scripts_have_the_results_of_numpy(part: int, traced: list[Any]) -> None:
    for seed in range(1000 * SEED + 25 * part, 1000 * SEED + 25 * (part + 1)):

        def opens(machine: Any, executor: str, **options: Any) -> stitch.Device:
            return stitch.open_device(machine, executor="torch:cpu-inductor", **options)

        try:
            run(script(seed), opens=opens)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
    assert traced


# What inductor compiles ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which inductor has its files."""
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


def results(model: Any, given: Any, machine: str, executor: str = "numpy") -> list[np.ndarray]:
    with stitch.open_device(machine, executor=executor) as device:
        program = device.load(model)
        for _ in range(4):
            found = program(*given)
        arrays = [t.numpy() for t in (found if isinstance(found, tuple) else (found,))]
        del found
        return arrays


def of_both(model: Any, given: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each result by inductor, and by NumPy's kernels."""
    with warnings.catch_warnings(action="error", category=RuntimeWarning):
        found = results(model, given, "torch:cpu", "cuda-inductor")
    return zip(found, results(model, given, "cuda"), strict=True)


@pytest.mark.campaign("torch_devices")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["MLP", "ResNet", "BERT"])
def test_networks_have_the_numbers_of_numpy(name: str, cache: Path) -> None:
    module, examples = made(name)
    model = stitch.compile(module, examples, target="cuda")
    for found, wanted in of_both(model, [t.numpy() for t in tensors_of(examples)]):
        assert found.dtype == wanted.dtype and close(found, wanted)


def added(b: ComputationGraphBuilder, name: str, row: Row, operands: Any) -> list[np.ndarray]:
    """Add an operation with its inputs and outputs to a graph; return the arrays of its inputs."""
    values, given = list[Any](), list[np.ndarray]()
    for spec, array in zip(row.specs, operands, strict=True):
        slot = f"{name} {len(values)}"
        if array is None:
            values.append(None)
        elif isinstance(spec, str):
            values.append(b.input(slot, array.shape, DataType.from_dtype(array.dtype)))
            given.append(array)
        else:
            values.append(b.parameter(slot, array))
    made_of = b.apply(row.op, values, row.outputs, row.attributes, row.domain)
    for number, value in enumerate(made_of):
        b.output(f"{name} result {number}", value)
    return given


def drawn(seeds: range) -> list[tuple[Row, Any]]:
    """Random operations of each operator with a kernel."""
    found = []
    known = [d for d in drawn_operators() if (d.domain, d.name) in KERNELS]
    for seed in seeds:
        for definition in known:
            row = draw_row(definition, seed)
            found.append((row, operands_of(row.specs, seed)))
    return found


def compare_together(rows: list[tuple[Row, Any]]) -> None:
    """Compare operations that are one program, and so a few functions."""
    b = ComputationGraphBuilder("together")
    given = [each for i, (row, x) in enumerate(rows) for each in added(b, f"row {i}", row, x)]
    pairs = of_both(stitch.compile(b.build(), target="cuda"), given)
    for row, operands in rows:
        found, wanted = zip(*[next(pairs) for _ in range(row.outputs)], strict=True)
        assert not difference(wanted, found, magnification(row, operands)), row


@pytest.mark.parametrize("part", range(4))
@pytest.mark.campaign("torch_devices")
def test_random_operations_are_traced(part: int, traced: list[Any]) -> None:
    rows = drawn(range(1000 * SEED + 5 * part, 1000 * SEED + 5 * (part + 1)))
    for first in range(0, len(rows), 60):
        compare_together(rows[first : first + 60])
    assert traced


@pytest.mark.campaign("torch_devices")
@pytest.mark.timeout(2400)
def test_random_operations_have_the_numbers_of_numpy(cache: Path) -> None:
    rows = drawn(range(1000 * SEED, 1000 * SEED + 1))
    for first in range(0, len(rows), 60):
        compare_together(rows[first : first + 60])


@pytest.mark.campaign("torch_devices")
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_narrow_types_are_rounded_after_each_operation(kind: str, cache: Path) -> None:
    b = ComputationGraphBuilder("narrow")
    x, y, z = (b.input(name, (40, 40), kind) for name in "xyz")
    t = b.op("Add", b.op("Mul", x, y), z)
    b.output("sum", t)
    b.output("quotient", b.op("Div", b.op("Sub", b.relu(t), y), b.op("Exp", b.op("Abs", x))))
    dtype = DataType(kind).dtype
    given = [RNG.standard_normal((40, 40)).astype(dtype) for _ in range(3)]
    for found, wanted in of_both(stitch.compile(b.build(), target="cuda"), given):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.campaign("torch_devices")
def test_infinities_and_nan_are_those_of_numpy(cache: Path) -> None:
    special = [0, 1, -1, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-37, 0.5, 2.5, 88.8, -104]
    x, y = (a.ravel() for a in np.meshgrid(*[np.array(special, np.float32)] * 2))
    b = ComputationGraphBuilder("special")
    p, q = b.input("x", x.shape, "float32"), b.input("y", y.shape, "float32")
    square = b.reshape(p, (len(special), len(special)))
    made_of = [b.op(op, p) for op in (
        "Abs", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "Relu", "Sigmoid", "Tanh", "Floor",
        "Round", "Sign", "Erf", "Gelu", "Elu", "LeakyRelu", "Softplus", "IsNaN",
    )]  # fmt: skip
    made_of += [b.op(op, p, q) for op in (
        "Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Equal", "Less", "GreaterOrEqual",
    )]  # fmt: skip
    made_of += [b.op("Clip", p, np.float32(-1), np.float32(1)), b.op("Softmax", square)]
    made_of += [b.op(op, square, np.array([1])) for op in ("ReduceMax", "ReduceSum", "ReduceMean")]
    for number, value in enumerate(made_of):
        b.output(f"y{number}", value)
    for found, wanted in of_both(stitch.compile(b.build(), target="cuda"), [x, y]):
        np.testing.assert_allclose(found, wanted, rtol=4e-6)


RUNS_ONCE = """
import sys, numpy as np, stitch
from stitch import ComputationGraphBuilder
from torch._dynamo.utils import counters
b = ComputationGraphBuilder("kept")
x = b.input("x", (3, 5), "float32")
w = np.full((5, 5), float(sys.argv[1]), np.float32)
b.output("y", b.op("Exp", b.op("Sub", b.op("MatMul", x, w), x)))
with stitch.open_device("torch:cpu", executor="cuda-inductor") as device:
    y = device.load(stitch.compile(b.build(), target="cuda"))(np.ones((3, 5), np.float32))
    print(y.numpy()[0, 0], *(counters["inductor"][f"fxgraph_cache_{how}"] for how in sys.argv[2:]))
    del y
"""


@pytest.mark.campaign("torch_devices")
def test_another_process_finds_what_was_compiled_also_for_other_weights(cache: Path) -> None:
    for weight, counted in (("0", "1 0 0"), ("0", "0 1 0"), ("1", "0 1 0")):
        command = [sys.executable, "-c", RUNS_ONCE, weight, "miss", "hit", "bypass"]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        number, _, counts = ran.stdout.strip().partition(" ")
        assert close([float(number)], np.exp([5 * float(weight) - 1]))
        assert counts == counted


#: Functions of one operand that are smooth at 0.
NEAR_0 = [
    "Erf", "Elu", "Selu", "Celu", "Atanh", "Asinh", "Asin", "Atan", "Tanh", "Sinh", "Sin", "Tan",
    "Gelu", "Mish", "Softplus", "Sigmoid", "Exp", "HardSwish", "Softsign",
]  # fmt: skip


@pytest.mark.campaign("torch_devices")
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
def test_functions_near_0_have_the_digits_of_numpy(scale: float, cache: Path) -> None:
    b = ComputationGraphBuilder("near 0")
    x = b.input("x", (64, 33), "float32")
    for name in NEAR_0:
        b.output(name, b.op("Neg", b.op(name, b.op("Neg", x))))
    values = np.random.default_rng(0).standard_normal((64, 33)).clip(-0.99, 0.99)
    pairs = of_both(stitch.compile(b.build(), target="cuda"), [(values * scale).astype(np.float32)])
    for name, (found, wanted) in zip(NEAR_0, pairs, strict=True):
        assert close(found, wanted), name


def test_two_threads_change_the_flags_of_products_and_leave_them_as_they_were() -> None:
    products = torch.backends.cuda.matmul
    before, wrong = products.fp32_precision, []

    def many(precision: str) -> None:
        def call() -> None:
            time.sleep(0)
            if products.fp32_precision != precision:
                wrong.append(precision)

        for _ in range(2000):
            with_precision(precision, call)

    threads = [threading.Thread(target=many, args=(word,)) for word in ("ieee", "tf32")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and products.fp32_precision == before

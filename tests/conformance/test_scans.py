"""Every executor gives what the rounds of a scan come to, one after the other in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError
from stitch.graph import ComputationGraphBuilder, SymbolicTensor, scan
from stitch.machine import load_machine
from stitch.program import Array
from stitch.runtime import HookContext
from stitch.runtime.executors import make_executor
from tests.support.grids import in_turn, named
from tests.support.scan_cases import CASES, ScanCase, expected_of, given_to, graph_of, inputs_of

Tensors = Sequence[SymbolicTensor]
EXECUTORS = ("numpy", "onnxruntime", "torch", "auto", "torch:cpu")
BY_NAME = {case.name: case for case in CASES}


def all_of(result: object) -> tuple[stitch.Tensor, ...]:
    """The outputs of a call, however many there are."""
    return result if isinstance(result, tuple) else (result,)


def check(case: ScanCase, found: Sequence[Array], expected: Sequence[Array]) -> None:
    assert [a.shape for a in found] == [a.shape for a in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if theirs.dtype.kind in "iu":
            assert ours.tolist() == theirs.tolist()
            continue
        a, b = ours.astype(np.float64), theirs.astype(np.float64)
        np.testing.assert_allclose(
            a, b, case.tolerance, case.tolerance * np.abs(b).max(initial=0.0)
        )


def run(case: ScanCase, count: int, executor: str, target: str = "host") -> list[Array]:
    model = stitch.compile(graph_of(case, count), target=target, schedule="rounds")
    with stitch.open_device(target, executor=executor) as device:
        given = inputs_of(case, count)
        return [tensor.numpy().copy() for tensor in all_of(device.load(model)(*given))]


@pytest.mark.parametrize(
    ("executor", "count", "case"),
    in_turn(EXECUTORS, [1, 2, 5], named(lambda case: case.name, CASES)),
)
def test_a_scan_gives_what_its_rounds_come_to(case: ScanCase, count: int, executor: str) -> None:
    check(case, run(case, count, executor), expected_of(case, count))


@pytest.mark.parametrize(
    ("executor", "case"), in_turn(EXECUTORS, named(lambda case: case.name, CASES))
)
def test_no_round_gives_the_first_states_and_nothing(case: ScanCase, executor: str) -> None:
    states = given_to(case, 0)[0]
    found = run(case, 0, executor)
    check(case, found[: len(states)], states)
    # Elements have the shapes that they have with rounds.
    elements = [given.shape[1:] for given in expected_of(case, 2)[len(states) :]]
    assert [given.shape for given in found[len(states) :]] == [(0, *shape) for shape in elements]


@pytest.mark.parametrize(("executor", "name"), in_turn(EXECUTORS, ["lstm", "nested", "bfloat16"]))
def test_a_device_with_memory_of_its_own_runs_scans(name: str, executor: str) -> None:
    case = BY_NAME[name]
    check(case, run(case, 5, executor, "wormhole_n150"), expected_of(case, 5))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_hooks_see_a_scan_as_one_operation(executor: str) -> None:
    case = BY_NAME["lstm"]
    model = stitch.compile(graph_of(case, 5), target="host", schedule="rounds")
    seen: list[str] = []

    def see(context: HookContext) -> None:
        assert context.operation is not None
        seen.append(context.operation.op)

    with stitch.open_device("host", executor=executor) as device:
        program = device.load(model)
        device.hooks.register(after_operation=see)
        found = [tensor.numpy() for tensor in all_of(program(*inputs_of(case, 5)))]
    assert seen == ["Scan"]
    check(case, found, expected_of(case, 5))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_lanes_run_scans_side_by_side(executor: str) -> None:
    cases = [BY_NAME["lstm"], BY_NAME["power"], BY_NAME["nested"]]
    models = [stitch.compile(graph_of(case, 5), target="host", schedule="rounds") for case in cases]
    with stitch.open_device("host", executor=executor, inter_op_threads=2) as device:
        programs = [device.load(model) for model in models]
        for _ in range(3):
            calls = [p(*inputs_of(c, 5)) for p, c in zip(programs, cases, strict=True)]
            for case, call in zip(cases, calls, strict=True):
                check(case, [t.numpy() for t in all_of(call)], expected_of(case, 5))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_linked_programs_with_scans_give_what_they_give_apart(executor: str) -> None:
    b = ComputationGraphBuilder("first")
    xs = b.input("xs", (5, 4), "float32")
    start = b.input("start", (4,), "float32")
    rng = np.random.default_rng(3)
    # So large that the model names them and does not hold them.
    wide, back = (rng.standard_normal(shape, np.float32) / 8 for shape in ((4, 300), (300, 4)))
    w, v = b.parameter("wide", wide), b.parameter("back", back)

    def turned(s: Tensors, e: Tensors) -> tuple[Tensors, Tensors]:
        after = s[0] + np.tanh(e[0] @ w) @ v
        return [after], [b.tanh(after)]

    _, (sums,) = scan(b, turned, [start], [xs])
    b.output("ys", sums)
    first = stitch.compile(b.build(), target="host")
    b = ComputationGraphBuilder("second")
    ys = b.input("ys", (5, 4), "float32")
    (last,), _ = scan(b, lambda s, e: ([s[0] * 0.5 + np.exp(e[0])], []), [np.ones(4, "f4")], [ys])
    b.output("last", last)
    second = stitch.compile(b.build(), target="host")
    linked = stitch.link([first, second])
    given = [rng.standard_normal((5, 4), np.float32), rng.standard_normal(4, np.float32)]
    with stitch.open_device("host", executor=executor) as device:
        between = all_of(device.load(first)(*given))
        (apart,) = all_of(device.load(second)(*between))
        (whole,) = all_of(device.load(linked)(*given))
        found = whole.numpy().copy()
        np.testing.assert_allclose(found, apart.numpy(), 1e-6)
    states = given[1] + np.cumsum(np.tanh(given[0] @ wide) @ back, 0)
    wanted = np.ones(4)
    for row in np.tanh(states):
        wanted = wanted * 0.5 + np.exp(row)
    np.testing.assert_allclose(found, wanted, 1e-5)


def test_what_the_onnx_executor_cannot_write_is_named_with_the_scan() -> None:
    b = ComputationGraphBuilder("odd")
    xs = b.input("xs", (3, 8), "float32")

    def odd(_: Tensors, e: Tensors) -> tuple[Tensors, Tensors]:
        return [], [b.op("DFT", b.op("Reshape", e[0], [1, 8, 1]))]

    _, (spectra,) = scan(b, odd, [], [xs])
    b.output("spectra", spectra)
    model = stitch.compile(b.build(), target="host", schedule="rounds")
    executor = make_executor("onnxruntime")
    with pytest.raises(CompileError, match=r"stitch\.Scan.*DFT.*in its body.*less accurate"):
        executor.prepare(model.program, load_machine("host").shape)
    # The automatic one gives it to NumPy's kernels.
    given = np.random.default_rng(0).standard_normal((3, 8), np.float32)
    with stitch.open_device("host", executor="auto") as device:
        (found,) = all_of(device.load(model)(given))
        pairs = found.numpy()[:, 0]
    expected = np.fft.fft(given)
    np.testing.assert_allclose(pairs[..., 0] + 1j * pairs[..., 1], expected, 1e-4, 1e-5)


def nested(depth: int, count: int) -> stitch.CompiledModel:
    """x/2 + 1, again and again, in scans within scans."""
    b = ComputationGraphBuilder("deep")

    def inside(depth: int, x: SymbolicTensor) -> SymbolicTensor:
        if not depth:
            return x * 0.5 + 1.0
        (last,), _ = scan(b, lambda s, _: ([inside(depth - 1, s[0])], []), [x], [], count=count)
        return last

    b.output("y", inside(depth, b.input("x", (2,), "float32")))
    return stitch.compile(b.build(), target="host", schedule="rounds")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_scans_within_scans(executor: str) -> None:
    with stitch.open_device("host", executor=executor) as device:
        (found,) = all_of(device.load(nested(3, 2))(np.zeros(2, np.float32)))
        assert found.numpy().tolist() == [2 - 2.0**-7] * 2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_scans_stand_as_deep_in_each_other_as_may_be(executor: str) -> None:
    model = nested(15, 1)
    with stitch.open_device("host", executor=executor) as device:
        (found,) = all_of(device.load(model)(np.zeros(2, np.float32)))
        assert found.numpy().tolist() == [1, 1]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_a_round_makes_counts_to_the_memory_of_the_host(executor: str) -> None:
    b = ComputationGraphBuilder("large")
    xs = b.input("xs", (3, 1000), "float32")

    def f(_: Tensors, e: Tensors) -> tuple[Tensors, Tensors]:
        large = b.exp(b.op("Expand", e[0], [2000, 1000]))
        return [], [b.reduce_sum(large, axis=0)]

    _, (sums,) = scan(b, f, [], [xs])
    b.output("sums", sums)
    program = stitch.compile(b.build(), target="host").program
    assert make_executor(executor).host_bytes(program).peak >= 2 * 4 * 2000 * 1000

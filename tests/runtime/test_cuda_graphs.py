"""Bindings whose launches are captured as graphs, on stand-ins for a card."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.planner import Allocate, Copy, Plan
from stitch.runtime.execution import running
from stitch.runtime.executors.cuda_executor import CudaExecutor
from stitch.runtime.executors.cuda_graphs import Graphs
from tests.support.random_scripts import run, script
from tests.support.run_seed import SEED
from tests.support.stitched_models import consuming
from tests.support.torch.late_graphs import LateGraphs, late_device
from tests.support.training.models import batches, mlp

SHAPE = (4, 8)


def binary(op: str, name: str) -> stitch.CompiledModel:
    b = ComputationGraphBuilder(name)
    x, y = b.input("x", SHAPE, "float32"), b.input("y", SHAPE, "float32")
    b.output("z", b.op(op, x, y))
    compiled: stitch.CompiledModel = stitch.compile(b.build(), target="cuda")
    return compiled


def unary(op: str, name: str) -> stitch.CompiledModel:
    b = ComputationGraphBuilder(name)
    b.output("z", b.op(op, b.input("x", SHAPE, "float32")))
    compiled: stitch.CompiledModel = stitch.compile(b.build(), target="cuda")
    return compiled


def arrays(seed: int, count: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(SHAPE).astype(np.float32) for _ in range(count))


def test_a_chain_is_one_graph_from_its_third_run_on() -> None:
    graphs = LateGraphs()
    with late_device(graphs=graphs) as device:
        programs = [device.load(unary("Neg", f"p{i}")) for i in range(5)]
        pipe = stitch.Pipeline(programs)
        for turn, x in enumerate(arrays(0, 7)):
            np.testing.assert_array_equal(pipe(x).numpy(), -x)
            captured = device.statistics().graphs_captured
            assert (captured, graphs.replays) == ((0, 0) if turn < 2 else (1, turn - 1))
        assert device.statistics().graphs_failed == 0


def test_an_array_that_enters_where_a_value_has_died_comes_in_the_order_of_the_plan() -> None:
    plans: list[Plan] = []
    with late_device(graphs=LateGraphs()) as device:
        device.on_plan(plans.append)
        programs = [device.load(unary(op, op)) for op in ("Exp", "Neg", "Abs")]
        last = device.load(binary("Mul", "last"))
        for x, y in zip(arrays(1, 8), arrays(2, 8), strict=True):
            value: Any = x
            for program in programs:
                value = program(value)
            found = last(value, y).numpy()
            np.testing.assert_allclose(found, np.exp(x) * y, rtol=1e-5)
        assert device.statistics().graphs_captured == 1
        del value
    entries = [s.target for s in plans[0].steps if isinstance(s, Copy)]
    lying = {s.buffer.number: s.buffer.address for s in plans[0].steps if isinstance(s, Allocate)}
    assert len(entries) == 2
    assert lying[entries[0].buffer] == lying[entries[1].buffer]


@pytest.mark.parametrize("waits", [True, False])
def test_host_arrays_are_written_again_after_the_graph_has_read_them(waits: bool) -> None:
    with late_device(graphs=LateGraphs(waits=waits)) as device:
        add = device.load(binary("Add", "add"))
        total = device.tensor(np.zeros(SHAPE, np.float32))
        given = [*arrays(2, 12)]
        for x in given:
            total = add(total, x)
            device.flush()
        is_right = np.allclose(total.numpy(), sum(given), rtol=1e-5)
        assert device.statistics().graphs_captured == 2
        del total
    # Without the wait the stand-in for a card shows what would be wrong there.
    assert is_right is waits


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_replay_that_fails_in_its_middle_loses_its_results_and_nothing_else(
    fails_at: int,
) -> None:
    graphs = LateGraphs(fails_at=fails_at)
    with late_device(graphs=graphs) as device:
        add, negate = device.load(binary("Add", "add")), device.load(unary("Neg", "negate"))
        held = add(*arrays(3, 2))
        kept = held.numpy()
        failed = 0
        for x in arrays(4, 9):
            result = negate(add(held, x))
            try:
                np.testing.assert_array_equal(result.numpy(), -(kept + x))
            except RuntimeError as error:
                failed += 1
                assert "the device failed" in str(error)
            np.testing.assert_array_equal(held.numpy(), kept)
        assert failed == 1
        assert graphs.replays > fails_at + 1
        del held, result


def test_what_is_not_captured_is_launched_call_by_call() -> None:
    class Refusing(Graphs):
        def capture(self, *_: Any, **named: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    executor = CudaExecutor(torch.device("cpu"))
    executor.graphs = Refusing()
    with stitch.open_device("cuda", executor=executor) as device:
        pipe = stitch.Pipeline([device.load(unary("Neg", f"p{i}")) for i in range(3)])
        for x in arrays(5, 8):
            np.testing.assert_array_equal(pipe(x).numpy(), -x)
        seen = device.statistics()
        assert seen.graphs_captured == 0 < seen.graphs_failed


def test_more_bindings_than_graphs_are_launched_call_by_call() -> None:
    with late_device(graphs=LateGraphs()) as device:
        pipe = stitch.Pipeline([device.load(unary("Neg", f"p{i}")) for i in range(3)])
        given = [*arrays(6, 60)]
        for _ in range(6):
            held = [pipe(x) for x in given]
            for x, result in zip(given, held, strict=True):
                np.testing.assert_array_equal(result.numpy(), -x)
            del held, result
        seen = device.statistics()
        assert 0 < seen.graphs_captured <= running.MAX_GRAPHS < seen.bindings_made


def test_host_functions_and_operators_of_numpy_split_the_graph() -> None:
    b = ComputationGraphBuilder("summed")
    x = b.op("Neg", b.op("Abs", b.input("x", SHAPE, "float32")))
    b.output("z", b.op("Exp", b.op("Neg", b.op("CumSum", x, np.array(0, np.int64), reverse=1))))
    with late_device(graphs=LateGraphs()) as device:
        program = device.load(stitch.compile(b.build(), target="cuda"))
        for given in arrays(7, 6):
            expected = np.exp(-np.cumsum(-np.abs(given[::-1]), 0)[::-1])
            np.testing.assert_allclose(program(given).numpy(), expected, rtol=1e-5)
        assert device.statistics().graphs_captured == 2


def test_a_training_step_is_captured_and_keeps_its_numbers() -> None:
    losses = []
    for graphs in None, LateGraphs():
        opened = stitch.open_device("cuda") if graphs is None else late_device(graphs=graphs)
        compiled = stitch.compile(mlp(), target="cuda", optimizer=stitch.Adam(lr=0.01), loss="mse")
        with opened as device, compiled.start(device) as instance:
            losses.append([instance.step([pair]) for pair in batches(8)])
            assert graphs is None or device.statistics().graphs_captured > 0
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize("fails_at", [0, 2, 5])
def test_a_training_step_that_fails_in_its_graph_loses_its_state_or_leaves_it(
    fails_at: int,
) -> None:
    data = batches(6)
    states = []
    for graphs in LateGraphs(), LateGraphs(fails_at=fails_at):
        compiled = stitch.compile(mlp(), target="cuda", optimizer=stitch.Adam(lr=0.01), loss="mse")
        with late_device(graphs=graphs) as device, compiled.start(device) as instance:
            seen = []
            for pair in data:
                try:
                    instance.step([pair])
                    seen.append(instance.state_dict())
                except (RuntimeError, stitch.errors.StitchError):
                    break
            before = seen[-1] if seen else None
            if len(seen) < len(data):
                try:
                    after = instance.state_dict()
                except stitch.errors.TaskError as error:
                    assert "lost" in str(error)
                else:
                    assert before is not None
                    for name, value in after.items():
                        np.testing.assert_array_equal(value, before[name], err_msg=name)
            states.append(seen)
    assert len(states[0]) == len(data) > len(states[1])


def test_a_donated_value_is_lost_where_its_graph_fails() -> None:
    """The step that overwrites it is not the first of the graph."""
    taking = consuming("take", 3.0, SHAPE, target="cuda")
    graphs = LateGraphs(fails_at=1)
    with late_device(graphs=graphs) as device:
        negate, take = device.load(unary("Neg", "negate")), device.load(taking)
        value = 1.0
        w = device.tensor(np.full(SHAPE, value, np.float32))
        failed = False
        for x in arrays(9, 8):
            y, new = negate(x), take(w)
            try:
                np.testing.assert_array_equal(new.numpy(), np.full(SHAPE, value * 3))
            except (RuntimeError, stitch.errors.StitchError):
                failed = True
                for each in w, new:
                    with pytest.raises(stitch.errors.TaskError):
                        each.numpy()
                w = device.tensor(np.full(SHAPE, value, np.float32))
                continue
            w, value = new, value * 3
        assert failed
        del w, y, new, each


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(5000, 8, id="short"),
        *(
            pytest.param(
                1000 * SEED + 500 + part * 100, 100, id=f"long {part}",
                marks=pytest.mark.campaign("torch_devices"),
            )
            for part in range(4)
        ),
    ],
)  # fmt: skip
def test_random_scripts_in_graphs_have_the_results_of_numpy(
    first: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "RUNS_TO_STRAIGHTEN", 0)
    for seed in range(first, first + count):
        made = CudaExecutor(torch.device("cpu"))
        made.graphs = graphs = LateGraphs()
        opens = partial(_open, made)
        try:
            with graphs:
                run(script(seed), opens=opens)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error


def _open(made: CudaExecutor, machine: Any, executor: str, **options: Any) -> stitch.Device:
    """Open a device with an executor of its own instead of the script's."""
    return stitch.open_device(machine, executor=made, **options)

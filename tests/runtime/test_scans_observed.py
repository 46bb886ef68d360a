"""Scans in calls, pipelines and queues, with hooks and listeners: one operation, the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stitch
from stitch.program import Array, DataType
from stitch.runtime import HookContext
from tests.support.files.scanned_specimens import by_hand, scanned_binary
from tests.support.grids import in_turn
from tests.support.scanned_graphs import FORMS, scanned_graph

FIRST = np.linspace(-1, 1, 8, dtype=np.float32)


def sequences(number: int = 0) -> Array:
    return np.random.default_rng(number).standard_normal((5, 3, 8), np.float32)


def results(made: stitch.Tensor | tuple[stitch.Tensor, ...]) -> list[Array]:
    return [t.numpy().copy() for t in (made if isinstance(made, tuple) else (made,))]


@pytest.mark.parametrize(("form", "debug"), in_turn(FORMS, [False, True]))
def test_hooks_see_a_scan_as_one_operation_and_change_nothing(form: str, debug: bool) -> None:
    model = stitch.compile(scanned_graph(form), target="host", schedule="rounds")
    rng = np.random.default_rng(1)
    kinds = [model.program.values[slot.value].type for slot in model.program.inputs]
    given = [rng.standard_normal(k.shape, np.float32).astype(k.data_type.dtype) for k in kinds]
    seen: list[tuple[str, list[Array]]] = []

    def see(context: HookContext) -> None:
        assert context.operation is not None
        seen.append((context.operation.op, [array.copy() for array in context.outputs]))

    with stitch.open_device("host", debug=debug) as device:
        program = device.load(model)
        expected = results(program(*given))
        undo = device.hooks.register(after_operation=see)
        events: list[object] = []
        stop = device.events.subscribe(events.append)
        found = results(program(*given))
        undo()
        stop()
        again = results(program(*given))
    scans = [op for op, _ in seen if op == "Scan"]
    assert len(scans) == len([o for o in model.program.operations if o.op == "Scan"]) == 1
    assert events
    for ours, theirs, last in zip(found, expected, again, strict=True):
        assert np.array_equal(ours, theirs) and np.array_equal(last, theirs)
    # What a hook sees of a scan is what the scan gives, in the type that it is computed in.
    made = next(outputs for op, outputs in seen if op == "Scan")
    for ours, theirs in zip(made, expected, strict=True):
        assert np.array_equal(ours, theirs.astype(ours.dtype))


def test_a_chain_of_scans_runs_in_a_pipeline_and_by_calls() -> None:
    with stitch.open_device("host") as device:
        program: Any = device.load(scanned_binary())
        state: object = FIRST
        expected = FIRST
        for number in range(5):
            found = program(state, sequences(number))
            assert isinstance(found, tuple)
            state, rows = found
            expected, theirs = by_hand(expected, sequences(number))
            np.testing.assert_allclose(rows.numpy(), theirs, 1e-5)
        assert isinstance(state, stitch.Tensor)
        np.testing.assert_allclose(state.numpy(), expected, 1e-5)


def test_a_device_with_memory_of_its_own_runs_scans() -> None:
    placement = ("input.xs.layout=tile", "output.y1.layout=tile")
    model = stitch.compile(scanned_graph("cell"), target="tiny", placement=placement)
    plain = stitch.compile(scanned_graph("cell"), target="host")
    rng = np.random.default_rng(2)
    xs, h = rng.standard_normal((6, 4, 32), np.float32), rng.standard_normal((4, 32), np.float32)
    made = []
    for compiled, target in ((model, "tiny"), (plain, "host")):
        with stitch.open_device(target) as device:
            made.append(results(device.load(compiled)(xs, h)))
    assert all(map(np.array_equal, *made))


def test_a_scan_in_a_narrow_type_rounds_after_each_operation() -> None:
    graph = scanned_graph("narrow", 16)
    rng = np.random.default_rng(3)
    kind = DataType.BFLOAT16.dtype
    xs, h = (rng.standard_normal(s, np.float32).astype(kind) for s in ((5, 16), (16,)))
    with stitch.open_device("host", executor="numpy") as device:
        found = device.load(stitch.compile(graph, target="host", schedule="rounds"))(xs, h)
        assert isinstance(found, tuple)
        last, given = found

        def rounded(array: Array) -> Array:
            return array.astype(kind).astype(np.float32)

        state, rows = h.astype(np.float32), []
        for x in xs[::-1].astype(np.float32):
            state = rounded(rounded(state * x) + x)
            state = rounded(1 / (1 + np.exp(-state)))
            exps = np.exp(state - state.max())
            rows.append(rounded(exps / exps.sum()))
        np.testing.assert_allclose(last.numpy().astype(np.float32), state, 0.01)
        np.testing.assert_allclose(given.numpy().astype(np.float32), np.stack(rows), 0.01)

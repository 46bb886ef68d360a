"""What every operator must do: inherit `OperatorSuite` and list cases.

The NumPy kernel defines an operator. Its types are those of inference, its gradient is compared
with finite differences, its ONNX form with the kernel, and its batching rule with one call for each
element of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from stitch import api, ops
from stitch.compiler import Differentiated, differentiate
from stitch.graph import ComputationGraph, ComputationGraphBuilder, vmap
from stitch.program import ABSENT, Array, DataType, Operation

Feeds = dict[str, Array]


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """One operation on operands; those that are lists or integers are constants of the program.

    Args:
        op: The operator.
        operands: Arrays, and None for an absent operand.
        attributes: Attributes by name.
        outputs: How many results are asked for.
    """

    op: str
    operands: tuple[Array | list[int] | int | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1

    @property
    def feeds(self) -> Feeds:
        """The operands that are inputs, by name."""
        return {f"x{i}": a for i, a in enumerate(self.operands) if isinstance(a, np.ndarray)}

    def graph(self, domain: str) -> ComputationGraph:
        """Return the graph of the operation."""
        builder = ComputationGraphBuilder("case")
        operands: list[Any] = [
            builder.input(f"x{i}", a.shape, DataType.from_dtype(a.dtype))
            if isinstance(a, np.ndarray) else None if a is None else np.array(a, np.int64)
            for i, a in enumerate(self.operands)
        ]  # fmt: skip
        results = builder.apply(self.op, operands, self.outputs, self.attributes, domain)
        for index, tensor in enumerate(results):
            builder.output(f"y{index}", tensor)
        return builder.build()


def evaluate_graph(graph: ComputationGraph, feeds: Mapping[str, Array]) -> Feeds:
    """Return every output of a graph by name, computed by the NumPy kernels."""
    known: dict[int, Array | None] = {ABSENT: None, **graph.constant_data()}
    known.update({slot.value: feeds[slot.name] for slot in graph.inputs})
    for operation in graph.operations:
        results = ops.evaluate_operation(operation, [known[v] for v in operation.inputs])
        known.update(zip(operation.outputs, results, strict=True))
        known[ABSENT] = None
    made = {slot.name: known[slot.value] for slot in graph.outputs}
    return {name: array for name, array in made.items() if array is not None}


def seeds_of(both: Differentiated, results: Mapping[str, Array]) -> Feeds:
    """Return a gradient for every differentiated output, drawn with a fixed seed."""
    rng = np.random.default_rng(11)
    return {
        slot: np.asarray(rng.normal(0, 1, results[output].shape)).astype(results[output].dtype)
        for output, slot in both.seeds
    }


def backward_feeds(
    both: Differentiated, feeds: Mapping[str, Array], results: Mapping[str, Array], seeds: Feeds
) -> Feeds:
    """Return what the backward graph reads: inputs, saved values and seeds, by name."""
    everything = {**feeds, **results, **seeds}
    return {slot.name: everything[slot.name] for slot in both.backward.inputs}


def check_gradients(
    graph: ComputationGraph, feeds: Feeds, wanted: Sequence[str], directions: int = 3
) -> None:
    """Assert that gradients equal central finite differences of the same kernels."""
    both = differentiate(graph, wanted)
    results = evaluate_graph(both.forward, feeds)
    seeds = seeds_of(both, results)
    made = evaluate_graph(both.backward, backward_feeds(both, feeds, results, seeds))
    gradients = {name: made[slot] for name, slot in both.gradients}
    by_output = {output: seeds[slot] for output, slot in both.seeds}
    rng = np.random.default_rng(5)
    single = any(a.dtype == np.float32 for a in (*feeds.values(), *by_output.values()))
    tolerance = 3e-2 if single else 2e-6
    for name, gradient in gradients.items():
        for _ in range(directions):
            direction = rng.normal(0, 1, gradient.shape)
            expected = _slope_along(graph, feeds, name, direction, by_output)
            got = float((gradient * direction).sum())
            size = float(np.abs(gradient * direction).sum())
            assert got == pytest.approx(expected, rel=tolerance, abs=tolerance * (1 + size))


def _slope_along(
    graph: ComputationGraph, feeds: Feeds, name: str, direction: Array, seeds: Feeds
) -> float:
    """Return the slope of sum(seed · output) along a direction of one operand, by differences."""
    start = feeds[name]
    step = 1e-6 if start.dtype == np.float64 else 1e-2
    total = 0.0
    for sign in (1, -1):
        moved = (start + sign * step * direction).astype(start.dtype)
        results = evaluate_graph(graph, feeds | {name: moved})
        for output, seed in seeds.items():
            total += sign * float((results[output].astype(np.float64) * seed).sum())
    return total / (2 * step)


class OperatorSuite:
    """The tests of the operators of one domain.

    Attributes:
        domain: The operators' domain.
        cases: At least one case for each operator of a plugin.
        relative_tolerance: How much ONNX Runtime's results may differ from the kernel's.
    """

    domain: ClassVar[str]
    cases: ClassVar[tuple[OperatorCase, ...]]
    relative_tolerance: ClassVar[float] = 1e-5

    def test_every_operator_of_a_plugin_has_a_case(self) -> None:
        assert self.cases
        assert set(ops.plugin_operators(self.domain)) <= {case.op for case in self.cases}

    def test_kernels_give_the_inferred_types_and_leave_operands_alone(self) -> None:
        for case in self.cases:
            graph, feeds = case.graph(self.domain), case.feeds
            before = {name: array.copy() for name, array in feeds.items()}
            first, second = evaluate_graph(graph, feeds), evaluate_graph(graph, feeds)
            for index, slot in enumerate(graph.outputs):
                kind = graph.values[slot.value].type
                result = first[slot.name]
                assert (result.shape, result.dtype) == (kind.shape, kind.data_type.dtype), index
                assert result.tobytes() == second[slot.name].tobytes()
            assert all(feeds[name].tobytes() == array.tobytes() for name, array in before.items())

    def test_gradients_equal_finite_differences(self) -> None:
        for case in self.cases:
            feeds = case.feeds
            wanted = [n for n, a in feeds.items() if DataType.from_dtype(a.dtype).is_floating]
            if wanted and ops.lookup(case.op, self.domain).gradient is not None:
                check_gradients(case.graph(self.domain), feeds, wanted)

    def test_a_file_gives_the_kernels_results_in_every_space(self, tmp_path: Path) -> None:
        for number, case in enumerate(self.cases):
            graph = case.graph(self.domain)
            expected = evaluate_graph(graph, case.feeds)
            for target in ("host", "tiny"):
                path = tmp_path / f"{number}.{target}.ttb"
                api.compile(graph, target=target).save(path)
                self._compare(path, target, "numpy", case, expected, 0.0)

    def test_onnx_runtime_gives_the_kernels_results(self, tmp_path: Path) -> None:
        """Operators without an ONNX form included: `auto` uses their kernels."""
        for number, case in enumerate(self.cases):
            path = tmp_path / f"{number}.ttb"
            graph = case.graph(self.domain)
            api.compile(graph, target="host").save(path)
            is_written = self.domain == "stitch" or ops.lookup(case.op, self.domain).onnx
            executor = "onnxruntime" if is_written else "auto"
            expected = evaluate_graph(graph, case.feeds)
            self._compare(path, "host", executor, case, expected, self.relative_tolerance)

    def test_a_batch_gives_what_its_elements_give(self) -> None:
        for case in self.cases:
            if ops.lookup(case.op, self.domain).batching is not None:
                self._check_batch(case)

    def _compare(
        self, path: Path, target: str, executor: str, case: OperatorCase, expected: Feeds,
        tolerance: float,
    ) -> None:  # fmt: skip
        with api.open_device(target, executor=executor, debug=True) as device:
            made = device.load(path)(*case.feeds.values())
            results = made if isinstance(made, tuple) else (made,)
            for (name, wanted), tensor in zip(expected.items(), results, strict=True):
                found = tensor.numpy()
                assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
                np.testing.assert_allclose(
                    found.astype(np.float64), wanted.astype(np.float64), rtol=tolerance,
                    atol=tolerance,
                )  # fmt: skip

    def _check_batch(self, case: OperatorCase) -> None:
        graph, builder = case.graph(self.domain), ComputationGraphBuilder("batch")
        scaled = [np.stack([a, a * a.dtype.type(2)]) for a in case.feeds.values()]
        operands = [
            builder.input(name, array.shape, DataType.from_dtype(array.dtype))
            for name, array in zip(case.feeds, scaled, strict=True)
        ]
        done = vmap(graph, operands, [True] * len(operands), 2, builder, _without_rule)
        for index, result in enumerate(done.results):
            assert result.is_batched, f"result {index} does not depend on the batch"
            builder.output(f"y{index}", result.tensor)
        feeds = dict(zip(case.feeds, scaled, strict=True))
        whole = evaluate_graph(builder.build(), feeds)
        for element in range(2):
            alone = {name: array[element] for name, array in feeds.items()}
            for name, wanted in evaluate_graph(graph, alone).items():
                np.testing.assert_allclose(whole[name][element], wanted, rtol=1e-6)


def _without_rule(operation: Operation, _: ops.BatchingContext) -> list[Any]:
    raise AssertionError(f"{operation.op} has a batching rule, and it was not used")

"""How a gradient is run: one operation as a graph, differentiated, both graphs on our kernels.

A case is a row of the tables beside this file: (operator, operands,
attributes, outputs). Operands are texts such as `f64[2,3]`, whose data
is drawn with a fixed seed; a suffix narrows it: `+` positive, `1` inside (-1, 1), `>` above 1,
`<5` an index in 0..4. Lists and arrays are constants, None an absent operand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stitch import ops
from stitch.compiler import Differentiated, differentiate
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import Array, DataType
from stitch.testing import backward_feeds as backward_feeds
from stitch.testing import evaluate_graph
from stitch.testing import seeds_of as seeds_of

_SPEC = re.compile(r"(\w+)\[([\d,]*)\](\+|1|>|<\d+)?$")
Feeds = dict[str, Array]
#: Every output of a graph, by name, on our kernels.
run = evaluate_graph


@dataclass(frozen=True, slots=True)
class Case:
    """One operation whose gradients are checked."""

    op: str
    specs: tuple[Any, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1

    def __str__(self) -> str:
        shapes = ",".join(s if isinstance(s, str) else "_" for s in self.specs)
        return f"{self.op}({shapes})" + "".join(f" {k}={v}" for k, v in self.attributes.items())


def case(
    op: str,
    specs: Sequence[Any],
    outputs: int = 1,
    **attributes: Any,
) -> Case:
    """A row of a table."""
    return Case(op, tuple(specs), attributes, outputs)


def _drawn(spec: str, rng: np.random.Generator) -> Array:
    found = _SPEC.match(spec)
    assert found, spec
    data_type, suffix = DataType.parse(found[1]), found[3] or ""
    shape = tuple(int(size) for size in found[2].split(",") if size)
    if suffix.startswith("<"):
        return np.asarray(rng.integers(0, int(suffix[1:]), shape)).astype(data_type.dtype)
    if data_type is DataType.BOOL:
        return np.asarray(rng.integers(0, 2, shape)).astype(np.bool_)
    values = np.asarray(rng.uniform(-0.9, 0.9, shape) if suffix == "1" else rng.normal(0, 2, shape))
    if suffix == "+":
        values = abs(values) + 0.3
    if suffix == ">":
        values = abs(values) + 1.3
    return values.astype(data_type.dtype)


def operands_of(one: Case, seed: int = 3) -> list[Array | None]:
    """The operands of a case, constants included."""
    rng = np.random.default_rng(seed)
    found: list[Array | None] = []
    for spec in one.specs:
        if isinstance(spec, str):
            found.append(_drawn(spec, rng))
        else:
            found.append(np.array(spec, np.int64) if isinstance(spec, list) else spec)
    return found


def wanted_names(one: Case, operands: Sequence[Array | None]) -> list[str]:
    """The drawn floating operands: their gradients are checked."""
    return [
        f"x{i}"
        for i, (spec, array) in enumerate(zip(one.specs, operands, strict=True))
        if isinstance(spec, str)
        and array is not None
        and DataType.from_dtype(array.dtype).is_floating
    ]


def graph_of(one: Case, operands: Sequence[Array | None]) -> tuple[ComputationGraph, Feeds]:
    """The case as a graph of one operation, and what goes into it."""
    definition = next(d for d in ops.operators() if d.name == one.op)
    builder = ComputationGraphBuilder("case")
    feeds: Feeds = {}
    given: list[Any] = []
    for index, (spec, array) in enumerate(zip(one.specs, operands, strict=True)):
        if isinstance(spec, str):
            assert array is not None
            name = f"x{index}"
            feeds[name] = array
            given.append(builder.input(name, array.shape, DataType.from_dtype(array.dtype)))
        else:
            given.append(array)
    made = builder.apply(one.op, given, one.outputs, one.attributes, definition.domain)
    for index, tensor in enumerate(made):
        builder.output(f"y{index}", tensor)
    return builder.build(), feeds


def inputs_of(graph: ComputationGraph, seed: int) -> Feeds:
    """Numbers for the inputs of a graph, drawn."""
    rng = np.random.default_rng(seed)
    types = [graph.input_type(i) for i in range(len(graph.inputs))]
    return {
        slot.name: np.asarray(rng.normal(0, 1, kind.shape)).astype(kind.data_type.dtype)
        for slot, kind in zip(graph.inputs, types, strict=True)
    }


def gradients_of(both: Differentiated, feeds: Feeds, seeds: Feeds | None = None) -> Feeds:
    """Gradients by the name of the forward input."""
    results = run(both.forward, feeds)
    given = seeds_of(both, results) if seeds is None else seeds
    made = run(both.backward, backward_feeds(both, feeds, results, given))
    return {name: made[slot] for name, slot in both.gradients}


def gradients(
    one: Case, wanted: Sequence[str] | None = None, operands: list[Array | None] | None = None
) -> tuple[Feeds, Feeds, Feeds]:
    """Gradients by the name of their operand; the seeds by output; the operands by name."""
    operands = operands_of(one) if operands is None else operands
    graph, feeds = graph_of(one, operands)
    both = differentiate(graph, wanted_names(one, operands) if wanted is None else wanted)
    results = run(both.forward, feeds)
    seeds = seeds_of(both, results)
    made = run(both.backward, backward_feeds(both, feeds, results, seeds))
    by_output = {output: seeds[slot] for output, slot in both.seeds}
    return {name: made[slot] for name, slot in both.gradients}, by_output, feeds

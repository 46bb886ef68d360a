"""A program as nodes and edges: Graphviz's DOT, and the JSON of Google's Model Explorer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stitch.program import ABSENT, Program, Value


@dataclass(frozen=True, slots=True)
class Node:
    """A node: an input, a constant, an operation or an output.

    Args:
        name: Unique in the program.
        label: What it is.
        reads: (node, index of its result, operand) of each edge.
        results: The values that it gives, with their types and layouts.
        facts: Attributes in words, by name.
    """

    name: str
    label: str
    reads: tuple[tuple[str, int, int], ...]
    results: tuple[Value, ...]
    facts: tuple[tuple[str, str], ...] = ()


def nodes_of(program: Program) -> Iterator[Node]:
    """Yield the nodes of a program in the order in which it runs."""
    made: dict[int, tuple[str, int]] = {}

    def reads(values: tuple[int, ...]) -> tuple[tuple[str, int, int], ...]:
        return tuple((*made[v], at) for at, v in enumerate(values) if v != ABSENT)

    for slot in program.inputs:
        node = Node(f"input:{slot.name}", slot.name, (), (program.values[slot.value],),
                    (("kind", slot.kind.value),))  # fmt: skip
        made[slot.value] = node.name, 0
        yield node
    for constant in program.constants:
        value = program.values[constant.value]
        node = Node(f"constant:{constant.value}", value.name or "constant", (), (value,))
        made[constant.value] = node.name, 0
        yield node
    for index, operation in enumerate(program.operations):
        facts = {name: str(value) for name, value in sorted(operation.attributes.items())}
        facts |= {"source": operation.location} if operation.location else {}
        results = [v for v in operation.outputs if v != ABSENT]
        node = Node(f"operation:{index}", operation.title, reads(operation.inputs),
                    tuple(program.values[v] for v in results), tuple(facts.items()))  # fmt: skip
        made.update({value: (node.name, at) for at, value in enumerate(results)})
        yield node
    for output in program.outputs:
        yield Node(f"output:{output.name}", output.name, reads((output.value,)), ())


def value_text(value: Value) -> str:
    """Return shape, types and layout of a value, `4x8xf32:l1:row_major:interleaved`."""
    return value.type.text() if value.layout is None else value.desc.text()


def dot_text(program: Program) -> str:
    """Return a program as a digraph in Graphviz's language, an edge for each operand."""

    def quoted(text: str) -> str:
        return json.dumps(text, ensure_ascii=False)  # The escapes are those of DOT.

    lines = [f"digraph {quoted(program.name)} {{", "  node [shape=box, fontname=monospace];"]
    results: dict[str, tuple[Value, ...]] = {}
    for node in nodes_of(program):
        results[node.name] = node.results
        shape = "box" if node.name.startswith("operation:") else "ellipse"
        tip = "\n".join(f"{key}: {text}" for key, text in node.facts)
        lines.append(f"  {quoted(node.name)} [label={quoted(node.label)}, shape={shape}, "
                     f"tooltip={quoted(tip)}];")  # fmt: skip
        for source, result, _ in node.reads:
            label = quoted(value_text(results[source][result]))
            lines.append(f"  {quoted(source)} -> {quoted(node.name)} [label={label}];")
    return "\n".join([*lines, "}", ""])


def model_explorer_text(program: Program) -> str:
    """Return a program as a graph collection of Model Explorer."""
    nodes = [_explorer_node(node) for node in nodes_of(program)]
    graph = {"id": program.name, "nodes": nodes}
    return json.dumps({"label": program.name, "graphs": [graph]}, indent=1) + "\n"


def _explorer_node(node: Node) -> dict[str, Any]:
    kind = node.name.partition(":")[0]
    return {
        "id": node.name,
        "label": node.label,
        "namespace": "" if kind == "operation" else f"{kind}s",
        "attrs": [{"key": key, "value": text} for key, text in node.facts],
        "incomingEdges": [
            {"sourceNodeId": source, "sourceNodeOutputId": str(result),
             "targetNodeInputId": str(operand)}
            for source, result, operand in node.reads
        ],
        "outputsMetadata": [
            {"id": str(at), "attrs": [
                {"key": "__tensor_tag", "value": value.name},
                {"key": "tensor_shape", "value": value.type.text()},
                {"key": "layout", "value": value_text(value)},
            ]}
            for at, value in enumerate(node.results)
        ],
    }  # fmt: skip

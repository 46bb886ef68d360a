"""Attributes of unexpected kinds, on any node: taken, or refused with an error of Stitch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, defs, helper

from stitch.errors import CompileError, FormatError, StitchError
from stitch.frontend.onnx import from_onnx
from stitch.frontend.onnx.composed_operators import LOWERINGS
from stitch.program import Array
from tests.support.onnx.models import BOOL, FLOAT, INT64, drawn, info, model
from tests.support.onnx.operator_nodes import CASES, built, opsets_of, schemas

node = helper.make_node
_TENSOR = helper.make_tensor("t", FLOAT, [2], [1.0, 2.0])
_GRAPH = helper.make_graph([], "g", [], [])
_TYPE = helper.make_tensor_type_proto(FLOAT, [2])
#: The fields of an attribute of each kind, and numbers at their bounds.
KINDS: list[dict[str, Any]] = [
    {"type": AttributeProto.FLOAT, "f": 0.5}, {"type": AttributeProto.FLOAT, "f": float("nan")},
    {"type": AttributeProto.INT, "i": 1}, {"type": AttributeProto.INT, "i": -(2**62)},
    {"type": AttributeProto.STRING, "s": b"x"}, {"type": AttributeProto.TENSOR, "t": _TENSOR},
    {"type": AttributeProto.GRAPH, "g": _GRAPH}, {"type": AttributeProto.TYPE_PROTO, "tp": _TYPE},
    {"type": AttributeProto.FLOATS, "floats": [0.5, 1.0]},
    {"type": AttributeProto.INTS, "ints": [1, 2]}, {"type": AttributeProto.INTS},
    {"type": AttributeProto.INTS, "ints": [2**62, -(2**62)]},
    {"type": AttributeProto.STRINGS, "strings": [b"a", b"b"]},
    {"type": AttributeProto.TENSORS, "tensors": [_TENSOR]},
    {"type": AttributeProto.GRAPHS, "graphs": [_GRAPH]},
    {"type": AttributeProto.SPARSE_TENSOR, "sparse_tensor": onnx.SparseTensorProto()},
    {"type": AttributeProto.TYPE_PROTOS, "type_protos": [_TYPE]}, {},
]  # fmt: skip
Model = tuple[onnx.ModelProto, Sequence[Array]]


def with_attribute(proto: onnx.ModelProto, index: int, name: str, kind: dict[str, Any]) -> Any:
    """The model with an attribute of one of its nodes replaced."""
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    written = changed.graph.node[index].attribute
    kept = [attribute for attribute in written if attribute.name != name]
    del written[:]
    written.extend([*kept, AttributeProto(name=name, **kind)])
    return changed


def assert_no_bare_exception(models: Iterator[tuple[Model, int, str]], step: int = 1) -> int:
    """Every `step`th of the models with every kind of attribute; gives how many were refused."""
    variants = [(m, i, name, kind) for m, i, name in models for kind in KINDS]
    refused = 0
    for (proto, arrays), index, name, kind in variants[::step]:
        changed = with_attribute(proto, index, name, kind)
        try:
            from_onnx(changed, tuple(arrays))
        except StitchError:
            refused += 1
        except Exception as error:
            pytest.fail(f"{changed.graph.node[index]}: {error!r}")
    return refused


def of_constants() -> Iterator[tuple[Model, int, str]]:
    forms = "value value_int value_ints value_float value_floats value_string value_strings"
    for form in (*forms.split(), "sparse_value"):
        yield (model([node("Constant", [], ["y"])], [], ["y"]), []), 0, form


def of_bodies() -> Iterator[tuple[Model, int, str]]:
    """Nodes with bodies, decided by data and by constants."""
    x, rows = drawn(4), drawn(6, 4)
    side = helper.make_graph([node("Neg", ["x"], ["n"])], "side", [], [info("n", [4])])
    rounds = helper.make_graph(
        [node("Add", ["v", "v"], ["w"]), node("Identity", ["c_in"], ["c_out"])], "rounds",
        [info("i", [], INT64), info("c_in", [], BOOL), info("v", [4])],
        [info("c_out", [], BOOL), info("w", [4])],
    )  # fmt: skip
    step = helper.make_graph(
        [node("Add", ["s", "r"], ["t"]), node("Neg", ["t"], ["o"])], "step",
        [info("s", [4]), info("r", [4])], [info("t", [4]), info("o", [4])],
    )  # fmt: skip
    both, names_of_both = {"then_branch": side, "else_branch": side}, "then_branch else_branch"
    nodes = [
        (node("If", ["flag"], ["y"], **both), names_of_both),
        (node("If", ["yes"], ["y"], **both), names_of_both),
        (node("Loop", ["count", "", "x"], ["y"], body=rounds), "body"),
        (node("Loop", ["nine", "", "x"], ["y"], body=rounds), "body"),
        (node("Scan", ["x", "rows"], ["y", "z"], body=step, num_scan_inputs=1),
         "body num_scan_inputs scan_input_axes scan_input_directions scan_output_axes"),
        (node("SequenceMap", ["list"], ["z"], body=side), "body"),
    ]  # fmt: skip
    inputs = [
        info("x", [4]),
        info("rows", [6, 4]),
        info("flag", [], BOOL),
        info("count", [], INT64),
    ]
    weights = {"nine": np.array(9), "yes": np.array(True)}
    arrays = [x, rows, np.array(True), np.array(3)]
    for one, names in nodes:
        begun = [node("SequenceConstruct", ["x", "x"], ["list"]), one]
        result = "y" if "y" in one.output else "x"
        for name in (*names.split(), "strange"):
            yield (model(begun, inputs, [result], weights), arrays), 1, name


def of_operators() -> Iterator[tuple[Model, int, str]]:
    """The oldest and the newest form of every operator of the table."""
    seen = set()
    for case in CASES:
        opsets = opsets_of(case)
        for opset in {opsets[0], opsets[-1]}:
            key = (case.op, schemas(case.op)[opset])
            if key not in seen:
                seen.add(key)
                made = built(case, opset)
                for name in (*sorted(defs.get_schema(case.op, opset).attributes), "strange"):
                    yield made, len(made[0].graph.node) - 1, name


def of_node(
    op: str, domain: str, version: int, operands: int, names: Iterable[str]
) -> Iterator[tuple[Model, int, str]]:
    one = node(op, ["x", "w", "w"][: max(1, min(3, operands))], ["y"], domain=domain)
    made = model([one], [info("x", [2, 3]), info("w", [3])], ["y"], domains={domain: version})
    for name in (*sorted(names), "strange"):
        yield (made, [drawn(2, 3), drawn(3)]), 0, name


def of_other_domains() -> Iterator[tuple[Model, int, str]]:
    """Operators of other domains, and those on sequences."""
    for (domain, op), row in LOWERINGS.items():
        if domain:
            yield from of_node(op, domain, 1, min(row.operands, 5), row.attributes)
    for op in ("LinearClassifier", "Scaler", "SVMClassifier", "SVMRegressor", "TreeEnsemble",
               "TreeEnsembleClassifier", "TreeEnsembleRegressor"):  # fmt: skip
        yield from of_node(op, "ai.onnx.ml", 5, 1, defs.get_schema(op, 5, "ai.onnx.ml").attributes)
    for op, operand in (("SplitToSequence", "x"), ("ConcatFromSequence", "s"), ("Optional", "x"),
                        ("SequenceEmpty", ""), ("RandomNormal", ""), ("NonZero", "x"),
                        ("MelWeightMatrix", ""), ("NonMaxSuppression", "x")):  # fmt: skip
        nodes = [node("SequenceConstruct", ["x"], ["s"]), node(op, [operand], ["y"])]
        for name in (*sorted(defs.get_schema(op, 26).attributes), "strange"):
            yield (model(nodes, [info("x", [2, 3])], ["y"]), [drawn(2, 3)]), 1, name


def test_a_constant_of_another_kind_is_one_clear_error() -> None:
    one = node("Constant", [], ["y"])
    one.attribute.append(
        AttributeProto(name="value_float", type=AttributeProto.TYPE_PROTO, tp=_TYPE)
    )
    with pytest.raises(FormatError, match="attribute 'value_float' of Constant does not fit"):
        from_onnx(model([one], [], ["y"]))
    assert assert_no_bare_exception(of_constants()) > 100


def test_bodies_of_another_kind_are_refused() -> None:
    assert assert_no_bare_exception(of_bodies()) > 200


def test_sides_that_give_different_numbers_of_results_are_refused() -> None:
    one, two = (
        helper.make_graph([node("Split", ["x"], ["a", "b"], num_outputs=2)], "side", [],
                          [info(name, [2]) for name in names])
        for names in (["a"], ["a", "b"])
    )  # fmt: skip
    nodes = [node("ReduceMax", ["x"], ["m"], keepdims=0), node("Cast", ["m"], ["c"], to=BOOL),
             node("If", ["c"], ["y"], then_branch=one, else_branch=two)]  # fmt: skip
    with pytest.raises(CompileError, match="If is not supported"):
        from_onnx(model(nodes, [info("x", [4])], ["y"]))


def test_attributes_of_another_kind_are_no_bare_exceptions() -> None:
    assert assert_no_bare_exception(of_operators(), step=31) > 200
    assert assert_no_bare_exception(of_other_domains(), step=13) > 200


@pytest.mark.campaign("hostile")
def test_no_attribute_of_any_operator_of_any_kind_is_a_bare_exception() -> None:
    assert assert_no_bare_exception(of_operators()) > 6000
    assert assert_no_bare_exception(of_other_domains()) > 2500

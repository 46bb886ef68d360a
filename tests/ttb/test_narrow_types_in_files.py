"""Files with float8, float4, int4 or int2 say so, and others stay what they were."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.errors import FormatError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.graph.graph_json import as_json, from_json
from stitch.program import DataType
from stitch.ttb import encode, load
from tests.support.grids import in_turn, named
from tests.support.stitched_models import several

NARROW = [t for t in DataType if not t.is_block and t.is_narrow]


def graph_of(kind: DataType) -> ComputationGraph:
    """Every code as a constant, gathered in another order, beside the input as it is."""
    builder = ComputationGraphBuilder("codes")
    codes = np.arange(1 << kind.bits, dtype=np.uint8).view(kind.dtype)
    table = builder.constant(codes.reshape(2, -1))
    given = builder.input("x", (3,), kind)
    builder.output("turned", builder.op("Transpose", table))
    builder.output("same", builder.op("Reshape", given, [1, 3]))
    return builder.build()


@pytest.mark.parametrize(
    ("kind", "space"), in_turn(named(lambda t: t.value, NARROW), ["host", "l1"])
)
def test_every_code_goes_through_a_file_and_a_device(kind: DataType, space: str) -> None:
    target = "host" if space == "host" else "tiny"
    model = stitch.compile(graph_of(kind), target=target)
    data = encode(model.binary)
    assert load(data, verify="full").requires == ("narrow_types",)
    given = np.arange(3, dtype=np.uint8).view(kind.dtype)
    with stitch.open_device(target) as device:
        turned, same = several(device.load(data)(given))
        codes = turned.numpy()
        assert codes.dtype == same.numpy().dtype == kind.dtype
        assert codes.T.reshape(-1).view(np.uint8).tolist() == list(range(1 << kind.bits))
        assert same.numpy().view(np.uint8).tolist() == [[0, 1, 2]]


def test_a_file_without_narrow_types_requires_nothing() -> None:
    assert stitch.compile(graph_of(DataType.INT8), target="host").binary.requires == ()


def test_a_constant_beyond_its_type_is_damage() -> None:
    model = stitch.compile(graph_of(DataType.UINT4), target="host")
    data = bytearray(encode(model.binary))
    folded = np.arange(16, dtype=np.uint8).reshape(2, 8).T
    at = bytes(data).index(folded.tobytes())
    data[at] = 16
    with pytest.raises(FormatError, match="no uint4"):
        load(bytes(data), verify="full")


def test_the_json_form_keeps_every_code() -> None:
    graph = graph_of(DataType.FLOAT4_E2M1)
    assert from_json(as_json(graph)) == graph

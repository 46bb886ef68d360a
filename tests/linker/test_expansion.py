"""Expansion: bodies written out; what nobody wants is left out; scratch, seams and links hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import stitch
from stitch.compiler import compile_graph
from stitch.errors import FormatError
from stitch.linker import Wire, expanded, link_programs
from stitch.machine import load_machine
from stitch.program import ABSENT, Array, Program
from stitch.ttb import Binary, encode, load
from tests.support.bodied_graphs import SHAPE, bodied_graph, plain_graph
from tests.support.stitched_models import several

MACHINE = load_machine("tiny")


def program() -> Program:
    return compile_graph(bodied_graph(), MACHINE).program


def drawn() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    return rng.standard_normal(SHAPE, np.float32), rng.standard_normal(SHAPE, np.float32)


def test_the_expansion_has_the_operations_that_results_need_in_order() -> None:
    whole = expanded(program())
    assert [o.op for o in whole.operations] == [
        "Mul", "Tanh", "Mul", "Add", "Mul", "Tanh", "Mul", "Add", "MatMul", "Exp"
    ]  # fmt: skip
    assert whole.bodies == () and all(o.body == ABSENT for o in whole.operations)
    assert [o.location for o in whole.operations[:5]] == ["first.py:1"] * 4 + ["first.py:2"]
    # The constant of a body is one for all that carry it.
    assert len(whole.constants) == len(program().constants) + 1


def test_the_scratch_of_the_file_holds_the_expansion() -> None:
    made = program()
    room = made.scratch.size_per_bank * MACHINE.shape.space(made.scratch.space).banks
    whole = expanded(made)
    slots = whole.placed_values()
    inner = {v for o in whole.operations for v in o.outputs} - slots
    places = [(whole.values[v].desc.layout.address, whole.values[v].type.nbytes) for v in inner]
    assert 0 < max(at + nbytes for at, nbytes in places if at is not None) <= room
    short = replace(made, scratch=replace(made.scratch, size_per_bank=0))
    with stitch.open_device("tiny") as device, pytest.raises(FormatError, match="scratch"):
        device.load(Binary((short,), MACHINE.shape, "test"))


def test_linked_programs_share_equal_bodies_and_give_the_same() -> None:
    one = compile_graph(bodied_graph(), MACHINE).program
    wires = [Wire(0, 1, 1, 0), Wire(0, 1, 1, 1)]
    linked = link_programs([one, one], wires, machine=MACHINE.shape, name="both")
    assert linked.bodies == one.bodies
    assert [o.body for o in linked.operations if o.domain == "own"] == [1, 1, 0, 1, 1, 0]
    x, w = drawn()
    with stitch.open_device("tiny") as device:
        whole, part = (device.load(Binary((p,), MACHINE.shape, "test")) for p in (linked, one))
        first = several(part(x, w))
        second = several(part(first[1], first[1]))
        found = [tensor.numpy() for tensor in several(whole(x, w))]
        for ours, expected in zip(found, (first[0], *second), strict=True):
            assert np.array_equal(ours, expected.numpy())


def test_files_name_the_feature_only_where_they_have_bodies() -> None:
    with_bodies = encode(Binary((program(),), MACHINE.shape, "test"))
    without = Binary((compile_graph(plain_graph(), MACHINE).program,), MACHINE.shape, "test")
    assert load(with_bodies, verify="full").requires == ("bodies",)
    assert load(with_bodies).programs == (program(),)
    assert load(encode(without)).requires == ()

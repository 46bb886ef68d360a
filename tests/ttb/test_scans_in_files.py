"""Scans in `.ttb` files and JSON graphs: what is written comes back, and runs as it did."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.errors import FormatError, IncompatibleError
from stitch.graph import as_json, check_types, from_json
from stitch.linker import Wire, link_programs
from stitch.machine import load_machine
from stitch.program import Array, is_scan
from stitch.ttb import Binary, binary, encode, load
from tests.support.files.scanned_specimens import by_hand, scanned_binary, scanned_program
from tests.support.scanned_graphs import FORMS, scanned_graph

MACHINE = load_machine("host").shape


def arrays(program: stitch.program.Program) -> list[Array]:
    rng = np.random.default_rng(4)
    kinds = [program.values[slot.value].type for slot in program.inputs]
    return [rng.standard_normal(k.shape, np.float32).astype(k.data_type.dtype) for k in kinds]


def results(held: Binary) -> list[Array]:
    with stitch.open_device("host") as device:
        program = device.load(held)
        made = program(*arrays(held.program(0)))
        return [t.numpy().copy() for t in (made if isinstance(made, tuple) else (made,))]


@pytest.mark.parametrize("form", FORMS)
def test_a_file_keeps_scans_and_gives_the_same_bits(form: str, tmp_path: Path) -> None:
    model = stitch.compile(scanned_graph(form), target="host", schedule="rounds")
    written = encode(model.binary)
    model.save(tmp_path / "scans.ttb")
    read = load(tmp_path / "scans.ttb", verify="full")
    assert read.programs == model.binary.programs
    assert read.requires == tuple(sorted({"bodies", "scans"}))
    assert encode(read) == written == encode(stitch.compile(
        scanned_graph(form), target="host", schedule="rounds").binary)  # fmt: skip
    assert all(map(np.array_equal, results(read), results(model.binary)))


@pytest.mark.parametrize("form", FORMS)
def test_the_json_form_keeps_scans(form: str) -> None:
    graph = scanned_graph(form)
    text = as_json(graph)
    read = from_json(text)
    assert read == graph and as_json(read) == text
    assert check_types(read) == ()


def test_json_whose_scans_do_not_fit_is_refused_by_what_is_wrong() -> None:
    plain = json.loads(as_json(scanned_graph("cell")))
    scan = next(o for o in plain["operations"] if o["op"] == "Scan")
    scan["attributes"]["count"]["value"] = 7
    with pytest.raises(FormatError, match="for 7 rounds of body 0 7x4x32xf32"):
        from_json(json.dumps(plain))
    del scan["attributes"]["count"]
    with pytest.raises(FormatError, match="does not say its count of rounds"):
        from_json(json.dumps(plain))
    del scan["body"]
    with pytest.raises(FormatError, match="a scan runs a body in rounds, and carries none"):
        from_json(json.dumps(plain))


def test_a_reader_that_does_not_know_scans_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    file = encode(scanned_binary())
    monkeypatch.setattr("stitch.ttb.file.FEATURES", binary.FEATURES - {"scans"})
    with pytest.raises(IncompatibleError, match="scans"):
        load(file)


def test_linked_scans_share_bodies_and_give_the_same() -> None:
    one = scanned_program()
    linked = link_programs([one, one], [Wire(0, 0, 1, 0)], machine=MACHINE, name="both")
    assert linked.bodies == one.bodies
    assert [o.body for o in linked.operations if is_scan(o)] == [2, 2]
    held = Binary((linked,), MACHINE, "test")
    assert load(encode(held)).programs == held.programs
    first, *xs = arrays(linked)
    state, one_by_one = by_hand(first, xs[0])
    last, all_of_two = by_hand(state, xs[1])
    named = dict(zip([slot.name for slot in linked.outputs], results(held), strict=True))
    expected = sorted([one_by_one, all_of_two, last], key=lambda a: a.sum())
    for ours, theirs in zip(sorted(named.values(), key=lambda a: a.sum()), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-5)

"""Machines with a `base`: figures replaced by name, and a defect of each kind on its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.errors import FormatError
from stitch.machine import load_machine, varied_machine
from stitch.program import Space


def machine(folder: Path, text: str, name: str = "own.yaml") -> str:
    """Write a description; return its path."""
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_machine_has_the_figures_of_its_base_but_those_it_overrides(tmp_path: Path) -> None:
    text = """\
base: tiny
name: small
overrides:
  l1.bank_nbytes: 8_192
  l1.policy: first_fit
  paths.host.dram.bytes_per_second: 8.0e+9
  noc.latency_cycles: 80
"""
    own, base = load_machine(machine(tmp_path, text)), load_machine("tiny")
    assert (own.name, own.shape.space(Space.L1).limit, own.shape.space(Space.L1).policy.value) == (
        "small",
        8192,
        "first_fit",
    )
    assert own.shape.dram == base.shape.dram and own.compute == base.compute
    for source, target, path in own.paths:
        rate = path.rate(1 << 20)
        before = base.path(source, target)
        assert before is not None
        changed = (source, target) == (Space.HOST, Space.DRAM)
        assert rate == (8e9 if changed else before.rate(1 << 20))
    assert own.noc is not None and own.noc.latency_cycles == 80


def test_a_base_may_be_a_file_that_has_a_base_itself(tmp_path: Path) -> None:
    machine(tmp_path, "base: tiny\nname: a\noverrides: {l1.bank_nbytes: 8192}\n", "a.yaml")
    (tmp_path / "sub").mkdir()
    text = "base: ../a.yaml\nname: b\noverrides: {l1.base: 2048}\n"
    assert (
        load_machine(machine(tmp_path / "sub", text, "b.yaml")).shape.space(Space.L1).capacity
        == 6144
    )


def test_a_key_of_the_file_replaces_that_of_the_base(tmp_path: Path) -> None:
    text = "base: tiny\nname: own\nhost: {banks: 1, bank_nbytes: 4096, alignment: 64}\n"
    assert load_machine(machine(tmp_path, text)).shape.host.capacity == 4096


def test_a_varied_machine_is_the_one_of_the_same_description() -> None:
    varied = varied_machine("tiny", {"l1.bank_nbytes": 8192}, "small")
    assert varied.shape.space(Space.L1).capacity == 7168 and varied.name == "small"
    assert load_machine("tiny").shape.space(Space.L1).capacity == 15360


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("base: tinny\nname: x\n", 1, "there is no machine 'tinny'; did you mean 'tiny'?"),
        ("name: x\nbase: none.yaml\n", 2, "No such file"),
        ("base: [tiny]\nname: x\n", 1, "must be the name of a shipped machine"),
        ("base: tiny\n", 1, "name: must be a name, not nothing"),
        ("base: tiny\nname: x\noverrides: 3\n", 3, "must be a mapping of figures"),
        ("base: tiny\nname: x\noverrides:\n  l2.bank_nbytes: 5\n", 4, "no figure 'l2.bank_nbytes'"),
        ("base: tiny\nname: x\noverrides: {l1.bank_nbyte: 5}\n", 3, "did you mean 'bank_nbytes'?"),
        ("base: tiny\nname: x\noverrides: {paths.l1.l2.hops: 5}\n", 3, "'paths.l1.l2.hops'"),
        ("base: tiny\nname: x\noverrides: {l1.bank_nbytes: many}\n", 3, "must be"),
        ("base: tiny\nname: x\noverrides: {l1.bank_nbytes: 1025}\n", 3, "usable addresses"),
        ("name: x\noverrides: {l1.base: 0}\n", 2, "belongs to `base`"),
    ],
)
def test_a_defect_is_named_on_its_line(tmp_path: Path, text: str, line: int, part: str) -> None:
    with pytest.raises(FormatError) as caught:
        load_machine(machine(tmp_path, text))
    said = [problem for problem in caught.value.problems if part in problem.detail]
    assert said, str(caught.value)
    assert said[0].where.endswith(f"own.yaml:{line}")


def test_descriptions_that_stand_on_themselves_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="more than 8 descriptions"):
        load_machine(machine(tmp_path, "base: own.yaml\nname: own\n"))

"""Machine descriptions: ours are sound and sourced, a user's are checked, every problem at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path as FilePath

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.errors import FormatError, UsageError
from stitch.machine import Policy, load_machine, parse_machine
from stitch.program import Space

SHIPPED = ("blackhole_p150", "host", "tiny", "wormhole_n150")


def text_of(name: str) -> str:
    import stitch.machine

    folder = FilePath(stitch.machine.__file__).parent
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")


def problems_of(text: str) -> dict[str, str]:
    """kind -> line and dotted place of each problem found in a description."""
    with pytest.raises(FormatError) as caught:
        parse_machine(text.encode(), "mine.yaml")
    assert "mine.yaml" in str(caught.value)
    found = {}
    for problem in caught.value.problems:
        file, _, line = problem.where.partition(":")
        assert file == "mine.yaml"
        found[problem.kind] = f"{line} {problem.detail.partition(': ')[0]}"
    return found


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def changed(old: str, new: str, name: str = "tiny") -> str:
    text = text_of(name)
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_figure_of_a_shipped_machine_names_its_source(name: str) -> None:
    def unsourced(node: object, place: str) -> list[str]:
        if isinstance(node, dict):
            if "source" in node:
                return []
            return [p for key, part in node.items() for p in unsourced(part, f"{place}.{key}")]
        if isinstance(node, list):
            return [p for i, part in enumerate(node) for p in unsourced(part, f"{place}[{i}]")]
        return [place] if place not in (".name", ".description") else []

    assert unsourced(yaml.safe_load(text_of(name)), "") == []


def test_a_description_of_ones_own_may_leave_out_every_source() -> None:
    def bare(node: object) -> object:
        if isinstance(node, dict):
            if "value" in node:
                return node["value"]
            return {key: bare(part) for key, part in node.items() if key != "source"}
        return [bare(part) for part in node] if isinstance(node, list) else node

    text = yaml.safe_dump(bare(yaml.safe_load(text_of("wormhole_n150"))))
    assert "source" not in text
    found, shipped = parse_machine(text.encode(), "mine.yaml"), load_machine("wormhole_n150")
    assert found.sources == ()
    assert dataclasses.replace(found, sources=shipped.sources) == shipped


def test_n150_keeps_l1_small_and_the_unreserved_base_out_of_reach() -> None:
    l1 = load_machine("wormhole_n150").shape.l1
    assert l1 is not None
    assert (l1.banks, l1.base, l1.limit, l1.alignment) == (64, 103_840, 1_499_136 - 32_768, 16)


def test_a_users_file_is_read_as_ours_is(tmp_path: FilePath) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(text_of("tiny"), encoding="utf-8")
    assert load_machine(mine) == load_machine("tiny")
    assert load_machine(str(mine)) == load_machine("tiny")


def test_an_unknown_name_suggests_the_closest_machine() -> None:
    with pytest.raises(UsageError, match="did you mean 'wormhole_n150'"):
        load_machine("wormhole_n15")


def test_an_unknown_key_suggests_the_closest() -> None:
    with pytest.raises(FormatError, match="did you mean 'alignment'") as caught:
        parse_machine(changed("alignment: 16", "alignmnet: 16").encode(), "mine.yaml")
    kinds = {problem.kind for problem in caught.value.problems}
    assert kinds == {"unknown_key", "missing_key"}


@pytest.mark.parametrize(
    ("old", "new", "kind", "where"),
    [
        ("banks: 4", "banks: 0", "out_of_range", "l1.banks"),
        ("banks: 4", "banks: 5", "banks_per_core", "l1.banks"),
        ("banks: 4", "banks: yes", "wrong_type", "l1.banks"),
        ("banks: 4", "banks: 4.5", "wrong_type", "l1.banks"),
        ("base: 1_024", "base: -16", "out_of_range", "l1.base"),
        ("base: 1_024", "base: 16_384", "no_room", "l1.base"),
        ("base: 1_024", "base: 1_030", "alignment", "l1.base"),
        ("alignment: 16", "alignment: 24", "alignment", "l1.alignment"),
        ("bank_nbytes: 16_384", "bank_nbytes: 1_0_0_0_0_1", "alignment", "l1.bank_nbytes"),
        ("reserved_top_nbytes: 0", "reserved_top_nbytes: 16_000", "no_room", "l1.base"),
        (
            "bank_nbytes: 16_384",
            "bank_nbytes: 17_592_186_044_432",
            "out_of_range",
            "l1.bank_nbytes",
        ),
        ("bank_nbytes: 16_384", f"bank_nbytes: {2**62}", "out_of_range", "l1.bank_nbytes"),
        ("clock_hz: 1_000_000_000", "clock_hz: 1.0e-320", "out_of_range", "noc.clock_hz"),
        ("latency_cycles: 40", "latency_cycles: 1.0e+308", "out_of_range", "noc.latency_cycles"),
        ("256: 16", "256: 6", "not_rising", "noc.bytes_per_cycle.256"),
        ("64: 4, 128: 8", "128: 8, 64: 4", "not_rising", "noc.bytes_per_cycle.64"),
        ("64: 4", "0: 4", "out_of_range", "noc.bytes_per_cycle"),
        ("64: 4", "64: 1.0e-308", "out_of_range", "noc.bytes_per_cycle.64"),
        ("64: 4", "64: -4", "out_of_range", "noc.bytes_per_cycle.64"),
        ("64: 4", "64: .nan", "out_of_range", "noc.bytes_per_cycle.64"),
        ("clock_hz: 1_000_000_000", "clock_hz: 0", "out_of_range", "noc.clock_hz"),
        ("clock_hz: 1_000_000_000", "clock_hz: .inf", "out_of_range", "noc.clock_hz"),
        ("latency_cycles: 40", "latency_cycles: fast", "wrong_type", "noc.latency_cycles"),
        ("value: [2, 2]", "value: [2]", "wrong_type", "core_grid"),
        ("value: [2, 2]", "vlaue: [2, 2]", "wrong_type", "core_grid"),
        ("name: tiny", "name: ''", "wrong_type", "name"),
        ("name: tiny", "", "missing_key", "name"),
        ("host:", "hots:", "missing_key", "host"),
        ("from: host, to: l1", "from: host, to: l2", "unknown_space", "paths[2].to"),
        ("from: host, to: l1", "from: host, to: dram", "duplicate_path", "paths[2]"),
        ("noc_links: 4", "bytes_per_second: 1", "rate", "paths[5].hops"),
        ("hops: 1", "hops: 1, curve: {1: 1}", "rate", "paths[5]"),
    ],
)
def test_an_impossible_figure_is_named(old: str, new: str, kind: str, where: str) -> None:
    found = problems_of(changed(old, new))[kind]
    line, _, place = found.partition(" ")
    assert place == where
    missing = "name: " if where == "host" else "description"
    at = {"no_room": "base: ", "missing_key": missing}.get(kind, old)
    assert int(line) == line_of(text_of("tiny"), at)


@pytest.mark.parametrize(
    ("key", "kind", "where"),
    [
        ("granule: 24", "granule", "l1.granule"),
        ("granule: 8", "granule", "l1.granule"),
        ("granule: 0", "out_of_range", "l1.granule"),
        ("granule: 4_096", "granule", "l1.base"),
        ("policy: worst_fit", "unknown_word", "l1.policy"),
        ("reserved_bottom_nbytes: 15_360", "no_room", "l1.base"),
        ("reserved_bottom_nbytes: -16", "out_of_range", "l1.reserved_bottom_nbytes"),
    ],
)
def test_an_impossible_key_of_a_space_is_named(key: str, kind: str, where: str) -> None:
    found = problems_of(changed("alignment: 16", f"alignment: 16\n  {key}"))[kind]
    assert found.partition(" ")[2] == where


@pytest.mark.parametrize(
    ("old", "new", "kind", "where"),
    [
        ("grid: [12, 10]", "grid: [12, 0]", "wrong_type", "noc.routers.grid"),
        ("grid: [12, 10]", "grid: [9, 10]", "routers", "noc.routers.core_rows"),
        ("8, 9, 10, 11]\n", "8]\n", "routers", "noc.routers.core_rows"),
        ("core_columns: [1, 2,", "core_columns: [1, 1,", "routers", "noc.routers.core_columns"),
        ("core_columns: [1, 2,", "core_columns: [1, -2,", "out_of_range",
         "noc.routers.core_columns[1]"),
        ("- [7, 5]", "- [7, 10]", "routers", "noc.routers.dram"),
        ("      - [7, 5]\n", "", "routers", "noc.routers.dram"),
        ("- [7, 5]", "- [7]", "wrong_type", "noc.routers.dram[11]"),
        ("{core: 70", "{here: 70", "unknown_key", "noc.read_latency_cycles.here"),
        ("  link_bytes_per_cycle: 30\n", "", "misplaced_key", "noc.routers"),
        ("value: 1.2", "value: 0.9", "out_of_range", "noc.dram_queueing"),
        ("  read_latency_cycles: {core: 70, column: 154, row: 170, both: 270}\n", "",
         "missing_key", "paths[8].hops"),
    ],
)  # fmt: skip
def test_routers_that_do_not_fit_are_named(old: str, new: str, kind: str, where: str) -> None:
    text = changed(old, new, "wormhole_n150")
    with pytest.raises(FormatError) as caught:
        parse_machine(text.encode(), "mine.yaml")
    found = {(p.kind, p.detail.partition(": ")[0]) for p in caught.value.problems}
    assert (kind, where) in found, found


def test_a_space_that_nothing_reaches_is_a_problem() -> None:
    text = "\n".join(line for line in text_of("tiny").splitlines() if ", to: l1" not in line)
    assert problems_of(text) == {"unreachable": f"{line_of(text, 'paths:')} paths"}


def test_l1_without_dram_is_refused() -> None:
    document = yaml.safe_load(text_of("tiny"))
    del document["dram"]
    document["paths"] = [p for p in document["paths"] if "dram" not in (p["from"], p["to"])]
    assert problems_of(yaml.safe_dump(document, sort_keys=False)) == {"missing_key": "1 dram"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1, 2]",
        b"\xff\xfe\x00",
        b"a: [",
        b"a: 1\na: 2",
        b"x: &x {a: 1}\ny: {<<: [*x, *x]}",
        b"[" * 5000,
        b"n: " + b"9" * 5000,
        b"? [a]\n: b",
        b"d: 2020-99-99",
        b"h: &h {banks: *h}",
        b"!!python/object:os.system {}",
        b"#" * (1 << 21),
    ],
)
def test_whatever_is_no_description_is_a_format_error(content: bytes) -> None:
    with pytest.raises(FormatError):
        parse_machine(content, "odd.yaml")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_damaged_description_is_read_or_refused(data: st.DataObject) -> None:
    lines = text_of("tiny").splitlines()
    index = data.draw(st.integers(0, len(lines) - 1))
    lines[index] = data.draw(st.sampled_from(["", "host: 3", "paths: {}", "l1: [", "noc: {}"]))
    try:
        machine = parse_machine("\n".join(lines).encode(), "damaged.yaml")
    except FormatError:
        return
    assert machine.seconds(Space.HOST, Space.L1, 1024, 64) > 0


@pytest.mark.parametrize("name", ["x" * 1000, "a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_no_machine(name: str) -> None:
    with pytest.raises(UsageError, match="there is no machine"):
        load_machine(name)


def test_a_machine_reserves_regions_at_both_ends_of_a_space() -> None:
    """L1_SMALL and the circular buffers of L1, the trace region of DRAM."""
    text = changed(
        "reserved_top_nbytes: 0", "reserved_top_nbytes: 512\n  reserved_bottom_nbytes: 256"
    )
    text = text.replace(
        "bank_nbytes: 1_048_576", "bank_nbytes: 1_048_576\n  reserved_top_nbytes: 4096"
    )
    shape = parse_machine(text.encode(), "mine.yaml").shape
    assert shape.l1 is not None and (shape.l1.base, shape.l1.limit) == (1_280, 16_384 - 512)
    assert shape.dram is not None and shape.dram.limit == 1_048_576 - 4_096


def test_first_fit_looks_at_dram_from_the_bottom_as_devices_do() -> None:
    text = changed("alignment: 16", "alignment: 16\n  policy: first_fit")
    text = text.replace("alignment: 32", "alignment: 32\n  policy: first_fit")
    shape = parse_machine(text.encode(), "mine.yaml").shape
    assert shape.l1 is not None and shape.l1.policy is Policy.FIRST_FIT
    assert shape.dram is not None and shape.dram.policy is Policy.FIRST_FIT_UPWARDS


def test_a_missing_file_names_itself(tmp_path: FilePath) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        load_machine(tmp_path / "nowhere.yaml")

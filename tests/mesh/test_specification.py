"""Machine specifications: YAML files with all their defects, numbers of devices, links."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest

from stitch.errors import FormatError, UsageError
from stitch.machine import load_machine
from stitch.mesh.specification import (
    DEFAULT_BYTES_PER_SECOND,
    DEFAULT_LATENCY_SECONDS,
    DeviceEntry,
    Link,
    MachineSpecification,
    specification_of,
)

TWO = """\
name: two
devices:
  left:  {machine: wormhole_n150}
  right: {machine: wormhole_n150, node: box-2}
links:
  - {from: left, to: right, latency_seconds: 3.0e-6, bytes_per_second: 11.0e+9, source: "a sheet"}
  - {from: right, to: left, like: 0}
"""


def read(folder: Path, text: str) -> MachineSpecification:
    file = folder / "two.yaml"
    file.write_text(text, encoding="utf-8")
    return MachineSpecification.from_yaml(file)


def defects(folder: Path, text: str) -> list[tuple[int, str]]:
    """The line and the kind of each defect of a file."""
    with pytest.raises(FormatError) as caught:
        read(folder, text)
    return [(int(p.where.rpartition(":")[2]), p.kind) for p in caught.value.problems]


def test_the_example_of_the_documentation_reads_as_written(tmp_path: Path) -> None:
    two = read(tmp_path, TWO)
    assert two.name == "two"
    assert {name: entry.node for name, entry in two.devices.items()} == {
        "left": None,
        "right": "box-2",
    }
    assert two.entry("left").machine == load_machine("wormhole_n150")
    there, back = two.link("left", "right"), two.link("right", "left")
    assert there == Link("left", "right", 3e-6, 11e9, provenance="a sheet")
    assert back == Link("right", "left", 3e-6, 11e9, provenance="a sheet")
    assert there.seconds(11_000) == 3e-6 + 1e-6


def test_a_machine_is_a_path_relative_to_the_file(tmp_path: Path) -> None:
    shipped = Path(load_machine.__code__.co_filename).parent / "tiny.yaml"
    (tmp_path / "mine.yaml").write_bytes(shipped.read_bytes())
    one = read(tmp_path, "devices:\n  left: {machine: mine.yaml}\n")
    assert one.name == "two"  # The file's name without suffix.
    assert one.entry("left").machine == load_machine("tiny")


def test_every_defect_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    found = defects(
        tmp_path,
        """\
devices:
  left: {machine: wormhole_n150}
  right: {node: box-2}
  third: {machine: no_such}
links:
  - {from: left, to: righd, latency_seconds: 1.0e-6, bytes_per_second: 1.0e+9}
  - {from: left, to: left, latency_seconds: 1.0e-6, bytes_per_second: 1.0e+9}
  - {from: left, to: right, latency_seconds: -1.0, bytes_per_second: 1.0e+9}
  - {from: left, to: right, latency_seconds: 1.0e-6, bytes_per_second: 0}
  - {from: right, to: left, like: 7}
  - {from: right, to: third, like: 6}
  - {from: third, to: right, latency_seconds: 1.0e-6}
  - {from: left, to: third, latency_seconds: 1.0e-6, curve: [[1, 2.0], [2, 1.0]]}
  - {from: left, to: third, latency_seconds: 0, bytes_per_second: 1, curve: [[1, 1], [2, 2]]}
  - {from: third, to: left, latency_seconds: 0, bytes_per_second: 1, speed: 4}
  - {from: right, to: left, like: 0, latency_seconds: 1}
color: red
""",
    )
    assert found == [
        (3, "missing_key"),
        (4, "bad_machine"),
        (6, "unknown_device"),
        (7, "self_link"),
        (8, "out_of_range"),
        (9, "out_of_range"),
        (10, "bad_like"),
        (11, "bad_like"),
        (12, "rate"),
        (13, "not_rising"),
        (14, "rate"),
        (15, "unknown_key"),
        (16, "misplaced_key"),
        (17, "unknown_key"),
    ]


def test_a_doubled_link_names_the_first_one(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=re.escape("from 'left' to 'right' is link 0 already")):
        read(tmp_path, TWO + "  - {from: left, to: right, like: 1}\n")


@pytest.mark.parametrize("devices", ["{}", "[a, b]", "3"])
def test_a_file_needs_named_devices(tmp_path: Path, devices: str) -> None:
    assert defects(tmp_path, f"devices: {devices}\n") == [(1, "wrong_type")]


def test_a_file_has_at_most_64_devices(tmp_path: Path) -> None:
    lines = [f"  d{i}: {{machine: tiny}}\n" for i in range(65)]
    assert len(read(tmp_path, "devices:\n" + "".join(lines[:64])).devices) == 64
    assert defects(tmp_path, "devices:\n" + "".join(lines)) == [(1, "wrong_type")]


def test_like_may_lead_to_a_link_that_has_like_itself(tmp_path: Path) -> None:
    text = TWO.replace("right: {", "third: {machine: tiny}\n  right: {")
    spec = read(tmp_path, text + "  - {from: left, to: third, like: 1, source: a guess}\n")
    assert spec.link("left", "third") == Link("left", "third", 3e-6, 11e9, provenance="a guess")


def test_a_link_that_no_file_describes_has_the_default_figures() -> None:
    link = MachineSpecification.of(3, "tiny").link("device2", "device0")
    assert (link.source, link.target) == ("device2", "device0")
    assert link.latency_seconds == DEFAULT_LATENCY_SECONDS
    assert link.bytes_per_second == DEFAULT_BYTES_PER_SECOND
    assert "assumed" in link.provenance


def test_an_unknown_device_is_refused_with_the_closest_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no device 'rihgt'; did you mean 'right'"):
        read(tmp_path, TWO).entry("rihgt")


def test_the_devices_of_a_mesh_are_a_number_or_a_file(tmp_path: Path) -> None:
    two = read(tmp_path, TWO)
    assert specification_of(tmp_path / "two.yaml") == two
    assert specification_of(str(tmp_path / "two.yaml")) == two
    assert specification_of(two) is two
    assert specification_of(2, "tiny") == specification_of("2", "tiny")
    assert tuple(specification_of(2, "tiny").devices) == ("device0", "device1")


@pytest.mark.parametrize("number", [0, -1, 65, "0", "-3"])
def test_an_impossible_number_of_devices_is_refused(number: int | str) -> None:
    with pytest.raises(UsageError, match="number of devices is not possible"):
        specification_of(number)


@pytest.mark.parametrize("what", [2.0, True, None, ["a"], ""])
def test_other_arguments_are_refused(what: object) -> None:
    with pytest.raises(UsageError, match="specification_of takes"):
        specification_of(what)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "figures",
    [
        {"latency_seconds": -1.0, "bytes_per_second": 1.0},
        {"latency_seconds": float("nan"), "bytes_per_second": 1.0},
        {"latency_seconds": 0.0, "bytes_per_second": -1.0},
        {"latency_seconds": 0.0},
        {"latency_seconds": 0.0, "bytes_per_second": 1.0, "curve": ((1, 1.0), (2, 2.0))},
        {"latency_seconds": 0.0, "curve": ((2, 1.0), (1, 2.0))},
        {"latency_seconds": 0.0, "curve": ((1, 1.0),)},
    ],
)
def test_a_link_made_in_python_is_checked_as_well(figures: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="a -> b"):
        Link("a", "b", **figures)  # type: ignore[arg-type]


def test_links_of_a_specification_made_in_python_join_two_of_its_devices() -> None:
    entry = DeviceEntry(load_machine("tiny"))
    link = Link("a", "b", 0.0, 1.0)
    with pytest.raises(UsageError, match="no device 'b'"):
        MachineSpecification("one", {"a": entry}, (link,))
    with pytest.raises(UsageError, match="is link 0 already"):
        MachineSpecification("two", {"a": entry, "b": entry}, (link, link))


#: What stands in the place of a word of a sound file.
ODD = (
    "", "-1", "0", ".nan", ".inf", "1e400", "9" * 60, "true", "[]", "{}", "[1, 2]", "{a: 1}",
    "left", "null", "x/y.yaml", '"\\0"', "!!python/object:a.b {}", "&a [*a]", "? [a]\n: b",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_is_read_or_refused_with_lines(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    text = TWO + "  - {from: right, to: left, latency_seconds: 1, curve: [[1, 1], [2, 3.5]]}\n"
    words = re.findall(r"[\w.+-]+|[^\w.+-]+", text)
    refused = 0
    for _ in range(60):
        damaged = list(words)
        for at in dice.sample(range(len(words)), dice.randint(1, 2)):
            damaged[at] = dice.choice(ODD)
        try:
            found = read(tmp_path, "".join(damaged))
        except FormatError as error:
            refused += 1
            assert all(re.fullmatch(r"two\.yaml:\d+", p.where) for p in error.problems)
        else:
            for link in found.links:
                assert 0 <= link.seconds(0) <= link.seconds(1 << 40) < math.inf
    assert refused > 30


def test_the_name_of_a_machine_is_no_specification() -> None:
    with pytest.raises(UsageError, match=r"devices=2, machine='wormhole_n150'"):
        specification_of("wormhole_n150")

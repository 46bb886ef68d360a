"""A mapping becomes a frozen dataclass by its rows, and every defect is told with line and word."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from stitch.errors import FormatError
from stitch.forms import (
    ByKey,
    Choice,
    ElementType,
    Entries,
    Field,
    Flag,
    ListOf,
    Name,
    Number,
    Pairs,
    ParseContext,
    RelativePath,
    Schema,
    Shape,
    SourceLocation,
    Whole,
    Word,
    read_yaml,
)
from stitch.program import DataType


@dataclass(frozen=True)
class Wheel:
    """A wheel of a car."""

    name: str
    line: int
    size: float
    file: Path | None = None
    array: str | None = None


@dataclass(frozen=True)
class Car:
    """A car, with all kinds of fields."""

    name: str
    file: str
    folder: Path
    doors: int = 4
    is_red: bool = False
    fuel: str = "none"
    wheels: tuple[Wheel, ...] = ()
    shape: tuple[int, ...] = ()
    kind: DataType | None = None
    seats: tuple[str, ...] = ()
    parts: tuple[tuple[str | None, str, int], ...] = ()
    load: object = None


@dataclass(frozen=True)
class Crate:
    """A load that holds loads."""

    crate: str
    loads: tuple[object, ...] = ()


@dataclass(frozen=True)
class Sack:
    """A load that holds nothing."""

    sack: str


WHEEL = Schema(
    Wheel,
    Field("size", Number(above=0), needed_without="file", default=1.0),
    Field("file", RelativePath()),
    Field("name", Word(), into="array", only_with="file"),
    word="file",
)
CRATE: Schema[object] = Schema(
    Crate,
    Field("crate", Word("the name of a crate"), needed=True),
    Field(
        "loads", ListOf(ByKey("a crate or a sack", lambda: LOADS), "a list of loads"), default=()
    ),
)
LOADS: dict[str, Schema[object]] = {
    "crate": CRATE,
    "sack": Schema(Sack, Field("sack", Word(), needed=True)),
}


def check(car: Car, place: SourceLocation) -> None:
    if car.doors < len(car.seats):
        place.at("seats").note("too_many", "must not be more than the doors")


CAR = Schema(
    Car,
    Field("name", Word(), default=ParseContext.stem),
    Field("doors", Whole(1, 9), default=5),
    Field("red", Flag(), into="is_red", default=False),
    Field("fuel", Choice(("none", "petrol", "diesel")), default="none"),
    Field("wheels", Entries(WHEEL), default=()),
    Field("shape", Shape(), default=()),
    Field("kind", ElementType()),
    Field("seats", ListOf(Name(), "a list of seats", least=1), default=()),
    Field("parts", Pairs(Word(), "parts", is_named=True, has_lines=True), default=()),
    Field("load", CRATE),
    check=check,
)


def read(text: str) -> Car | None:
    root, log = read_yaml(text, "car.yaml")
    car = CAR.read(root, ParseContext(log, Path("garage")).root)
    log.raise_any("car")
    return car


def defects(text: str) -> list[str]:
    with pytest.raises(FormatError) as caught:
        read(text)
    return [str(problem).removeprefix("car.yaml:") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "value"), [("-.inf", -math.inf), ("+.INF", math.inf), ("+-.inf", "+-.inf")]
)
def test_an_infinity_has_at_most_one_sign(text: str, value: object) -> None:
    root, _ = read_yaml(f"a: {text}", "f.yaml")
    assert isinstance(root.data, dict)
    assert root.data["a"].data == value


def test_what_is_left_out_has_its_default() -> None:
    assert read("red: null") == Car("car", "car.yaml", Path("garage"), doors=5)


def test_every_kind_of_value_becomes_what_it_stands_for() -> None:
    car = read(
        "name: 911\ndoors: 3\nred: yes\nfuel: diesel\nshape: [2, 3]\nkind: float16\nseats: [left]\n"
        "wheels:\n  front: {size: 1.5}\n  back: {file: w.npz, name: w}\n  spare: w.npy\n"
        "parts: {hood: steel}\nload: {crate: big, loads: [{sack: sand}, {crate: small}]}\n"
    )
    wheels = (
        Wheel("front", 9, 1.5),
        Wheel("back", 10, 1.0, Path("garage/w.npz"), "w"),
        Wheel("spare", 11, 1.0, Path("garage/w.npy")),
    )
    assert car == Car(
        "911", "car.yaml", Path("garage"), 3, True, "diesel", wheels, (2, 3), DataType.FLOAT16,
        ("left",), (("hood", "steel", 12),), Crate("big", (Sack("sand"), Crate("small"))),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dors: 3", "1: dors: there is no such key; allowed: name, doors, red, fuel, wheels, "
         "shape, kind, seats, parts, load; did you mean 'doors'? [unknown_key]"),
        ("fuel: disel", "1: fuel: must be one of none, petrol, diesel (did you mean "
         "'diesel'?), not 'disel' [unknown_word]"),
        ("\ndoors: 11", "2: doors: must be a whole number from 1 to 9, not '11' "
         "[out_of_range]"),
        ("doors: 2.5", "1: doors: must be a whole number from 1 to 9, not '2.5' "
         "[wrong_type]"),
        ("doors: true", "1: doors: must be a whole number from 1 to 9, not 'true' "
         "[wrong_type]"),
        ("red: 1", "1: red: must be true or false, not '1' [wrong_type]"),
        ("wheels: {a: {}}", "1: wheels.a.size: must be a finite number above 0, not nothing "
         "[missing_key]"),
        ("wheels: {a: {size: 0}}", "1: wheels.a.size: must be a finite number above 0, not '0' "
         "[out_of_range]"),
        ("wheels: {a: {size: .nan}}", "1: wheels.a.size: must be a finite number above 0, not "
         "'.nan' [out_of_range]"),
        ("wheels: {a: {size: 1, name: w}}", "1: wheels.a.name: must be left out: it belongs to "
         "`file`, not 'w' [misplaced_key]"),
        ("wheels:\n  a:\n    - 3", "2: wheels.a: must be a mapping, not a list of 1 [wrong_type]"),
        ("wheels: {1a: w}", "1: '1a' is no name: letters, digits and _ only [bad_name]"),
        ("wheels: 3", "1: wheels: must be a mapping, not '3' [wrong_type]"),
        ("shape: [2,\n  -1]", "2: shape: must be a list of at most 32 whole numbers that are "
         "not negative, and its element 1 is '-1' [out_of_range]"),
        ("kind: bfp8", "1: kind: must be a type of single elements, not a block format, "
         "not 'bfp8' [wrong_type]"),
        ("seats: []", "1: seats: must be a list of seats, not a list of 0 [wrong_type]"),
        ("seats: [a, b c]", "1: 'b c' is no name: letters, digits and _ only [bad_name]"),
        ("load: heavy", "1: load: must be a mapping, not 'heavy' [wrong_type]"),
        ("load: {crate: a, loads: [{box: c}]}", "1: load.loads[0].crate: must be the name of a "
         "crate, not nothing [missing_key]"),
        ("load: {crate: a, loads: [3]}", "1: load.loads[0]: must be a crate or a sack, not '3' "
         "[wrong_type]"),
        ("seats: [a, b, c]\ndoors: 1", "1: seats: must not be more than the doors "
         "[too_many]"),
        ("- 3", "1: must be a mapping, not a list of 1 [wrong_type]"),
    ],
)  # fmt: skip
def test_a_defect_names_line_place_and_what_is_allowed(text: str, told: str) -> None:
    assert told in defects(text)


def test_all_defects_are_told_at_once_in_the_order_of_the_file() -> None:
    told = defects("doors: many\nwheels:\n  a: {size: -1}\n  b: {sise: 2}\nfuel: gas\ncolour: 3")
    assert [text.partition(":")[0] for text in told] == ["1", "3", "4", "4", "5", "6"]


def test_a_figure_may_name_its_source_and_places_have_dots() -> None:
    text = "doors: {value: 3, source: counted}\nwheels: {a: {size: 2, source: measured}}"
    root, log = read_yaml(text, "car.yaml")
    reading = ParseContext(log, sources=[])
    car = CAR.read(root, reading.root)
    assert car is not None and car.doors == 3 and car.wheels == (Wheel("a", 2, 2),)
    assert reading.sources == [("doors", "counted"), ("wheels.a", "measured")]
    root, log = read_yaml(
        "wheels: {a: {size: 0, sise: 1}}\ndoors: {value: 3, sauce: x}", "car.yaml"
    )
    assert CAR.read(root, ParseContext(log, sources=[]).root) is None
    assert [str(problem) for problem in log.problems] == [
        "car.yaml:2: doors: has the unknown key 'sauce'; allowed: value, source [unknown_key]",
        "car.yaml:1: wheels.a.sise: there is no such key; allowed: size, file, name, source; did "
        "you mean 'size'? [unknown_key]",
        "car.yaml:1: wheels.a.size: must be a finite number above 0, not '0' [out_of_range]",
    ]

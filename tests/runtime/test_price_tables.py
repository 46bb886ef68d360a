"""Price tables: the shipped ones, the checks of a user's, the choice by processor."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

import stitch
from stitch.errors import FormatError, UsageError
from stitch.runtime import executors
from stitch.runtime.executors import make_executor
from stitch.runtime.executors.prices import load_prices, parse_prices, tables
from stitch.runtime.executors.prices.tables import (
    Processor,
    nearest_table,
    parse_cpuinfo,
)
from stitch.runtime.executors.torch_executor import CONVOLUTIONS, KERNELS
from tests.support.executors.named_prices import FILE

SHIPPED = ("x86_avx512_amd", "x86_avx512_intel")
FOLDER = Path(executors.__file__).parent / "price_tables"


def text_of(name: str = "") -> str:
    """A shipped table's text; without a name that of a table of round figures."""
    file = FOLDER / f"{name}.yaml" if name else FILE
    return file.read_text(encoding="utf-8")


def problems_of(text: str) -> list[str]:
    with pytest.raises(FormatError) as caught:
        parse_prices(text.encode(), "mine.yaml")
    assert "mine.yaml is not a sound price table" in str(caught.value)
    return [f"{p.where.partition(':')[2]} {p.detail}" for p in caught.value.problems]


def changed(old: str, new: str) -> str:
    text = text_of()
    assert old in text
    return text.replace(old, new, 1)


def figures_of(value: object, place: str = "") -> list[str]:
    """The places of all figures in a file."""
    if isinstance(value, Mapping):
        inside = ((f"{place}.{key}" if place else str(key), at) for key, at in value.items())
        return [found for where, at in inside for found in figures_of(at, where)]
    return [place] if isinstance(value, int | float) else []


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_table_loads_under_its_own_name_and_names_the_source_of_every_figure(
    name: str,
) -> None:
    table = load_prices(name)
    assert table.name == name
    sourced = tuple(place for place, source in table.sources if source.strip())
    figures = figures_of(yaml.safe_load(text_of(name)))
    assert len(figures) > 80
    assert [f for f in figures if not f.startswith(tuple(f"{place}." for place in sourced))] == []


#: Kernels that came after a table was measured: it leaves them to others.
NOT_MEASURED = {"x86_avx512_intel": {"stitch.BatchNormalizationGradient"}}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_table_prices_every_kernel_of_torch(name: str) -> None:
    prices = load_prices(name).torch
    assert prices is not None
    named = {f"{domain}.{op}" if domain else op for domain, op in KERNELS.keys() - CONVOLUTIONS}
    later = NOT_MEASURED.get(name, set())
    assert named - {"Gemm", "MatMul"} - later == set(prices.functions_ns)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  round_us: 0.6\n", "", "numpy.round_us: must be a finite number from 0, not nothing"),
        ("call_us: 0.6", "call_us: -1", "numpy.call_us: must be a finite number from 0, not '-1'"),
        ("matrix_us: 0.25", "matrix_us: .nan", "numpy.matrix_us: must be a finite number from 0"),
        ("{262143: 0.15", "{many: 0.15", "numpy.arithmetic_ns: 'many' is not a size"),
        ("{262143: 0.15", "{262145: 0.15", "numpy.arithmetic_ns: sizes must rise"),
        ("{262143: 0.15", "{262143: 0", "numpy.arithmetic_ns.262143: must be a finite number"),
        ("    Erf: 1.7", "    Erg: 1.7", "there is no operator 'Erg'; did you mean 'Erf'?"),
        ("  round_us: 0.6", "  rounds_us: 0.6\n  round_us: 0.6",
         "numpy.rounds_us: there is no such key"),
        ("\ntorch:", "\ntorches:", "torches: there is no such key"),
        ("  cache_nbytes: 2_097_152\n", "", "processor.cache_nbytes: must be a whole number"),
        ("part: 0.1", "part: 1", "gains.division.part: must be a finite number from 0 and below 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_one_problem_with_its_line(
    old: str, new: str, said: str
) -> None:
    (problem,) = problems_of(changed(old, new))
    line, _, detail = problem.partition(" ")
    assert said in detail
    assert int(line) > 1


def smallest() -> str:
    """A table of NumPy's prices alone."""
    return text_of().partition("\nonnxruntime:")[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("- 1\n", "must be a mapping"),
        (smallest()[:700], "mine.yaml"),
        (smallest() + "\nname: other\n", "the key 'name' is defined twice"),
        ("version: 2\n" + smallest(), "version: there is no such key"),
        ("a: " + "[" * 5000 + "]" * 5000, "this YAML goes beyond 16 levels"),
        ("a: &a [*a]\n", "aliases make this YAML too large"),
        (smallest() + "#" * (1 << 20), "expected: at most 1048576 bytes"),
        (smallest() + "\n---\n" + smallest(), "another document"),
        (smallest().replace("0.6", "9" * 5000), "unsupported number"),
        (smallest().replace("0.6", "1e999"), "must be a finite number from 0, not '1e999'"),
        (smallest().replace("0.6", "!!python/name:os.system x"), "mine.yaml:"),
    ],
)
def test_a_file_that_is_no_table_is_one_error(text: str, said: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_prices(text.encode(), "mine.yaml")
    assert said in str(caught.value)
    assert "mine.yaml" in str(caught.value)
    assert len(str(caught.value)) < 20_000


WRONG = (
    "", ".nan", "-.inf", "-1", "1e400", "true", "null", "[1]", "{a: 1}", "{1: 2, 1: 3}", "x",
    "!!python/object:os.system x", "&a 1", "*a", "2026-01-01", "{value: 1, source: 3}", "|\n",
    "{262143: x}", "{: 1}", "[", "- 1", "\0", "\t", "#", "9" * 30,
)  # fmt: skip


def damaged(lines: list[str], rng: random.Random) -> list[str]:
    """The lines of a table after one damage."""
    i, kind = rng.randrange(len(lines)), rng.randrange(6)
    line, before, after = lines[i], lines[:i], lines[i + 1 :]
    if kind == 0:
        return [*before, *(after or [""])]
    if kind == 1:
        return [*before, line, rng.choice(lines), *after]
    if kind == 2:
        return [*before, f"{line.partition(':')[0]}: {rng.choice(WRONG)}", *after]
    if kind == 3:
        number = re.sub(r"\d+(\.\d+)?", lambda _: rng.choice(WRONG), line, count=1)
        return [*before, number, *after]
    if kind == 4:
        return [*before, "  " * rng.randrange(4) + line.strip(), *after]
    j = rng.randrange(len(line) + 1)
    sign = rng.choice("{}[]:,-#&*!|>'\"%@` \t\0é")
    return [*before, line[:j] + sign + line[j + rng.randrange(2) :], *after]


@pytest.mark.parametrize("count", [300, pytest.param(3_000, marks=pytest.mark.campaign("hostile"))])
def test_damaged_tables_are_tables_or_problems_with_their_lines(count: int) -> None:
    rng, refused = random.Random(13), 0
    for _ in range(count):
        lines = smallest().split("\n")
        for _ in range(rng.choice([1, 1, 2, 3])):
            lines = damaged(lines, rng)
        try:
            parse_prices("\n".join(lines).encode(), "mine.yaml")
        except FormatError as error:
            assert "mine.yaml" in str(error)
            assert all(re.fullmatch(r"mine\.yaml:\d+", p.where) for p in error.problems)
            refused += 1
    assert count // 2 < refused < count


def test_an_unknown_table_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no price table 'x86_avx512_intle'; did you mean"):
        load_prices("x86_avx512_intle")
    with pytest.raises(UsageError, match="cannot read price table"):
        load_prices(tmp_path / "none.yaml")


# -- families --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        (Processor("AuthenticAMD", 1 << 20), "x86_avx512_amd"),
        (Processor("GenuineIntel", 2 << 20), "x86_avx512_intel"),
        (Processor("AuthenticAMD", 1 << 19), "x86_avx512_amd"),
        (Processor("GenuineIntel", 1 << 18), "x86_avx512_intel"),
        # Nobody's: what is known of it decides, then the alphabet.
        (Processor("0x41", 2 << 20), "x86_avx512_intel"),
        (Processor("0x41", 1 << 20), "x86_avx512_amd"),
        (Processor("", 0), "x86_avx512_amd"),
    ],
)
def test_a_processor_takes_the_table_of_the_nearest_family(processor: Processor, name: str) -> None:
    assert nearest_table(processor).name == name


@pytest.mark.parametrize(
    ("cpuinfo", "vendor"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu sse2 avx avx2\n", "AuthenticAMD"),
        ("processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n", "0x41"),
        ("", ""), ("flags : avx512f\n: :\nvendor_id", ""),
    ],
)  # fmt: skip
def test_a_family_is_read_from_cpuinfo(cpuinfo: str, vendor: str) -> None:
    assert parse_cpuinfo(cpuinfo, 7) == Processor(vendor, 7)


def test_without_cpuinfo_a_table_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(tables, "CACHES", tmp_path)
    tables.this_processor.cache_clear()
    try:
        assert tables.this_processor() == Processor("", 0)
        assert load_prices().name in SHIPPED
    finally:
        tables.this_processor.cache_clear()


# -- what is chosen --------------------------------------------------------------------------------


def test_explain_names_the_table_and_its_family() -> None:
    for executor in ("auto", "torch"):
        with stitch.open_device("host", executor=executor, prices="x86_avx512_intel") as device:
            text = device.explain()
        assert "by the prices 'x86_avx512_intel' (GenuineIntel, 2048 KiB" in text
    with stitch.open_device("host") as device:
        assert "prices" not in device.explain()


def test_a_device_takes_the_table_of_a_file_also_on_several_threads(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text_of().replace("name: round_prices", "name: mine"))
    for threads in (None, 2):
        with stitch.open_device("host", executor="auto", prices=file, threads=threads) as device:
            assert device.prices is not None and device.prices.name == "mine"


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime", "null"])
def test_an_executor_that_has_no_choice_takes_no_prices(executor: str) -> None:
    with pytest.raises(UsageError, match=f"{executor!r} takes no prices") as failure:
        stitch.open_device("host", executor=executor, prices="x86_avx512_intel")
    assert "auto or torch" in str(failure.value)


def test_an_executor_that_is_made_already_takes_no_other_prices() -> None:
    made = make_executor("auto", prices="x86_avx512_intel")
    with pytest.raises(UsageError, match="takes no prices"):
        stitch.open_device("host", executor=made, prices="x86_avx512_amd")

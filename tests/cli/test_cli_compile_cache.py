"""`stitch-compile --cache DIR`: what is read, what is kept, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Cli = Callable[..., Any]


def test_the_second_time_the_file_comes_from_the_cache(cli: Cli, here: Path) -> None:
    first = cli("compile", "a.yaml", "-o", "1.ttb", "--cache=kept")
    second = cli("compile", "a.yaml", "-o", "2.ttb", "--cache", "kept")
    plain = cli("compile", "a.yaml", "-o", "3.ttb")
    assert (first.code, second.code, plain.code) == (0, 0, 0)
    assert first.out.splitlines()[-1] == "cache kept: 0 hits, 1 miss"
    assert second.out.splitlines()[-1] == "cache kept: 1 hit, 0 misses"
    files = [(here / f"{n}.ttb").read_bytes() for n in (1, 2, 3)]
    assert files[0] == files[1] == files[2]


def test_the_parts_of_a_split_are_kept_each(cli: Cli, here: Path) -> None:
    words = ("compile", "a.yaml", "-o", "m.ttb", "--split=2", "--cache=kept")
    assert "cache kept: 0 hits, 2 misses" in cli(*words).out
    before = [(here / f"m.{n}.ttb").read_bytes() for n in range(2)]
    assert "cache kept: 2 hits, 0 misses" in cli(*words).out
    assert before == [(here / f"m.{n}.ttb").read_bytes() for n in range(2)]


def test_a_damaged_entry_is_told_of_on_standard_error(cli: Cli, here: Path) -> None:
    cli("compile", "a.yaml", "-o", "1.ttb", "--cache=kept")
    (entry,) = (here / "kept").glob("*.ttb")
    entry.write_bytes(entry.read_bytes()[:-1])
    done = cli("compile", "a.yaml", "-o", "2.ttb", "--cache=kept")
    assert done.code == 0 and done.err.count("[cache_entry]") == 1 and str(entry.name) in done.err
    assert "0 hits, 1 miss" in done.out
    again = cli("compile", "a.yaml", "-o", "2.ttb", "--cache=kept", "-q")
    assert "1 hit, 0 misses" in again.out and again.err == ""


def test_text_stays_alone_on_standard_output(cli: Cli) -> None:
    plain = cli("compile", "a.yaml", "--text")
    done = cli("compile", "a.yaml", "--text", "--cache=kept")
    assert done.out == plain.out and done.err == "cache kept: 0 hits, 1 miss\n"


def test_a_size_without_a_folder_is_refused(cli: Cli, here: Path) -> None:
    done = cli("compile", "a.yaml", "-o", "1.ttb", "--cache_size=1GiB")
    assert done.code == 2 and "--cache=DIR" in done.err and not (here / "1.ttb").exists()
    done = cli("compile", "a.yaml", "-o", "1.ttb", "--cache=kept", "--cache_size=lots")
    assert done.code == 2 and "--cache_size" in done.err

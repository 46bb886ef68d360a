"""`read_entry`: one key of a file, read no further."""

from __future__ import annotations

import pytest

from stitch.errors import FormatError
from stitch.forms import Node, read_entry
from stitch.forms.nodes import MAX_DEPTH


def test_an_entry_is_read_with_its_line() -> None:
    assert read_entry("a: 1\nb: {c: 2}\n", "f.yaml", "b") == Node(2, {"c": Node(2, 2, "2", 2)})


def test_what_comes_after_the_entry_is_not_read() -> None:
    found = read_entry("a: 1\nb: ]", "f.yaml", "a")
    assert found is not None
    assert found.data == 1


@pytest.mark.parametrize("text", ["b: 1\n", "[a, b]\n", "a\n", ""])
def test_a_file_that_says_nothing_of_it_gives_nothing(text: str) -> None:
    assert read_entry(text, "f.yaml", "a") is None


def test_what_stands_before_it_is_read_within_the_same_bounds() -> None:
    deep = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)
    with pytest.raises(FormatError, match=f"beyond {MAX_DEPTH} levels"):
        read_entry(f"a: {deep}\nb: 1\n", "f.yaml", "b")


def test_what_is_no_yaml_is_told_with_its_line() -> None:
    with pytest.raises(FormatError, match="not YAML") as caught:
        read_entry("a: ]\nb: 1\n", "f.yaml", "b")
    assert caught.value.where == "f.yaml:1"

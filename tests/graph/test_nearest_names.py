"""The nearest of known words: little work, whatever a hostile text calls its things."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stitch.errors import MAX_NEAR_CHARACTERS, MAX_NEAR_NAMES, MAX_NEAR_WORK, closest, nearest


def test_of_very_many_names_the_first_are_looked_at() -> None:
    looked_at = 0

    def names() -> Iterator[str]:
        nonlocal looked_at
        for looked_at in range(1, 10**6):
            yield f"n{looked_at}"

    assert nearest("n7x", names()) == ("n7",)
    assert looked_at == MAX_NEAR_NAMES


def test_very_long_words_have_no_nearest_and_are_none() -> None:
    longest = "a" * MAX_NEAR_CHARACTERS
    assert nearest(longest, [longest]) == (longest,)
    assert nearest(longest + "a", [longest]) == nearest(longest, [longest + "a"]) == ()
    assert closest("modle", [longest + "a", "model"]) == "did you mean 'model'?"


def test_of_long_names_fewer_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def matches(word: str, names: list[str], most: int, cutoff: float) -> list[str]:
        compared.extend(names)
        return []

    monkeypatch.setattr("difflib.get_close_matches", matches)
    word = "a" * MAX_NEAR_CHARACTERS
    nearest(word, ["b" * MAX_NEAR_CHARACTERS] * MAX_NEAR_NAMES)
    assert 0 < len(compared) * MAX_NEAR_CHARACTERS**2 <= MAX_NEAR_WORK

"""The nearest of known words: little work, whatever a hostile text calls its things."""

from __future__ import annotations

from collections.abc import Iterator

from stitch.errors import MAX_NEAR_CHARACTERS, MAX_NEAR_NAMES, closest, nearest


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

"""Words of the form `[SLOT=]WHAT` dealt out to slots: by name, by index, else by position.

Comes in: the words of one option, and the names of the slots. Goes out: slot → word. Must not know:
what the words mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from stitch.cli.wire_words import slot_index
from stitch.errors import UsageError, closest


def split_slot(word: str, is_value: Callable[[str], bool]) -> tuple[str | None, str]:
    """The slot that a word names, if any, and the rest; `is_value` knows a bare value.

    >>> split_slot("x=@x.npy", lambda w: w.startswith("@"))
    ('x', '@x.npy')
    """
    if is_value(word):
        return None, word
    name, equals, rest = word.partition("=")
    if equals and name and is_value(rest):
        return name, rest
    return None, word


def deal(
    words: Sequence[tuple[str | None, str]],
    names: Sequence[str],
    option: str,
    shared: Sequence[str] = (),
) -> dict[int, str]:
    """The word of each slot that has one: named words first, the others fill up in order.

    `shared`: what each slot is called within its own program; a word for `mask` goes to `a.mask`
    and `b.mask` alike, but where another word names one of them. Raises `UsageError` for unknown
    names, slots named twice, and words left over.
    """
    dealt: dict[int, str] = {}
    places = {name: index for index, name in enumerate(names)}
    for_several: list[tuple[list[int], str]] = []
    for name, word in words:
        if name is None:
            continue
        index = slot_index(places, name)
        owners = [i for i, own in enumerate(shared) if own == name]
        if index is None and owners:
            for_several.append((owners, word))
            continue
        if index is None:
            near = closest(name, names)
            raise UsageError(
                f"there is no {option} {name!r}" + (f"; {near}" if near else ""),
                where=f"--{option}={name}={word}"[:200],
                expected=", ".join(names) or "none",
            )
        if index in dealt:
            raise UsageError(f"{option} {names[index]!r} is given twice")
        dealt[index] = word
    for owners, word in for_several:
        left = [index for index in owners if index not in dealt]
        if not left:
            raise UsageError(f"{option} {names[owners[0]]!r} is given twice")
        dealt |= dict.fromkeys(left, word)
    free = deque(index for index in range(len(names)) if index not in dealt)
    for name, word in words:
        if name is not None:
            continue
        if not free:
            raise UsageError(
                f"there is a surplus --{option}: {word[:80]}",
                expected=f"at most {len(names)}: {', '.join(names)}" if names else f"no --{option}",
            )
        dealt[free.popleft()] = word
    return dealt

"""The arrays that a run starts from: files, words, or made up by `--init`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from stitch.budget import claimed_array
from stitch.cli.array_text import array_of_text, looks_like_array
from stitch.cli.chain import RunInput
from stitch.cli.wiring import deal, split_words
from stitch.errors import LayoutError, LinkError, UsageError
from stitch.forms import read_array_file, typed
from stitch.program import Array, DataType, InputKind, ValueType
from stitch.runtime import capture

#: Elements `[start, stop)` of an array that is made up, in any type.
_Part: TypeAlias = Callable[[int, int], Array]
#: Arrays are made up in parts of so many elements: none is ever held in a wider type as a whole.
_PART = 1 << 16

#: Called with what is worth knowing and no error.
Note: TypeAlias = Callable[[str], None]

INITS = ("randn", "arange", "zeros", "ones")
FORM = "[NAME=]@file.npy, @file.npz (by name), [NAME=]2x2xf32=1 2 3 4, [NAME=]2x2xf32=@raw.bin"


def _unheard(text: str) -> None:
    """The `Note` of a call that says nothing."""


def is_array_word(word: str) -> bool:
    """Whether a word is an array by itself, without a slot's name before it."""
    return word.startswith("@") or looks_like_array(word)


def is_archive(word: str) -> bool:
    """Whether a word names a `.npz` file."""
    return word.startswith("@") and word.lower().endswith(".npz")


def given_names(words: Sequence[str]) -> tuple[str, ...]:
    """The slots that words of `--input` name; raises `UsageError` for words that are no input."""
    split = split_words(words, is_array_word, "input", FORM, "--input")
    return tuple(name for name, _ in split if name is not None)


def gather_inputs(
    slots: Sequence[RunInput],
    words: Sequence[str],
    *,
    init: str | None,
    seed: int,
    without_data: bool = False,
    strict_types: bool = False,
    note: Note = _unheard,
) -> tuple[Array, ...]:
    """One array per slot; what no word gives is made by `init`.

    `without_data`: what is missing is not an error, its shape is enough (nothing will read it).
    `strict_types`: no array of another floating type; else `note` is told of every conversion.
    Raises `UsageError` for missing, surplus or unfit inputs, `FormatError` for bad files.
    """
    single = (word for word in words if not is_archive(word))
    split = split_words(single, is_array_word, "input", FORM, "--input")
    names, own = [slot.name for slot in slots], [slot.own for slot in slots]
    given = _arrays(deal(split, names, "input", own), slots)
    for name, array in _of_archives(slots, words).items():
        if name in given:
            raise UsageError(f"input {slots[name].name!r} is given twice")
        given[name] = array
    missing = [slot.name for i, slot in enumerate(slots) if i not in given and slot.given is None]
    if missing and init is None and not without_data:
        wanted = ", ".join(f"{s.name}: {s.type.text()}" for s in slots)
        raise UsageError(
            f"inputs are missing: {', '.join(missing)}",
            expected=wanted,
            remedy="give them with --input, or have them made with --init=randn",
        )
    arrays: list[Array] = []
    fitted: dict[tuple[int, ValueType], Array] = {}
    for i, slot in enumerate(slots):
        known = given.get(i, slot.given)
        if known is not None:
            key = id(known), slot.type
            if key not in fitted:
                fitted[key] = _fitted(slot, known, strict_types, note)
            arrays.append(fitted[key])
        elif without_data:
            one = np.zeros((), slot.type.data_type.dtype)
            arrays.append(np.broadcast_to(one, slot.type.shape))
        else:
            arrays.append(made_up(slot, "zeros" if init is None else init, (seed, i)))
    return tuple(arrays)


def _of_archives(slots: Sequence[RunInput], words: Sequence[str]) -> dict[int, Array]:
    """The arrays of archives given as a whole: every member belongs to the slot of its name."""
    names = [slot.name for slot in slots]
    by_slot: dict[int, Array] = {}
    for word in words:
        if not is_archive(word):
            continue
        arrays = read_array_file(
            Path(word[1:]),
            lambda name, shape: any(
                slot.type.shape == shape for slot in slots if name in (slot.name, slot.own)
            ),
        )
        for name in arrays:
            owners = [i for i, slot in enumerate(slots) if name in (slot.name, slot.own)]
            if not owners:
                raise UsageError(
                    f"{word[1:]} holds an array {name!r}, and there is no such input",
                    expected=", ".join(names),
                    remedy=f"take one array of it with --input=NAME={word}",
                )
            array = arrays[name]
            for owner in owners:
                if owner in by_slot:
                    raise UsageError(f"input {names[owner]!r} is given twice")
                by_slot[owner] = array
    return by_slot


def _arrays(dealt: Mapping[int, str], slots: Sequence[RunInput]) -> dict[int, Array]:
    """The array of each slot that has a word; slots that share a word share its array."""
    known: dict[tuple[str, str], Array] = {}
    by_slot: dict[int, Array] = {}
    for index, word in dealt.items():
        own = slots[index].own or slots[index].name
        # Slots that share a word may be of several shapes.
        shapes = {slots[i].type.shape for i, other in dealt.items() if other == word}
        if (word, own) not in known:
            try:
                known[word, own] = array_of_word(word, own, shapes)
            except UsageError as error:
                if not word.startswith("@"):
                    error.where = error.where or f"--input={own}={word}"[:120]
                raise
        by_slot[index] = known[word, own]
    return by_slot


def array_of_word(word: str, name: str, shapes: Collection[tuple[int, ...]] | None = None) -> Array:
    """The array that a word spells or whose file it names: there the only one, or the slot's.

    Of a file's array of another shape than `shapes` no data is read, as `read_array_file` says.
    """
    if not word.startswith("@"):
        return array_of_text(word)
    path = Path(word[1:])
    arrays = read_array_file(path, lambda _, shape: shapes is None or shape in shapes)
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    if name not in arrays:
        raise UsageError(
            f"{path} holds several arrays, and none is called {name!r}",
            expected=", ".join(str(n) for n in arrays) or "an archive that is not empty",
        )
    return arrays[name]


def _fitted(slot: RunInput, array: Array, strict_types: bool, note: Note) -> Array:
    """The array in the slot's type; raises `UsageError` where shape or kind of number differ."""
    what, data_type = f"input {slot.name!r}", slot.type.data_type
    seen = typed(array, data_type, what)
    if seen is not array:
        note(f"{what}: two nameless bytes for each element (|V2) are read as bfloat16")
    try:
        captured = capture(seen, slot.type.shape, data_type, True, what)
    except (LinkError, LayoutError) as error:
        raise UsageError(
            error.what, expected=error.expected, got=error.got, remedy=error.remedy
        ) from error
    given = DataType.from_dtype(seen.dtype)
    if given is not data_type and data_type.is_floating:
        if strict_types:
            raise UsageError(
                f"{what} has another floating type, and --strict_types converts none",
                expected=data_type.value,
                got=given.value,
                remedy=f"convert the array with .astype({data_type.value!r})",
            )
        note(f"{what} is converted from {given.value} to {data_type.value}")
    return captured


def made_up(slot: RunInput, init: str, seed: tuple[int, int]) -> Array:
    """An array for a slot; the same seed gives the same array, in every process.

    `randn`: floats from the normal distribution, integers from 0 to 9, fair bits; `arange`: 0, 1,
    2, ... in row-major order (bits alternate).
    """
    whole: Array = claimed_array(
        slot.type.shape, slot.type.data_type.dtype, f"making input {slot.name!r} up"
    )
    if init in ("zeros", "ones"):
        whole[...] = int(init == "ones")
        return whole
    flat = whole.reshape(-1)
    part = _counted(slot) if init == "arange" else _drawn(slot, seed)
    for start in range(0, flat.size, _PART):
        stop = min(start + _PART, flat.size)
        with np.errstate(over="ignore"):  # counting beyond float16 gives infinities
            flat[start:stop] = part(start, stop).astype(flat.dtype)
    return whole


def _counted(slot: RunInput) -> _Part:
    step = 2 if slot.type.data_type is DataType.BOOL else 0
    return lambda start, stop: np.arange(start, stop) % step if step else np.arange(start, stop)


def _drawn(slot: RunInput, seed: tuple[int, int]) -> _Part:
    data_type = slot.type.data_type
    random = np.random.default_rng([seed[0], seed[1], zlib.crc32(slot.name.encode())])
    if slot.kind is InputKind.KEY and data_type.dtype.kind in "iu":
        dtype, most = data_type.dtype, np.iinfo(data_type.dtype).max
        return lambda start, stop: random.integers(0, most, stop - start, dtype, endpoint=True)
    if data_type.is_floating:
        return lambda start, stop: random.standard_normal(stop - start)
    limit = 2 if data_type is DataType.BOOL else 10
    return lambda start, stop: random.integers(0, limit, stop - start)

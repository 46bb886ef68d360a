"""Where results go (`--output`), and what they should be (`--expected_output`).

Comes in: words, result arrays. Goes out: files in a batch, text, verdicts. Must not know: devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stitch.cli.array_text import text_of_array
from stitch.cli.chain import RunOutput
from stitch.cli.run_inputs import Note, array_of_word, is_archive, is_array_word
from stitch.cli.wire_words import deal, split_words
from stitch.errors import UsageError
from stitch.files import FileBatch
from stitch.forms import NUMPY_SUFFIXES, npy_bytes, npz_bytes, read_array_file, typed
from stitch.program import Array, DataType

OUTPUT_FORM = "'' (ignore), - (print), @file.npy, @file.npz; NAME= may stand before each"
EXPECTED_FORM = "(ignored), @file.npy, @file.npz, 2x2xf32=1 2 3 4; NAME= may stand before each"
IGNORED = "(ignored)"


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where each result goes, checked before anything runs.

    `files`: result → `.npy` path. `archives`: path → results. `printed`: results in full; `brief`:
    all results are shown, cut short.
    """

    files: Mapping[int, Path]
    archives: Mapping[Path, tuple[int, ...]]
    printed: tuple[int, ...]
    brief: bool


def destinations(
    outputs: Sequence[RunOutput], words: Sequence[str], *, brief: bool
) -> Destinations:
    """What the words of `--output` say; raises `UsageError`.

    `brief`: show all results, cut short, where the words say nothing.
    """
    single = (word for word in words if not is_archive(word))
    split = split_words(
        single, lambda word: word in ("", "-") or word.startswith("@"), "output", OUTPUT_FORM
    )
    dealt = deal(split, [output.name for output in outputs], "output")
    files: dict[int, Path] = {}
    archives: dict[Path, tuple[int, ...]] = {
        Path(word[1:]): tuple(range(len(outputs))) for word in words if is_archive(word)
    }
    for index, word in sorted(dealt.items()):
        if not word.startswith("@"):
            continue
        path = Path(word[1:])
        if path.suffix.lower() not in NUMPY_SUFFIXES:
            raise UsageError(
                f"results are written to {' and '.join(NUMPY_SUFFIXES)} files", got=str(path)
            )
        if is_archive(word):
            archives[path] = (*archives.get(path, ()), index)
        elif path in files.values():
            raise UsageError(f"two outputs go to {path}")
        else:
            files[index] = path
    printed = tuple(index for index, word in sorted(dealt.items()) if word == "-")
    return Destinations(files, archives, printed, brief and not words)


def put(
    where: Destinations,
    outputs: Sequence[RunOutput],
    arrays: Sequence[Array],
    batch: FileBatch,
    note: Note,
) -> list[str]:
    """Adds the files to the batch; gives the lines to print. `note` hears of wider types."""
    for index in sorted({*where.files, *(i for m in where.archives.values() for i in m)}):
        if outputs[index].type.data_type is DataType.BFLOAT16:
            note(f"output {outputs[index].name!r} is bfloat16, and is written as float32, which "
                 "holds it exactly")  # fmt: skip
    for output, array in zip(outputs, arrays, strict=True):
        note_if_not_finite(output.name, array, note)
    for index, path in where.files.items():
        batch.add(path, npy_bytes(arrays[index]))
    for path, members in where.archives.items():
        batch.add(path, npz_bytes({outputs[i].name: arrays[i] for i in dict.fromkeys(members)}))
    shown = range(len(outputs)) if where.brief else where.printed
    return [
        f"result[{i}] {outputs[i].name}: {text_of_array(arrays[i], whole=not where.brief)}"
        for i in shown
    ]


def note_if_not_finite(name: str, array: Array, note: Note) -> None:
    """Tells of results that are no numbers: they compare equal to themselves, and spread."""
    if not DataType.from_dtype(array.dtype).is_floating:
        return
    for what, count in (("NaN", np.isnan(array).sum()), ("infinite", np.isinf(array).sum())):
        if count:
            note(f"output {name!r}: {count:,} of {array.size:,} elements are {what}")


def expectations(outputs: Sequence[RunOutput], words: Sequence[str]) -> dict[int, Array]:
    """What the words of `--expected_output` say; raises `UsageError`, `FormatError`."""
    names = [output.name for output in outputs]
    single = (word for word in words if not is_archive(word))
    split = split_words(
        single, lambda w: w == IGNORED or is_array_word(w), "expected output", EXPECTED_FORM
    )
    wanted: dict[int, Array] = {}
    for index, word in deal(split, names, "expected_output").items():
        if word != IGNORED:
            wanted[index] = array_of_word(word, names[index])
    for word in words:
        if not is_archive(word):
            continue
        arrays = read_array_file(Path(word[1:]))
        for name in arrays:
            if name not in names:
                raise UsageError(
                    f"{word[1:]} holds an array {name!r}, and there is no such output",
                    expected=", ".join(names),
                )
            wanted[names.index(name)] = arrays[name]
    return {
        i: typed(array, outputs[i].type.data_type, f"expected_output {names[i]!r}")
        for i, array in wanted.items()
    }


#: |actual - expected| <= atol + rtol * |expected|, by the type that a result is stored in.
DEFAULT_ATOL = {
    DataType.FLOAT64: 1e-4,
    DataType.FLOAT32: 1e-4,
    DataType.FLOAT16: 1e-3,
    DataType.BFLOAT16: 1e-2,
    DataType.BFP8: 5e-2,
    DataType.BFP4: 5e-1,
}
DEFAULT_RTOL = 1e-5


@dataclass(frozen=True, slots=True)
class Tolerances:
    """What the user asked for; None: the default. `pcc` alone replaces the elementwise rule."""

    atol: float | None = None
    rtol: float | None = None
    pcc: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a result is as expected; `detail` says how it is not."""

    name: str
    passed: bool
    detail: str
    max_abs_difference: float | None = None
    pcc: float | None = None


def compare(output: RunOutput, actual: Array, expected: Array, how: Tolerances) -> Verdict:
    """Compare a result. NaN equals NaN, an infinity itself; integers and bits are exact."""
    if actual.shape != expected.shape:
        got = f"its shape is {list(actual.shape)}, expected {list(expected.shape)}"
        return Verdict(output.name, False, got)
    is_floating = output.type.data_type.is_floating
    expected_type = DataType.from_dtype(expected.dtype)
    if is_floating is not expected_type.is_floating:
        got = f"its type is {output.type.data_type.value}, expected {expected_type.value}"
        return Verdict(output.name, False, got)
    atol = how.atol
    if atol is None:
        atol = DEFAULT_ATOL.get(output.stored, 1e-4) if is_floating else 0.0
    rtol = how.rtol
    if rtol is None:
        rtol = DEFAULT_RTOL if is_floating else 0.0
    correlated = correlation(actual, expected) if how.pcc is not None else None
    problems: list[str] = []
    if how.pcc is not None and correlated is not None and not correlated >= how.pcc:
        problems.append(f"PCC is {correlated:.6g}, at least {how.pcc:g} was asked for")
    elementwise = how.pcc is None or how.atol is not None or how.rtol is not None
    wrong, largest = differences(actual, expected, atol, rtol)
    if elementwise and wrong is not None:
        problems.append(f"{wrong} (allowed: {atol:g} + {rtol:g} * |expected|)")
    return Verdict(output.name, not problems, "; ".join(problems), largest, correlated)


def differences(
    actual: Array, expected: Array, atol: float, rtol: float
) -> tuple[str | None, float]:
    """What differs in words (None: nothing does), and the largest finite difference."""
    if actual.size == 0:
        return None, 0.0
    with np.errstate(all="ignore"):
        one, two = _widened(actual), _widened(expected)
        same = (one == two) | ((one != one) & (two != two))
        # Without a width of its own, the difference of the extremes of int64 would wrap.
        gap = np.where(same, 0.0, np.abs(one.astype(np.float64) - two.astype(np.float64)))
        near = gap <= atol + rtol * np.abs(two.astype(np.float64))
        if atol == 0 and rtol == 0:
            near = same
        bad = ~(same | (near & np.isfinite(gap)))
    finite = gap[np.isfinite(gap)]
    largest = float(finite.max()) if finite.size else 0.0
    count = int(bad.sum())
    if not count:
        return None, largest
    # Where a difference is no number at all, that is the place to look.
    weight = np.where(bad, np.where(np.isfinite(gap), gap, np.inf), -1.0)
    at = np.unravel_index(int(weight.argmax()), actual.shape)
    place = f"[{', '.join(str(int(i)) for i in at)}]"
    share = f"{count} of {actual.size} elements differ"
    worst = float(gap[at])
    return (
        f"{share}; largest difference {worst:.6g} at {place}: "
        f"{_number(one[at])}, expected {_number(two[at])}"
    ), largest


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _widened(array: Array) -> Array:
    """Floats as float64, the rest as they are: comparisons must not round."""
    return array.astype(np.float64) if DataType.from_dtype(array.dtype).is_floating else array


def correlation(actual: Array, expected: Array) -> float:
    """Pearson's correlation; 1 for equal arrays, 0 where it is not defined otherwise."""
    one, two = (a.astype(np.float64).reshape(-1) for a in (actual, expected))
    if np.array_equal(one, two, equal_nan=True):
        return 1.0
    if not (np.isfinite(one) == np.isfinite(two)).all():
        return 0.0
    keep = np.isfinite(one)
    one, two = one[keep], two[keep]
    if one.size < 2:
        return 0.0
    one, two = one - one.mean(), two - two.mean()
    norm = float(np.sqrt((one * one).sum() * (two * two).sum()))
    return float((one * two).sum()) / norm if norm else 0.0

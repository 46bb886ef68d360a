"""Where results go (`--output`), and what they should be (`--expected_output`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stitch.cli.array_text import text_of_array
from stitch.cli.chain import RunOutput
from stitch.cli.run_inputs import Note, array_of_word, is_archive, is_array_word
from stitch.cli.wiring import deal, split_words
from stitch.errors import UsageError
from stitch.files import OutputFiles
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
    batch: OutputFiles,
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
    shapes: dict[str | None, tuple[int, ...]] = {o.name: o.type.shape for o in outputs}
    for index, word in deal(split, names, "expected_output").items():
        if word != IGNORED:
            wanted[index] = array_of_word(word, names[index], {outputs[index].type.shape})
    for word in words:
        if not is_archive(word):
            continue
        arrays = read_array_file(Path(word[1:]), lambda name, shape: shapes.get(name) == shape)
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

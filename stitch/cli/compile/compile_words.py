"""The words of `stitch-compile` that bind inputs and cut graphs.

Comes in: `--input_shape`, `--input`, `--split`, `--split_at`, `-o`. Goes out: shapes, example
arrays, cuts, file names. Must not know: modules, programs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from stitch.cli.array_text import array_of_text
from stitch.cli.run_inputs import is_array_word, member
from stitch.cli.wire_words import split_slot
from stitch.documents import MACHINE, MODULE, form_of
from stitch.errors import FormatError, UsageError
from stitch.files import nearest_file
from stitch.forms import read_array_file
from stitch.program import Array

_SHAPE = re.compile(r"(?:\d{1,18}(?:x\d{1,18})*)?")


def input_shapes(words: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes by input; raises `UsageError` for another form.

    >>> input_shapes(["x=1x3x224x224", "scale="])
    {'x': (1, 3, 224, 224), 'scale': ()}
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for word in words:
        name, equals, text = word.rpartition("=")
        if not (equals and name) or _SHAPE.fullmatch(text) is None:
            raise UsageError(
                f"{word[:80]!r} is no shape of an input", where="--input_shape",
                expected="NAME=1x3x224x224",
            )  # fmt: skip
        if name in shapes:
            raise UsageError(f"the shape of input {name!r} is given twice", where="--input_shape")
        shapes[name] = tuple(int(size) for size in text.split("x") if size)
    return shapes


def example_inputs(words: Sequence[str]) -> dict[str, Array]:
    """Example arrays by input; raises `UsageError`, or `FormatError` for a bad file."""
    examples: dict[str, Array] = {}
    for word in words:
        name, text = split_slot(word, is_array_word)
        if name is None:
            raise UsageError(
                f"{word[:80]!r} is no example input", where="--input",
                expected="NAME=@file.npy, or as in NAME=2xi64=3 4",
            )  # fmt: skip
        if name in examples:
            raise UsageError(f"input {name!r} is given twice", where="--input")
        if text.startswith("@"):
            path = Path(text[1:])
            examples[name] = member(read_array_file(path), name, path)
        else:
            examples[name] = array_of_text(text)
    return examples


def cuts_of(count: int | None, nodes: Sequence[str]) -> int | tuple[str, ...] | None:
    """What `split_graph` takes; None where nothing asks for a split. Raises `UsageError`."""
    names = tuple(name for word in nodes for name in word.split(",") if name)
    if count is not None and names:
        raise UsageError("--split and --split_at both say where to cut", remedy="choose one")
    if nodes and not names:
        raise UsageError("--split_at names no node", expected="--split_at=NODE,NODE")
    if count is not None and count < 1:
        raise UsageError("a split has at least one part", got=f"--split={count}")
    return names or count


def part_path(output: str, index: int) -> str:
    """The file of one part: `m.ttb` becomes `m.0.ttb`.

    >>> part_path("m.ttb", 2)
    'm.2.ttb'
    """
    path = Path(output)
    return str(path.with_name(f"{path.stem}.{index}{path.suffix}"))


def other_source(source: str) -> str | None:
    """What to do with a source that no front end reads, if it is known.

    >>> other_source("mlp.py:make"), other_source("a.ttb"), other_source("a.txt")
    ('--entry=mlp.py:make', 'it is compiled: stitch-run a.ttb', None)
    """
    module, colon, factory = source.rpartition(":")
    if colon and module and factory.isidentifier():
        return f"--entry={source}"
    if Path(source).suffix.lower() == ".ttb":
        return f"it is compiled: stitch-run {source}"
    return nearest_file(source, (".yaml", ".yml", ".onnx", ".json", ".py")) or None


def refuse_other_forms(source: str | None, error: FormatError) -> None:
    """Raise `UsageError` where what is no sound module in YAML is another form of file."""
    if source is None or Path(source).suffix.lower() not in (".yaml", ".yml"):
        return
    form = form_of(source, MODULE)
    if form != MODULE:
        how = f"stitch-compile module.yaml --target={source}"
        raise UsageError(
            f"{source!r} is a {form}, and only modules are compiled",
            remedy=how if form == MACHINE else f"stitch-run {source}",
        ) from error

"""What `stitch-compile` compiles: the words that name a module, its examples and shapes.

Comes in: words. Goes out: what `api.compile` takes, or an error that says what is compiled. Must
not know: targets, files that are written.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stitch import api
from stitch.cli.compile.python_factories import from_entry
from stitch.cli.run_inputs import array_of_word, is_array_word
from stitch.cli.wire_words import split_slot
from stitch.documents import MACHINE, MODULE, PIPELINE, form_of
from stitch.errors import CompileError, FormatError, UsageError
from stitch.files import nearest_file, text_of
from stitch.graph import ComputationGraph, from_json
from stitch.program import Array

SOURCES = (
    "modules in YAML (.yaml, .yml), ONNX models (.onnx), graphs in JSON (.json), "
    "Python (.py with --entry=NAME)"
)
_SHAPE = re.compile(r"(?:\d{1,18}(?:x\d{1,18})*)?")


def module_of(words: argparse.Namespace) -> tuple[Any, Sequence[Any] | Mapping[str, Any]]:
    """The module and its example inputs. Raises `UsageError`, `CompileError` for what is none."""
    source: str | None = words.source
    suffix = Path(source or "").suffix.lower()
    if words.examples and suffix != ".onnx":
        raise UsageError("example inputs are for ONNX models", where="--input")
    if words.entry is not None:
        return from_entry(source, words.entry)
    if source is None:
        raise UsageError(
            "there is no module to compile", expected=f"SOURCE ({SOURCES}), or --entry"
        )
    if suffix == ".onnx":
        return source, example_inputs(words.examples)
    if suffix == ".json":
        return _graph_of_json(Path(source)), ()
    if suffix == ".py":
        raise UsageError(
            "a Python file needs the name of its factory", remedy=f"add --entry=NAME to {source}"
        )
    if suffix not in (".yaml", ".yml"):
        raise CompileError(
            f"no front end reads {source!r}", expected=SOURCES, remedy=other_source(source)
        )
    return source, ()


def _graph_of_json(path: Path) -> ComputationGraph:
    text = text_of(path)
    if '"stitch": "model"' in text[:40]:
        model = api.CompiledModel.load(io.StringIO(text))
        return model.graph.with_wishes(*model.wishes)
    return from_json(text)


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
        examples[name] = array_of_word(text, name)
    return examples


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


def refuse_other_forms(words: argparse.Namespace, error: FormatError) -> None:
    """Raise `UsageError` where a module or a pipeline in YAML is another form of file."""
    placed = f"a pipeline that runs {words.output}"
    for path, wanted, only, expected in (
        (words.source, MODULE, "only modules are compiled", None),
        (words.pipeline, PIPELINE, "--for takes a pipeline", placed),
    ):
        is_yaml = path is not None and Path(path).suffix.lower() in (".yaml", ".yml")
        if is_yaml and (form := form_of(path, wanted)) != wanted:
            remedy = {
                MACHINE: f"stitch-compile module.yaml --target={path}",
                MODULE: f"stitch-compile {path}",
            }.get(form, f"stitch-run {path}")
            raise UsageError(
                f"{path!r} is a {form}, and {only}", expected=expected, remedy=remedy
            ) from error

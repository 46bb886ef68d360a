"""The files that `stitch-run` is given by position: modules, a pipeline, or a training.

Comes in: parsed words. Goes out: the form of the run; modules are put where `--module` puts them.
Must not know: what is in modules.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from stitch.documents.recognition import MACHINE, MODULE, PIPELINE, form_of
from stitch.errors import UsageError
from stitch.files import nearest_file

_YAML = (".yaml", ".yml")
_MODULES = (".ttb", ".onnx")


def take_files(words: argparse.Namespace) -> str:
    """Sorts `words.files` into `words.pipeline` and `words.module`; gives the form of the run.

    Raises `UsageError` for files that do not go together, or that no run is made of.
    """
    words.pipeline = None
    documents = [path for path in words.files if Path(path).suffix.lower() in _YAML]
    if not documents:
        _take_modules(words)
        return PIPELINE
    if len(words.files) > 1 or words.module or words.wire or words.function:
        raise UsageError(
            "a pipeline or a training runs alone: its file says which modules run, and how they "
            "are connected",
            got=", ".join([*words.files, *(f"--module={path}" for path in words.module)]),
            remedy=f"stitch-run {documents[0]}, without other files, --module, --function, --wire",
        )
    (words.pipeline,) = documents
    form = form_of(words.pipeline)
    if form == MACHINE:
        raise UsageError(
            f"{words.pipeline!r} describes a machine, which runs modules",
            remedy=f"stitch-run a.ttb --device={words.pipeline}",
        )
    if form == MODULE:
        made = Path(words.pipeline).with_suffix(".ttb").name
        raise UsageError(
            f"{words.pipeline!r} is a module, and modules are compiled before they run",
            remedy=f"stitch-compile {words.pipeline} -o {made}, then stitch-run {made}",
        )
    return form


def _take_modules(words: argparse.Namespace) -> None:
    strangers = [p for p in words.files if p != "-" and Path(p).suffix.lower() not in _MODULES]
    if strangers and not Path(strangers[0]).is_file():
        raise UsageError(
            f"{strangers[0]!r} is a folder, which nothing runs" if Path(strangers[0]).is_dir()
            else f"there is no file {strangers[0]!r}",
            expected="modules (.ttb, .onnx), or one pipeline or training (.yaml)",
            remedy=nearest_file(strangers[0], (*_MODULES, *_YAML)) or None,
        )  # fmt: skip
    if strangers:
        raise UsageError(
            f"{strangers[0]!r} is nothing that runs, by its name",
            expected="modules (.ttb, .onnx), or one pipeline or training (.yaml)",
            remedy=f"to run it as a module all the same, write --module={strangers[0]}",
        )
    if words.files and words.module:
        raise UsageError(
            "the order of modules is not known where some stand after --module and some do not",
            remedy="write all of them with --module=, or all without",
        )
    words.module = [*words.module, *words.files]
    if not words.module:
        raise UsageError(
            "there is nothing to run", expected="modules (.ttb, .onnx), or a pipeline.yaml"
        )

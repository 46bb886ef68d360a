"""`stitch-run`: run `.ttb` modules one after the other on a simulated device, stitched.

A YAML file is a pipeline. Modules are connected by position, or by `--wire`. `--max_copies=N`
bounds, for each pass, the writes that the memories of the spaces saw, less those that bring host
arrays in: copies between programs, moves, evictions, bounces. Without data (`--dry_run`,
`--executor=null`) memory sees nothing, and the copies of the plan are counted instead.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from stitch.cli.command import EXIT_OK, Command, say
from stitch.cli.module_files import read_document
from stitch.cli.parser import make_parser
from stitch.cli.run.examples import write_example
from stitch.cli.run.run_session import run_session
from stitch.cli.run.run_words import EXAMPLES, add_run_words, refuse_without_effect
from stitch.documents import MACHINE, MODULE, form_of
from stitch.errors import UsageError
from stitch.files import nearest_file
from stitch.machine import load_machine, machine_names
from stitch.report import counted, replay

_YAML = (".yaml", ".yml")
_MODULES = (".ttb", ".onnx", ".ttnn")


def command() -> Command:
    """`stitch-run` and its options."""
    parser = make_parser(
        "stitch-run", "Run .ttb modules, stitched, on a simulated device.", EXAMPLES
    )
    add_run_words(parser)
    return Command(parser.read, lambda words: _run(parser, words))


def _run(parser: argparse.ArgumentParser, words: argparse.Namespace) -> int:
    if words.list_devices:
        for name in machine_names():
            shape = load_machine(name).shape
            spaces = ", ".join(
                f"{space.value} {shape.space(space).banks} x {shape.space(space).capacity} B"
                for space in shape.spaces
            )
            say(f"{name}: {spaces}")
        return EXIT_OK
    if words.example is not None:
        target, how = write_example(words.example)
        say(f"wrote {target}; to run it:\n{how}")
        return EXIT_OK
    if words.replay is not None:
        alone = {"replay", "debug", "max_memory"}
        extra = [w for w, value in vars(words).items()
                 if w not in alone and value not in (parser.get_default(w), [])]  # fmt: skip
        if extra:
            raise UsageError(
                "a replay runs alone: the record says what ran, and on which machine",
                got=", ".join([*words.files, *(f"--{w}" for w in extra if w != "files")]),
                remedy=f"stitch-run --replay={words.replay}",
            )
        return _replay(words.replay)
    _take_files(words)
    refuse_without_effect(parser, words)
    return run_session(words)


def _replay(path: str) -> int:
    """Replay a record; raises `FormatError` for a bad file, `TaskError` at a difference."""
    done = read_document(path, replay)
    numbers = (
        counted(done.runs, "plan run"),
        counted(done.allocations, "allocation"),
        counted(done.frees, "free"),
        counted(done.moves, "move"),
    )
    say(
        f"[SUCCESS] {counted(done.events, 'event')} replayed on {done.machine}: "
        f"{', '.join(numbers)}; every address as recorded"
    )
    return EXIT_OK


def _take_files(words: argparse.Namespace) -> None:
    """Sort `words.files` into `words.pipeline` and `words.module`.

    Raises `UsageError` for files that do not go together, or that no run is made of.
    """
    words.pipeline = None
    documents = [path for path in words.files if Path(path).suffix.lower() in _YAML]
    if not documents:
        _take_modules(words)
        return
    if len(words.files) > 1 or words.module or words.wire or words.function:
        raise UsageError(
            "a pipeline runs alone: its file says which modules run, and how they are connected",
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
        binary = Path(words.pipeline).with_suffix(".ttb").name
        raise UsageError(
            f"{words.pipeline!r} is a module, and modules are compiled before they run",
            remedy=f"stitch-compile {words.pipeline} -o {binary}, then stitch-run {binary}",
        )


def _take_modules(words: argparse.Namespace) -> None:
    strangers = [p for p in words.files if p != "-" and Path(p).suffix.lower() not in _MODULES]
    if strangers and not Path(strangers[0]).is_file():
        raise UsageError(
            f"{strangers[0]!r} is a folder, which nothing runs" if Path(strangers[0]).is_dir()
            else f"there is no file {strangers[0]!r}",
            expected="modules (.ttb, .onnx, .ttnn), or one pipeline (.yaml)",
            remedy=nearest_file(strangers[0], (*_MODULES, *_YAML)) or None,
        )  # fmt: skip
    if strangers:
        raise UsageError(
            f"{strangers[0]!r} is nothing that runs, by its name",
            expected="modules (.ttb, .onnx, .ttnn), or one pipeline (.yaml)",
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
            "there is nothing to run", expected="modules (.ttb, .onnx, .ttnn), or a pipeline.yaml"
        )

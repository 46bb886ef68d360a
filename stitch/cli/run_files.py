"""Read the files that `stitch run` names, and run, replay or list what its options ask for."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from shlex import quote

from stitch import plugins
from stitch.cli.command import EXIT_OK, say_result
from stitch.cli.examples_command import write_example
from stitch.cli.machine_command import machine_line
from stitch.cli.module_files import read_document
from stitch.cli.run_session import run_session
from stitch.documents import MACHINE, MODULE, kind_of
from stitch.errors import UsageError
from stitch.files import nearest_file
from stitch.machine import known_machines, machine_names
from stitch.report import counted, replay

_YAML = (".yaml", ".yml")
_MODULES = (".ttb", ".onnx", ".ttnn")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Carry out the options; return the exit code."""
    if options.list_devices:
        machines = [machine_line(name) for name in machine_names()]
        for plugin in plugins.installed("machines"):
            problem = f"; {plugin.problem}" if plugin.problem else ""
            machines.append(f"{plugin.name}: of the plugin {plugin.source}{problem}")
        say_result({"machines": list(known_machines())}, lambda: machines)
        return EXIT_OK
    if options.example is not None:
        target, how = write_example(options.example)
        say_result(
            {"wrote": str(target), "run": how}, lambda: [f"wrote {target}; to run it:\n{how}"]
        )
        return EXIT_OK
    if options.replay is not None:
        alone = {"replay", "debug", "json", "max_memory", "plugin", "quiet", "timings", "verbose"}
        extra = [w for w, value in vars(options).items()
                 if w not in alone and value not in (parser.get_default(w), [])]  # fmt: skip
        if extra:
            raise UsageError(
                "a replay runs alone: the record names the programs and the machine",
                got=", ".join([*options.files, *(f"--{w}" for w in extra if w != "files")]),
                remedy=f"stitch-run {quote(f'--replay={options.replay}')}",
            )
        return _replay(options.replay)
    _take_files(options)
    refuse_without_effect(parser, options)
    return run_session(options)


def _replay(path: str) -> int:
    """Replay a record; raises `FormatError` for a bad file, `TaskError` at a difference."""
    done = read_document(path, replay)
    numbers = (
        counted(done.runs, "plan run"),
        counted(done.allocations, "allocation"),
        counted(done.frees, "free"),
        counted(done.moves, "move"),
    )
    say_result(
        asdict(done),
        lambda: [
            f"[SUCCESS] {counted(done.events, 'event')} replayed on {done.machine}: "
            f"{', '.join(numbers)}; every address as recorded"
        ],
    )
    return EXIT_OK


def _take_files(options: argparse.Namespace) -> None:
    """Assign `options.files` to `options.pipeline` or `options.module`; raise `UsageError`."""
    options.pipeline = None
    documents = [path for path in options.files if Path(path).suffix.lower() in _YAML]
    if not documents:
        _take_modules(options)
        return
    if options.at:
        raise UsageError("--at is for modules: a pipeline takes those without named sizes")
    if len(options.files) > 1 or options.module or options.wire or options.function:
        raise UsageError(
            "a pipeline runs alone: its file names the modules and their connections",
            got=", ".join([*options.files, *(f"--module={path}" for path in options.module)]),
            expected="no other files, --module, --function or --wire",
            remedy=f"stitch-run {quote(documents[0])} --init=ones",
        )
    (options.pipeline,) = documents
    kind = kind_of(options.pipeline)
    if kind == MACHINE:
        raise UsageError(
            f"{options.pipeline!r} describes a machine, not a pipeline",
            remedy=f"stitch-run a.ttb --init=ones {quote(f'--device={options.pipeline}')}",
        )
    if kind == MODULE:
        source, binary = quote(options.pipeline), Path(options.pipeline).with_suffix(".ttb").name
        raise UsageError(
            f"{options.pipeline!r} is a module that is not compiled",
            remedy=f"stitch-compile {source} -o {quote(binary)} && "
            f"stitch-run {quote(binary)} --init=ones",
        )


def _take_modules(options: argparse.Namespace) -> None:
    unknown = [p for p in options.files if p != "-" and Path(p).suffix.lower() not in _MODULES]
    if unknown and not Path(unknown[0]).is_file():
        raise UsageError(
            f"{unknown[0]!r} is a folder, expected a file" if Path(unknown[0]).is_dir()
            else f"there is no file {unknown[0]!r}",
            expected="modules (.ttb, .onnx, .ttnn), or one pipeline (.yaml)",
            remedy=nearest_file(unknown[0], (*_MODULES, *_YAML)) or None,
        )  # fmt: skip
    if unknown:
        raise UsageError(
            f"{unknown[0]!r} has an unknown suffix",
            expected="modules (.ttb, .onnx, .ttnn), or one pipeline (.yaml)",
            remedy=f"to run it as a .ttb module, write --module={unknown[0]}",
        )
    if options.files and options.module:
        raise UsageError(
            "the order of modules is ambiguous: some have --module and some do not",
            remedy="write all of them with --module=, or none",
        )
    options.module = [*options.module, *options.files]
    if not options.module:
        raise UsageError(
            "there is nothing to run", expected="modules (.ttb, .onnx, .ttnn), or a pipeline.yaml"
        )


def refuse_without_effect(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Raise `UsageError` for options that have no effect without an absent option."""
    alone = [w for w in ("atol", "rtol", "pcc") if getattr(options, w) is not None]
    if alone and not (options.expected_output or options.expected_operations):
        raise UsageError(
            f"--{alone[0]} has no effect without --expected_output or --expected_operations"
        )
    if options.artifact_dir != parser.get_default("artifact_dir") and not options.save_artifacts:
        raise UsageError("--artifact_dir has no effect without --save_artifacts")

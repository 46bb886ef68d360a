"""`stitch export`: a program as ONNX (for Netron), for Model Explorer, or in Graphviz's DOT."""

from __future__ import annotations

import argparse

from stitch.cli.command import EXIT_OK, Command, say_written
from stitch.cli.options import FUNCTION_OPTION
from stitch.cli.parser import add_options, make_parser
from stitch.errors import CompileError, UsageError

EXAMPLES = """\
  stitch export a.ttb --format=onnx -o a.onnx && netron a.onnx
  stitch export a.ttb --format=model_explorer -o a.json && model-explorer a.json
  stitch export a.ttb --format=dot | dot -Tsvg -o a.svg"""
FORMATS = ("onnx", "model_explorer", "dot")


def command() -> Command:
    """Return `stitch export` with its options."""
    parser = make_parser("Write a program of a .ttb file for another viewer.", EXAMPLES)
    parser.add_argument("module", nargs="?", metavar="FILE", help="a .ttb file")
    add_options(
        parser,
        ("--format", {"choices": FORMATS, "help": "onnx: operations and types as they are, layouts "
                      "and source locations as properties; model_explorer: JSON; dot: Graphviz"}),
        FUNCTION_OPTION,
        ("--output", {"metavar": "FILE", "default": "-", "help": "default: - (stdout)"}),
        ("-o", {"dest": "output", "metavar": "FILE", "help": "the same as --output"}),
    )  # fmt: skip
    return Command(parser.read, _export)


def _export(options: argparse.Namespace) -> int:
    from stitch.cli.export import program_drawing
    from stitch.cli.module_files import read_modules
    from stitch.files import write_files

    if options.module is None or options.format is None:
        raise UsageError(
            "a file and a format are needed", expected=f"--format={', '.join(FORMATS)}",
            remedy="stitch export a.ttb --format=dot -o a.dot",
        )  # fmt: skip
    (module,) = read_modules([options.module], options.function, verify="full")
    if options.format == "onnx":
        try:
            from stitch.cli.export.onnx_graph import onnx_bytes
        except ModuleNotFoundError as error:
            raise CompileError(
                "writing ONNX models needs the package onnx",
                remedy="pip install 'stitch-runtime[onnx]'",
            ) from error
        content = onnx_bytes(module.program)
    elif options.format == "dot":
        content = program_drawing.dot_text(module.program).encode()
    else:
        content = program_drawing.model_explorer_text(module.program).encode()
    written = write_files({options.output: content})
    if options.output != "-":
        say_written(written)
    return EXIT_OK

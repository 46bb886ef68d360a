"""`stitch export`: a program as ONNX (for Netron), for Model Explorer, or in Graphviz's DOT."""

from __future__ import annotations

import argparse

from stitch.cli.command import EXIT_OK, Command, is_json, say_result, say_written
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
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", help="write it, - for stdout (default)")
    return Command(parser.read, _export)


def _export(options: argparse.Namespace) -> int:
    from stitch.cli import program_drawing
    from stitch.cli.module_files import read_modules
    from stitch.cli.output_checks import DRAWING, ONNX, OutputChecks
    from stitch.files import write_files

    if options.module is None or options.format is None:
        raise UsageError(
            "a file and a format are needed", expected=f"--format={', '.join(FORMATS)}",
            remedy="stitch export a.ttb --format=dot -o a.dot",
        )  # fmt: skip
    output = options.output or "-"
    body = {"file": output, "format": options.format}
    (module,) = read_modules([options.module], options.function, verify="full")
    if options.format == "onnx":
        try:
            from stitch.cli.onnx_graph import onnx_bytes
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
    kinds = {"onnx": ONNX, "model_explorer": DRAWING, "dot": DRAWING}
    if options.output is None and is_json():
        if options.format == "onnx":
            raise UsageError("an ONNX model is no text to print as JSON", expected="-o FILE")
        say_result(body | {"file": None, "text": content.decode()}, tuple)
        return EXIT_OK
    checks = OutputChecks()
    checks.add(output, kinds[options.format], "-o")
    say_written(write_files({output: content}))
    say_result(body | {"nbytes": len(content)}, tuple)
    return EXIT_OK

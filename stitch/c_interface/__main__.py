"""`python -m stitch.c_interface build -o DIR`: build the library for C programs."""

from __future__ import annotations

import argparse
import sys

from stitch.c_interface.build import build_library
from stitch.c_interface.header import header_text
from stitch.errors import StitchError


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m stitch.c_interface", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="write libstitch.so, stitch.h and stitch.pc")
    build.add_argument("-o", "--output", metavar="DIR", required=True, help="the folder")
    commands.add_parser("header", help="print stitch.h")
    arguments = parser.parse_args()
    if arguments.command == "header":
        print(header_text(), end="")
        return 0
    try:
        for path in build_library(arguments.output):
            print(path)
    except StitchError as error:
        print(f"stitch.c_interface: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`stitch diff`: compare the copies of two runs, and check budgets."""

from __future__ import annotations

import argparse

from stitch.cli.command import Command
from stitch.cli.parser import add_options, make_parser
from stitch.errors import UsageError

EXAMPLES = """\
  stitch diff old.json new.json
  stitch diff old.json new.json --fail_on=copies,bytes:+0,seconds:+5%,peak.l1
  stitch diff old.json new.json --fail_on=copies:2 --format=markdown
  stitch diff old.json new.json --fail_on=bytes:+4KiB --format=junit > stitch.xml"""

FORMATS = ("text", "markdown", "json", "junit", "github")


def command() -> Command:
    """Return `stitch diff` with its options."""
    parser = make_parser("Compare the copies of two runs, and check budgets.", EXAMPLES)
    parser.add_argument(
        "files", nargs="*", metavar="FILE",
        help="the old and the new run: records of `stitch run --record=FILE`, or result files of "
        "`--result_file=FILE`",
    )  # fmt: skip
    add_options(
        parser,
        ("--fail_on", {"action": "append", "default": [], "metavar": "BUDGETS", "help":
                       "exit code 7 if the new run breaks one of these, separated by commas: KEY "
                       "may not grow, KEY:+N may grow by N, KEY:+P%% by P percent, KEY:N is at "
                       "most N; KEY is copies, bytes, seconds, program_seconds (both simulated), "
                       "peak.l1, peak.dram or peak.host"}),
        ("--format", {"choices": FORMATS, "default": "text",
                      "help": "markdown: for a comment; junit: for test reports; github: "
                      "annotations of a workflow, at the lines of the source (default: text)"}),
    )  # fmt: skip
    return Command(parser.read, _diff)


def _diff(options: argparse.Namespace) -> int:
    from stitch.cli.run_comparison import compare_files
    from stitch.report import parse_budgets

    budgets = parse_budgets(*options.fail_on) if options.fail_on else ()
    if len(options.files) != 2:
        raise UsageError(
            "a comparison takes two files, of the old and of the new run",
            got=", ".join(options.files) or "none",
            expected="records of stitch run --record=FILE, or its result files",
            remedy="stitch run a.ttb b.ttb --init=ones --record=new.json",
        )
    return compare_files(options.files, budgets, "json" if options.json else options.format)

"""`stitch doctor`: check this installation, and say what each part of it gives."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict

from stitch.cli.command import EXIT_FAILURE, EXIT_OK, Command, say_result
from stitch.cli.doctor.findings import Finding, all_findings
from stitch.cli.parser import make_parser
from stitch.report import counted

EXAMPLES = """\
  stitch doctor
  stitch doctor --quick
  stitch doctor --json"""


def command() -> Command:
    """Return `stitch doctor` with its options."""
    parser = make_parser("Check this installation, and say what each part of it gives.", EXAMPLES)
    parser.add_argument("--quick", action="store_true",
                        help="do not compile and run a program with each executor")  # fmt: skip
    return Command(parser.read, _doctor)


def _doctor(options: argparse.Namespace) -> int:
    findings = all_findings(quick=options.quick)
    counts = Counter(finding.status for finding in findings)
    verdict = "Stitch works here"
    if counts["problem"]:
        verdict = f"{counted(counts['problem'], 'problem')} to solve"
    elif options.quick:
        verdict = "no problem found; without --quick programs are run as well"
    body = {"verdict": verdict, "findings": list(map(asdict, findings))}
    say_result(body, lambda: [*map(_line, findings), f"verdict: {verdict}"])
    return EXIT_FAILURE if counts["problem"] else EXIT_OK


def _line(finding: Finding) -> str:
    remedy = f"\n  try: {finding.remedy}" if finding.remedy else ""
    mark = {"ok": "ok  ", "note": "--  ", "problem": "BAD "}[finding.status]
    return f"{mark}{finding.topic}: {finding.text}{remedy}"

"""The benchmarks of the planner, the mover and the layouts, one after the other, with their goals.

Runs each with `--check` in a process of its own, so that none disturbs another, prints what it
prints, and at last a line for each: its goals are met, or are missed. Exits with 1 where any is
missed or does not run. `--only` picks some by the first word of their command.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = sorted(str(file) for file in (HERE / "minimalloc").glob("*.csv"))
#: Each benchmark with its words; all have rows for MiniMalloc's cases where they take files.
COMMANDS = (
    ("packing", *FILES, "--seconds", "1"),
    ("packing", *FILES, "--seconds", "10"),
    ("fragmentation", *FILES, "--slack", "0.1", "--random"),
    ("fragmentation", *FILES, "--slack", "0"),
    ("fragmentation", *FILES, "--slack", "0", "--known"),
    ("residency", "--seeds", "8"),
    ("moves",),
    ("planning",),
    ("layout",),
)


def main(arguments: list[str] | None = None) -> int:
    names = sorted({name for name, *_ in COMMANDS})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these alone")
    options = parser.parse_args(arguments)
    ended = []
    for name, *words in COMMANDS:
        if name not in options.only:
            continue
        said = " ".join([name, *(word for word in words if word not in FILES)])
        print(f"\n== {said}", flush=True)
        command = [sys.executable, str(HERE / f"{name}.py"), *words, "--check"]
        code = subprocess.run(command).returncode
        ended.append((said, code))
    print()
    for said, code in ended:
        state = {0: "goals met", 1: "a goal is missed"}.get(code, f"did not run (exit code {code})")
        print(f"{said:<32} {state}")
    return int(any(code for _, code in ended))


if __name__ == "__main__":
    sys.exit(main())

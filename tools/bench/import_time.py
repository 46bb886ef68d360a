"""What `import stitch` costs beyond `import numpy`, in fresh interpreters.

Both are started in turn, with their bytecode written before into a folder of their own (whatever
PYTHONDONTWRITEBYTECODE says). Timed is the import alone, inside each, with one thread, in time of
the processor, which other work on the machine disturbs less. Printed are the least times in
milliseconds, and the packages beyond numpy that take most of the difference. `--check` exits 1 from
150 ms on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict

GOAL_MS = 150.0
MODULES = ("numpy", "stitch")


def run_python(cache: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that keeps its bytecode in a folder."""
    # NumPy's threads wait busily after it is imported, which counts as time of the processor.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = os.environ | threads | {"PYTHONPYCACHEPREFIX": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=True, env=environment
    )


def import_ms(module: str, cache: str) -> float:
    """Milliseconds of the processor that one import takes in an interpreter of its own."""
    code = (
        "import time; started = time.process_time(); "
        f"import {module}; print((time.process_time() - started) * 1e3)"
    )
    return float(run_python(cache, "-c", code).stdout)


def least_ms(rounds: int, cache: str) -> dict[str, float]:
    """The least time of each module; the first round only writes bytecode."""
    times: dict[str, list[float]] = {name: [] for name in MODULES}
    for number in range(rounds + 1):
        for name in MODULES if number % 2 else reversed(MODULES):
            spent = import_ms(name, cache)
            if number:
                times[name].append(spent)
    return {name: min(found) for name, found in times.items()}


def by_package(cache: str) -> dict[str, float]:
    """Milliseconds of `import stitch` by package, most first; what numpy loads is left out."""
    done = run_python(cache, "-X", "importtime", "-c", "import numpy; import stitch")
    spent: dict[str, float] = defaultdict(float)
    counts = False
    for line in done.stderr.splitlines():
        found = re.match(r"import time: +(\d+) \| +\d+ \|( +)(\S+)", line)
        if found is None:
            continue
        if counts:
            name = found[3]
            parts = name.split(".")
            spent[".".join(parts[:2]) if parts[0] == "stitch" else parts[0]] += int(found[1]) / 1e3
        counts = counts or (found[3] == "numpy" and len(found[2]) == 1)
    return dict(sorted(spent.items(), key=lambda entry: -entry[1]))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; see the module's docstring for the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--check", action="store_true", help=f"exit 1 from {GOAL_MS:.0f} ms on")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as cache:
        least = least_ms(options.rounds, cache)
        packages = by_package(cache)
    beyond = least["stitch"] - least["numpy"]
    if options.json:
        found = {f"{name}_ms": spent for name, spent in least.items()}
        print(json.dumps(found | {"beyond_ms": beyond, "packages_ms": packages}, indent=2))
    else:
        print(f"import numpy   {least['numpy']:7.1f} ms")
        goal = f"(goal: < {GOAL_MS:.0f})"
        print(f"import stitch  {least['stitch']:7.1f} ms, {beyond:.1f} ms more {goal}")
        for name, spent in list(packages.items())[:10]:
            print(f"  {spent:7.1f} ms  {name}")
    return 1 if options.check and beyond >= GOAL_MS else 0


if __name__ == "__main__":
    sys.exit(main())

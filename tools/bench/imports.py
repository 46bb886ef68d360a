"""What Stitch costs before it does anything: imports, and a command that only says its version.

    import stitch                     less `import numpy`
    compile, open_device at hand      the same, and all that compiling and running need
    a device open                     the same, and a machine's description read
    training at hand                  the same as `compile` at hand, and what training needs
    stitch-run --version              whole processes, ÷ `python -c "import numpy"`

Each is a fresh interpreter; they take turns, with their bytecode written before into a folder of
their own (whatever PYTHONDONTWRITEBYTECODE says) and with one thread. Taken is time of the
processor, which other work on the machine disturbs less: of the import alone, inside the
interpreter, or of the whole process. The least of all rounds counts. Printed as well are the
packages that take most of what `compile` and `open_device` need. `--check` exits 1 where a goal is
missed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass

from command_line import bench_parser, exit_code_for, from_one

#: Milliseconds beyond `import numpy`, and how often its whole process.
GOAL_MS, GOAL_RATIO = 110.0, 1.5
AT_HAND = "import stitch; stitch.compile, stitch.open_device"
#: Imports, timed inside the interpreter.
IMPORTS = {
    "import numpy": "import numpy",
    "import stitch": "import numpy, stitch",
    "compile, open_device at hand": f"import numpy; {AT_HAND}",
    "a device open": f"import numpy; {AT_HAND}('tiny')",
    "training at hand": f"import numpy; {AT_HAND}, stitch.TrainingInstance",
}
#: Whole processes.
PROCESSES = {
    'python -c "import numpy"': "import numpy",
    "stitch-run --version": "import sys; sys.argv[1:] = ['--version']\n"
    "from stitch.cli import run_main as main; sys.exit(main())",
}


@dataclass(frozen=True)
class Finished:
    """A process that ended well: its milliseconds of the processor, and what it wrote."""

    milliseconds: float
    output: str


def run_python(cache: str, *words: str) -> Finished:
    """A fresh interpreter that keeps its bytecode in a folder."""
    # NumPy's threads wait busily after it is imported, which counts as time of the processor.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = os.environ | threads | {"PYTHONPYCACHEPREFIX": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryFile("w+") as output:
        actions = [(os.POSIX_SPAWN_DUP2, output.fileno(), handle) for handle in (1, 2)]
        child = os.posix_spawn(
            sys.executable, [sys.executable, *words], environment, file_actions=actions
        )
        _, status, usage = os.wait4(child, 0)
        output.seek(0)
        text = output.read()
    if status:
        raise SystemExit(text)
    return Finished((usage.ru_utime + usage.ru_stime) * 1e3, text)


def import_ms(code: str, cache: str) -> float:
    """Milliseconds of the processor that imports take in an interpreter of their own."""
    timed = (
        f"import time; started = time.process_time()\n{code}\n"
        "print((time.process_time() - started) * 1e3)"
    )
    return float(run_python(cache, "-c", timed).output)


def least_ms(rounds: int, cache: str) -> dict[str, float]:
    """The least time of each row; the first round only writes bytecode."""
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        spent = {name: import_ms(code, cache) for name, code in IMPORTS.items()}
        for name, code in PROCESSES.items():
            spent[name] = run_python(cache, "-c", code).milliseconds
        if number:
            for name, milliseconds in spent.items():
                times[name].append(milliseconds)
    return {name: min(several) for name, several in times.items()}


def by_package(cache: str) -> dict[str, float]:
    """Milliseconds of what is at hand by package, most first; what numpy loads is left out."""
    report = run_python(cache, "-X", "importtime", "-c", f"import numpy; {AT_HAND}").output
    spent: dict[str, float] = defaultdict(float)
    counts = False
    for line in report.splitlines():
        module = re.match(r"import time: +(\d+) \| +\d+ \|( +)(\S+)", line)
        if module is None:
            continue
        if counts:
            parts = module[3].split(".")
            package = ".".join(parts[:2]) if parts[0] == "stitch" else parts[0]
            spent[package] += int(module[1]) / 1e3
        counts = counts or (module[3] == "numpy" and len(module[2]) == 1)
    return dict(sorted(spent.items(), key=lambda entry: -entry[1]))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; see the module's docstring for the exit code."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=from_one, default=11)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as cache:
        least = least_ms(options.rounds, cache)
        packages = by_package(cache)
    numpy, *others = IMPORTS
    beyond = {name: least[name] - least[numpy] for name in others}
    process, version = PROCESSES
    ratio = least[version] / least[process]
    at_hand = beyond["compile, open_device at hand"]
    if options.json:
        print(json.dumps({"least_ms": least, "beyond_numpy_ms": beyond, "version_ratio": ratio,
                          "packages_ms": packages}, indent=2))  # fmt: skip
    else:
        print(f"{numpy:30} {least[numpy]:7.1f} ms")
        for name, milliseconds in beyond.items():
            goal = f" (goal: <= {GOAL_MS:.0f})" if milliseconds is at_hand else ""
            print(f"{name:30} {milliseconds:7.1f} ms more{goal}")
        for name, milliseconds in list(packages.items())[:10]:
            print(f"  {milliseconds:7.1f} ms  {name}")
        print(f"{version:30} {ratio:7.2f} x {process} (goal: <= {GOAL_RATIO})")
    missed = [f"{at_hand:.0f} ms beyond {numpy}, not {GOAL_MS:.0f}"] if at_hand > GOAL_MS else []
    if ratio > GOAL_RATIO:
        missed.append(f"{version}: {ratio:.2f} x {process}, not {GOAL_RATIO}")
    return exit_code_for(missed, check=options.check)


if __name__ == "__main__":
    sys.exit(main())

"""Programs compiled apart on a CUDA card, beside what people would run instead.

Suites (`--suites`, with commas): `chains` of `--counts` programs; `networks` (like BERT and GPT-2,
ResNet-18, in six files, of each batch of `--batches`); `operations` (errors of kernels); `nests`
(stacked LSTM, dilated and grid RNN, flash attention as a fold, BigBird); `training` (steps of an
MLP and of four encoder layers). PyTorch computes the same: eager, through torch.compile, in a CUDA
graph that is made by hand.

Microseconds a pass: the median of rounds of many passes between two events of the card. Results are
compared before anything is timed; a way that fails, or is wrong, is a row that says so. Each goal
has the number of its line in the issue. Every suite is a process with a time limit, so that a fault
of the card ends one of them.

Needs PyTorch 2.11, Triton 3.6, NumPy, flatbuffers, ml_dtypes, pyyaml, and this checkout. Without
a card it says so and exits 0. `--device=torch:cpu` runs everything that runs on the processor, at
small sizes: goals are not compared there. `--check` exits 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(Path(__file__).parent)) if path not in sys.path]
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(16, os.cpu_count() or 1)))

from command_line import above_zero, exit_code_for, from_one, several_from_one  # noqa: E402

#: Suites with their parts of the time, and seconds in all on a card.
SUITES = {"chains": 65, "networks": 65, "operations": 15, "nests": 50, "training": 25}
SECONDS, LOADING_SECONDS = 230.0, 12
#: How the notes of rows begin that have no result, or a wrong one.
BAD = ("failed", "wrong")
#: Programs in a chain; batches of the networks.
COUNTS, BATCHES = (2, 8, 64), (1, 8)
NETWORKS = "BERT,GPT,ResNet"


def reason_without(device: str) -> str | None:
    """Why nothing can be measured on a device; None where it is there."""
    try:
        import torch
    except ImportError as error:
        return f"{error}"
    if device == "torch:cpu":
        return None
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no CUDA card"
    number = int(device.partition(":")[2])
    if number >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} cards, so no {device}"
    return None


def run_suite(bench: Any, suite: str, options: argparse.Namespace) -> None:
    """Measure one suite in this process."""
    from cuda_ways import nests, networks, programs, training

    small = options.small
    bench.begin(suite)
    if suite == "chains":
        programs.chains(bench, options.counts, 8, 8 if small else 64)
    elif suite == "networks":
        sizes = networks.SMALL if small else networks.Sizes()
        programs.networks(bench, options.networks.split(","), options.batches, sizes)
    elif suite == "operations":
        programs.operations(bench, 1 if small else programs.DRAWS)
    elif suite == "nests":
        nests.measured(bench, small=small)
    else:
        training.measured(bench, small=small)


def in_this_process(suites: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure suites one after the other."""
    import torch
    from cuda_ways.measuring import Bench, OutOfTime, as_data, first_line

    is_card = options.device != "torch:cpu"
    bench = Bench(
        options.device, options.seconds, options.rounds,
        goals_of=is_card and not options.small, peers=options.compile,
    )  # fmt: skip
    if options.quiet and options.out is not None:
        # Its time may end at any moment.
        bench.changed = lambda bench: write(options.out, as_data(bench))
    if not is_card:
        torch.set_num_threads(1)
    for suite in suites:
        try:
            run_suite(bench, suite, options)
        except OutOfTime:
            bench.note("", "", f"failed: out of time, the rest of {suite} was not measured")
        except Exception as error:  # One suite must not end the others.
            bench.note("", "", f"failed: {type(error).__name__}: {first_line(error)}")
    return as_data(bench)


def in_processes(suites: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure each suite in a process of its own, which has its share of the time that is left."""
    whole: dict[str, Any] = {"rows": [], "goals": []}
    until = time.monotonic() + options.seconds
    for number, suite in enumerate(suites):
        share = SUITES[suite] / sum(SUITES[each] for each in suites[number:])
        seconds = max(1.0, share * (until - time.monotonic()))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            words = [f"--{name}={_word(getattr(options, name))}"
                     for name in ("device", "rounds", "counts", "batches", "networks")]  # fmt: skip
            words += ["--small"] * options.small + ["--no-compile"] * (not options.compile)
            # To load PyTorch takes a part of it.
            words += [f"--suites={suite}", f"--out={file}", "--quiet",
                      f"--seconds={max(1.0, seconds - LOADING_SECONDS)}"]  # fmt: skip
            try:
                done = subprocess.run(
                    [sys.executable, __file__, *words], check=False, timeout=seconds,
                    capture_output=True, text=True,
                )  # fmt: skip
                why = f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"
            except subprocess.TimeoutExpired:
                why, done = "it did not end in time", None
            if file.exists():
                data = json.loads(file.read_text())
                whole["rows"] += data["rows"]
                whole["goals"] += data["goals"]
            if done is None or done.returncode or not file.exists():
                empty = dict.fromkeys(("microseconds", "error"))
                whole["rows"].append({"suite": suite, "case": "", "way": "", **empty,
                                      "note": f"failed: {why}"})  # fmt: skip
    return whole


def write(file: Path, data: dict[str, Any]) -> None:
    """Replace a file as a whole."""
    made = file.with_name(f"{file.name}.new")
    made.write_text(json.dumps(data, indent=1))
    made.replace(file)


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def facts_of(device: str) -> dict[str, str]:
    """The card, and versions."""
    import torch

    facts = {"device": device, "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    try:
        facts["triton"] = import_module("triton").__version__
    except ImportError:
        facts["triton"] = "not installed"
    if device != "torch:cpu":
        facts["card"] = torch.cuda.get_device_name(device)
    return facts


def table_of(data: dict[str, Any]) -> str:
    """Rows and goals as a table of text."""
    lines, case = [", ".join(f"{name} {value}" for name, value in data["facts"].items())], None
    for row in data["rows"]:
        if (row["suite"], row["case"]) != case:
            case = row["suite"], row["case"]
            lines.append(f"{row['suite']}: {row['case']}")
        spent = "" if row["microseconds"] is None else f"{row['microseconds']:,.1f} us"
        error = "" if row["error"] is None else f"error {row['error']:.1e}"
        lines.append(f"  {row['way']:50} {spent:>16} {error:14} {row['note']}".rstrip())
    lines.append("goals")
    words = {True: "met", False: "MISSED", None: "not measured"}
    for goal in data["goals"]:
        found = "" if goal["found"] is None else f"{goal['found']:.3g}"
        most = f"at most {goal['most']:.3g}"
        lines.append(
            f"  {goal['line']}. {goal['name']:64} {found:>9} {most:16} {words[goal['is_met']]}"
        )
    return "\n".join(lines)


def parsed(words: list[str] | None) -> argparse.Namespace:
    """The options of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or torch:cpu")
    parser.add_argument("--suites", default=",".join(SUITES), help="with commas between")
    parser.add_argument("--counts", type=several_from_one, default=COUNTS)
    parser.add_argument("--batches", type=several_from_one, default=BATCHES)
    parser.add_argument("--networks", default=NETWORKS)
    parser.add_argument("--rounds", type=from_one, default=5)
    parser.add_argument("--seconds", type=above_zero,
                        help=f"time for all suites; default {SECONDS:.0f} on a card")  # fmt: skip
    parser.add_argument("--small", action="store_true", help="small sizes; goals are not compared")
    parser.add_argument("--no-compile", dest="compile", action="store_false",
                        help="leave torch.compile out")  # fmt: skip
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    options = parser.parse_args(words)
    unknown = sorted({*options.suites.split(",")} - {*SUITES})
    if unknown:
        parser.error(f"unknown suite {', '.join(unknown)}: expected {', '.join(SUITES)}")
    wrong = sorted({*options.networks.split(",")} - {*NETWORKS.split(",")})
    if wrong:
        parser.error(f"unknown network {', '.join(wrong)}: expected {NETWORKS}")
    if options.device != "torch:cpu" and not _is_card(options.device):
        parser.error(f"unknown device {options.device!r}: expected cuda:0 or torch:cpu")
    options.small |= options.device == "torch:cpu"
    if options.seconds is None and options.device != "torch:cpu":
        options.seconds = SECONDS
    return options


def _is_card(name: str) -> bool:
    kind, _, number = name.partition(":")
    return kind == "cuda" and number.isascii() and number.isdigit()


def main(words: list[str] | None = None) -> int:
    """Measure, print, and write what was asked for."""
    options = parsed(words)
    reason = reason_without(options.device)
    if reason is not None:
        print(f"not measured: {reason}")
        return 0
    began, suites = time.monotonic(), options.suites.split(",")
    apart = len(suites) > 1 and options.device != "torch:cpu"
    data = (in_processes if apart else in_this_process)(suites, options)
    data = {"facts": facts_of(options.device), **data}
    data["facts"]["seconds"] = f"{time.monotonic() - began:.0f}"
    if options.out is not None:
        write(options.out, data)
    if not options.quiet:
        print(json.dumps(data) if options.json else table_of(data))
    missed = [f"{g['line']}. {g['name']}: {g['found']:.3g}, at most {g['most']:.3g}"
              for g in data["goals"] if g["is_met"] is False]  # fmt: skip
    # A peer that fails is none of ours.
    missed += [f"{row['suite']}, {row['case']}: {row['note']}" for row in data["rows"]
               if not row["way"].startswith("torch") and row["note"].startswith(BAD)]  # fmt: skip
    return exit_code_for(missed if options.check else (), check=options.check)


if __name__ == "__main__":
    sys.exit(main())

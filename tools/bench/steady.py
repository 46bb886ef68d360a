"""What repeats, however it is written: rows of ratios, each with its goal.

Programs are tiny (one Gemm and one Relu on a row of 64 numbers, compiled by itself), so what is
measured is everything but kernels. In one process and on one thread:

* `sessions`: `pipe(x)`, `pipe(x).numpy()`, `c(b(a(x))).numpy()` beside ONNX Runtime's bound
  sessions, one a program, which nothing enters or leaves;
* `feeding`: `pipe(tensor)` beside `pipe(array)`; `h = a(h)` beside NumPy by hand;
* `observing`: with a Chrome trace listening, and with hooks, beside bare: a pipeline, a training
  step;
* `queueing`: tasks a second where every result is kept; a call while another thread computes;
* `torch`: torch.compile of two layers, beside its backend `aot_eager`;
* `holding`: for every length of a pipeline and window of a device the slowest way of holding
  results beside the fastest (unheld, `y =`, rings of 1 to 20, random, `.numpy()`, feedback), what
  keeping all of them costs, what a program costs in a longer chain, and how often a settled device
  planned or wrote code, where it tells.

Results are compared before anything is timed, and what is held is looked at again long after.
Ways take turns in every round; ratios are of least times, `--json` has the median of the ratios of
each round too. `--quick` runs fewer rounds, lengths, windows and rings; `--only` names groups.
`--check` exits 1 where a goal is missed, or a peer is not installed. Only `import stitch` is used,
so an older tree may be measured as well: `PYTHONPATH=TREE python tools/bench/steady.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace

# Before NumPy is loaded: threads would measure the machine's other work.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

from command_line import bench_parser, exit_code_for, several_from_one
from steady_ways import feeding, holding, observing, queueing, sessions, torch_graphs
from steady_ways.measuring import FULL, QUICK, Effort, Row

GROUPS: Mapping[str, Callable[[Effort], Iterator[Row]]] = {
    "sessions": sessions.rows, "feeding": feeding.rows, "observing": observing.rows,
    "queueing": queueing.rows, "torch": torch_graphs.rows, "holding": holding.rows,
}  # fmt: skip


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = bench_parser(__doc__)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups of rows")
    parser.add_argument("--quick", action="store_true", help="a few rounds of few lengths")
    parser.add_argument(
        "--lengths",
        type=several_from_one,
        default=(),
        help="programs of the pipelines of `holding`",
    )
    parser.add_argument(
        "--windows", type=several_from_one, default=(), help="windows of its devices"
    )
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    unknown = [name for name in options.only if name not in GROUPS]
    if unknown:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    return options


def effort_of(options: argparse.Namespace) -> Effort:
    """What the command line allows to be spent."""
    effort = QUICK if options.quick else FULL
    if options.lengths:
        effort = replace(effort, lengths=options.lengths)
    if options.windows:
        effort = replace(effort, windows=options.windows)
    return effort


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; see the module's docstring for the exit code."""
    options = parsed(arguments)
    effort = effort_of(options)
    if not options.json:
        print(f"{'row':64} {'value':>15} {'goal':>9}{'ours us':>11}{'peer us':>11}")
    rows = []
    for name in options.only:
        for row in GROUPS[name](effort):
            rows.append(row)
            if not options.json:
                print(row.text(), flush=True)
    if options.json:
        print(json.dumps([asdict(row) | {"missed": row.missed} for row in rows], indent=2))
    return exit_code_for((row.name for row in rows if row.missed), check=options.check)


if __name__ == "__main__":
    sys.exit(main())

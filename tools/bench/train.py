"""One training step as four stitched programs, beside PyTorch eager and torch.compile.

Ours stands there as a backend of torch.compile too, with torch's step or with a program in its
place (`options={"optimizer": ...}`).

Models with random weights (`--models`): `mlp` 784-512-512-10, `cnn` (two convolutions with batch
normalization and max pooling), `transformer` (two layers); `--batch`, `--image`, `--length` and
`--width` say how large, `--optimizer` how they learn. A step is forward, cross-entropy, backward,
update, and the loss read as a number, on one batch that lies on the host.

Every way trains its own copy from the same weights. First all run `--compared` steps, and their
losses must agree (relative 1e-4) with eager's; then every round runs each way once, in an order of
its own, in one process, on one thread. Printed are least and median microseconds a step, ours over
each peer by least times, and by the median of the ratios of each round. With `--memory` each way
then runs in a process of its own, and it is printed by how much its resident memory grows at most
beyond what it is before the first step (Linux). `--check` exits 1 where best of ours takes more
than 0.85 times eager (cnn: 1.2 times) or 0.95 times torch.compile, or grows by more than eager.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

# Before NumPy and torch are loaded: threads would measure the machine's other work.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
from command_line import bench_parser, exit_code_for, from_one, refused
from train_ways.models import MODELS, Sizes, Subject, subjects
from train_ways.ways import OPTIMIZERS, Step, our_step, torch_step

from stitch.errors import StitchError
from stitch.machine import load_machine
from stitch.runtime.executors import EXECUTORS

EAGER, COMPILED = "torch eager", "torch.compile"
#: Ours as a backend of torch.compile: torch's optimizer steps, or a program does in its place.
BACKEND, STEPPED = "stitch in torch.compile", "stitch in torch.compile, steps"


@dataclass(frozen=True, slots=True)
class Row:
    """One way of training one model; ratios are over the two peers, by least times."""

    model: str
    way: str
    least_us: float
    median_us: float
    over_eager: float
    over_compile: float | None
    over_eager_by_rounds: float
    growth_mib: float | None = None


def names_of_ways(options: argparse.Namespace) -> list[str]:
    """Peers and torch.compile with our backend first; the rest of ours are `stitch <executor>
    <machine>`."""
    ours = [f"stitch {e} {m}" for m in options.machines for e in options.executors]
    compiled = [] if options.no_compile else [COMPILED, BACKEND, STEPPED]
    return [EAGER, *compiled, *ours]


def make_step(subject: Subject, way: str, options: argparse.Namespace, stack: ExitStack) -> Step:
    """One way by its name."""
    if way == EAGER:
        return torch_step(subject, options.optimizer, None)
    if way == COMPILED:
        return torch_step(subject, options.optimizer, "inductor")
    if way in (BACKEND, STEPPED):
        return torch_step(subject, options.optimizer, "stitch", steps=way == STEPPED)
    _, executor, machine = way.split(" ")
    return our_step(subject, options.optimizer, executor, machine, stack)


def measure(subject: Subject, options: argparse.Namespace) -> list[Row]:
    """All ways of training one model; raises `SystemExit` where losses differ."""
    ways = names_of_ways(options)
    with ExitStack() as stack:
        steps = [make_step(subject, way, options, stack) for way in ways]
        found = [[step() for _ in range(options.compared)] for step in steps]
        for way, losses in zip(ways, found, strict=True):
            for number, (ours, theirs) in enumerate(zip(losses, found[0], strict=True)):
                if not abs(ours - theirs) <= 1e-4 * max(1.0, abs(theirs)):
                    sys.exit(f"{subject.name}, {way}: loss {ours} at step {number}, not {theirs}")
        times = interleaved(steps, options.rounds)
    least = [min(t) * 1e6 for t in times]
    return [
        Row(
            subject.name, way, least[i], median(times[i]) * 1e6, least[i] / least[0],
            None if options.no_compile else least[i] / least[1],
            median(a / b for a, b in zip(times[i], times[0], strict=True)),
        )
        for i, way in enumerate(ways)
    ]  # fmt: skip


def interleaved(steps: list[Step], rounds: int) -> list[list[float]]:
    """Seconds of each step in each round; the order changes from round to round."""
    times: list[list[float]] = [[] for _ in steps]
    order, shuffle = list(range(len(steps))), Random(0)
    for number in range(rounds + 2):
        shuffle.shuffle(order)
        for i in order:
            started = time.perf_counter()
            steps[i]()
            spent = time.perf_counter() - started
            if number >= 2:  # The first rounds warm up.
                times[i].append(spent)
    return times


def memory_kib(name: str) -> int:
    """What Linux says of this process: VmRSS is what it has now, VmHWM the most it has had."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def grown(subject: Subject, way: str, options: argparse.Namespace) -> float:
    """MiB that this process has at most during its steps beyond what it has before the first."""
    with ExitStack() as stack:
        step = make_step(subject, way, options, stack)
        before = memory_kib("VmRSS")
        # Forgets the most so far, which compiling has needed.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        for _ in range(options.compared):
            step()
        return (memory_kib("VmHWM") - before) / 1024


def grown_apart(model: str, way: str, arguments: list[str]) -> float:
    """`grown` in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--models", model, "--grown", way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{model}, {way}: {done.stderr}")
    return float(done.stdout.split()[-1])


def missed_goals(rows: list[Row], subject: Subject) -> list[str]:
    """What `--check` complains of."""
    ours = [row for row in rows if row.way.startswith("stitch")]
    best = min(ours, key=lambda row: row.least_us)
    missed = []
    if best.over_eager > subject.eager_goal:
        missed.append(f"{subject.name}: {best.over_eager:.2f} x eager, goal {subject.eager_goal}")
    bound = subject.compile_goal
    if best.over_compile is not None and best.over_compile > bound:
        missed.append(f"{subject.name}: {best.over_compile:.2f} x torch.compile, goal {bound}")
    if best.growth_mib is not None and rows[0].growth_mib is not None:
        least = min(row.growth_mib for row in ours if row.growth_mib is not None)
        if least > rows[0].growth_mib:
            missed.append(
                f"{subject.name}: grows by {least:.1f} MiB, eager by {rows[0].growth_mib:.1f}"
            )
    return missed


def show(rows: list[Row]) -> None:
    """The table of one model."""
    print(f"{rows[0].model}: us a step")
    print(f"{'way':36} {'least':>9} {'median':>9} {'/eager':>7} {'/compile':>8} {'rounds':>7}  MiB")
    for row in rows:
        over = "" if row.over_compile is None else f"{row.over_compile:.2f}"
        grew = "" if row.growth_mib is None else f"{row.growth_mib:.1f}"
        print(
            f"{row.way:36} {row.least_us:9.0f} {row.median_us:9.0f} {row.over_eager:7.2f} "
            f"{over:>8} {row.over_eager_by_rounds:7.2f}  {grew}"
        )


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = bench_parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help=", ".join(MODELS))
    parser.add_argument("--batch", type=from_one, default=64)
    parser.add_argument("--image", type=from_one, default=28, help="side of the cnn's images")
    parser.add_argument(
        "--length", type=from_one, default=32, help="tokens in the transformer's rows"
    )
    parser.add_argument("--width", type=from_one, default=128, help="of the transformer")
    parser.add_argument("--optimizer", default="sgd", choices=sorted(OPTIMIZERS))
    parser.add_argument("--executors", default="numpy,onnxruntime,auto,torch")
    parser.add_argument("--machines", default="host")
    parser.add_argument("--rounds", type=from_one, default=61)
    parser.add_argument(
        "--compared", type=from_one, default=5, help="steps before anything is timed"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--memory", action="store_true", help="also measure growth, apart")
    parser.add_argument("--grown", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.models = options.models.split(",")
    options.executors = options.executors.split(",")
    options.machines = options.machines.split(",")
    for what, given, known in (
        ("model", options.models, MODELS), ("executor", options.executors, EXECUTORS)
    ):  # fmt: skip
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    if options.image < 4:
        parser.error("--image takes numbers from 4 on: the cnn halves its images twice")
    if options.width % Sizes().heads:
        parser.error(f"--width takes multiples of {Sizes().heads}, the transformer's heads")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; see the module's docstring for the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    try:
        for name in options.machines:
            load_machine(name)
    except StitchError as error:
        return refused("train.py", error)
    torch.set_num_threads(1)
    sizes = Sizes(options.batch, options.image, options.length, options.width)
    missed: list[str] = []
    everything: list[Row] = []
    for subject in subjects(options.models, sizes):
        if options.grown:
            print(grown(subject, options.grown, options))
            continue
        rows = measure(subject, options)
        if options.memory:
            rows = [
                Row(**{**asdict(r), "growth_mib": grown_apart(subject.name, r.way, arguments)})
                for r in rows
            ]
        missed += missed_goals(rows, subject)
        everything += rows
        if not options.json:
            show(rows)
    if options.json:
        print(json.dumps([asdict(row) for row in everything], indent=2))
    return exit_code_for(missed, check=options.check)


if __name__ == "__main__":
    sys.exit(main())

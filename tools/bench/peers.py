"""Two programs compiled apart and stitched, beside what people would run instead.

`--suite chain`: two programs in a row, each layer a Gemm and a Relu. `tiny` is 64-64 twice at batch
1, `middle` 784-512 | 512-512-10 at batch 64, `large` 1024-4096-1024 twice at batch 256. Everything
runs in one process, on one thread and on the same numbers; every round runs every way once, each
round beginning with another; every result is compared before anything is timed.

* Ours: `stitch.Pipeline` on every machine of `--machines` and every executor of `--executors`, in
  dense float32; beside it with tiled values and with bfloat16 values at every program's ends.
* Peers: ONNX Runtime (a session each by `run`, a session each bound, one merged session bound),
  PyTorch eager and compiled by inductor, IREE (two modules in one context). What is not installed,
  or lacks something, is listed with its reason; `pip install stitch-runtime[bench]` brings them.
* NumPy by hand with `out=`: a yardstick and no product, so it stands beside the goals, not in them.

Peers have it as easy as their interfaces allow: inputs lie where they read them, bindings and
outputs are made beforehand, results stay where they are. Ours gets an array each pass and gives a
handle on a ready result, as users have it. Printed are the least and the median microseconds per
pass, each way over the fastest peer, and the ratio that the goal is about: best of ours in dense
float32 over best peer, of the least times, which other work on the machine disturbs least.
`--check` exits 1 where that is above 0.65 (tiny) or 1.03 (middle, large), or where no peer ran.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal

# Before NumPy and torch are loaded: threads would measure the machine's other work.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

from peer_ways import ours
from peer_ways.chains import Case, Chain, NotAvailableError, Way, make_case

from stitch.errors import UsageError

Side = Literal["ours", "other form", "peer", "yardstick"]

CHAINS = (
    Chain("tiny", ((64, 64), (64, 64)), 1, 0.65, 301),
    Chain("middle", ((784, 512), (512, 512, 10)), 64, 1.03, 61),
    Chain("large", ((1024, 4096, 1024), (1024, 4096, 1024)), 256, 1.03, 7),
)
#: Names for `--peers`: the module that makes the ways, and on which side they stand.
PEERS: dict[str, tuple[str, Side]] = {
    "numpy": ("peer_ways.numpy_by_hand", "yardstick"),
    "onnxruntime": ("peer_ways.onnx_sessions", "peer"),
    "torch": ("peer_ways.torch_modules", "peer"),
    "torch.compile": ("peer_ways.torch_compiled", "peer"),
    "iree": ("peer_ways.iree_modules", "peer"),
}
#: Seconds that one way runs in one round, at least one pass.
STRETCH = 0.002


@dataclass(frozen=True, slots=True)
class Row:
    """One way on one chain: microseconds per pass."""

    way: str
    side: Side
    least_us: float
    median_us: float


@dataclass(frozen=True, slots=True)
class Result:
    """One chain: all ways, those that could not run and why, and the ratio of the goal."""

    chain: str
    text: str
    goal: float
    rows: tuple[Row, ...]
    absent: tuple[tuple[str, str], ...]

    def best(self, side: Side) -> Row | None:
        """The fastest way of a side."""
        return min((r for r in self.rows if r.side == side), key=lambda r: r.least_us, default=None)

    def ratio_to(self, side: Side) -> float | None:
        """Best of ours over the best of a side; nothing where one of them did not run."""
        mine, other = self.best("ours"), self.best(side)
        return mine.least_us / other.least_us if mine and other else None

    def as_data(self) -> dict[str, object]:
        """What `--json` prints of it."""
        ratios = {"ratio": self.ratio_to("peer"), "ratio_to_hand": self.ratio_to("yardstick")}
        return asdict(self) | ratios | {"absent": dict(self.absent)}


def make_ways(
    case: Case, stack: ExitStack, options: argparse.Namespace
) -> tuple[list[tuple[Side, Way]], list[tuple[str, str]]]:
    """Every way that can run here, and the others with the reason; results are compared."""
    ways: list[tuple[Side, Way]] = []
    absent: list[tuple[str, str]] = []
    for machine in options.machines:
        for executor in options.executors:
            for form in options.forms:
                side: Side = "ours" if form == "float32" else "other form"
                try:
                    made = ours.make_ways(case, stack, machine, executor, form)
                except UsageError as error:
                    absent.append((f"stitch {executor}, {form}, {machine}", str(error)))
                    continue
                ways += [(side, way) for way in made]
    for peer in options.peers:
        module, side = PEERS[peer]
        try:
            made = importlib.import_module(module).make_ways(case, stack)
        except ModuleNotFoundError as error:
            absent.append((peer, f"not installed ({error.name})"))
        except NotAvailableError as error:
            absent.append((peer, f"not available: {error}"))
        else:
            ways += [(side, way) for way in made]
    for _, way in ways:
        case.check(way)
    return ways, absent


def passes_per_stretch(way: Way) -> int:
    """How many passes fill a stretch."""
    started = time.perf_counter()
    way.run(way.given)
    return max(1, int(STRETCH / (time.perf_counter() - started)))


def interleaved(ways: Sequence[Way], rounds: int) -> list[list[float]]:
    """Microseconds per pass of each way in each round; every round begins with another way."""
    times: list[list[float]] = [[] for _ in ways]
    passes = [passes_per_stretch(way) for way in ways]
    for number in range(rounds):
        for turn in range(len(ways)):
            chosen = (number + turn) % len(ways)
            run, given, count = ways[chosen].run, ways[chosen].given, passes[chosen]
            # Untimed: the way before has left its own data in the caches.
            run(given)
            started = time.perf_counter()
            for _ in range(count):
                run(given)
            times[chosen].append((time.perf_counter() - started) / count * 1e6)
    return times


def measure(chain: Chain, options: argparse.Namespace) -> Result:
    """One chain in all ways; raises `AssertionError` where results differ."""
    case = make_case(chain)
    with ExitStack() as stack:
        ways, absent = make_ways(case, stack, options)
        times = interleaved([way for _, way in ways], options.rounds or chain.rounds)
        rows = [
            Row(way.name, side, min(found), median(found))
            for (side, way), found in zip(ways, times, strict=True)
        ]
    return Result(chain.name, chain.text(), chain.goal, tuple(rows), tuple(absent))


def table(result: Result) -> str:
    """A chain's rows by side, the fastest first, and the ratio of its goal."""
    peer = result.best("peer")
    lines = [f"{result.chain}: {result.text}", f"{'':48}  least us  median us  / best peer"]
    sides: tuple[Side, ...] = ("ours", "other form", "peer", "yardstick")
    for side in sides:
        lines.append(f"  {side}")
        for row in sorted((r for r in result.rows if r.side == side), key=lambda r: r.least_us):
            over = f"{row.least_us / peer.least_us:12.2f}" if peer else f"{'-':>12}"
            lines.append(f"    {row.way:44} {row.least_us:9.2f} {row.median_us:10.2f} {over}")
    lines += [f"    {name:44} {reason}" for name, reason in result.absent]
    ratio, hand = result.ratio_to("peer"), result.ratio_to("yardstick")
    if ratio is not None:
        lines.append(f"  best of ours / best peer: {ratio:.2f} (goal: at most {result.goal})")
    if hand is not None:
        lines.append(f"  best of ours / NumPy by hand: {hand:.2f}")
    return "\n".join(lines) + "\n"


def missed_goals(results: Sequence[Result]) -> list[str]:
    """What `--check` complains of."""
    missed = []
    for result in results:
        ratio = result.ratio_to("peer")
        if ratio is None:
            missed.append(f"{result.chain}: nothing to compare: ours or every peer is missing")
        elif ratio > result.goal:
            missed.append(f"{result.chain}: {ratio:.2f} x the best peer, not {result.goal}")
    return missed


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = parser.add_argument_group("what runs (each takes names; by default all)")
    parser.add_argument("--suite", choices=["chain"], default="chain")
    for option, known in {
        "--chains": [chain.name for chain in CHAINS],
        "--machines": ["host", "wormhole_n150"],
        "--executors": ["numpy", "onnxruntime", "auto"],
        "--forms": list(ours.FORMS),
        "--peers": list(PEERS),
    }.items():
        several.add_argument(
            option, nargs="*", choices=known, default=known, metavar="NAME", help=", ".join(known)
        )
    parser.add_argument("--rounds", type=int, default=0, help="instead of each chain's own number")
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; see the module's docstring for the exit code."""
    options = parse(arguments)
    results = []
    for chain in CHAINS:
        if chain.name in options.chains:
            results.append(measure(chain, options))
            if not options.json:
                print(table(results[-1]), flush=True)
    if options.json:
        print(json.dumps([result.as_data() for result in results], indent=2))
    missed = missed_goals(results)
    for goal in missed:
        print(f"goal missed: {goal}", file=sys.stderr)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())

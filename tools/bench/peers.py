"""Programs compiled apart and stitched, beside what people would run instead.

`--suite chain`: two programs in a row, each layer a Gemm and a Relu. `tiny` is 64-64 twice at batch
1, `middle` 784-512 | 512-512-10 at batch 64, `large` 1024-4096-1024 twice at batch 256; `many` is
64-64 64 times at batch 1.
`--suite models`: networks with random weights as torch modules, cut at module boundaries into
`--splits` programs: `resnet` (like ResNet-18), `bert` and `gpt` (an embedding, layers, a head);
`--batch`, `--image`, `--length`, `--layers`, `--width` say how large.
`--suite torch_compile`: ten networks and GPT-2 small as whole torch modules, by the backends of
torch.compile: ours beside eager, `aot_eager`, inductor; and IREE, a yardstick there.
Everything runs in one process, on one thread and on the same numbers; every round runs every way
once, in an order of its own, after untimed passes; every result is compared before anything is
timed (relative 1e-4, and absolute 1e-4 of the greatest number; 3e-2 for forms in bfloat16).

* Ours: `stitch.Pipeline` on every machine of `--machines` and every executor of `--executors`, in
  dense float32; with `--forms` beside it with tiled or bfloat16 values at every program's ends. Two
  sides of their own are `linked`, the pipeline as one program (`link=True` and `fuse=True`), and
  `calls`, written as `b(a(x)).numpy()`.
* Peers: ONNX Runtime (a session each by `run`, a session each bound, one merged session bound),
  PyTorch eager and compiled by inductor, IREE (a module each in one context). Models reach ONNX
  Runtime and IREE as torch exports them. What is not installed, or lacks something, is listed with
  its reason; `pip install --group bench` in a checkout brings them.
* NumPy by hand with `out=`, for chains: a yardstick and no product, so it stands beside the goals.

Peers have it as easy as their interfaces allow: inputs lie where they read them, bindings and
outputs are made beforehand, results stay where they are. Ours gets an array each pass and gives a
handle on a ready result, as users have it. Printed are the least and the median microseconds per
pass and each way over the fastest peer; then best of ours over each kind of peer, by least times,
which other work on the machine disturbs least, and by the median over the rounds of the ratio in
one round. Goals are about the least times. `--check` exits 1 where best of ours over best peer is
above 0.65 (tiny) or 1.03 (middle, large); over the best peer that runs the same programs one by one
(one that was given them as one stands beside) above 1.03 in models, above 0.7 in `many`; where no
peer ran; and, beside ONNX Runtime's bound sessions, where `calls` are above 1.2 (tiny) or 0.35
(many), `linked` above 0.2 (many), and, beside its merged session, `linked` above 0.8 (many) or 1.0
(models).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from random import Random

# Before NumPy and torch are loaded: threads would measure the machine's other work.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

from command_line import bench_parser, exit_code_for, from_one
from peer_ways import ours
from peer_ways.cases import Absent, Case, NotAvailableError, Subject, Way
from peer_ways.chains import CHAINS
from peer_ways.results import Result, Row, Side, missed_goals, table

from stitch.errors import UsageError

#: Names for `--peers`: the module that makes the ways, and on which side they stand.
PEERS: dict[str, tuple[str, Side]] = {
    "numpy": ("peer_ways.numpy_by_hand", "yardstick"),
    "onnxruntime": ("peer_ways.onnx_sessions", "peer"),
    "torch": ("peer_ways.torch_modules", "peer"),
    "torch.compile": ("peer_ways.torch_compiled", "peer"),
    "aot_eager": ("peer_ways.torch_aot_eager", "peer"),
    "stitch": ("peer_ways.torch_stitch", "ours"),
    "iree": ("peer_ways.iree_modules", "peer"),
}
#: Of `--peers`: what only `--suite torch_compile` runs.
BACKENDS = ("aot_eager", "stitch")
#: What runs, by suite, unless told otherwise.
DEFAULTS: dict[str, dict[str, list[str]]] = {
    "chain": {
        "machines": ["host", "wormhole_n150"],
        "executors": ["numpy", "onnxruntime", "auto"],
        "forms": list(ours.FORMS),
        "peers": [name for name in PEERS if name not in BACKENDS],
    },
    "models": {
        "machines": ["host", "wormhole_n150"],
        "executors": ["numpy", "onnxruntime"],
        "forms": ["float32"],
        "peers": ["onnxruntime", "torch", "torch.compile", "iree"],
    },
    "torch_compile": {
        "machines": [],
        "executors": [],
        "forms": [],
        "peers": ["torch", "aot_eager", "torch.compile", "stitch", "iree"],
    },
}
#: Seconds that one way runs in one round, at least one pass.
STRETCH = 0.002
#: Untimed passes before: the way before has left its own data in the caches, and where weights are
#: larger than the caches next to a core, one pass alone does not bring them back.
WARM_PASSES = 4


def subjects(options: argparse.Namespace) -> tuple[Subject, ...]:
    """What `--suite` measures."""
    module = {"models": "models", "torch_compile": "networks"}.get(options.suite)
    if module is not None:
        # They are torch modules, and chains do without torch.
        found: tuple[Subject, ...] = importlib.import_module(f"peer_ways.{module}").subjects(
            options
        )
        return found
    return tuple(chain.subject() for chain in CHAINS if chain.name in options.chains)


def make_ways(
    subject: Subject, case: Case, stack: ExitStack, options: argparse.Namespace
) -> tuple[list[tuple[Side, str, Way]], list[tuple[str, str]]]:
    """Every way that can run here, and the others with the reason; results are compared."""
    ways: list[tuple[Side, str, Way]] = []
    more = {goal.side for goal in subject.more_goals}
    absent: list[tuple[str, str]] = []
    for machine in options.machines:
        for executor in options.executors:
            for form in options.forms:
                try:
                    made = ours.make_ways(case, stack, machine, executor, form, more)
                except UsageError as error:
                    absent.append((f"stitch {executor}, {form}, {machine}", str(error)))
                    continue
                ways += [(side, "", way) for side, way in made]
    for peer in options.peers:
        module, side = PEERS[peer]
        if peer in subject.without:
            absent.append((peer, subject.without[peer]))
            continue
        try:
            made = importlib.import_module(module).make_ways(case, stack)
        except ModuleNotFoundError as error:
            absent.append((peer, f"not installed ({error.name})"))
        except NotAvailableError as error:
            absent.append((peer, f"not available: {error}"))
        else:
            ways += [(side, peer, way) for way in made if isinstance(way, Way)]
            absent += [(way.name, way.reason) for way in made if isinstance(way, Absent)]
    for _, _, way in ways:
        case.check(way)
    return ways, absent


def passes_per_stretch(way: Way) -> int:
    """How many passes fill a stretch."""
    started = time.perf_counter()
    way.run(way.given)
    return max(1, int(STRETCH / (time.perf_counter() - started)))


def interleaved(ways: Sequence[Way], rounds: int) -> list[list[float]]:
    """Microseconds per pass of each way in each round; every round has an order of its own."""
    times: list[list[float]] = [[] for _ in ways]
    passes = [passes_per_stretch(way) for way in ways]
    order, random = list(range(len(ways))), Random(0)
    for _ in range(rounds):
        # Ways that always follow the same one would always find the same caches.
        random.shuffle(order)
        for chosen in order:
            run, given, count = ways[chosen].run, ways[chosen].given, passes[chosen]
            for _ in range(WARM_PASSES):
                run(given)
            started = time.perf_counter()
            for _ in range(count):
                run(given)
            times[chosen].append((time.perf_counter() - started) / count * 1e6)
    return times


def measure(subject: Subject, options: argparse.Namespace) -> Result:
    """One subject in all ways; raises `AssertionError` where results differ."""
    case = subject.make()
    with ExitStack() as stack:
        ways, absent = make_ways(subject, case, stack, options)
        times = interleaved([way for _, _, way in ways], options.rounds or subject.rounds)
        rows = [
            Row(way.name, side, tuple(found), peer, way.stitched)
            for (side, peer, way), found in zip(ways, times, strict=True)
        ]
    return Result(
        subject.name, subject.text, subject.goal, tuple(rows), tuple(absent),
        subject.stitched_only, subject.more_goals,
    )  # fmt: skip


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = bench_parser(__doc__)
    parser.add_argument("--suite", choices=list(DEFAULTS), default="chain")
    several = parser.add_argument_group("what runs (each takes names)")
    for option, known in DEFAULTS["chain"].items():
        fewer = DEFAULTS["models"][option]
        known = list(PEERS) if option == "peers" else known
        usual = "by default all" + ("" if fewer == known else f"; of models {', '.join(fewer)}")
        several.add_argument(
            f"--{option}", nargs="*", choices=known, metavar="NAME",
            help=f"{', '.join(known)} ({usual})",
        )  # fmt: skip
    chains = [chain.name for chain in CHAINS]
    models = ["resnet", "bert", "gpt"]
    networks = ["mlp", "encoder_layer", "conv_block", "resnet18", "mobilenet", "bert", "gpt", "vit",
                "lstm", "unet", "gpt2_small"]  # fmt: skip
    subjects_of = {"--chains": chains, "--models": models, "--networks": networks}
    for option, all_names in subjects_of.items():
        several.add_argument(
            option,
            nargs="*",
            choices=all_names,
            default=all_names,
            metavar="NAME",
            help=", ".join(all_names),
        )
    parser.add_argument("--small", action="store_true", help="networks in a small size")
    _add_sizes(parser)
    parser.add_argument(
        "--rounds", type=from_one, default=0, help="instead of each subject's own number"
    )
    options = parser.parse_args(arguments)
    if options.width % 64:
        parser.error("--width takes multiples of 64: heads of bert and gpt are as wide")
    for option, defaults in DEFAULTS[options.suite].items():
        if getattr(options, option) is None:
            setattr(options, option, defaults)
    return options


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("models: how large")
    sizes.add_argument("--splits", type=from_one, nargs="*", default=[2, 6], metavar="N",
                       help="into how many programs (default: 2 6)")  # fmt: skip
    for option, usual, text in (
        ("--batch", 1, "images or texts at a time"),
        ("--image", 112, "height and width of images"),
        ("--length", 64, "words of a text"),
        ("--layers", 6, "layers of bert and gpt"),
        ("--width", 256, "width of their values, a multiple of 64"),
    ):
        sizes.add_argument(option, type=from_one, default=usual, metavar="N",
                           help=f"{text} (default: {usual})")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; see the module's docstring for the exit code."""
    options = parse(arguments)
    results = []
    # What peers would change in their next release is not what is measured.
    warnings.simplefilter("ignore")
    for subject in subjects(options):
        results.append(measure(subject, options))
        if not options.json:
            print(table(results[-1]), flush=True)
    if options.json:
        print(json.dumps([result.as_data() for result in results], indent=2))
    return exit_code_for(missed_goals(results), check=options.check)


if __name__ == "__main__":
    sys.exit(main())

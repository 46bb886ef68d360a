"""Functions over nested lists of tensors, beside what people would run instead.

Networks (`--suite`, several with commas): `lstm` (stacked, for each size of `--hidden`), `dilated`,
`grid`, `gemm` (two products back to back), `flash`, `bigbird`, `ragged` (scans of products of 3x3
matrices over 16 times `--batch` lists of different lengths, as in onnxruntime#23024), `sentences`
(an LSTM over `--sentences` of 5 to `--words` words; compiling it and its file), `small` (the
stacked LSTM as small as the first of `--widths`, of the depth and twice that). They are written for
elements, cell by cell. Each is compiled for the machine `host` and run by every executor of
`--executors`, with the schedule that is chosen and with each by name that some loop takes; it runs
in mode parallel; a small one in mode sequential, once. Peers: the same nest as
loops in PyTorch, eager and through torch.compile (leave it out with `--no-compile`: it takes
minutes), `torch.nn.LSTM`, ONNX Runtime's LSTM operator and its own Scan (models by hand),
`scaled_dot_product_attention`, whole matrices. What refuses, or is not installed, is listed with
its reason.

Single figures: `memory` (flash attention beside a quarter of its length), `length` (compiling, the
first run and the file beside those of a 64th of `--count` words; an ONNX Scan of a quarter),
`rounds` (a round of a recorded loop beside its kernel), `training` (a step of the stacked LSTM
beside PyTorch), `growth` (rounds of scans and time over `--depths` for `--widths`; `--plot FILE`
draws it by plotly).

One process, one thread. All results of a network are compared (relative 2e-4, and absolute of the
greatest number) before anything is timed; every round runs each way once, in an order of its own.
Printed are the least milliseconds of the processor and of the clock. Ratios are of the former, and
of the best executor with the schedule that is chosen; how far that is from the best by name is a
figure of its own.
`--check` exits 1 where a goal is missed: each has its name in the table, and is a constant where it
is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

# Before NumPy and torch are loaded: threads would measure the machine's other work.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

from command_line import bench_parser, exit_code_for, from_one, several_from_one
from fractal_ways import (
    blockwise_cases,
    compiling,
    growth,
    peak_memory,
    ragged_cases,
    recurrent_cases,
    round_cost,
    sentence_cases,
    training_step,
)
from fractal_ways.cases import Case
from fractal_ways.networks import measured
from fractal_ways.results import Result, missed_goals

from stitch.runtime.executors import EXECUTORS

#: The least number of blocks that BigBird's windows and chances need; words of flash attention.
LEAST_BLOCKS, LEAST_ATTENTION = 7, 32
#: Queries of a block of flash attention that are beside single ones.
BY_HAND = (128, 512)
#: Lists of matrices for each of `--batch`.
LISTS = 16


def lstm(options: argparse.Namespace) -> Iterator[Case]:
    """The stacked LSTM of each hidden size."""
    for hidden in options.hidden:
        yield recurrent_cases.stacked_lstm(
            options.depth, options.length, options.batch, hidden, options.compiled
        )


def small(options: argparse.Namespace) -> Iterator[Case]:
    """The same where what is between kernels is what counts."""
    for depth in (options.depth, 2 * options.depth):
        yield recurrent_cases.stacked_lstm(
            depth, options.length, options.batch, options.widths[0], options.compiled, small=False
        )


def dilated(options: argparse.Namespace) -> Iterator[Case]:
    """A dilated RNN."""
    yield recurrent_cases.dilated_rnn(
        options.length, options.batch, options.hidden[0], options.compiled
    )


def grid(options: argparse.Namespace) -> Iterator[Case]:
    """A grid RNN, as many cells as a layer of the others has words, for each of 16."""
    side = max(2, options.length // 4)
    yield recurrent_cases.grid_rnn(side, options.batch, options.hidden[0], options.compiled)


def gemm(options: argparse.Namespace) -> Iterator[Case]:
    """Two matrix products back to back."""
    yield blockwise_cases.two_products(options.hidden[0], options.compiled)


def flash(options: argparse.Namespace) -> Iterator[Case]:
    """Flash attention, in blocks that were written by hand, and of single queries; a quarter as
    long of single keys as well."""
    length, width = options.attention, options.hidden[0]
    yield blockwise_cases.flash_attention(length, width, options.compiled)
    keys = min(blockwise_cases.FLASH_BLOCK, length // 4)
    for queries in (1, *(size for size in BY_HAND if size < length)):
        yield blockwise_cases.attention_by_size(length, width, queries, keys)
    yield blockwise_cases.attention_by_size(length // 4, width, 1, 1)


def bigbird(options: argparse.Namespace) -> Iterator[Case]:
    """BigBird's attention."""
    blocks = max(LEAST_BLOCKS, options.length)
    yield blockwise_cases.bigbird(blocks, options.batch, options.hidden[0], options.compiled)


def ragged(options: argparse.Namespace) -> Iterator[Result]:
    """Products of matrices in lists of different lengths."""
    lists = LISTS * options.batch
    case = ragged_cases.ragged_products(lists, options.length, options.compiled)
    figures = list(ragged_cases.growth(lists, options.length, options.rounds))
    yield measured(case, options.executors, options.rounds, figures)


def sentences(options: argparse.Namespace) -> Iterator[Result]:
    """An LSTM over sentences of different lengths."""
    for many in options.sentences:
        words = many, options.words, options.hidden[0]
        case = sentence_cases.sentences(*words, options.compiled)
        figures = list(sentence_cases.begun(*words))
        yield measured(case, options.executors, options.rounds, figures)


def memory(options: argparse.Namespace) -> Iterator[Result]:
    """Peak memory of flash attention."""
    words = ("--hidden", str(options.hidden[0]))
    figures = peak_memory.figures(__file__, options.attention, words)
    yield Result("memory of flash attention", "MiB beyond inputs", more=tuple(figures))


def length(options: argparse.Namespace) -> Iterator[Result]:
    """What does not grow with the length."""
    short = max(2, options.count // 64)
    yield from compiling.rows(short, max(options.count, short + 1), options.hidden[0])


def rounds(options: argparse.Namespace) -> Iterator[Result]:
    """A round beside its kernel."""
    yield round_cost.measured(options.count, options.rounds)


def training(options: argparse.Namespace) -> Iterator[Result]:
    """A training step."""
    yield training_step.measured(
        options.depth, options.length, options.batch, options.hidden[0], options.executors,
        options.rounds,
    )  # fmt: skip


def growing(options: argparse.Namespace) -> Iterator[Result]:
    """Growth with depth, drawn if that is asked for."""
    found = list(
        growth.points(options.widths, options.depths, options.length, options.batch, options.rounds)
    )
    for hidden in options.widths:
        yield growth.result_of(found, hidden, options.length, options.batch)
    if options.plot:
        from fractal_ways import picture

        picture.draw([point for point, _ in found], Path(options.plot))


NETWORKS: Mapping[str, Callable[[argparse.Namespace], Iterator[Case]]] = {
    "lstm": lstm, "small": small, "dilated": dilated, "grid": grid, "gemm": gemm, "flash": flash,
    "bigbird": bigbird,
}  # fmt: skip
FIGURES: Mapping[str, Callable[[argparse.Namespace], Iterator[Result]]] = {
    "ragged": ragged, "sentences": sentences, "memory": memory, "length": length, "rounds": rounds,
    "training": training, "growth": growing,
}  # fmt: skip


def results_of(suite: str, options: argparse.Namespace) -> Iterator[Result]:
    """What a suite measures, each result as soon as it is there."""
    if suite in FIGURES:
        yield from FIGURES[suite](options)
    else:
        for case in NETWORKS[suite](options):
            yield measured(case, options.executors, options.rounds)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = bench_parser(__doc__)
    suites = (*NETWORKS, *FIGURES)
    parser.add_argument("--suite", default=",".join(suites), help=", ".join(suites))
    parser.add_argument("--depth", type=from_one, default=8, help="layers of the stacked LSTM")
    parser.add_argument("--length", type=from_one, default=64, help="words, or blocks")
    parser.add_argument("--batch", type=from_one, default=16, help="rows of a word, or a block")
    parser.add_argument(
        "--hidden", type=several_from_one, default=(64, 128, 256),
        help="64,128,256: sizes of the stacked LSTM; all else takes the first",
    )  # fmt: skip
    parser.add_argument("--attention", type=from_one, default=4096, help="words of flash attention")
    parser.add_argument(
        "--sentences",
        type=several_from_one,
        default=(64, 256),
        help="64,256: of the suite sentences",
    )
    parser.add_argument("--words", type=from_one, default=100, help="the most of a sentence")
    parser.add_argument("--count", type=from_one, default=4096, help="rounds of long loops")
    parser.add_argument("--widths", type=several_from_one, default=(8, 32, 64), help="for growth")
    parser.add_argument(
        "--depths", type=several_from_one, default=(1, 2, 4, 8, 16), help="for growth"
    )
    parser.add_argument("--executors", default="numpy,onnxruntime,torch,auto")
    parser.add_argument("--rounds", type=from_one, default=7)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--plot", default="", metavar="FILE.html", help="draw growth by plotly")
    parser.add_argument("--grown", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.compiled = not options.no_compile
    options.suite, options.executors = options.suite.split(","), options.executors.split(",")
    for what, given, known in (
        ("suite", options.suite, suites), ("executor", options.executors, EXECUTORS)
    ):  # fmt: skip
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    if options.attention < LEAST_ATTENTION:
        parser.error(f"--attention takes numbers from {LEAST_ATTENTION} on")
    if options.plot:
        _check_plot(parser, options)
    return options


def _check_plot(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse a picture that could not be drawn, before anything is measured."""
    if "growth" not in options.suite:
        parser.error("--plot draws the suite growth, which is not among those of --suite")
    path = Path(options.plot)
    if path.suffix != ".html" or not path.parent.is_dir():
        parser.error(f"--plot takes a file in a folder that is there, .html, not {options.plot!r}")
    try:
        import plotly  # noqa: F401
    except ImportError:
        parser.error("--plot needs plotly: pip install --group bench")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; see the module's docstring for the exit code."""
    options = parsed(arguments)
    if options.grown:
        way, words = options.grown.split(",")
        print(peak_memory.grown_here(way, int(words), options.hidden[0]))
        return 0
    found: list[Result] = []
    for suite in options.suite:
        for result in results_of(suite, options):
            found.append(result)
            if not options.json:
                print(result.table(), flush=True)
    if options.json:
        print(json.dumps([result.as_data() for result in found], indent=2))
    return exit_code_for(missed_goals(found), check=options.check)


if __name__ == "__main__":
    sys.exit(main())

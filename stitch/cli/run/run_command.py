"""`stitch-run`: run `.ttb` modules one after the other on a simulated device, stitched.

A YAML file is a pipeline or a training; trainings are in `stitch/cli/train/`. Modules are
connected by position, or by `--wire`. `--max_copies=N` bounds, for each pass, the
writes that the memories of the spaces saw, less those that brought host arrays in: copies between
programs, moves, evictions, bounces. Without data (`--dry_run`, `--executor=null`) memory sees
nothing, and the copies of the plan are counted instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from stitch.cli.command import EXIT_OK, run_command, say
from stitch.cli.parser import add_options, count, make_parser, not_negative, positive, real
from stitch.cli.run.examples import write_example
from stitch.cli.run.positional_files import take_files
from stitch.cli.run.replay_file import replay_file
from stitch.cli.run.run_outputs import EXPECTED_FORM, OUTPUT_FORM
from stitch.cli.run.run_session import run_session
from stitch.cli.run_inputs import FORM as INPUT_FORM
from stitch.cli.run_inputs import INITS
from stitch.cli.train import add_training_words, refuse_strangers, run_training
from stitch.cli.wire_words import FORM as WIRE_FORM
from stitch.documents.recognition import PIPELINE, TRAINING
from stitch.errors import UsageError
from stitch.machine import load_machine, machine_names
from stitch.runtime import DEFAULT_WINDOW
from stitch.runtime.executors import EXECUTORS

EXAMPLES = """\
  stitch-run a.ttb b.ttb --input=x=@x.npy --output=y=@y.npy --explain
  stitch-run --module=a.ttb --input="2x2xf32=1 2 3 4" --expected_output=@y.npy
  stitch-run --module=a.ttb --module=b.ttb --dry_run --max_copies=0
  stitch-run --module=a.ttb --init=randn --num_runs=100 --warmup_runs=5 --print_statistics
  stitch-run pipeline.yaml --input=x=@x.npy --trace=trace.json --record=run.json
  stitch-run --replay=run.json
  stitch-run --example=digits
  stitch-run train.yaml --checkpoint_dir=checkpoints --result_file=results.jsonl
  stitch-run train.yaml --checkpoint_dir=checkpoints --resume"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code."""
    parser = make_parser(
        "stitch-run", "Run .ttb modules, stitched, on a simulated device.", EXAMPLES
    )
    _add_what(parser)
    _add_how(parser)
    _add_reports(parser)
    add_training_words(parser)
    return run_command(parser, lambda words: _run(parser, words), argv)


def _add_what(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        ("files", {"nargs": "*", "metavar": "FILE",
                   "help": "modules (.ttb; an .onnx model is compiled first) in the order of the "
                   "run, or one .yaml: a pipeline or a training, its keys say which"}),
        ("--module", {"action": "append", "default": [], "metavar": "FILE",
                      "help": "a module, whatever its name, - for standard input; again for the "
                      "next one"}),
        ("--function", {"action": "append", "default": [], "metavar": "NAME",
                        "help": "the program of a module, by name or index; the k-th for the "
                        "k-th module (default: the first)"}),
        ("--wire", {"action": "append", "default": [], "metavar": "A.Y=B.X",
                    "help": f"connect by name instead of by position: {WIRE_FORM}"}),
        ("--input", {"action": "append", "default": [], "metavar": "WHAT", "help": INPUT_FORM}),
        ("--output", {"action": "append", "default": [], "metavar": "WHERE", "help": OUTPUT_FORM}),
        ("--expected_output", {"action": "append", "default": [], "metavar": "WHAT",
                               "help": f"compare; exit code 1 if it differs: {EXPECTED_FORM}"}),
        ("--atol", {"type": not_negative, "help": "absolute tolerance (default by type: f32 1e-4, "
                    "f16 1e-3, bf16 1e-2; integers are exact)"}),
        ("--rtol", {"type": not_negative, "help": "relative tolerance (default 1e-5)"}),
        ("--pcc", {"type": real, "help": "least Pearson correlation; alone it replaces the "
                   "elementwise rule, with --atol or --rtol both must hold"}),
        ("--init", {"choices": INITS, "help": "make the inputs that are not given"}),
        ("--seed", {"type": count, "default": 0, "help": "for --init=randn (default 0)"}),
    )  # fmt: skip


def _add_how(parser: argparse.ArgumentParser) -> None:
    machine = {"metavar": "NAME|machine.yaml", "dest": "device",
               "help": "default: the machine that the first module was compiled for"}  # fmt: skip
    add_options(
        parser,
        ("--device", machine),
        ("--target", machine | {"help": "the same as --device"}),
        ("--list_devices", {"action": "store_true", "help": "list the known machines, and end"}),
        ("--example", {"metavar": "NAME", "help": "write an example's files here (digits, "
                       "recurrent, ...), say how to run it, and end"}),
        ("--executor", {"choices": tuple(EXECUTORS),
                        "help": "who computes (default: numpy); auto: NumPy or ONNX Runtime, "
                        "whichever is faster for an operation; torch: PyTorch's kernels too; "
                        "null: nobody"}),
        ("--threads", {"type": positive, "metavar": "N",
                       "help": "threads on which ONNX Runtime computes one operation, for "
                       "--executor=onnxruntime or auto (default: 1); NumPy's and "
                       "PyTorch's are set by OMP_NUM_THREADS"}),
        ("--window", {"type": positive, "default": DEFAULT_WINDOW,
                      "help": "tasks queued before they run; 1: each call at once"}),
        ("--strict_types", {"action": "store_true",
                            "help": "links and --input may not change the floating type"}),
        ("--check_memory", {"action": "store_true",
                            "help": "poison freed bytes, guard padding (slower)"}),
        ("--loops", {"type": positive, "default": 1,
                     "help": "do all runs N times; outputs are compared each time"}),
        ("--num_runs", {"type": positive, "default": 1, "help": "timed passes in each loop"}),
        ("--warmup_runs", {"type": count, "default": 0, "help": "passes before, not timed"}),
        ("--dry_run", {"action": "store_true",
                       "help": "plan and price everything, execute nothing; needs no data"}),
        ("--max_copies", {"type": count, "metavar": "N",
                          "help": "exit code 6 if one pass makes more copies than N: writes that "
                          "the memories saw, less those that bring host arrays in"}),
        ("--check_memory_leak", {"action": "store_true",
                                 "help": "exit code 6 if anything is left at the end"}),
    )  # fmt: skip


def _add_reports(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        ("--explain", {"action": "store_true", "help": "every copy: bytes, time, reason"}),
        ("--memory", {"action": "store_true", "help": "what each space holds, and its peak"}),
        ("--print_statistics", {"action": "store_true", "help": "p50, p90, p99 of the passes"}),
        ("--result_file", {"nargs": "?", "const": "run_results.json", "metavar": "FILE",
                           "help": "everything as JSON (default name: %(const)s); here, as for "
                           "--trace, --record and --plot, - is standard output"}),
        ("--save_artifacts", {"action": "store_true",
                              "help": "inputs, outputs, programs, plans and reports as files"}),
        ("--artifact_dir", {"default": "stitch-artifacts", "metavar": "FOLDER",
                            "help": "where to (default: %(default)s)"}),
        ("--trace", {"metavar": "FILE", "help": "a Chrome trace (opens in Perfetto)"}),
        ("--record", {"metavar": "FILE", "help": "machine, plans and allocator events"}),
        ("--replay", {"metavar": "FILE", "help": "re-run recorded allocator events and check "
                      "every address"}),
    )  # fmt: skip


def _run(parser: argparse.ArgumentParser, words: argparse.Namespace) -> int:
    if words.list_devices:
        for name in machine_names():
            shape = load_machine(name).shape
            spaces = ", ".join(
                f"{space.value} {shape.space(space).banks} x {shape.space(space).capacity} B"
                for space in shape.spaces
            )
            say(f"{name}: {spaces}")
        return EXIT_OK
    if words.example is not None:
        target, how = write_example(words.example)
        say(f"wrote {target}; to run it:\n{how}")
        return EXIT_OK
    if words.replay is not None:
        alone = {"replay", "debug", "max_memory"}
        extra = [w for w, value in vars(words).items()
                 if w not in alone and value not in (parser.get_default(w), [])]  # fmt: skip
        if extra:
            raise UsageError(
                "a replay runs alone: the recording says what ran, and on which machine",
                got=", ".join([*words.files, *(f"--{w}" for w in extra if w != "files")]),
                remedy=f"stitch-run --replay={words.replay}",
            )
        return replay_file(words.replay)
    form = take_files(words)
    refuse_strangers(parser, words, form)
    runners = {PIPELINE: run_session, TRAINING: run_training}
    return runners[form](words)

"""The options of `stitch-run`: what each takes, and which have no effect without another."""

from __future__ import annotations

import argparse

from stitch.cli.parser import add_options, count, not_negative, place, positive, real
from stitch.cli.run.run_outputs import EXPECTED_FORM, OUTPUT_FORM
from stitch.cli.run_inputs import FORM as INPUT_FORM
from stitch.cli.run_inputs import INITS
from stitch.cli.wire_words import WIRE_WORD
from stitch.errors import UsageError
from stitch.runtime import DEFAULT_WINDOW, EXECUTORS

EXAMPLES = """\
  stitch-run a.ttb b.ttb --input=x=@x.npy --output=y=@y.npy --explain
  stitch-run --module=a.ttb --input="2x2xf32=1 2 3 4" --expected_output=@y.npy
  stitch-run a.ttb --init=randn --executor=onnxruntime --expected_operations=reference
  stitch-run --module=a.ttb --module=b.ttb --dry_run --max_copies=0
  stitch-run --module=a.ttb --init=randn --num_runs=100 --warmup_runs=5 --print_statistics
  stitch-run pipeline.yaml --input=x=@x.npy --trace=trace.json --record=run.json
  stitch-run --replay=run.json
  stitch-run --example=digits"""


def add_run_words(parser: argparse.ArgumentParser) -> None:
    """Add the options of `stitch-run`."""
    _add_what(parser)
    _add_how(parser)
    _add_reports(parser)


def _add_what(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        ("files", {"nargs": "*", "metavar": "FILE",
                   "help": "modules (.ttb; an .onnx model is compiled first; a .ttnn is planned "
                   "only) in the order of the run, or one pipeline (.yaml)"}),
        ("--module", {"action": "append", "default": [], "metavar": "FILE",
                      "help": "a module, whatever its name, - for standard input; again for the "
                      "next one"}),
        ("--function", {"action": "append", "default": [], "metavar": "NAME",
                        "help": "the program of a module, by name or index; the k-th for the "
                        "k-th module (default: the first)"}),
        WIRE_WORD,
        ("--input", {"action": "append", "default": [], "metavar": "WHAT", "help": INPUT_FORM}),
        ("--output", {"action": "append", "default": [], "metavar": "WHERE", "help": OUTPUT_FORM}),
        ("--expected_output", {"action": "append", "default": [], "metavar": "WHAT",
                               "help": f"compare; exit code 1 if it differs: {EXPECTED_FORM}"}),
        ("--expected_operations", {"metavar": "FILE|reference", "type": place,
                                   "help": "compare what every operation makes, with what "
                                   "NumPy's kernels make of the same operands (reference), or "
                                   "with a run saved by --save_operations; exit code 1 if it "
                                   "differs"}),
        ("--save_operations", {"metavar": "FILE.npz", "help": "what every operation makes in the "
                               "first pass"}),
        ("--atol", {"type": not_negative, "help": "absolute tolerance (default by type: f32 1e-4, "
                    "f16 1e-3, bf16 1e-2; integers are exact)"}),
        ("--rtol", {"type": not_negative, "help": "relative tolerance (default 1e-5)"}),
        ("--pcc", {"type": _correlation, "help": "least Pearson correlation; alone it replaces the "
                   "elementwise rule, with --atol or --rtol both must hold"}),
        ("--init", {"choices": INITS, "help": "make the inputs that are not given"}),
        ("--seed", {"type": count, "default": 0, "help": "for --init=randn (default 0)"}),
    )  # fmt: skip


def _add_how(parser: argparse.ArgumentParser) -> None:
    machine = {"metavar": "NAME|machine.yaml|.ttsys", "dest": "device",
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
        ("--prices", {"metavar": "NAME|prices.yaml",
                      "help": "the table by which --executor=auto and torch choose who computes an "
                      "operation: that of a family of processors, or a file of that "
                      "form (default: the family nearest to this processor)"}),
        ("--window", {"type": positive, "default": DEFAULT_WINDOW,
                      "help": "tasks queued before they run; 1: each call at once"}),
        ("--aggregate", {"choices": ("auto", "never", "always"), "default": "auto",
                         "help": "whether programs that feed each other are linked and run as "
                         "one: where the bits stay the same and it pays (auto, the default), "
                         "never, or always, where the last bits of sums may differ"}),
        ("--lanes", {"type": positive, "default": 1, "metavar": "N",
                     "help": "threads on which independent stretches of a plan run beside each "
                     "other, where each takes 100 us at least by its counts (default: 1)"}),
        ("--strict_types", {"action": "store_true",
                            "help": "links and --input may not change the floating type"}),
        ("--check_memory", {"action": "store_true",
                            "help": "poison freed bytes, guard padding (slower); in Python "
                            "open_device(debug=True)"}),
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
                           "--trace and --record, - is standard output"}),
        ("--save_artifacts", {"action": "store_true",
                              "help": "inputs, outputs, programs, plans and reports as files"}),
        ("--artifact_dir", {"default": "stitch-artifacts", "metavar": "FOLDER", "type": place,
                            "help": "where to (default: %(default)s)"}),
        ("--trace", {"metavar": "FILE", "help": "a Chrome trace (opens in Perfetto), compressed "
                     "as FILE.json.gz"}),
        ("--visualizer", {"metavar": "FOLDER", "type": place, "help": "operations, tensors and "
                          "what lies in the spaces, as the folder that ttnn-visualizer opens"}),
        ("--record", {"metavar": "FILE", "help": "machine, plans and allocator events"}),
        ("--replay", {"metavar": "FILE", "help": "re-run recorded allocator events and check "
                      "every address"}),
    )  # fmt: skip


def refuse_without_effect(parser: argparse.ArgumentParser, words: argparse.Namespace) -> None:
    """Raise `UsageError` for options that have no effect without others that are absent."""
    alone = [w for w in ("atol", "rtol", "pcc") if getattr(words, w) is not None]
    if alone and not (words.expected_output or words.expected_operations):
        raise UsageError(
            f"--{alone[0]} has no effect without --expected_output or --expected_operations"
        )
    if words.artifact_dir != parser.get_default("artifact_dir") and not words.save_artifacts:
        raise UsageError("--artifact_dir has no effect without --save_artifacts")


def _correlation(text: str) -> float:
    number = real(text)
    if not -1 <= number <= 1:
        raise argparse.ArgumentTypeError(f"takes a number from -1 to 1, not {text!r}")
    return number

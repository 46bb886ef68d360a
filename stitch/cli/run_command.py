"""`stitch run`: run `.ttb` modules or a pipeline file on a simulated device.

`--max_copies=N` limits the writes to memory spaces in a pass, except those of host arrays: copies
between programs, moves, evictions and bounces. Without data (`--dry_run`, `--executor=null`) it
limits the copies of the plan. Nothing here loads NumPy: `--help` is quick.
"""

from __future__ import annotations

import argparse

from stitch import plugins
from stitch.cli.command import Command
from stitch.cli.options import (
    EXPECTED_FORM,
    FUNCTION_OPTION,
    INPUT_FORM,
    OUTPUT_FORM,
    WIRE_OPTION,
)
from stitch.cli.parser import (
    Group,
    add_options,
    count,
    file_path,
    make_parser,
    not_negative,
    not_one_of,
    positive,
    real,
)
from stitch.option_values import (
    BACKENDS,
    DEFAULT_WINDOW,
    EXECUTOR_NAMES,
    IN_FLIGHT,
    INITS,
    TORCH_DEVICES,
    is_torch_device,
)

EXAMPLES = """\
  stitch-run a.ttb b.ttb --input=x=@x.npy --output=y=@y.npy --explain
  stitch-run --module=a.ttb --input="2x2xf32=1 2 3 4" --expected_output=@y.npy
  stitch-run a.ttb --init=randn --executor=onnxruntime --expected_operations=reference
  stitch-run --module=a.ttb --module=b.ttb --dry_run --max_copies=0
  stitch-run --module=a.ttb --init=randn --num_runs=100 --warmup_runs=5 --print_statistics
  stitch-run a.ttb b.ttb --init=randn --devices=2 --num_runs=100 --print_statistics
  stitch-run pipeline.yaml --devices=two.yaml --backend=ray --input=x=@x.npy
  stitch-run pipeline.yaml --input=x=@x.npy --trace=trace.json --record=run.json
  stitch-run --replay=run.json
  stitch-run --example=digits"""


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `stitch-run`."""
    _add_what(parser.add_argument_group("what runs, and its data"))
    _add_how(parser.add_argument_group("devices, executors and passes"))
    _add_reports(parser.add_argument_group("reports"))


def _add_what(parser: Group) -> None:
    add_options(
        parser,
        ("files", {"nargs": "*", "metavar": "FILE",
                   "help": "modules in run order (.ttb; .onnx is compiled first; .ttnn is only "
                   "planned), or one pipeline (.yaml)"}),
        ("--module", {"action": "append", "default": [], "metavar": "FILE",
                      "help": "a module of any file name, - for standard input; repeat it for "
                      "the next module"}),
        FUNCTION_OPTION,
        WIRE_OPTION,
        ("--input", {"action": "append", "default": [], "metavar": "WHAT", "help": INPUT_FORM}),
        ("--output", {"action": "append", "default": [], "metavar": "WHERE", "help": OUTPUT_FORM}),
        ("--expected_output", {"action": "append", "default": [], "metavar": "WHAT",
                               "help": "compare an output; exit code 1 if it differs: "
                               + EXPECTED_FORM}),
        ("--expected_operations", {"choices": ("reference",),
                                   "help": "compare the results of every operation with NumPy "
                                   "on the same operands; exit code 1 if they differ"}),
        ("--atol", {"type": not_negative, "help": "absolute tolerance (default by type: f32 1e-4, "
                    "f16 1e-3, bf16 1e-2; integers are exact)"}),
        ("--rtol", {"type": not_negative, "help": "relative tolerance (default 1e-5)"}),
        ("--pcc", {"type": _correlation, "help": "minimum Pearson correlation; replaces the "
                   "elementwise comparison, with --atol or --rtol both must pass"}),
        ("--at", {"action": "append", "default": [], "metavar": "NAME=N", "help": "a named size of "
                  "a module or ONNX model, if no --input has it: batch=7,length=3"}),
        ("--init", {"choices": INITS, "help": "generate the missing inputs"}),
        ("--seed", {"type": count, "default": 0, "help": "seed of --init=randn (default 0)"}),
    )  # fmt: skip


def _executor(name: str) -> str:
    """Check the name of an executor; those of plugins are looked up only for other names."""
    is_known = name in EXECUTOR_NAMES or is_torch_device(name)
    if not is_known and name not in plugins.names("executors"):
        names = [*EXECUTOR_NAMES, *TORCH_DEVICES, *plugins.names("executors")]
        raise argparse.ArgumentTypeError(not_one_of(names, name))
    return name


def _add_how(parser: Group) -> None:
    machine = {"metavar": "NAME|machine.yaml|.ttsys", "dest": "device",
               "help": "default: the machine that the first module was compiled for; torch:cpu or "
               "cuda:0: a device of PyTorch, for what is compiled for cuda"}  # fmt: skip
    add_options(
        parser,
        ("--device", machine),
        ("--target", machine | {"help": "the same as --device"}),
        ("--devices", {"metavar": "N|specification.yaml", "type": file_path,
                       "help": "run on several devices: N equal ones, or those of a machine "
                       "specification; modules are placed by the pipeline file, or automatically"}),
        ("--backend", {"choices": BACKENDS, "help": "where several devices are: local, all in "
                       "this process (default); ray, each in a process of its own"}),
        ("--address", {"metavar": "auto|HOST:PORT", "help": "the running Ray cluster to use, with "
                       "--backend=ray (default: start one here, and end it)"}),
        ("--in_flight", {"type": positive, "metavar": "N", "help": "passes under way at once on "
                         f"several devices (default: {IN_FLIGHT})"}),
        ("--list_devices", {"action": "store_true", "help": "list the known machines and exit"}),
        ("--example", {"metavar": "NAME", "help": "write the files of an example (digits, "
                       "recurrent, ...) here, print how to run it, and exit"}),
        ("--executor", {"type": _executor,
                        "metavar": "{" + ",".join((*EXECUTOR_NAMES, *TORCH_DEVICES)) + "}",
                        "help": "how operations are computed (default: numpy); auto: each by NumPy "
                        "or ONNX Runtime, whichever is faster; torch: each by NumPy, ONNX Runtime "
                        "or PyTorch; null: plan only, compute nothing; torch:cpu or cuda:0: by "
                        "PyTorch, in that device's memory; or a plugin's name"}),
        ("--allocator", {"metavar": "NAME", "help": "the plugin that chooses addresses in L1 and "
                         "DRAM; the checker checks every plan"}),
        ("--residency", {"metavar": "NAME", "help": "the plugin whose rule chooses what is evicted "
                         "from a full memory space; the checker checks every plan"}),
        ("--threads", {"type": positive, "metavar": "N",
                       "help": "threads of ONNX Runtime for one operation, with "
                       "--executor=onnxruntime or auto (default: 1); OMP_NUM_THREADS sets those "
                       "of NumPy and PyTorch"}),
        ("--prices", {"metavar": "NAME|prices.yaml",
                      "help": "the cost table by which --executor=auto and torch select a kernel "
                      "for each operation: of a processor family, or a file in that format "
                      "(default: the family nearest to this processor)"}),
        ("--window", {"type": positive, "default": DEFAULT_WINDOW, "metavar": "N",
                      "help": "tasks queued before they run (default: %(default)s); 1: run each "
                      "call immediately"}),
        ("--inter_op_threads", {"type": positive, "default": 1, "metavar": "N",
                     "help": "threads that run independent sections of a plan concurrently, if "
                     "each is estimated at 100 us or more (default: 1)"}),
        ("--strict_types", {"action": "store_true", "help": "refuse links and --input arrays that "
                            "change the floating-point type"}),
        ("--check_memory", {"action": "store_true",
                            "help": "overwrite freed bytes and check padding (slower); in Python "
                            "open_device(debug=True)"}),
        ("--loops", {"type": positive, "default": 1, "metavar": "N",
                     "help": "repeat all passes N times; outputs are compared each time"}),
        ("--num_runs", {"type": positive, "default": 1, "metavar": "N",
                        "help": "timed passes in each loop (default: 1)"}),
        ("--warmup_runs", {"type": count, "default": 0, "metavar": "N",
                           "help": "untimed passes before them (default: 0)"}),
        ("--dry_run", {"action": "store_true", "help": "plan and estimate times, execute nothing; "
                       "needs no data"}),
        ("--max_copies", {"type": count, "metavar": "N",
                          "help": "exit code 7 if one pass makes more than N copies: writes to "
                          "memory spaces, except those of host arrays"}),
        ("--check_memory_leak", {"action": "store_true",
                                 "help": "exit code 6 if memory is still allocated at the end"}),
    )  # fmt: skip


def _add_reports(parser: Group) -> None:
    add_options(
        parser,
        ("--explain", {"action": "store_true",
                       "help": "print every copy with bytes, simulated time and reason"}),
        ("--memory", {"action": "store_true",
                      "help": "print the contents and the peak of each memory space"}),
        ("--print_statistics", {"action": "store_true",
                                "help": "print p50, p90 and p99 of the wall times of passes"}),
        ("--result_file", {"nargs": "?", "const": "run_results.json", "metavar": "FILE",
                           "help": "write all reports as JSON (default name: %(const)s); -, as "
                           "with --trace and --record, is standard output"}),
        ("--save_artifacts", {"action": "store_true",
                              "help": "write inputs, outputs, programs, plans and reports"}),
        ("--artifact_dir", {"default": "stitch-artifacts", "metavar": "FOLDER", "type": file_path,
                            "help": "the folder of --save_artifacts (default: %(default)s)"}),
        ("--trace", {"metavar": "FILE", "help": "write a Chrome trace (for Perfetto), compressed "
                     "if FILE ends with .gz"}),
        ("--visualizer", {"metavar": "FOLDER", "type": file_path, "help": "write operations, "
                          "tensors and buffers as a report folder for ttnn-visualizer"}),
        ("--report", {"metavar": "FILE.html", "type": file_path,
                      "help": "write a page about the run: memory map, links, copies with their "
                      "reasons; one file that any browser opens"}),
        ("--record", {"metavar": "FILE", "help": "write machine, plans and allocator events"}),
        ("--replay", {"metavar": "FILE", "help": "replay the allocator events of a record and "
                      "check every address"}),
    )  # fmt: skip


def _correlation(text: str) -> float:
    number = real(text)
    if not -1 <= number <= 1:
        raise argparse.ArgumentTypeError(f"takes a number from -1 to 1, not {text!r}")
    return number


def command() -> Command:
    """Return `stitch run` with its options; its body is loaded when it runs."""
    parser = make_parser("Run .ttb modules, stitched, on a simulated device.", EXAMPLES)
    add_run_options(parser)

    def body(options: argparse.Namespace) -> int:
        from stitch.cli.run_files import run

        return run(parser, options)

    return Command(parser.read, body)

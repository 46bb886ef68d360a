"""`stitch-run`: run `.ttb` modules or a pipeline file on a simulated device.

`--max_copies=N` limits the writes to memory spaces in a pass, except those of host arrays: copies
between programs, moves, evictions and bounces. Without data (`--dry_run`, `--executor=null`) it
limits the copies of the plan.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from pathlib import Path

from stitch.cli.command import EXIT_OK, Command, say
from stitch.cli.module_files import read_document
from stitch.cli.parser import (
    add_options,
    count,
    file_path,
    make_parser,
    not_negative,
    positive,
    real,
)
from stitch.cli.run.run_session import EXPECTED_FORM, OUTPUT_FORM, run_session
from stitch.cli.run_inputs import FORM as INPUT_FORM
from stitch.cli.run_inputs import INITS
from stitch.cli.wiring import FUNCTION_OPTION, WIRE_OPTION
from stitch.documents import MACHINE, MODULE, kind_of
from stitch.errors import StitchError, UsageError, unknown
from stitch.files import nearest_file
from stitch.machine import load_machine, machine_names
from stitch.mesh import BACKENDS, IN_FLIGHT
from stitch.report import counted, replay
from stitch.runtime import DEFAULT_WINDOW, EXECUTORS

# `--example`.

_PACKAGE = Path(__file__).resolve().parents[2]
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")


def example_names() -> tuple[str, ...]:
    """Return the names that `write_example` takes: folders, and scripts without suffix."""
    return tuple(sorted(_sources()))


def write_example(name: str, folder: str | Path = ".") -> tuple[Path, str]:
    """Copy an example into a folder; return its path there and the commands that run it.

    Raises `UsageError` for an unknown name, or if the path exists.
    """
    sources = _sources()
    if name not in sources:
        raise unknown(f"there is no example {name!r}", name, example_names())
    source = sources[name]
    target = Path(folder) / source.name
    if target.exists() or target.is_symlink():
        raise UsageError(
            f"{str(target)!r} exists already",
            remedy="remove it, or write the example from another folder",
        )
    # Atomic: an incomplete folder would be refused at the next attempt.
    with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".part", dir=folder) as part:
        copy = Path(part) / source.name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=_IGNORED)
        else:
            shutil.copyfile(source, copy)
        copy.rename(target)
    return target, _how_to_run(target)


def _sources() -> dict[str, Path]:
    inside = _PACKAGE / "examples"
    folder = inside if inside.is_dir() else _PACKAGE.parent / "examples"
    if not folder.is_dir():
        raise StitchError(
            "the examples are missing", where=str(folder), remedy="install the package again"
        )
    scripts = {p.stem: p for p in folder.glob("*.py")}
    return scripts | {p.name: p for p in folder.iterdir() if (p / "README.md").is_file()}


def _how_to_run(target: Path) -> str:
    """Return the commands that run an example: the script, or the first block of its README."""
    if target.is_file():
        return f"python {target}"
    text = (target / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return f"cd {target}\n{blocks[0].rstrip()}" if blocks else f"see {target / 'README.md'}"


# Options.

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
    _add_what(parser)
    _add_how(parser)
    _add_reports(parser)


def _add_what(parser: argparse.ArgumentParser) -> None:
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
        ("--init", {"choices": INITS, "help": "generate the missing inputs"}),
        ("--seed", {"type": count, "default": 0, "help": "seed of --init=randn (default 0)"}),
    )  # fmt: skip


def _add_how(parser: argparse.ArgumentParser) -> None:
    machine = {"metavar": "NAME|machine.yaml|.ttsys", "dest": "device",
               "help": "default: the machine that the first module was compiled for"}  # fmt: skip
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
        ("--executor", {"choices": tuple(EXECUTORS),
                        "help": "how operations are computed (default: numpy); auto: each by NumPy "
                        "or ONNX Runtime, whichever is faster; torch: each by NumPy, ONNX Runtime "
                        "or PyTorch; null: plan only, compute nothing"}),
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


def _add_reports(parser: argparse.ArgumentParser) -> None:
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
        ("--record", {"metavar": "FILE", "help": "write machine, plans and allocator events"}),
        ("--replay", {"metavar": "FILE", "help": "replay the allocator events of a record and "
                      "check every address"}),
    )  # fmt: skip


def refuse_without_effect(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Raise `UsageError` for options that have no effect without an absent option."""
    alone = [w for w in ("atol", "rtol", "pcc") if getattr(options, w) is not None]
    if alone and not (options.expected_output or options.expected_operations):
        raise UsageError(
            f"--{alone[0]} has no effect without --expected_output or --expected_operations"
        )
    if options.artifact_dir != parser.get_default("artifact_dir") and not options.save_artifacts:
        raise UsageError("--artifact_dir has no effect without --save_artifacts")


def _correlation(text: str) -> float:
    number = real(text)
    if not -1 <= number <= 1:
        raise argparse.ArgumentTypeError(f"takes a number from -1 to 1, not {text!r}")
    return number


_YAML = (".yaml", ".yml")
_MODULES = (".ttb", ".onnx", ".ttnn")


def command() -> Command:
    """`stitch-run` and its options."""
    parser = make_parser("Run .ttb modules, stitched, on a simulated device.", EXAMPLES)
    add_run_options(parser)
    return Command(parser.read, lambda options: _run(parser, options))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.list_devices:
        for name in machine_names():
            shape = load_machine(name).shape
            spaces = ", ".join(
                f"{space.value} {shape.space(space).banks} x {shape.space(space).capacity} B"
                for space in shape.spaces
            )
            say(f"{name}: {spaces}")
        return EXIT_OK
    if options.example is not None:
        target, how = write_example(options.example)
        say(f"wrote {target}; to run it:\n{how}")
        return EXIT_OK
    if options.replay is not None:
        alone = {"replay", "debug", "max_memory", "quiet"}
        extra = [w for w, value in vars(options).items()
                 if w not in alone and value not in (parser.get_default(w), [])]  # fmt: skip
        if extra:
            raise UsageError(
                "a replay runs alone: the record names the programs and the machine",
                got=", ".join([*options.files, *(f"--{w}" for w in extra if w != "files")]),
                remedy=f"stitch-run --replay={options.replay}",
            )
        return _replay(options.replay)
    _take_files(options)
    refuse_without_effect(parser, options)
    return run_session(options)


def _replay(path: str) -> int:
    """Replay a record; raises `FormatError` for a bad file, `TaskError` at a difference."""
    done = read_document(path, replay)
    numbers = (
        counted(done.runs, "plan run"),
        counted(done.allocations, "allocation"),
        counted(done.frees, "free"),
        counted(done.moves, "move"),
    )
    say(
        f"[SUCCESS] {counted(done.events, 'event')} replayed on {done.machine}: "
        f"{', '.join(numbers)}; every address as recorded"
    )
    return EXIT_OK


def _take_files(options: argparse.Namespace) -> None:
    """Assign `options.files` to `options.pipeline` or `options.module`; raise `UsageError`."""
    options.pipeline = None
    documents = [path for path in options.files if Path(path).suffix.lower() in _YAML]
    if not documents:
        _take_modules(options)
        return
    if len(options.files) > 1 or options.module or options.wire or options.function:
        raise UsageError(
            "a pipeline runs alone: its file names the modules and their connections",
            got=", ".join([*options.files, *(f"--module={path}" for path in options.module)]),
            remedy=f"stitch-run {documents[0]}, without other files, --module, --function, --wire",
        )
    (options.pipeline,) = documents
    kind = kind_of(options.pipeline)
    if kind == MACHINE:
        raise UsageError(
            f"{options.pipeline!r} describes a machine, not a pipeline",
            remedy=f"stitch-run a.ttb --device={options.pipeline}",
        )
    if kind == MODULE:
        binary = Path(options.pipeline).with_suffix(".ttb").name
        raise UsageError(
            f"{options.pipeline!r} is a module that is not compiled",
            remedy=f"stitch-compile {options.pipeline} -o {binary}, then stitch-run {binary}",
        )


def _take_modules(options: argparse.Namespace) -> None:
    unknown = [p for p in options.files if p != "-" and Path(p).suffix.lower() not in _MODULES]
    if unknown and not Path(unknown[0]).is_file():
        raise UsageError(
            f"{unknown[0]!r} is a folder, expected a file" if Path(unknown[0]).is_dir()
            else f"there is no file {unknown[0]!r}",
            expected="modules (.ttb, .onnx, .ttnn), or one pipeline (.yaml)",
            remedy=nearest_file(unknown[0], (*_MODULES, *_YAML)) or None,
        )  # fmt: skip
    if unknown:
        raise UsageError(
            f"{unknown[0]!r} has an unknown suffix",
            expected="modules (.ttb, .onnx, .ttnn), or one pipeline (.yaml)",
            remedy=f"to run it as a .ttb module, write --module={unknown[0]}",
        )
    if options.files and options.module:
        raise UsageError(
            "the order of modules is ambiguous: some have --module and some do not",
            remedy="write all of them with --module=, or none",
        )
    options.module = [*options.module, *options.files]
    if not options.module:
        raise UsageError(
            "there is nothing to run", expected="modules (.ttb, .onnx, .ttnn), or a pipeline.yaml"
        )

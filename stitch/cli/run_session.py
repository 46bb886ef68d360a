"""One run of `stitch-run`, from its parsed options to its exit code.

Options and files are checked before anything runs; output files are written at the end.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from stitch import api, documents
from stitch.api import Device
from stitch.cli.chain import Chain, PipelineRunnable, RunInput, Runnable, RunOutput
from stitch.cli.command import (
    EXIT_FAILURE,
    EXIT_MISMATCH,
    EXIT_OK,
    EXIT_OVER_LIMIT,
    failure_of,
    prog,
    say_aside,
    say_result,
    say_written,
)
from stitch.cli.device_costs import copies_inside
from stitch.cli.module_files import (
    Dimensions,
    lacking_lines,
    machine_for,
    read_modules,
    with_unique_names,
)
from stitch.cli.options import EXPECTED_FORM, OUTPUT_FORM
from stitch.cli.output_checks import (
    DATABASE,
    JSON,
    NPY,
    PAGE,
    RECORD,
    RESULT,
    TEXT,
    OutputChecks,
    array_kind,
    trace_kind,
)
from stitch.cli.phases import phase
from stitch.cli.run_inputs import (
    Note,
    SlotNames,
    archive_arrays,
    assign,
    gather_inputs,
    is_archive,
    is_array_text,
    named_inputs,
    parse_array,
    split_slots,
    text_of_array,
)
from stitch.cli.run_sizes import parse_sizes, shapes_for, sizes_for
from stitch.cli.run_target import (
    AddReports,
    Measured,
    OneDevice,
    RunTarget,
    one_device,
    open_several,
    percentiles,
    refuse_for_one,
)
from stitch.cli.tables import table_lines
from stitch.cli.wiring import wires_of
from stitch.errors import StitchError, UsageError, unknown
from stitch.files import OutputFiles, make_folder, write_files
from stitch.forms import NUMPY_SUFFIXES, npy_bytes, npz_bytes, typed
from stitch.linker import ProgramNames
from stitch.machine import Machine, load_machine, with_policies
from stitch.model import PRODUCER
from stitch.option_values import is_torch_device
from stitch.program import Array, DataType
from stitch.report import (
    ComparedResult,
    OperationComparison,
    OperationLine,
    PageExtras,
    Tolerances,
    Verdict,
    compare,
    counted,
    memory_views,
    plan_json,
)
from stitch.runtime import LoadedProgram

# Outputs: `--output` and `--expected_output`.

IGNORED = "(ignored)"


@dataclass(frozen=True, slots=True)
class Destinations:
    """The destination of each result.

    Args:
        files: Result → path of a `.npy` file.
        archives: Path of a `.npz` file → results.
        printed: Results that are printed in full.
        brief: Print all results, abbreviated.
    """

    files: Mapping[int, Path]
    archives: Mapping[Path, tuple[int, ...]]
    printed: tuple[int, ...]
    brief: bool


def destinations(
    outputs: Sequence[RunOutput], options: Sequence[str], modules: ProgramNames | None = None,
    *, brief: bool,
) -> Destinations:  # fmt: skip
    """Parse the values of `--output`.

    Args:
        outputs: The results of the run.
        options: The values of the option.
        modules: The names of the chain's modules, for `MODULE.SLOT`.
        brief: Without options, print all results, abbreviated.

    Raises:
        UsageError: A value has another form or names no result.
    """
    single = (word for word in options if not is_archive(word))
    split = split_slots(
        single, lambda word: word in ("", "-") or word.startswith("@"), "output", OUTPUT_FORM
    )
    assigned = assign(split, SlotNames(outputs, "output", modules), "output")
    files: dict[int, Path] = {}
    archives: dict[Path, tuple[int, ...]] = {
        Path(word[1:]): tuple(range(len(outputs))) for word in options if is_archive(word)
    }
    for index, word in sorted(assigned.items()):
        if not word.startswith("@"):
            continue
        path = Path(word[1:])
        if path.suffix.lower() not in NUMPY_SUFFIXES:
            raise UsageError(
                "unknown type of a result file", where="--output", got=str(path),
                expected=" or ".join(NUMPY_SUFFIXES),
            )  # fmt: skip
        if is_archive(word):
            archives[path] = (*archives.get(path, ()), index)
        elif path in files.values():
            raise UsageError(f"two outputs have the file {path}", where="--output")
        else:
            files[index] = path
    printed = tuple(index for index, word in sorted(assigned.items()) if word == "-")
    return Destinations(files, archives, printed, brief and not options)


def add_results(
    where: Destinations,
    outputs: Sequence[RunOutput],
    arrays: Sequence[Array],
    files: OutputFiles,
    note: Note,
) -> list[str]:
    """Add the result files to `files`; return the lines to print. `note` receives remarks."""
    for index in sorted({*where.files, *(i for m in where.archives.values() for i in m)}):
        if outputs[index].type.data_type is DataType.BFLOAT16:
            note(f"output {outputs[index].name!r} is bfloat16, and is written as float32 (exact)")
    for output, array in zip(outputs, arrays, strict=True):
        note_if_not_finite(output.name, array, note)
    for index, path in where.files.items():
        files[path] = npy_bytes(arrays[index])
    for path, members in where.archives.items():
        files[path] = npz_bytes({outputs[i].name: arrays[i] for i in dict.fromkeys(members)})
    shown = range(len(outputs)) if where.brief else where.printed
    return [
        f"result[{i}] {outputs[i].name}: {text_of_array(arrays[i], whole=not where.brief)}"
        for i in shown
    ]


def note_if_not_finite(name: str, array: Array, note: Note) -> None:
    """Note NaN and infinite elements: two runs with the same ones compare equal."""
    if not DataType.from_dtype(array.dtype).is_floating:
        return
    for what, count in (("NaN", np.isnan(array).sum()), ("infinite", np.isinf(array).sum())):
        if count:
            note(f"output {name!r}: {count:,} of {array.size:,} elements are {what}")


def expectations(
    outputs: Sequence[RunOutput], options: Sequence[str], modules: ProgramNames | None = None
) -> dict[int, Array]:
    """Return the arrays of `--expected_output` by result; raise `UsageError`, `FormatError`."""
    names = SlotNames(outputs, "output", modules)
    single = (word for word in options if not is_archive(word))
    split = split_slots(
        single, lambda w: w == IGNORED or is_array_text(w), "expected output", EXPECTED_FORM
    )
    wanted: dict[int, Array] = {}
    for index, word in assign(split, names, "expected_output").items():
        if word != IGNORED:
            output = outputs[index]
            wanted[index] = parse_array(word, output.name, {output.type.shape})
    for word in filter(is_archive, options):
        for (index,), array in archive_arrays(word, outputs, names, "expected_output"):
            wanted[index] = array
    return {
        i: typed(array, outputs[i].type.data_type, f"expected_output {outputs[i].name!r}")
        for i, array in wanted.items()
    }


# `--save_artifacts`.

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_REPORTS = ("plans.json", "memory.json", "explain.txt")


def add_artifacts(
    files: OutputFiles,
    folder: str,
    device: api.Device,
    runnable: Runnable,
    arrays: Sequence[Array],
    results: Sequence[Array],
) -> None:
    """Add the artifacts of a run to `files`, and create their folders."""
    places = _places(folder, runnable)
    for part in places:
        make_folder(Path(folder) / part)
    for path, array in zip(places["inputs"], arrays, strict=True):
        files[path] = npy_bytes(array)
    for path, array in zip(places["outputs"], results, strict=False):  # No results without data.
        files[path] = npy_bytes(array)
    for path, program in zip(places["programs"], runnable.programs, strict=True):
        files[path] = program.program.text()
    plans = [plan_json(plan) | {"runs": times} for plan, times in device.history.plans]
    texts = json.dumps(plans, indent=2), json.dumps(memory_views(device), indent=2)
    for name, text in zip(_REPORTS, (*texts, device.explain()), strict=True):
        files[Path(folder) / name] = text + "\n"


def artifact_paths(folder: str, runnable: Runnable) -> list[Path]:
    """Return the files of `add_artifacts`."""
    parts = [path for paths in _places(folder, runnable).values() for path in paths]
    return [*parts, *(Path(folder) / name for name in _REPORTS)]


def _places(folder: str, runnable: Runnable) -> dict[str, tuple[Path, ...]]:
    """Return the paths of each part's artifacts, without unsafe characters of slot names."""
    parts: tuple[tuple[str, Sequence[RunInput | RunOutput | LoadedProgram], str], ...] = (
        ("inputs", runnable.inputs, ".npy"), ("outputs", runnable.outputs, ".npy"),
        ("programs", runnable.programs, ".txt"),
    )  # fmt: skip
    return {
        part: tuple(
            Path(folder) / part / f"{at}-{_UNSAFE.sub('_', one.name)[:80]}{suffix}"
            for at, one in enumerate(named)
        )
        for part, named, suffix in parts
    }


# `--expected_operations`.

_COLUMNS = (
    "program", "operation", "output", "runs", "PCC", "difference", "atol", "rtol", "", "at"
)  # fmt: skip
_LEFT = {"program", "operation", "output", "", "at"}


def operation_lines(comparison: OperationComparison | None) -> list[str]:
    """Return a table of the results of operations, and the verdict."""
    if comparison is None:
        return []
    lines = comparison.lines
    if comparison.first is None:
        verdict = f"[SUCCESS] {counted(len(lines), 'result')} of operations as expected"
    else:
        many = counted(sum(not line.verdict.passed for line in lines), "result")
        first = comparison.first.text
        verdict = f"[FAILED] {many} of operations not as expected; the first: {first}"
    return [*_table(lines), verdict]


def _table(lines: Sequence[OperationLine]) -> Iterator[str]:
    """Yield a table with the differences of each result of each operation."""
    rows = []
    for line in lines:
        verdict = line.verdict
        figures = (verdict.pcc, verdict.max_abs_difference, verdict.atol, verdict.rtol)
        rows.append([
            line.program, f"{line.index} {line.op}", f"{line.output} {verdict.name}",
            str(line.runs), *("-" if f is None else f"{f:.6g}" for f in figures),
            "ok" if verdict.passed else "FAILED", line.location,
        ])  # fmt: skip
    yield from table_lines(_COLUMNS, rows, _LEFT)


# Passes and their report.


def leaks(device: Device) -> list[str]:
    """Describe each buffer that is still allocated."""
    device.flush()
    return [
        f"{space.value} {address:#x}: {size} B per bank, {origin}"
        for space, use in sorted(device.memory_use().items(), key=lambda item: item[0].value)
        for address, size, origin in sorted(use.buffers)
    ]


def result_json(session: RunSession, code: int) -> dict[str, Any]:
    """Return all reports as plain data, for `--result_file`."""
    runnable, operations = session.runnable, session.operations
    return {
        "result": {0: "pass", 1: "mismatch"}.get(code, "error"),
        "exit_code": code,
        "errors": list(session.failures),
        "producer": PRODUCER,
        "inputs": [{"name": i.name, "type": i.type.text()} for i in runnable.inputs],
        "outputs": [{"name": o.name, "type": o.type.text()} for o in runnable.outputs],
        "comparisons": [
            {"result": index, **asdict(verdict)}
            for index, verdict in sorted(session.verdicts.items())
        ],
        **({} if operations is None else {"operations": [asdict(o) for o in operations.lines]}),
        "passes": session.measured.passes,
        "seconds": percentiles(session.measured.seconds),
        **session.target.as_json(session.measured),
    }


#: Loads the programs of a run, after the reports have begun to observe the device.
_Load: TypeAlias = Callable[[], Runnable]


@dataclass(slots=True)
class RunSession:
    """The state of a run."""

    options: argparse.Namespace
    target: RunTarget
    runnable: Runnable
    arrays: tuple[Array, ...]
    where: Destinations
    expected: dict[int, Array]
    measured: Measured = field(default_factory=Measured)
    results: list[Array] = field(default_factory=list)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    files: OutputFiles = field(default_factory=dict)
    operations: OperationComparison | None = None


def run_session(options: argparse.Namespace) -> int:
    """Run the modules or pipeline of the options; write errors to `--result_file` as well."""
    if is_torch_device(options.device):
        if options.executor not in (None, options.device):
            raise UsageError(
                f"--device={options.device} computes by PyTorch's kernels",
                got=f"--executor={options.executor}", remedy="leave out --executor",
            )  # fmt: skip
        if not options.dry_run:
            options.executor = options.device
        options.device = "cuda"
    checks = OutputChecks()
    checks.reads(filter(None, (options.pipeline, options.device, *options.module)))
    checks.add_folder(options.artifact_dir, "--artifact_dir")
    for path, kind, option in ((options.result_file, RESULT, "--result_file"),
                               (options.trace, trace_kind(options.trace), "--trace"),
                               (options.record, RECORD, "--record"),
                               (options.report, PAGE, "--report")):  # fmt: skip
        if path is not None:
            checks.add(path, kind, option)
    if options.visualizer is not None:
        checks.add_folder(options.visualizer, "--visualizer")
        for name, kind in (("db.sqlite", DATABASE), ("config.json", JSON)):
            checks.add(Path(options.visualizer) / name, kind, "--visualizer",
                       own_folder=options.visualizer)  # fmt: skip
    try:
        return _run(options, checks)
    except (Exception, KeyboardInterrupt) as error:
        # Replace the result of an earlier run, whatever the error is.
        if options.result_file is not None and not checks.is_read(options.result_file):
            what, code = failure_of(error)
            body = {"result": "error", "exit_code": code, "error": what}
            text = json.dumps(body, indent=2) + "\n"
            say_written(write_files({options.result_file: text}))
        raise


def _run(options: argparse.Namespace, checks: OutputChecks) -> int:
    with ExitStack() as stack:
        target, load = (_chain if options.pipeline is None else _pipeline)(options)
        stack.enter_context(target.opened)
        add_reports = stack.enter_context(target.observed(options))
        with phase("loading"):
            session = _prepared(options, target, load())
        _check_outputs(session, checks)
        try:
            return _observed_run(session, add_reports, stack)
        except (Exception, KeyboardInterrupt) as error:
            if options.report is not None or options.record is not None:
                # The page must not hide the error: writing it may fail for the same reason.
                with suppress(StitchError, MemoryError):
                    files: OutputFiles = {}
                    add_reports(files, PageExtras(error=failure_of(error)[0]))
                    say_written(write_files(files))
            raise


def _observed_run(session: RunSession, add_reports: AddReports, stack: ExitStack) -> int:
    options, target = session.options, session.target
    if options.expected_operations is not None:
        how = Tolerances(options.atol, options.rtol, options.pcc)
        compared = OperationComparison(one_device(target), how)
        session.operations = stack.enter_context(compared)
    _announce_passes(session)
    passes = options.loops * (options.warmup_runs + options.num_runs)
    with phase("planning and running", passes) as tick:
        _all_passes(session, tick)
    lines = _outcome(session)
    code = _checked(session)
    if options.save_artifacts:
        add_artifacts(session.files, options.artifact_dir, one_device(target),
                      session.runnable, session.arrays, session.results)  # fmt: skip
    if options.check_memory_leak:
        code = max(code, _leak_check(session))
    add_reports(session.files, _page_extras(session))
    body = result_json(session, code) if options.json or options.result_file else None
    if options.result_file is not None:
        session.files[options.result_file] = json.dumps(body, indent=2) + "\n"
    with phase("writing"):
        say_written(write_files(session.files))
    say_result(body, lambda: lines)
    for failure in () if options.json else session.failures:
        say_aside(f"{prog()}: error: {failure}")
    return code


def _page_extras(session: RunSession) -> PageExtras:
    """Return what the page shows beside the record."""
    most, copies = session.options.max_copies, session.measured.copies
    wrong = [f"result[{i}]: {v.name}: {v.detail}" for i, v in session.verdicts.items()
             if not v.passed]  # fmt: skip
    return PageExtras(
        notes=(*session.failures, *wrong),
        budgets=[] if most is None else [
            (f"copies in one pass: {copies}, at most {most}", copies <= most)
        ],
    )  # fmt: skip


def _open(options: argparse.Namespace, machine: Machine, devices: str | int | None) -> RunTarget:
    """Open a device, or where `devices` names several, a mesh."""
    executor = options.executor or ("null" if options.dry_run else "numpy")
    if options.dry_run and executor != "null":
        raise UsageError(f"--dry_run executes nothing, --executor={executor} does")
    if executor == "null":
        _refuse_results(options)
    if devices is not None:
        return open_several(options, machine, devices)
    refuse_for_one(options)
    return OneDevice(api.open_device(
        machine,
        executor=executor,
        threads=options.threads,
        prices=options.prices,
        window=options.window,
        debug=options.check_memory,
        strict_types=options.strict_types,
        inter_op_threads=options.inter_op_threads,
    ))  # fmt: skip


def _refuse_results(options: argparse.Namespace) -> None:
    """Raise `UsageError` for options that need results if nothing is executed."""
    wanted = [f"--expected_output={word}" for word in options.expected_output]
    wanted += [f"--output={word}" for word in options.output if "@" in word]
    if options.expected_operations is not None:
        wanted.append(f"--expected_operations={options.expected_operations}")
    if wanted:
        how = "--dry_run" if options.dry_run else f"--executor={options.executor}"
        raise UsageError(
            f"{how} executes nothing, and {wanted[0]} needs a result",
            remedy=f"leave out {how}, or {', '.join(wanted)}"[:300],
        )


def _chain(options: argparse.Namespace) -> tuple[RunTarget, _Load]:
    asked = parse_sizes(options.at)
    used: set[str] = set()

    def sizes(model: api.DynamicModel, path: str, label: str) -> dict[str, int]:
        used.update(model.program.sizes.dims)
        return sizes_for(model, path, label, options.input, asked, options.module)

    def shapes(dimensions: Dimensions, path: str, label: str) -> dict[str, tuple[int, ...]]:
        used.update([axis for axes in dimensions.values() for axis in axes if type(axis) is str])
        return shapes_for(dimensions, path, label, options.input, asked, options.module)

    with phase("reading modules"):
        modules = with_unique_names(read_modules(
            options.module, options.function, device=options.device, compiling=_note, sizes=sizes,
            shapes=shapes,
        ))  # fmt: skip
    for name in asked:
        if name not in used:
            raise unknown(f"no module has a size {name!r}, which --at gives", name, used,
                          UsageError)  # fmt: skip
    for line in lacking_lines(modules):
        _note(line)
    named = named_inputs(options.input)
    wires = wires_of(modules, options.wire, strict_types=options.strict_types, named=named)
    machine = machine_for(options.device, modules)
    target = _open(options, _with_policies(machine, options), options.devices)
    return target, lambda: Chain(target.opened, modules, wires)


def _pipeline(options: argparse.Namespace) -> tuple[RunTarget, _Load]:
    with phase("reading the pipeline"):
        checked = documents.read_pipeline(options.pipeline, strict_types=options.strict_types)
    for warning in checked.warnings:
        say_aside(f"{prog()}: warning: {warning}")
    machine = load_machine(options.device if options.device is not None else checked.machine)
    devices = checked.file.devices if options.devices is None else options.devices
    target = _open(options, _with_policies(machine, options), devices)
    return target, lambda: PipelineRunnable(target.opened, checked)


def _with_policies(machine: Machine, options: argparse.Namespace) -> Machine:
    return with_policies(machine, options.allocator, options.residency)


def _prepared(options: argparse.Namespace, target: RunTarget, runnable: Runnable) -> RunSession:
    target.check(runnable)
    arrays = gather_inputs(
        runnable.inputs, options.input, runnable.modules, init=options.init, seed=options.seed,
        without_data=not target.computes, strict_types=options.strict_types, note=_note,
    )  # fmt: skip
    where = destinations(
        runnable.outputs, options.output, runnable.modules, brief=not options.expected_output
    )
    expected = expectations(runnable.outputs, options.expected_output, runnable.modules)
    return RunSession(options, target, runnable, arrays, where, expected)


def _check_outputs(session: RunSession, checks: OutputChecks) -> None:
    """Check the outputs, after all input is read and before anything is computed."""
    options, where = session.options, session.where
    if where.printed:
        checks.take_standard_output("--output=-")
    for path in (*where.files.values(), *where.archives):
        checks.add(path, array_kind(path), "--output")
    if options.save_artifacts:
        for path in artifact_paths(options.artifact_dir, session.runnable):
            kind = {".npy": NPY, ".json": JSON}.get(path.suffix, TEXT)
            checks.add(path, kind, "--save_artifacts", own_folder=options.artifact_dir)
    checks.refuse_sources()


def _note(text: str) -> None:
    say_aside(f"{prog()}: note: {text}")


def _announce_passes(session: RunSession) -> None:
    """Note the number of program runs, on a terminal and with `--explain` or `--dry_run`."""
    options = session.options
    if not (options.explain or options.dry_run or sys.stderr.isatty()):
        return
    passes = options.loops * (options.warmup_runs + options.num_runs)
    runs = session.runnable.runs
    total = f"{runs * passes:,} program run{'s' if runs * passes != 1 else ''}"
    _note(f"{total} ahead" + (f": {passes:,} passes of {runs:,}" if passes > 1 else ""))


def _all_passes(session: RunSession, tick: Callable[[], None]) -> None:
    options, runnable = session.options, session.runnable
    how = Tolerances(options.atol, options.rtol, options.pcc)
    for _ in range(options.loops):
        session.results = session.target.run_passes(
            runnable, session.arrays, options.warmup_runs, options.num_runs, session.measured, tick
        )
        if session.results:
            for index, expected in session.expected.items():
                output = runnable.outputs[index]
                what = ComparedResult(output.name, output.type.data_type, output.stored)
                verdict = compare(what, session.results[index], expected, how)
                earlier = session.verdicts.get(index)
                if earlier is None or earlier.passed:  # Keep the first failure of the loops.
                    session.verdicts[index] = verdict


def _outcome(session: RunSession) -> list[str]:
    """Add the result files to the session's; return the lines to print."""
    options, target = session.options, session.target
    lines: list[str] = []
    if target.computes:
        outputs = session.runnable.outputs
        lines += add_results(session.where, outputs, session.results, session.files, _note)
    else:
        lines.append("planned only: nothing was executed, no results exist")
    if options.explain or options.dry_run:
        lines.append(target.explain())
    if options.memory:
        lines.append(target.memory())
    if options.print_statistics:
        lines.append(target.statistics(session.measured))
    failed = [(i, v) for i, v in sorted(session.verdicts.items()) if not v.passed]
    lines += [f"[FAILED] result[{i}]: {v.name}: {v.detail}" for i, v in failed]
    if session.verdicts and not failed:
        lines.append(f"[SUCCESS] {counted(len(session.verdicts), 'result')} as expected")
    return lines + operation_lines(session.operations)


def _checked(session: RunSession) -> int:
    options, target = session.options, session.target
    code = EXIT_OK
    has_wrong = session.operations is not None and session.operations.first is not None
    if has_wrong or any(not v.passed for v in session.verdicts.values()):
        code = EXIT_MISMATCH
    if options.max_copies is not None and session.measured.copies > options.max_copies:
        many = counted(session.measured.copies, "copy", "copies")
        what = f"{many} in one pass, at most {options.max_copies} allowed"
        lines = [
            f"  {line.kind} x{line.times} {line.nbytes} B  {line.source} -> {line.target}\n"
            f"    {line.reason}"
            for line in copies_inside(one_device(target))
        ]
        session.failures.append("\n".join([what, *lines]))
        code = EXIT_OVER_LIMIT
    return code


def _leak_check(session: RunSession) -> int:
    session.runnable.forget()
    buffers = leaks(one_device(session.target))
    if not buffers:
        return EXIT_OK
    session.failures.append("memory is still allocated at the end:\n  " + "\n  ".join(buffers))
    return EXIT_FAILURE

"""One run of `stitch-run`, from its words to its exit code.

Comes in: parsed words. Goes out: files, text, an exit code. Everything that can be wrong with the
words and the files is found before anything runs; files appear at the end, all or none.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stitch import api
from stitch.cli.chain import Chain, Runnable
from stitch.cli.command import EXIT_FAILURE, EXIT_MISMATCH, EXIT_OK, failure_of, say, say_aside
from stitch.cli.device_costs import check_room, copies_inside, memory_text, planned_copies
from stitch.cli.module_files import (
    lacking_lines,
    machine_for,
    read_modules,
    told_apart,
    with_program,
)
from stitch.cli.output_checks import (
    DATABASE,
    JSON,
    NPZ,
    RECORD,
    RESULT,
    OutputChecks,
    array_kind,
    trace_kind,
)
from stitch.cli.rehearsal import MOST_RUNS, Load, advise
from stitch.cli.run.artifacts import add_artifacts, artifact_kinds
from stitch.cli.run.run_operations import WORDS, OperationsAsked
from stitch.cli.run.run_outputs import (
    Destinations,
    destinations,
    expectations,
    put,
)
from stitch.cli.run.run_report import (
    Measured,
    copies_text,
    leaks,
    progress,
    result_json,
    run_passes,
    statistics_text,
)
from stitch.cli.run_inputs import gather_inputs, given_names
from stitch.cli.wire_words import wires_of
from stitch.errors import UsageError
from stitch.files import OutputFiles, atomic_write
from stitch.program import Array
from stitch.report import (
    REFERENCE,
    ChromeTrace,
    ComparedResult,
    Recorder,
    Tolerances,
    Verdict,
    VisualizerFolder,
    compare,
    counted,
)


@dataclass(slots=True)
class RunSession:
    """A run under way."""

    words: argparse.Namespace
    device: api.Device
    load: Load
    runnable: Runnable
    arrays: tuple[Array, ...]
    where: Destinations
    expected: dict[int, Array]
    measured: Measured = field(default_factory=Measured)
    results: list[Array] = field(default_factory=list)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    batch: OutputFiles = field(default_factory=OutputFiles)
    operations: OperationsAsked = field(default_factory=OperationsAsked)


def run_session(words: argparse.Namespace) -> int:
    """Run what the words ask for; with `--result_file`, errors are written there as well."""
    checks = OutputChecks()
    checks.reads(filter(None, (words.pipeline, words.device, *words.module)))
    if words.expected_operations not in (None, REFERENCE):
        checks.reads((words.expected_operations,))
    checks.add_folder(words.artifact_dir, "--artifact_dir")
    for path, kind, option in ((words.result_file, RESULT, "--result_file"),
                               (words.trace, trace_kind(words.trace), "--trace"),
                               (words.save_operations, NPZ, "--save_operations"),
                               (words.record, RECORD, "--record")):  # fmt: skip
        if path is not None:
            checks.add(path, kind, option)
    if words.visualizer is not None:
        checks.add_folder(words.visualizer, "--visualizer")
        for name, kind in (("db.sqlite", DATABASE), ("config.json", JSON)):
            checks.add(Path(words.visualizer) / name, kind, "--visualizer",
                       own_folder=words.visualizer)  # fmt: skip
    try:
        return _run(words, checks)
    except (Exception, KeyboardInterrupt) as error:
        # Whatever it is: else the result of an earlier run would stay there.
        if words.result_file is not None and not checks.is_read(words.result_file):
            what, code = failure_of(error)
            body = {"result": "error", "exit_code": code, "error": what}
            atomic_write(words.result_file, json.dumps(body, indent=2) + "\n")
        raise


def _run(words: argparse.Namespace, checks: OutputChecks) -> int:
    with ExitStack() as stack:
        make = _pipeline_file if words.pipeline is not None else _chain
        device, load = make(words)
        stack.enter_context(device)
        trace = None if words.trace is None else ChromeTrace(device, words.trace)
        if trace is not None:
            stack.callback(trace.forget)
        folder = None if words.visualizer is None else VisualizerFolder(device, words.visualizer)
        if folder is not None:
            stack.callback(folder.forget)
        recorder = Recorder(device) if words.record is not None else None
        session = _prepared(words, device, load)
        _check_outputs(session, checks)
        session.operations.begin(words, device, stack)
        _say_how_much(session)
        _all_passes(session)
        lines = _outcome(session)
        code = _checked(session)
        if words.save_artifacts:
            add_artifacts(session.batch, words.artifact_dir, session.device, session.runnable,
                          session.arrays, session.results)  # fmt: skip
        if words.check_memory_leak:
            code = max(code, _leak_check(session))
        session.operations.add_to(session.batch)
        if trace is not None:
            trace.add_to(session.batch)
        if folder is not None:
            folder.add_to(session.batch)
        if recorder is not None:
            session.batch.add(words.record, recorder.text())
        if words.result_file is not None:
            body = result_json(session.device, session.runnable, session.measured,
                               session.verdicts, code, session.failures,
                               session.operations.comparison)  # fmt: skip
            session.batch.add(words.result_file, json.dumps(body, indent=2) + "\n")
        session.batch.commit()
        for line in lines:
            say(line)
        for failure in session.failures:
            say_aside(f"stitch-run: error: {failure}")
        return code


def _open(words: argparse.Namespace, machine: Any) -> api.Device:
    executor = words.executor or ("null" if words.dry_run else "numpy")
    if words.dry_run and executor != "null":
        raise UsageError(f"--dry_run executes nothing, --executor={executor} does")
    if executor == "null":
        _refuse_results(words)
    return api.open_device(
        machine,
        executor=executor,
        threads=words.threads,
        prices=words.prices,
        window=words.window,
        aggregate=words.aggregate,
        debug=words.check_memory,
        strict_types=words.strict_types,
        lanes=words.lanes,
    )


def _refuse_results(words: argparse.Namespace) -> None:
    """Raise `UsageError` for words that need results, where nothing is executed."""
    wanted = [f"--expected_output={word}" for word in words.expected_output]
    wanted += [f"--output={word}" for word in words.output if "@" in word]
    wanted += [
        f"--{name}={getattr(words, name)}" for name in WORDS if getattr(words, name) is not None
    ]
    if wanted:
        how = "--dry_run" if words.dry_run else f"--executor={words.executor}"
        raise UsageError(
            f"{how} executes nothing, and {wanted[0]} needs a result",
            remedy=f"leave out {how}, or {', '.join(wanted)}"[:300],
        )


def _chain(words: argparse.Namespace) -> tuple[api.Device, Load]:
    given = read_modules(words.module, words.function, device=words.device, compiling=_note)
    modules = told_apart(given)
    for line in lacking_lines(modules):
        _note(line)
    named = given_names(words.input)
    wires = wires_of(modules, words.wire, strict_types=words.strict_types, given=named)
    device = _open(words, machine_for(words.device, modules))
    return device, lambda where, programs: Chain(
        where, [with_program(m, programs.get(at)) for at, m in enumerate(modules)], wires
    )


def _pipeline_file(words: argparse.Namespace) -> tuple[api.Device, Load]:
    from stitch.cli.pipeline_file import open_pipeline_file

    return open_pipeline_file(words, _open)


def _prepared(words: argparse.Namespace, device: api.Device, load: Load) -> RunSession:
    computes, runnable = device.computes, load(device, {})
    check_room(device, runnable)
    arrays = gather_inputs(
        runnable.inputs, words.input, init=words.init, seed=words.seed,
        without_data=not computes, strict_types=words.strict_types, note=_note,
    )  # fmt: skip
    where = destinations(runnable.outputs, words.output, brief=not words.expected_output)
    expected = expectations(runnable.outputs, words.expected_output)
    return RunSession(words, device, load, runnable, arrays, where, expected)


def _check_outputs(session: RunSession, checks: OutputChecks) -> None:
    """Refuse outputs that would do harm, now that all is read and nothing is computed."""
    words, where = session.words, session.where
    if where.printed:
        checks.take_standard_output("--output=-")
    for path in (*where.files.values(), *where.archives):
        checks.add(path, array_kind(path), "--output")
    if words.save_artifacts:
        for path, kind in artifact_kinds(words.artifact_dir, session.runnable).items():
            checks.add(path, kind, "--save_artifacts", own_folder=words.artifact_dir)
    checks.refuse_sources()


def _note(text: str) -> None:
    say_aside(f"stitch-run: note: {text}")


def _say_how_much(session: RunSession) -> None:
    """What lies ahead, before it starts: on a terminal, and with `--explain` or `--dry_run`."""
    words = session.words
    if not (words.explain or words.dry_run or sys.stderr.isatty()):
        return
    passes = words.loops * (words.warmup_runs + words.num_runs)
    runs = session.runnable.runs
    total = f"{runs * passes:,} program run{'s' if runs * passes != 1 else ''}"
    _note(f"{total} ahead" + (f": {passes:,} passes of {runs:,}" if passes > 1 else ""))


def _all_passes(session: RunSession) -> None:
    words, runnable = session.words, session.runnable
    how = Tolerances(words.atol, words.rtol, words.pcc)
    with progress(words.loops * (words.warmup_runs + words.num_runs)) as tick:
        for _ in range(words.loops):

            def passed() -> None:
                tick()
                session.operations.next_pass()

            session.results = run_passes(
                runnable, session.arrays, words.warmup_runs, words.num_runs, session.measured,
                passed,
            )  # fmt: skip
            if session.results:
                for index, expected in session.expected.items():
                    output = runnable.outputs[index]
                    what = ComparedResult(output.name, output.type.data_type, output.stored)
                    verdict = compare(what, session.results[index], expected, how)
                    known = session.verdicts.get(index)
                    if known is None or known.passed:  # one bad loop is enough
                        session.verdicts[index] = verdict


def _outcome(session: RunSession) -> list[str]:
    """The lines to print; result files go into the batch."""
    words, device = session.words, session.device
    lines: list[str] = []
    if device.computes:
        lines += put(session.where, session.runnable.outputs, session.results, session.batch, _note)
    else:
        lines.append("planned only: nothing was executed, no results exist")
    if words.explain or words.dry_run:
        lines += [device.explain(), *_advice(session)]
    if words.memory:
        lines.append(memory_text(device))
    if words.print_statistics:
        lines.append(statistics_text(session.measured))
    failed = [(i, v) for i, v in sorted(session.verdicts.items()) if not v.passed]
    lines += [f"[FAILED] result[{i}]: {v.name}: {v.detail}" for i, v in failed]
    if session.verdicts and not failed:
        lines.append(f"[SUCCESS] {counted(len(session.verdicts), 'result')} as expected")
    return lines + session.operations.lines()


def _advice(session: RunSession) -> list[str]:
    """What to compile otherwise, if that saves anything."""
    words, runnable = session.words, session.runnable
    if runnable.runs * 2 > MOST_RUNS:
        return []
    advice = advise(
        session.device.machine, session.load, session.arrays,
        window=words.window, strict_types=words.strict_types,
    )  # fmt: skip
    return [] if advice is None else [f"  advice: {line}" for line in advice.lines]


def _checked(session: RunSession) -> int:
    words, device = session.words, session.device
    code = EXIT_OK
    if session.operations.differ or any(not v.passed for v in session.verdicts.values()):
        code = EXIT_MISMATCH
    if not device.computes:
        session.measured.copies = planned_copies(device)
    if words.max_copies is not None and session.measured.copies > words.max_copies:
        many = counted(session.measured.copies, "copy", "copies")
        what = f"{many} in one pass, at most {words.max_copies} allowed"
        session.failures.append(f"{what}\n{copies_text(copies_inside(device))}")
        code = EXIT_FAILURE
    return code


def _leak_check(session: RunSession) -> int:
    session.runnable.forget()
    left = leaks(session.device)
    if not left:
        return EXIT_OK
    session.failures.append("memory is still allocated at the end:\n  " + "\n  ".join(left))
    return EXIT_FAILURE

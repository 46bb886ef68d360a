"""`stitch-run train.yaml`: a training from its file to its weights.

Comes in: parsed words. Goes out: checkpoints, lines of results, the trained model, a table, an
exit code. All that can be wrong with the words, the file, the data and the checkpoint is found
before the first step. The form of the file is in `stitch/documents/trainings/training_form.py`.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stitch import api
from stitch.cli.command import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, say, say_aside
from stitch.cli.device_costs import memory_text
from stitch.cli.output_checks import OutputChecks
from stitch.cli.train.progress_report import (
    Bar,
    ResultLines,
    metrics_text,
    plans_text,
    progress_bar,
    table_text,
)
from stitch.cli.train.resuming import Keeper, facts_of
from stitch.cli.train.trained_model import Evaluation, TrainModel, build_model
from stitch.cli.train.trained_outputs import LossPicture, add_outputs, check_outputs, output_paths
from stitch.cli.train.training_advice import training_advice
from stitch.cli.train.training_defects import defects_of
from stitch.cli.train.training_loop import (
    STEADY,
    Course,
    StepResult,
    TrainingLoop,
    stopping_between_steps,
)
from stitch.documents import (
    ModelTypes,
    TrainData,
    TrainFile,
    completed_schedule,
    read_data,
    read_training,
)
from stitch.errors import FormatError, StitchError, UsageError
from stitch.files import FileBatch
from stitch.machine import load_machine
from stitch.planner import Plan
from stitch.report import ChromeTrace, counted, explain, totals_json
from stitch.runtime import WHOLE_RUN
from stitch.training import TrainingInstance, optimizer_from_config


@dataclass(slots=True)
class Run:
    """A training under way."""

    words: argparse.Namespace
    file: TrainFile
    model: TrainModel
    data: TrainData
    course: Course
    device: api.Device
    instance: TrainingInstance
    loop: TrainingLoop
    evaluation: Evaluation
    keeper: Keeper
    lines: ResultLines
    bar: Bar
    picture: LossPicture | None
    trace: ChromeTrace | None
    began: float
    #: The first step of this process.
    first: int = 0
    last: StepResult | None = None
    loss_sum: float = 0.0
    epoch_seconds: float = 0.0
    step_seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    plans: list[tuple[int, int]] = field(default_factory=list)
    copies: int = 0
    explained: str = ""
    #: The plans of the loop that is explained, with how often each ran.
    explained_plans: tuple[tuple[Plan, int], ...] = ()
    #: Steps since the last checkpoint; work since the last step that is not the loop's.
    dirty: bool = True
    others: bool = False
    #: The step after which the device's history began.
    stretch: int = 0


def run_training(words: argparse.Namespace) -> int:
    """Train what the words ask for; gives the exit code. Raises `StitchError`."""
    began = time.perf_counter()
    if words.device is not None:
        load_machine(words.device)
    draft = read_training(words.pipeline)
    if draft.file is None:
        raise defects_of(draft, words.device)
    file = draft.file
    picture = LossPicture.of(words.plot)
    outputs = output_paths(file, words.output)
    checks = OutputChecks()
    check_outputs(checks, words, file, outputs)
    optimizer = optimizer_from_config(dict(file.optimizer))
    try:
        model = build_model(file, optimizer, words.device)
    except StitchError as error:
        defects = defects_of(draft, words.device, error)
        raise defects from (None if defects is error else error)
    types = ModelTypes(model.inputs, model.programs.prediction_type, model.training.loss)
    data = read_data(file.data, types, file.file, file.seed)
    course = _course(file, model, data, words.epochs or file.epochs)
    optimizer.schedule = completed_schedule(file.schedule, course.steps)
    for warning in model.programs.warnings:
        say_aside(f"stitch-run: warning: {warning}")
    with ExitStack() as stack:
        device = stack.enter_context(_device(words, file, model))
        trace = None if words.trace is None else ChromeTrace(device, words.trace)
        if trace is not None:
            stack.callback(trace.forget)
        instance = stack.enter_context(model.compiled.start(device, seed=file.seed))
        loop = TrainingLoop(instance, data.train, course, count_copies=words.max_copies is not None)
        keeper = Keeper.of(words, file, facts_of(file, model, data, course, instance))
        stack.callback(keeper.close)
        progress = keeper.resume(instance, wanted=words.resume)
        checks.refuse_sources()
        lines = ResultLines(words.result_file, instance.steps)
        stack.callback(lines.close)
        if picture is not None:
            picture.remember(lines.earlier)
        bar = stack.enter_context(progress_bar(course.steps, instance.steps))
        run = Run(
            words, file, model, data, course, device, instance, loop,
            Evaluation(model, instance, file.metrics), keeper, lines, bar, picture, trace,
            began,
            first=instance.steps, loss_sum=float(progress.get("loss_sum", 0.0)),
        )  # fmt: skip
        stopped = stack.enter_context(stopping_between_steps())
        try:
            _steps(run, stopped)
            return _finish(run, stopped(), outputs)
        except StitchError as error:
            _give_up(run, error)
            raise


def _device(words: argparse.Namespace, file: TrainFile, model: TrainModel) -> api.Device:
    executor = words.executor or file.executor
    if executor == "null":
        raise UsageError("a training computes, --executor=null does not")
    return api.open_device(
        model.target, executor=executor, threads=words.threads, window=words.window,
        prices=words.prices, debug=words.check_memory,
    )  # fmt: skip


def _course(file: TrainFile, model: TrainModel, data: TrainData, epochs: int) -> Course:
    size, parts = model.batch_size, file.options.accumulation_steps
    steps = len(data.train) // (size * parts)
    if not steps:
        raise FormatError(
            "there is less data than one step takes", where=file.where("data"),
            expected=f"{counted(size * parts, 'row')} or more ({parts} x a batch of {size})",
            got=f"{counted(len(data.train), 'row')} to train on",
        )  # fmt: skip
    return Course(size, parts, steps, epochs, file.seed, file.shuffle)


# -- steps -----------------------------------------------------------------------------------------


def _steps(run: Run, stopped: Any) -> None:
    """The steps that are left, until a signal comes."""
    course, loop = run.course, run.loop
    while loop.step < course.steps and not stopped():
        if run.others:
            # Evaluations and checkpoints are no part of the loop that is explained.
            run.device.history.clear(f"after step {loop.step}")
            run.others, run.stretch = False, loop.step
        result = loop.run_step()
        _note(run, result)
        ended = loop.step % course.steps_per_epoch == 0
        if ended:
            _epoch(run, result)
        if run.keeper.is_due(loop.step, course):
            run.keeper.save(run.instance, _progress(run))
            run.dirty, run.others = False, True
        run.others |= loop.step == run.first + STEADY


def _note(run: Run, result: StepResult) -> None:
    run.last, run.dirty = result, True
    run.loss_sum += result.loss
    run.epoch_seconds += result.seconds
    run.step_seconds += result.seconds
    if result.plans:
        run.plans.append((result.step, result.plans))
    if result.step > run.first + STEADY:
        run.copies = max(run.copies, result.copies or 0)
    run.bar.stepped(result)
    if run.picture is not None:
        run.picture.losses.append((result.step, result.loss))
    facts = {"step": result.step, "epoch": result.epoch, "loss": result.loss, "rate": result.rate,
             "seconds": round(result.seconds, 6)}  # fmt: skip
    if result.copies is not None:
        facts["copies"] = result.copies
    run.lines.add("step", **facts)


def _epoch(run: Run, result: StepResult) -> None:
    """The end of an epoch: look at the validation part, write a line."""
    facts: dict[str, Any] = {"step": result.step, "epoch": result.epoch,
                             "loss": run.loss_sum / run.course.steps_per_epoch}  # fmt: skip
    _explain(run)
    if run.data.validation is not None:
        run.metrics = run.evaluation.measure(run.data.validation)
        facts["validation"] = run.metrics
        run.bar.measured(run.metrics)
        if run.picture is not None and "loss" in run.metrics:
            run.picture.validation.append((result.step, run.metrics["loss"]))
    run.lines.add("epoch", **facts, seconds=round(run.epoch_seconds, 6))
    run.loss_sum, run.epoch_seconds, run.others = 0.0, 0.0, True


def _explain(run: Run) -> None:
    """What the loop did of late, in its steady state, before others use the device."""
    if run.words.explain and run.loop.step > run.first + STEADY and not run.others:
        run.explained = explain(run.device, _stretch(run))
        run.explained_plans = run.device.account().plans


def _stretch(run: Run) -> str:
    """Which steps the device's history covers."""
    first, last = run.stretch + 1, run.loop.step
    return f"last {counted(last - first + 1, 'step')} of {run.loop.step}, {first} to {last}"


def _progress(run: Run) -> dict[str, Any]:
    epoch, index = divmod(run.loop.step, run.course.steps_per_epoch)
    return {"epoch": epoch, "step_of_epoch": index, "loss_sum": run.loss_sum}


# -- the end ---------------------------------------------------------------------------------------


def _finish(run: Run, signalled: int, outputs: tuple[str | Path, ...]) -> int:
    """Save, write, judge, tell."""
    run.bar.close()
    if run.loop.step % run.course.steps_per_epoch:
        _explain(run)
    if run.dirty:
        run.keeper.save(run.instance, _progress(run))
    held_out: Mapping[str, float] = {}
    code, batch = EXIT_OK, FileBatch()
    if signalled:
        code = EXIT_INTERRUPTED if signalled == signal.SIGINT else 128 + signalled
    else:
        if run.data.held_out is not None:
            held_out = run.evaluation.measure(run.data.held_out)
        add_outputs(batch, outputs, run.model, run.instance)
    if run.picture is not None:
        run.picture.add(batch, run.file.name)
    if run.trace is not None:
        run.trace.add_to(batch)
    batch.commit()
    most = run.words.max_copies
    failure = ""
    if most is not None and run.copies > most and not code:
        code = EXIT_FAILURE
        failure = f"{counted(run.copies, 'copy', 'copies')} in one step, at most {most} allowed"
    _final(run, "interrupted" if signalled else "done", code, held_out=dict(held_out))
    if run.explained:
        say(run.explained)
        advice = training_advice(run.file, run.model, run.words.window, run.explained_plans)
        for line in () if advice is None else advice.lines:
            say(f"  advice: {line}")
    elif run.words.explain:
        say_aside(f"stitch-run: note: nothing to explain: the loop is steady after {STEADY} steps")
    if run.words.memory:
        say(memory_text(run.device))
    say(table_text(_rows(run, held_out, outputs if not signalled else ())))
    if signalled:
        say_aside(f"stitch-run: interrupted after step {run.loop.step}{run.keeper.told()}")
    if failure:
        say_aside(f"stitch-run: error: {failure}")
    return code


def _give_up(run: Run, error: StitchError) -> None:
    """Save what there is before an error is told; a second error would hide the first."""
    if run.dirty:
        with suppress(StitchError):
            run.keeper.save(run.instance, _progress(run))
    with suppress(StitchError):
        _final(run, "error", error.exit_code, error=str(error))


def _final(run: Run, result: str, code: int, **facts: Any) -> None:
    planned = [step for step, _ in run.plans]
    run.lines.add(
        "final", result=result, exit_code=code, step=run.loop.step, first_step=run.first,
        plans=sum(count for _, count in run.plans), last_planned_step=max(planned, default=0),
        loss=None if run.last is None else run.last.loss, validation=run.metrics,
        seconds=round(time.perf_counter() - run.began, 3),
        totals=totals_json(WHOLE_RUN, run.device.history.whole()), **facts,
    )  # fmt: skip


def _rows(
    run: Run, held_out: Mapping[str, float], outputs: tuple[str | Path, ...]
) -> list[tuple[str, str]]:
    course, done = run.course, run.loop.step
    seconds = time.perf_counter() - run.began
    rows = [
        ("training", f"{run.file.name}: {counted(len(run.data.train), 'row')}, batches of "
         f"{course.batch_size}" + (f" x {course.batches_per_step}"
                                   if course.batches_per_step > 1 else "")),
        ("steps", f"{done} of {course.steps} ({counted(course.epochs, 'epoch')})"
         + (f", from {run.first}" if run.first else "")),
    ]  # fmt: skip
    if run.last is not None:
        rows.append(("loss", f"{run.last.loss:.4f} in the last step"))
    if run.metrics:
        rows.append(("validation", metrics_text(run.metrics)))
    if held_out and run.data.held_out is not None:
        rows.append(
            ("held out", f"{metrics_text(held_out)} ({counted(len(run.data.held_out), 'row')})")
        )
    rows.append(("plans made", plans_text(run.plans, run.first)))
    if run.words.max_copies is not None:
        rows.append(("copies", f"at most {run.copies} in a step"))
    speed = (done - run.first) / max(run.step_seconds, 1e-9)
    rows.append(("seconds", f"{seconds:.1f}, {speed:.0f} steps a second"))
    if run.keeper.saved is not None:
        rows.append(("checkpoint", str(run.keeper.saved)))
    rows += [("written", "standard output" if path == "-" else str(path)) for path in outputs]
    return rows

"""Advice on a training: which slots of its module to wish elsewhere, so that a step costs less.

Comes in: a training's file, the plans that its loop ran. Goes out: advice, from whole trainings
that are compiled with such wishes and go through a few steps without data. Must not know: how it
is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from stitch import api
from stitch.cli.rehearsal import Advice, Rehearsal, chosen, cost_of, placed
from stitch.cli.train.trained_model import TrainModel
from stitch.cli.train.training_loop import STEADY
from stitch.documents import TrainFile
from stitch.machine import load_machine
from stitch.planner import Plan, SlotChange, possible_changes
from stitch.program import Program
from stitch.training import as_trainable, compile_model


def training_advice(
    file: TrainFile, model: TrainModel, window: int, plans: Sequence[tuple[Plan, int]]
) -> Advice | None:
    """What to wish of the module's slots; None where nothing is saved, or for compiled programs.

    `plans`: those of the steady loop, with how often each ran.
    """
    forward = model.programs.forward
    if file.model[0].endswith(".ttb") or not possible_changes(plans, _keys(plans, forward)):
        return None

    def planned(changes: Sequence[SlotChange]) -> Rehearsal:
        graph = model.compiled.graph
        for change in changes:
            graph = placed(graph, change)
        training = compile_model(
            as_trainable(graph, model.training.values), dict(file.loss), dict(file.optimizer),
            file.options, load_machine(model.target), file.algorithm, file.executor,
        )  # fmt: skip
        return _one_step(replace(model, training=training), window)

    now = planned(())
    return chosen(now, lambda changes: planned(changes).cost if changes else now.cost,
                  period="step")  # fmt: skip


def _one_step(model: TrainModel, window: int) -> Rehearsal:
    """A step of the steady loop, planned without data."""
    batch = {name: np.zeros(t.shape, t.data_type.dtype) for name, t in model.inputs.items()}
    label = model.training.loss.label_type(model.programs.prediction_type)
    with (
        api.open_device(model.target, executor="null", window=window) as device,
        model.training.start(device) as instance,
    ):
        for step in range(STEADY + 2):
            if step == STEADY + 1:
                device.history.clear()
            for _ in range(model.training.options.accumulation_steps):
                instance.forward(**batch)
                instance.judge(np.zeros(label.shape, label.data_type.dtype))
                instance.backward()
            instance.update()
            instance.zero_grad()
        account = device.account()
    forward = model.programs.forward
    return Rehearsal(
        cost_of(account.total), account.plans, (), (forward,), (0,),
        _keys(account.plans, forward), len(model.programs.in_order) * (STEADY + 2),
    )  # fmt: skip


def _keys(plans: Iterable[tuple[Plan, int]], program: Program) -> Mapping[int, int]:
    """The module's own program is number 0; the others follow from it."""
    tasks = {task.transformation for plan, _ in plans for task in plan.request.tasks}
    return {one.key: 0 for one in tasks if one.name == program.name}

"""Run the stages of a training one after the other in one process, in any order that is legal."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import stitch
from stitch.program import Array, InputKind, Program
from stitch.training import Trainable, TrainingOptions
from stitch.training.graphs import CLIP_FACTOR, GRADIENT_NORM, MASTER, MORE, SQUARE, rate_name
from stitch.training.losses import Loss
from stitch.training.optimizers import Optimizer
from stitch.training.programs import LABEL, LOSS, compilation
from stitch.training.stages import Stage, compile_stage, stages_of
from stitch.ttb import Binary


class StagedRunner:
    """The stages of a training, and all of their tensors as arrays.

    `seed` draws the order of forward and backward passes of stages and micro-batches.
    """

    def __init__(
        self, model: Trainable, loss: Loss, optimizer: Optimizer, options: TrainingOptions,
        cuts: int | Sequence[str], seed: int = 0,
    ) -> None:  # fmt: skip
        self.device = stitch.open_device("host")
        machine = self.device.machine
        self.staged = stages_of(model, loss, optimizer, options, cuts)
        self.stages = [compile_stage(stage, machine) for stage in self.staged.stages]
        self.clipping = None
        if self.staged.clipping is not None:
            self.clipping = compilation(
                stitch.program.Role.UPDATE, self.staged.clipping, machine, {}
            ).program
        self.optimizer, self.options, self.order = optimizer, options, random.Random(seed)
        self.loaded: dict[int, Any] = {}
        self.tensors: list[dict[str, Array]] = [
            self._initial(stage, model.values) for stage in self.stages
        ]
        self.gradients: dict[str, Array] = {}
        self.steps = 0

    def _initial(self, stage: Stage[Program], values: Mapping[str, Array]) -> dict[str, Array]:
        tensors = {}
        for program in filter(None, (stage.forward, stage.update)):
            for slot in program.inputs:
                if slot.kind not in (InputKind.PARAMETER, InputKind.STATE):
                    continue
                kind = program.values[slot.value].type
                name, _, state = slot.name.rpartition(".")
                start = values[name] if state == MASTER else values.get(slot.name)
                if start is None:
                    start = np.full(kind.shape, self.optimizer.start_of_slot(name, state))
                tensors[slot.name] = np.asarray(start).astype(kind.data_type.dtype)
        return tensors

    def _call(self, program: Program, values: Mapping[str, Array]) -> dict[str, Array]:
        loaded = self.loaded.get(id(program))
        if loaded is None:
            binary = Binary((program,), self.device.machine.shape, "test")
            loaded = self.loaded[id(program)] = self.device.load(binary)
        given = {port.name: np.asarray(values[port.name]) for port in loaded.ports}
        made = loaded(**given)
        made = made if isinstance(made, tuple) else (made,)
        return {n: tensor.numpy() for n, tensor in zip(loaded.output_names, made, strict=True)}

    def step(self, batches: Sequence[tuple[Mapping[str, Array], Array]]) -> list[float]:
        """Train on micro-batches (inputs and keys by name, target); return the losses."""
        count, micro = len(self.stages), len(batches)
        todo = [(kind, k, m) for kind in "FB" for k in range(count) for m in range(micro)]
        done: set[tuple[str, int, int]] = set()
        made: dict[tuple[int, int], dict[str, Array]] = {}
        losses = [0.0] * micro
        sums: list[dict[str, Array]] = [{} for _ in self.stages]
        while todo:
            ready = [each for each in todo if self._needs(*each) <= done]
            kind, k, m = self.order.choice(ready)
            inputs, target = batches[m]
            if kind == "F":
                values = made[k, m] = self._forward(k, m, inputs, made)
                loss = self.stages[k].loss
                if loss is not None:
                    values |= self._call(loss, {**values, LABEL: target})
                    losses[m] = float(values[LOSS])
            else:
                self._backward(k, m, made, sums[k])
            todo.remove((kind, k, m))
            done.add((kind, k, m))
        self._update(sums)
        return losses

    def _needs(self, kind: str, k: int, m: int) -> set[tuple[str, int, int]]:
        before = {(kind, k, m - 1)} if m else set()
        if kind == "F":
            return before | {("F", j, m) for j in range(k)}
        return before | {("B", j, m) for j in range(k + 1, len(self.stages))} | {("F", k, m)}

    def _forward(
        self, k: int, m: int, inputs: Mapping[str, Array],
        made: Mapping[tuple[int, int], Mapping[str, Array]],
    ) -> dict[str, Array]:  # fmt: skip
        stage = self.stages[k]
        given = {slot.name: inputs[slot.name] for slot in stage.forward.inputs
                 if slot.name in inputs}  # fmt: skip
        given |= {each.slot: made[each.source, m][each.output] for each in stage.arriving}
        results = self._call(stage.forward, {**self.tensors[k], **given})
        before = {name: self.tensors[k][name] for name in stage.reread}
        self.tensors[k] |= {n: a for n, a in results.items() if n in self.tensors[k]}
        return {**self.tensors[k], **given, **results, **before}

    def _backward(
        self, k: int, m: int, made: dict[tuple[int, int], dict[str, Array]], sums: dict[str, Array]
    ) -> None:
        programs = self.stages[k]
        if programs.backward is None:
            return
        given = {each.slot: made[each.source, m][each.output] for each in programs.returning}
        results = self._call(programs.backward, {**made[k, m], **given})
        made[k, m] |= results
        own = {parameter.gradient for parameter in programs.parameters}
        gradients = {name: array for name, array in results.items() if name in own}
        if m and own:
            assert programs.accumulation is not None
            more = {f"{MORE}{name}": array for name, array in gradients.items()}
            gradients = self._call(programs.accumulation, {**sums, **more})
        sums |= gradients

    def _update(self, sums: Sequence[dict[str, Array]]) -> None:
        self.gradients = {name: array for each in sums for name, array in each.items()}
        given: dict[str, Array] = {}
        if self.clipping is not None:
            for programs, each in zip(self.stages, sums, strict=True):
                if programs.squares is not None:
                    given |= self._call(programs.squares, each)
            assert all(name.endswith(f".{SQUARE}") for name in given)
            given = self._call(self.clipping, given)
            self.gradients[GRADIENT_NORM] = given[GRADIENT_NORM]
            assert CLIP_FACTOR in given
        rates = self.optimizer.rates(self.steps)
        given |= {
            rate_name(number): np.asarray(rate, np.float32) for number, rate in enumerate(rates)
        }
        updated: dict[str, Array] = {}
        for tensors, programs, each in zip(self.tensors, self.stages, sums, strict=True):
            if programs.update is not None:
                results = self._call(programs.update, {**tensors, **each, **given})
                tensors |= results
                updated |= {p.name: results[p.name] for p in programs.parameters}
        for tensors in self.tensors:
            tensors |= {name: updated[name] for name in tensors.keys() & updated.keys()}
        self.steps += 1

    def close(self) -> None:
        self.device.close()

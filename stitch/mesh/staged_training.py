"""`StagedTraining`: a training in stages on the devices of a mesh, with the bits of one device.

Each micro-batch is a forward and a backward message to each stage, in the order of a schedule.
Weights, optimizer states and sums of gradients are persistent buffers; values that only the
backward pass of the same stage reads stay on the device. Updates are sent once all losses of a step
are finite, so a failure before leaves every stage as it was.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from stitch.argument_kinds import (
    LIST,
    MAPPING,
    PATH,
    TEXT,
    WHOLE,
    arranged,
    check_fields,
    either,
    instance_of,
    optional,
    takes,
)
from stitch.errors import StitchError, TaskError, UsageError, unknown
from stitch.machine import Machine
from stitch.mesh.client import Entry, MeshClient, RemoteValue
from stitch.mesh.divided_stages import DividedSlots, DividedStages, Shards
from stitch.mesh.mesh import Mesh, one_at_a_time, open_mesh
from stitch.mesh.messages import to_wire
from stitch.mesh.schedules import Action, Schedule, schedule, schedule_text
from stitch.mesh.specification import MachineSpecification, specification_of
from stitch.mesh.stage_pieces import StagePiece, StagePieces
from stitch.program import Array, InputKind, TensorDesc, ValueType
from stitch.runtime import capture
from stitch.training import (
    COUNTS,
    GRADIENT_NORM,
    LABEL,
    LOSS,
    MASTER,
    Loss,
    Optimizer,
    StagedGraphs,
    Trainable,
    TrainingOptions,
    check_state,
    check_weights,
    loss_of,
    micro_batches_of,
    optimizer_from_config,
    random_key,
    rate_name,
    stages_of,
)

_STATE = "with model.start() as training: training.state_dict() has parameters and states by name"
_TRAINED = (
    "stitch.compile(stitch.training.with_weights(model.model.evaluation, training.state_dict())) "
    "is the trained model on one device"
)
_REPLACE = "model.start(weights={name: array}), or training.load_state_dict(state)"
#: What a model of one device has, by name: what to do instead.
_OF_ONE_DEVICE = {
    "get_tensor": _STATE, "set_tensor": _REPLACE, "as_json": _STATE, "dump": _STATE,
    "instance": "with model.start() as training: training.step(batches)",
    "load": _TRAINED, "save": _TRAINED, "save_programs": _TRAINED, "program": _TRAINED,
    "binary": _TRAINED,
}  # fmt: skip
#: What a training on one device has: what to do instead.
_OF_ONE_TRAINING = {
    "predict": f"{_TRAINED}, with `model` what was compiled in stages",
    "get_tensor": "training.tensors([name])[name]", "set_tensor": "training.set_tensors({name: a})",
    "forward": "training.compute_gradients(batches)",
    "backward": "training.compute_gradients(batches)", "zero_grad": "training.step(batches)",
    "compute_loss": "training.compute_gradients(batches) returns the losses",
}  # fmt: skip
#: Steps after which the persistent buffers are read back, for a server that is started again.
SAVE_EVERY = 8


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """How a training is divided among devices.

    Attributes:
        stages: Their number, or the nodes to cut after.
        schedule: `gpipe`, `1f1b` or `interleaved`.
        replicas: Copies of all stages, each with its share of the micro-batches.
        micro_batches: The micro-batches of a step, of all replicas together.
        chunks: Stages per device, for `interleaved`.
        tensor: The devices among which weights are divided, in each replica; then `stages` is 1.
        divide: The axis along which each divided weight is divided, by name.

    Raises:
        UsageError: A value is out of range.
    """

    stages: int | Sequence[str] = 1
    schedule: str = "1f1b"
    replicas: int = 1
    micro_batches: int = 1
    chunks: int = 1
    tensor: int = 1
    divide: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(
            self, stages=either(WHOLE, LIST), schedule=TEXT, replicas=WHOLE, micro_batches=WHOLE,
            chunks=WHOLE, tensor=WHOLE, divide=MAPPING,
        )  # fmt: skip
        for name in ("replicas", "micro_batches", "chunks", "tensor"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1", got=str(getattr(self, name)))
        if self.micro_batches % self.replicas:
            more = self.replicas * (self.micro_batches // self.replicas + 1)
            raise UsageError(
                "each replica has the same number of micro-batches",
                expected=f"micro_batches as a multiple of {self.replicas}",
                got=str(self.micro_batches), remedy=f"parallel={{'micro_batches': {more}, ...}}",
            )  # fmt: skip
        if (self.tensor > 1) != bool(self.divide):
            raise UsageError(
                "tensor is the number of devices among which the weights of divide are divided",
                expected="both, or none", got=f"tensor={self.tensor}, divide={dict(self.divide)}",
                remedy="divide={'weight': axis}",
            )  # fmt: skip
        if self.tensor > 1 and (self.stages != 1 or self.chunks != 1):
            raise UsageError(
                "a training with divided weights has one stage in each replica",
                got=f"stages={self.stages}, chunks={self.chunks}", remedy="stages=1",
            )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class CompiledStages:
    """A model compiled for training in stages; `start` opens the devices and trains.

    Attributes:
        model: The whole model, with initial values.
        staged: The graphs of the stages.
        schedule: The order of forward and backward passes on each device of a replica.
        specification: The devices that `start` opens.
        executor: The executor of the devices, None for the default.
        search_result: What `stitch.training.optimize` found, None for stages that the caller chose.
    """

    model: Trainable
    loss: Loss
    optimizer: Optimizer
    options: TrainingOptions
    parallel: ParallelOptions
    staged: StagedGraphs
    schedule: Schedule
    specification: MachineSpecification
    executor: str | None = None
    search_result: Any = None
    #: The divided parameters by name.
    shards: Mapping[str, Shards] = field(default_factory=dict)

    @takes(mesh=optional(instance_of("an open mesh", Mesh)), weights=optional(MAPPING), seed=WHOLE)
    def start(
        self, mesh: Mesh | None = None, *, weights: Mapping[str, Any] | None = None, seed: int = 0,
        **options: Any,
    ) -> StagedTraining:  # fmt: skip
        """Start training on a mesh, or on a new one with `options` as for `open_mesh`.

        Args:
            weights: Replace initial values, by name.
            seed: Seed of random operators.

        Raises:
            UsageError: The mesh has too few devices, or a name or shape of a weight is another.
        """
        if mesh is not None and options:
            raise UsageError("options for a new mesh were passed with an open mesh",
                             got=", ".join(options))  # fmt: skip
        values = {**self.model.values, **{n: np.asarray(v) for n, v in (weights or {}).items()}}
        if mesh is not None:
            with mesh.lock:
                return StagedTraining(self, mesh, values, seed=seed, owns_mesh=False)
        if self.executor is not None:
            options.setdefault("executor", self.executor)
        mesh = open_mesh(self.specification, **options)
        try:
            return StagedTraining(self, mesh, values, seed=seed, owns_mesh=True)
        except BaseException:
            mesh.close()
            raise

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            "a model compiled in stages trains by steps only",
            remedy="with model.start() as training: training.step(batches)",
        )

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_ONE_DEVICE:
            raise AttributeError(f"'CompiledStages' object has no attribute {name!r}")
        raise UsageError(
            f"a model compiled in stages has no {name}: a training on its devices has the tensors",
            where=self.model.graph.name, remedy=_OF_ONE_DEVICE[name],
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<CompiledStages of {self.model.graph.name}: {self.parallel!r}>"

    def __str__(self) -> str:
        """Return the parameters of each stage, what passes between stages, and the schedule."""
        lines = []
        for k, stage in enumerate(self.staged.stages):
            nbytes = sum(parameter.type.nbytes for parameter in stage.parameters)
            types = {
                s.name: stage.forward.input_type(i) for i, s in enumerate(stage.forward.inputs)
            }
            read = [f"{each.slot} {types[each.slot].text()}" for each in stage.arriving]
            lines.append(
                f"stage {k}: {len(stage.forward.operations)} operations, "
                f"{len(stage.parameters)} parameters of {nbytes} bytes"
                + (f"; reads {', '.join(read)}" if read else "")
            )
        return "\n".join([*lines, schedule_text(self.schedule)])


@takes(
    devices=either(
        WHOLE, PATH, instance_of("a MachineSpecification", MachineSpecification),
        instance_of("a Machine", Machine),
    )
)  # fmt: skip
def compile_stages(
    model: Trainable, loss: Any, optimizer: Any, options: TrainingOptions,
    parallel: ParallelOptions, devices: Machine | int | str | Path | MachineSpecification,
    executor: str | None = None, divided: DividedStages | None = None,
) -> CompiledStages:  # fmt: skip
    """Compile a trainable model in stages.

    Args:
        loss: A loss, its name, or its configuration.
        optimizer: An optimizer, its name, or its configuration.
        options: `accumulation_steps` is the number of micro-batches.
        devices: A machine specification, its file, or a number of devices, of which the first ones
            are used; or the machine of as many as are needed.
        divided: The stages, if weights are divided (`stitch.parallel.divided_stages`).

    Raises:
        UsageError: The specification has too few devices, or the options do not go together.
        CompileError: The graph cannot be differentiated or cut so.
    """
    if options.accumulation_steps != parallel.micro_batches:
        raise UsageError(
            "accumulation_steps is the number of micro-batches of a training in stages",
            expected=str(parallel.micro_batches), got=str(options.accumulation_steps),
            remedy="leave it out: parallel={'micro_batches': N} sets it",
        )  # fmt: skip
    loss, optimizer = loss_of(loss), optimizer_from_config(optimizer)
    share = parallel.micro_batches // parallel.replicas
    if parallel.tensor > 1 and divided is None:
        raise UsageError(
            "the stages of a training with divided weights are missing",
            remedy="divided=stitch.parallel.divided_stages(...), or stitch.compile(parallel=...)",
        )
    if divided is None:
        staged = stages_of(model, loss, optimizer, options, parallel.stages)
        orders = schedule(parallel.schedule, len(staged.stages), share, parallel.chunks)
    else:
        staged, orders = divided.staged, divided.schedule(share)
    count = len(orders) * parallel.replicas
    specification = (
        MachineSpecification.of(count, devices)
        if isinstance(devices, Machine)
        else specification_of(devices)
    )
    _check_devices(list(specification.devices), len(orders), parallel.replicas)
    changed = [
        slot.name for slot in model.graph.outputs if slot.name in model.names(InputKind.STATE)
    ]
    if parallel.replicas > 1 and changed:
        raise UsageError(
            "replicas of a model with states that forward replaces would have other states",
            got=", ".join(changed), remedy="train it in stages with replicas=1",
        )  # fmt: skip
    return CompiledStages(
        model, loss, optimizer, options, parallel, staged, orders, specification, executor,
        shards={} if divided is None else divided.shards,
    )  # fmt: skip


def _check_devices(names: Sequence[str], count: int, replicas: int) -> None:
    """Raise `UsageError` if there are too few devices."""
    if len(names) < count * replicas:
        raise UsageError(
            "a training in stages needs more devices",
            expected=f"{count * replicas}: {count} for each of {replicas} replicas",
            got=f"{len(names)}: {', '.join(names)}",
        )


class StagedTraining:
    """A training in stages on a mesh. Use it as a context manager, or call `close`.

    With one replica, losses, weights and states have the bits of a `TrainingInstance` with
    `accumulation_steps` equal to `micro_batches`, on every schedule and carrier. Replicas add their
    gradients in the order of their numbers. `state_dict` is that of a `TrainingInstance`.

    `steps` and `forwards` count optimizer steps and micro-batches.
    """

    def __init__(
        self, compiled: CompiledStages, mesh: Mesh, values: Mapping[str, Array], *, seed: int,
        owns_mesh: bool,
    ) -> None:  # fmt: skip
        """Send programs and initial values to the devices; see `CompiledStages.start`."""
        staged, options, parallel = compiled.staged, compiled.options, compiled.parallel
        self.parallel, self.schedule, self.mesh = parallel, compiled.schedule, mesh
        self.loss_fn, self.optimizer, self.seed = compiled.loss, compiled.optimizer, seed
        self._owns_mesh, self._changes = owns_mesh, compiled.optimizer.changes
        self._client: MeshClient = mesh.open_client("the training")
        self.steps = self.forwards = 0
        #: The runs of an update that may not have ended, and whether writing all tensors has not.
        self._updating: Sequence[Entry] = ()
        self._is_partial = False
        #: The losses of gradients without an update.
        self._losses: tuple[float, ...] = ()
        self._parameters = staged.parameters
        self._divided = DividedSlots(compiled.shards)
        #: The device of each stage, by its number in a replica.
        places = {a.stage: device for device, order in enumerate(self.schedule) for a in order}
        devices = self._devices(len(self.schedule))
        homes = {p.name: k for k, stage in enumerate(staged.stages) for p in stage.parameters}
        readers = [
            {slot.name for slot in stage.forward.inputs if slot.kind is InputKind.PARAMETER}
            for stage in staged.stages
        ]
        #: By replica and stage: the parameters that a device has a copy of.
        copies = [
            [
                sorted(n for n in names if replica or homes[n] != k)
                for k, names in enumerate(readers)
            ]
            for replica in range(parallel.replicas)
        ]
        shared = {name for replica in copies for names in replica for name in names}
        leaving: list[set[str]] = [set() for _ in staged.stages]
        for stage in staged.stages:
            for each in stage.arriving:
                leaving[each.source].add(each.output)
        # The first replica updates; the others have copies of its parameters.
        others = [replace(stage, squares=None, update=None) for stage in staged.stages]
        self._stages = [
            [
                StagePieces(mesh, row[places[k]], k, stage, options, leaving[k], shared)
                for k, stage in enumerate(others if replica else staged.stages)
            ]
            for replica, row in enumerate(devices)
        ]
        self._first = first = self._stages[0]
        last = first[-1].stage.loss
        assert last is not None, "the last stage has the loss"
        self._prediction = last.values[last.inputs[0].value].type
        self._sums = [[each.sums() for each in stages] for stages in self._stages[1:]]
        self._additions = [each.addition() for each in first] if self._sums else []
        self._squares = [each.squares() for each in first]
        self._clipping = None if staged.clipping is None else first[0].clipping(staged.clipping)
        self._updates = [each.update() for each in first]
        self._copies = [
            each.copies(names)
            for stages, replica in zip(self._stages, copies, strict=True)
            for each, names in zip(stages, replica, strict=True)
        ]
        self._order = _global_order(self.schedule, len(self._stages), len(first))
        #: The tensors of a batch and the keys, by name, and the stages that have each kept tensor.
        self._inputs = _inputs_of(compiled.model, first, InputKind.ACTIVATION)
        self._keys = _inputs_of(compiled.model, first, InputKind.KEY)
        self._owners = {
            name: each
            for each in reversed(first)
            for name in each.descs
            if homes.get(name, each.number) == each.number
        }
        #: The descriptions of the kept tensors as wholes.
        self.descs = self._divided.descs({n: o.descs[n] for n, o in self._owners.items()})
        self.gradient_norm: float | None = None
        check_weights(values, [*compiled.model.values, *self.descs])
        self._write(self._initial(values))

    def _devices(self, count: int) -> list[list[str]]:
        """Return the devices of each replica, `count` for each."""
        names, replicas = list(self.mesh.devices), self.parallel.replicas
        _check_devices(names, count, replicas)
        return [names[k * count : (k + 1) * count] for k in range(replicas)]

    # -- a step ------------------------------------------------------------------------------------

    @one_at_a_time
    @takes(batches=LIST)
    def step(self, batches: Sequence[tuple[Any, Any]]) -> list[float]:
        """Train on micro-batches with one update for all of them; return their losses.

        The update may still run when this returns. After an error, weights, states and counters are
        as before the step, unless an update itself failed, which the next call tells: then only
        `load_state_dict` or `close` is possible.

        Args:
            batches: Pairs of inputs and target, as for `TrainingInstance.step`.

        Raises:
            UsageError: There is another number of micro-batches, or one does not fit the model.
            TaskError: A loss is NaN or infinite, or a device could not go on.
        """
        losses = self.compute_gradients(batches)
        self.update()
        return losses

    @one_at_a_time
    @takes(batches=LIST)
    def compute_gradients(self, batches: Sequence[tuple[Any, Any]]) -> list[float]:
        """Run forward and backward passes of micro-batches; return their losses.

        `update` is the other half of a step; without it, these gradients are dropped.

        Args:
            batches: As for `step`.

        Raises:
            UsageError: There is another number of micro-batches, or one does not fit the model.
            TaskError: A device could not go on.
        """
        self._check_open()
        self._losses = ()
        pairs = micro_batches_of(batches, self.parallel.micro_batches)
        values = [self._values(index, *pair) for index, pair in enumerate(pairs)]
        losses = self._passes(values)
        self._losses = tuple(losses)
        return losses

    @one_at_a_time
    def update(self) -> None:
        """Update parameters and states by the gradients of `compute_gradients`, once.

        Raises:
            UsageError: There are none, or settings of the optimizer have changed.
            TaskError: A loss is NaN or infinite: all is as before the step.
        """
        self._check_open()
        losses, self._losses = self._losses, ()
        if not losses:
            raise UsageError("update() was called without gradients",
                             remedy="call compute_gradients(batches) first")  # fmt: skip
        for index, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise TaskError(
                    f"the loss of step {self.steps} is {loss}", where=f"micro-batch {index}",
                    remedy="the weights are as before this step: lower the learning rate, clip "
                    "gradients, or look at the batch",
                )  # fmt: skip
        self._update(self._rates())

    def _values(self, index: int, inputs: Any, target: Any) -> dict[str, RemoteValue]:
        """Return the tensors and keys of a micro-batch; raise `UsageError`."""
        named = inputs if isinstance(inputs, Mapping) else {}
        given = () if named else inputs if isinstance(inputs, tuple) else (inputs,)
        types = [(name, desc.text()) for name, desc in self._inputs.items()]
        arrays = arranged("a micro-batch", types, given, named)
        values = {
            f"input.{name}": self._put(array, desc, f"{name!r} of micro-batch {index}")
            for (name, desc), array in zip(self._inputs.items(), arrays, strict=True)
        }
        self.loss_fn.check_label(np.asarray(target), self._prediction)
        label = f"{LABEL!r} of micro-batch {index}"
        values[f"input.{LABEL}"] = self._put(target, self._first[-1].label, label)
        for name, desc in self._keys.items():
            kind = ValueType(desc.shape, desc.layout.data_type)
            key = random_key(self.seed, self.forwards + 1 + index, kind)
            values[f"input.{name}"] = self._put(key, desc, name)
        return values

    def _put(self, array: Any, desc: TensorDesc, what: str) -> RemoteValue:
        kind = desc.layout.data_type.in_arrays
        return self._client.put(to_wire(capture(array, desc.shape, kind, True, what)))

    def _passes(self, values: Sequence[dict[str, RemoteValue]]) -> list[float]:
        """Send all forward and backward passes; return the losses when all have ended."""
        client, share = self._client, len(values) // len(self._stages)
        runs = [client.begin_run() for _ in values]
        entries: list[Entry] = []
        for replica, action in self._order:
            index = replica * share + action.micro_batch
            pieces = self._stages[replica][action.stage]
            self._add(entries, pieces.of(action), runs[index], values[index])
        self._submit(entries)
        client.settle([entry.record for entry in entries])
        self._finish_update()
        key = f"F{len(self._first) - 1}.{LOSS}"
        losses = client.values([each[key] for each in values])
        client.finish(entries)
        return [float(loss) for loss in losses]

    def _add(
        self, entries: list[Entry], piece: StagePiece | None, run: int,
        values: dict[str, RemoteValue],
    ) -> None:  # fmt: skip
        """Add a run of a piece on values by key, and the values that it answers."""
        if piece is not None:
            entry = self._client.entry(piece.prepared, run, [values[key] for key in piece.sent])
            values.update(zip(piece.answered, entry.outputs, strict=True))
            entries.append(entry)

    def _submit(self, entries: Sequence[Entry]) -> None:
        """Send runs: all of them, or none."""
        try:
            self._client.submit(entries, saves=False)
        finally:
            for run in {entry.run for entry in entries}:
                self._client.end_run(run)

    def _rates(self) -> dict[str, RemoteValue]:
        """Return the learning rates of this step; raise `UsageError` for other changes."""
        if self.optimizer.changes != self._changes:
            raise UsageError("settings of the optimizer other than the learning rate have changed",
                             remedy="compile the training again")  # fmt: skip
        rates = [np.asarray(rate, np.float32) for rate in self.optimizer.rates(self.steps)]
        return {rate_name(number): self._client.put(rate) for number, rate in enumerate(rates)}

    def _update(self, values: dict[str, RemoteValue]) -> None:
        """Add the gradients of the replicas, clip them, and update all stages."""
        client = self._client
        entries: list[Entry] = []
        for sums in self._sums:
            run, of_replica = client.begin_run(), dict[str, RemoteValue]()
            for piece in (*sums, *self._additions):
                self._add(entries, piece, run, of_replica)
        run = client.begin_run()
        for piece in (*self._squares, self._clipping, *self._updates, *self._copies):
            self._add(entries, piece, run, values)
        self._updating = entries
        try:
            self._submit(entries)
        finally:  # An interrupted update was sent wholly, or not at all.
            if entries and client.has_sent(entries[0]):
                self.steps += 1
                self.forwards += self.parallel.micro_batches
        if self._clipping is not None:
            self._finish_update()
            self.gradient_norm = float(client.value(values[GRADIENT_NORM]))
        if self.steps % SAVE_EVERY == 0:
            for device in self._used:
                client.save(device)

    # -- tensors -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        self.mesh.open_client("the training")
        if self._is_partial:
            raise TaskError("load_state_dict() of this training did not come to its end",
                            remedy="load_state_dict() of a checkpoint")  # fmt: skip

    def _check_usable(self) -> None:
        self._check_open()
        self._finish_update()

    def _finish_update(self) -> None:
        """Wait for an update; raise `TaskError` if it failed on a device."""
        if not any(self._client.has_sent(entry) for entry in self._updating):
            self._updating = ()
        try:
            self._client.finish(self._updating)
        except StitchError as error:
            raise TaskError(
                f"an update of this training failed on a part of its devices: {error.what}",
                where=error.where, remedy="load_state_dict() of a checkpoint",
            ) from error  # fmt: skip
        self._updating = ()

    def _initial(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the first values of all kept tensors; raise `UsageError` for another shape."""
        arrays = {}
        for name, desc in self.descs.items():
            parameter, _, state = name.rpartition(".")
            found = values[parameter] if state == MASTER else values.get(name)
            if found is None:
                found = np.full(desc.shape, self.optimizer.start_of_slot(parameter, state))
            arrays[name] = np.asarray(found)
            _check_shape(name, arrays[name].shape, desc.shape)
        return arrays

    def _write(self, wholes: Mapping[str, Array], *, begins: bool = True) -> None:
        """Set persistent buffers: all of them if the training `begins`, also after a failed
        update."""
        self._is_partial = True
        values = {
            name: self._divided.part(name, wholes) for name in self._owners
            if self._divided.whole(name) in wholes
        }  # fmt: skip
        by_device: dict[str, dict[str, RemoteValue]] = {device: {} for device in self._used}
        for stages in self._stages:
            for each in stages:
                by_device[each.device] |= each.buffers(values, begins=begins)
        for device, buffers in by_device.items():
            if buffers:
                self._client.write(device, buffers)
        self._updating, self._is_partial = (), False

    @property
    def _used(self) -> tuple[str, ...]:
        """The devices of the training."""
        return tuple(dict.fromkeys(each.device for stages in self._stages for each in stages))

    def _read(self, names: Iterable[str]) -> dict[str, Array]:
        """Return kept tensors by name, with one message for each stage."""
        by_stage: dict[int, list[str]] = {}
        for name in names:
            by_stage.setdefault(self._owners[name].number, []).append(name)
        arrays: dict[str, Array] = {}
        for number, own in by_stage.items():
            arrays |= self._first[number].read(own)
        return arrays

    @one_at_a_time
    def state_dict(self) -> dict[str, Array]:
        """Return everything that the next step depends on, as `TrainingInstance.state_dict`."""
        self._check_usable()
        counts = {f"training.{name}": np.asarray(getattr(self, name), np.int64) for name in COUNTS}
        return self._divided.joined(self._read(self._owners)) | counts

    @one_at_a_time
    @takes(state=MAPPING)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, also of a `TrainingInstance` or in other stages.

        Raises `UsageError` with what is missing, unknown, or of another shape or type.
        """
        self.mesh.open_client("the training")
        check_state(state, self.descs)
        self._losses = ()
        self._write({name: np.asarray(state[name]) for name in self.descs})
        self.steps, self.forwards, self.seed = (int(state[f"training.{k}"]) for k in COUNTS)

    @one_at_a_time
    def parameters(self) -> dict[str, Array]:
        """Return the weights by name; float32 masters if programs have another precision."""
        return self.tensors({self._divided.whole(each.name) for each in self._parameters})

    @one_at_a_time
    def tensors(self, names: Iterable[str]) -> dict[str, Array]:
        """Return parameters, states of the model and of the optimizer by name, as `parameters`
        does; raise `UsageError` for other names."""
        self._check_usable()
        masters = {
            name: slot if (slot := f"{name}.{MASTER}") in self.descs else name for name in names
        }
        self._check_names(masters)
        wanted = {*masters.values()}
        found = self._divided.joined(
            self._read([slot for slot in self._owners if self._divided.whole(slot) in wanted])
        )
        return {name: found[slot] for name, slot in masters.items()}

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.descs:
                raise unknown(f"the training has no tensor {name!r}", name, sorted(self.descs))

    @one_at_a_time
    @takes(values=MAPPING)
    def set_tensors(self, values: Mapping[str, Any]) -> None:
        """Overwrite parameters, with their float32 masters, and states by name.

        Raises `UsageError` for a name or shape of no such tensor.
        """
        self._check_usable()
        self._check_names(values)
        arrays = {name: np.asarray(value) for name, value in values.items()}
        for name, array in arrays.items():
            _check_shape(name, array.shape, self.descs[name].shape)
        masters = {f"{name}.{MASTER}": array for name, array in arrays.items()}
        arrays |= {slot: array for slot, array in masters.items() if slot in self.descs}
        self._write(arrays, begins=False)

    @one_at_a_time
    def gradients(self) -> dict[str, Array]:
        """Return the gradients of the last step, before clipping, by parameter."""
        self._check_usable()
        made: dict[str, Array] = {}
        # The update adds those of the other replicas to the first one's.
        for each in itertools.chain(*(self._stages if self._losses else self._stages[:1])):
            own = each.stage.parameters
            arrays = each.read([parameter.gradient for parameter in own]) if own else {}
            for parameter in own:
                more, before = arrays[parameter.gradient], made.get(parameter.name)
                made[parameter.name] = more if before is None else before + more
        return self._divided.joined(made)

    def close(self) -> None:
        """End the training, and the mesh if it is its own. Closing twice is allowed."""
        if self._owns_mesh:
            self.mesh.close()

    def __enter__(self) -> Self:
        self.mesh.open_client("the training")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_ONE_TRAINING:
            raise AttributeError(f"'StagedTraining' object has no attribute {name!r}")
        raise UsageError(
            f"a training in stages has no {name}: it runs whole steps",
            remedy=_OF_ONE_TRAINING[name],
        )

    def __repr__(self) -> str:
        return f"<StagedTraining: {len(self._first)} stages, step {self.steps}, {self.mesh!r}>"


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise `UsageError` for an array of another shape."""
    if shape != expected:
        raise UsageError(
            f"tensor {name!r} has another shape", expected=str(list(expected)),
            got=str(list(shape)), remedy="pass the whole array",
        )  # fmt: skip


def _global_order(orders: Schedule, replicas: int, stages: int) -> tuple[tuple[int, Action], ...]:
    """Return the actions of all replicas in an order in which each comes after those it needs."""
    order: list[Action] = []
    queues = [deque(each) for each in orders]
    while any(queues):
        for queue in queues:
            while queue and all(each in order for each in queue[0].needs(stages)):
                order.append(queue.popleft())
    return tuple((replica, action) for action in order for replica in range(replicas))


def _inputs_of(
    model: Trainable, stages: Iterable[StagePieces], kind: InputKind
) -> dict[str, TensorDesc]:
    """Return the inputs of a kind by name, in the order of the model."""
    descs = {
        slot.name: program.input_desc(i)
        for program in [each.stage.forward for each in stages]
        for i, slot in enumerate(program.inputs)
        if slot.kind is kind
    }
    return {slot.name: descs[slot.name] for slot in model.graph.inputs if slot.kind is kind}

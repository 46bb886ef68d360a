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
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from stitch.argument_kinds import (
    LIST,
    MAPPING,
    TEXT,
    WHOLE,
    arranged,
    check_fields,
    either,
    takes,
)
from stitch.errors import StitchError, TaskError, UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.mesh.client import MeshClient, PreparedPiece, RemoteValue
from stitch.mesh.mesh import Mesh, send_piece
from stitch.mesh.messages import Source, Target, from_wire, to_wire
from stitch.mesh.schedules import Action, schedule
from stitch.program import Array, InputKind, InputSlot, Program, Role, TensorDesc, ValueType
from stitch.runtime import capture
from stitch.tasks import Future, TaskGraph
from stitch.training import (
    CLIP_FACTOR,
    COUNTS,
    GRADIENT_NORM,
    KEPT_KINDS,
    LABEL,
    LOSS,
    MASTER,
    MORE,
    Loss,
    Optimizer,
    Stage,
    Trainable,
    TrainingOptions,
    check_state,
    compilation,
    compile_stage,
    is_rate,
    micro_batches_of,
    random_key,
    rate_name,
    stages_of,
)
from stitch.ttb import Binary

_NUMBERS = itertools.count()
#: Steps after which the persistent buffers are read back, for a server that is started again.
SAVE_EVERY = 8
_HALF_UPDATED = "an update of this training failed on a part of its devices"


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """How a training is divided among devices.

    Attributes:
        stages: Their number, or the nodes to cut after.
        schedule: `gpipe`, `1f1b` or `interleaved`.
        replicas: Copies of all stages, each with its share of the micro-batches.
        micro_batches: The micro-batches of a step, of all replicas together.
        chunks: Stages per device, for `interleaved`.

    Raises:
        UsageError: A value is out of range.
    """

    stages: int | Sequence[str] = 1
    schedule: str = "1f1b"
    replicas: int = 1
    micro_batches: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        check_fields(
            self, stages=either(WHOLE, LIST), schedule=TEXT, replicas=WHOLE, micro_batches=WHOLE,
            chunks=WHOLE,
        )  # fmt: skip
        for name in ("replicas", "micro_batches", "chunks"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1", got=str(getattr(self, name)))
        if self.micro_batches % self.replicas:
            raise UsageError(
                "each replica has the same number of micro-batches",
                expected=f"a multiple of {self.replicas}", got=str(self.micro_batches),
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Piece:
    """A prepared piece, with the keys of the values that it is sent and that it answers."""

    prepared: PreparedPiece
    sent: tuple[str, ...]
    answered: tuple[str, ...]


class _PieceGraph:
    """The task graph of a piece under construction: values by slot name, sources, targets."""

    def __init__(self, name: str, binary: Callable[[Program], Binary]) -> None:
        self.graph, self._binary = TaskGraph(name), binary
        self.values: dict[str, Future] = {}
        self.sources: list[Source] = []
        self.targets: list[Target] = []
        self.sent: list[str] = []
        self.answered: list[str] = []

    def take(self, slot: str, desc: TensorDesc, source: Source, key: str = "") -> None:
        """Add an input; `key` names a value that is sent."""
        self.values[slot] = self.graph.input(desc.without_address(), f"v{len(self.sources)}")
        self.sources.append(source)
        if source.kind == "sent":
            self.sent.append(key)

    def call(self, program: Program) -> None:
        """Call a program on the values of its slots; its results are values afterwards."""
        results = self.graph.call(
            self._binary(program), *[self.values[slot.name] for slot in program.inputs]
        )
        results = results if isinstance(results, tuple) else (results,)
        names = [slot.name for slot in program.outputs]
        self.values |= zip(names, results, strict=True)

    def give(self, value: Future, key: str = "", buffer: str = "", kept: str = "") -> None:
        """Add an output; `key` names a value that is answered."""
        self.graph.output(value, f"o{len(self.targets)}")
        self.targets.append(Target(bool(key), buffer, kept))
        if key:
            self.answered.append(key)


class _StagePieces:
    """The pieces of a stage on the device of a replica.

    They take turns in one sequence. Values of a micro-batch are named `F{stage}.{output}`,
    `B{stage}.{output}` and `input.{name}`.
    """

    def __init__(
        self, mesh: Mesh, device: str, number: int, stage: Stage[ComputationGraph],
        options: TrainingOptions, leaving: Container[str], shared: Container[str],
    ) -> None:  # fmt: skip
        """`leaving`: outputs of forward that later stages read; `shared`: parameters that other
        stages or replicas have copies of."""
        self.device, self.number = device, number
        self._mesh, self._scope = mesh, f"stage {number} of training {next(_NUMBERS)}"
        self._leaving, self._shared, self._spaces = leaving, shared, options.spaces
        self._machine = mesh.specification.devices[device].machine
        self.stage = compile_stage(stage, self._machine, options.spaces)
        self._binaries: dict[int, Binary] = {}
        #: The persistent buffers by slot name.
        self.descs: dict[str, TensorDesc] = {}
        forward, backward = self.stage.forward, self.stage.backward
        for program in filter(None, (forward, self.stage.update)):
            for i, slot in enumerate(program.inputs):
                if slot.kind in KEPT_KINDS and not is_rate(slot.name):
                    self.descs.setdefault(slot.name, program.input_desc(i))
        #: The states that forward replaces: they have a second buffer, for the next values.
        self.changed = [slot.name for slot in forward.outputs if slot.name in self.descs]
        self._gradients = {
            slot.name: program.output_desc(i)
            for program in filter(None, (backward,))
            for i, slot in enumerate(program.outputs)
            if slot.name in {parameter.gradient for parameter in stage.parameters}
        }
        arriving = {each.slot for each in stage.returning}
        self._read_back = {
            slot.name for program in filter(None, (backward,)) for slot in program.inputs
            if slot.name not in arriving and self._is_of_pass(slot)
        }  # fmt: skip
        # The first micro-batch begins the sums of gradients and the next states.
        self.forwards = [self._forward(is_first=True)]
        self.forwards += [self._forward(is_first=False)] if self.changed else self.forwards
        self.backwards = (
            [] if backward is None
            else [self._backward(is_first=True), self._backward(is_first=False)]
        )  # fmt: skip

    def of(self, action: Action) -> _Piece | None:
        """Return the piece of an action, None for a backward pass without gradients."""
        pieces = self.backwards if action.is_backward else self.forwards
        return pieces[min(action.micro_batch, 1)] if pieces else None

    @property
    def label(self) -> TensorDesc:
        """The descriptor of the target, in the last stage."""
        assert self.stage.loss is not None
        return self.stage.loss.input_desc([s.name for s in self.stage.loss.inputs].index(LABEL))

    def buffer(self, name: str) -> str:
        """Return the name of a persistent buffer."""
        return f"{self._scope}.{name}"

    def buffers(self, values: Mapping[str, Array]) -> dict[str, RemoteValue]:
        """Return all persistent buffers for `MeshClient.write`, with these values by slot name."""
        put = self._mesh.client.put
        made = {}
        for name, desc in self.descs.items():
            value = put(to_wire(values[name].astype(desc.layout.data_type.in_arrays.dtype)))
            made[self.buffer(name)] = value
            if name in self.changed:
                made[self.buffer(f"next.{name}")] = value
        for name, desc in self._gradients.items():
            zeros = np.zeros(desc.shape, desc.layout.data_type.in_arrays.dtype)
            made[self.buffer(name)] = put(to_wire(zeros))
        return made

    def read(self, names: Sequence[str]) -> dict[str, Array]:
        """Return persistent buffers by slot name."""
        descs = self.descs | self._gradients
        arrays = self._mesh.client.read(self.device, [self.buffer(name) for name in names])
        kinds = [descs[name].layout.data_type for name in names]
        return {
            name: from_wire(array, kind).astype(kind.dtype)
            for name, array, kind in zip(names, arrays, kinds, strict=True)
        }

    def _is_of_pass(self, slot: InputSlot) -> bool:
        """Whether a tensor is of a micro-batch, not a buffer that stays as it is in a step."""
        return slot.kind not in KEPT_KINDS or slot.name in self.changed

    def _graph(self, name: str) -> _PieceGraph:
        return _PieceGraph(f"{self.stage.forward.name} {name}", self._binary)

    def _binary(self, program: Program) -> Binary:
        held = self._binaries.get(id(program))
        if held is None:
            held = self._binaries[id(program)] = Binary(
                (program,), self._machine.shape, "stitch training"
            )
        return held

    def _prepared(self, piece: _PieceGraph) -> _Piece:
        prepared = send_piece(self._mesh, self.device, piece.graph, piece.sources, piece.targets)
        return _Piece(prepared, tuple(piece.sent), tuple(piece.answered))

    def _copied(self, piece: _PieceGraph, names: Iterable[str]) -> dict[str, Future]:
        """Return copies of values by slot name: an output of a piece is a result of a task."""
        descs, builder = self.descs | self._gradients, ComputationGraphBuilder("copies")
        spaces = {}
        for name in names:
            kind = descs[name]
            spaces[f"{name}.copy"] = spaces[name] = kind.layout.space
            value = builder.input(name, kind.shape, kind.layout.data_type)
            builder.output(f"{name}.copy", builder.op("Identity", value))
        if not spaces:
            return {}
        program = compilation(Role.FORWARD, builder.build(), self._machine, spaces).program
        piece.call(program)
        return {name: piece.values[f"{name}.copy"] for name in names}

    def _forward(self, *, is_first: bool) -> _Piece:
        stage, piece = self.stage, self._graph("forward")
        sources = {each.slot: f"F{each.source}.{each.output}" for each in stage.arriving}
        for i, slot in enumerate(stage.forward.inputs):
            desc = stage.forward.input_desc(i)
            if slot.kind in KEPT_KINDS:
                follows = slot.name in self.changed and not is_first
                name = f"next.{slot.name}" if follows else slot.name
                piece.take(slot.name, desc, Source("buffer", self.buffer(name)))
            else:
                key = sources.get(slot.name, f"input.{slot.name}")
                piece.take(slot.name, desc, Source("sent", self._kept(slot.name)), key)
        before = self._copied(piece, stage.reread)
        piece.call(stage.forward)
        if stage.loss is not None:
            piece.take(LABEL, self.label, Source("sent"), f"input.{LABEL}")
            piece.call(stage.loss)
        outputs = (*stage.forward.outputs, *(stage.loss.outputs if stage.loss else ()))
        for name in [output.name for output in outputs]:
            changed, leaves = name in self.changed, name in self._leaving or name == LOSS
            key = f"F{self.number}.{name}" if leaves else ""
            buffer = self.buffer(f"next.{name}") if changed else ""
            kept = "" if changed else self._kept(name)
            if key or buffer or kept:
                piece.give(piece.values[name], key, buffer, kept)
        for name, value in before.items():
            piece.give(value, kept=self._kept(name))
        return self._prepared(piece)

    def _kept(self, name: str) -> str:
        return f"{self._scope}.{name}" if name in self._read_back else ""

    def _backward(self, *, is_first: bool) -> _Piece:
        stage, piece = self.stage, self._graph("backward")
        assert stage.backward is not None
        sources = {each.slot: f"B{each.source}.{each.output}" for each in stage.returning}
        for i, slot in enumerate(stage.backward.inputs):
            desc = stage.backward.input_desc(i)
            if slot.name in sources:
                piece.take(slot.name, desc, Source("sent"), sources[slot.name])
            elif self._is_of_pass(slot):
                piece.take(slot.name, desc, Source("kept", self._kept(slot.name), is_last=True))
            else:
                piece.take(slot.name, desc, Source("buffer", self.buffer(slot.name)))
        piece.call(stage.backward)
        for output in [slot.name for slot in stage.backward.outputs]:
            if output not in self._gradients:
                piece.give(piece.values[output], f"B{self.number}.{output}")
        if self._gradients and not is_first:
            self._accumulate(piece)
        for name in self._gradients:
            piece.give(piece.values[name], buffer=self.buffer(name))
        return self._prepared(piece)

    def _accumulate(self, piece: _PieceGraph) -> None:
        """Add gradients to the sums."""
        assert self.stage.accumulation is not None
        for name, desc in self._gradients.items():
            piece.values[f"{MORE}{name}"] = piece.values[name]
            piece.take(name, desc, Source("buffer", self.buffer(name)))
        piece.call(self.stage.accumulation)

    def sums(self) -> _Piece | None:
        """Return the piece that answers the sums of gradients, None without gradients."""
        piece = self._graph("sums")
        for name, desc in self._gradients.items():
            piece.take(name, desc, Source("buffer", self.buffer(name)))
        for name, value in self._copied(piece, self._gradients).items():
            piece.give(value, f"sum.{name}")
        return self._prepared(piece) if self._gradients else None

    def addition(self) -> _Piece | None:
        """Return the piece that adds the sums of another replica, None without gradients."""
        piece = self._graph("addition")
        for name, desc in self._gradients.items():
            piece.take(name, desc, Source("sent"), f"sum.{name}")
        if not self._gradients:
            return None
        self._accumulate(piece)
        for name in self._gradients:
            piece.give(piece.values[name], buffer=self.buffer(name))
        return self._prepared(piece)

    def squares(self) -> _Piece | None:
        """Return the piece of the sums of squares of gradients, None without any."""
        program = self.stage.squares
        if program is None:
            return None
        piece = self._graph("squares")
        for name, desc in self._gradients.items():
            piece.take(name, desc, Source("buffer", self.buffer(name)))
        piece.call(program)
        for output in program.outputs:
            piece.give(piece.values[output.name], output.name)
        return self._prepared(piece)

    def clipping(self, graph: ComputationGraph) -> _Piece:
        """Return the piece of the factor of clipping and of the norm."""
        program = compilation(Role.UPDATE, graph, self._machine, self._spaces).program
        piece = self._graph("clipping")
        for i, slot in enumerate(program.inputs):
            piece.take(slot.name, program.input_desc(i), Source("sent"), slot.name)
        piece.call(program)
        for output in program.outputs:
            piece.give(piece.values[output.name], output.name)
        return self._prepared(piece)

    def update(self) -> _Piece | None:
        """Return the piece that updates parameters and states, None without any."""
        piece, program = self._graph("update"), self.stage.update
        for name in self.changed:
            piece.take(name, self.descs[name], Source("buffer", self.buffer(f"next.{name}")))
        for name, value in self._copied(piece, self.changed).items():
            piece.give(value, buffer=self.buffer(name))
        for i, slot in enumerate(program.inputs if program else ()):
            assert program is not None
            if slot.name == CLIP_FACTOR or is_rate(slot.name):
                piece.take(slot.name, program.input_desc(i), Source("sent"), slot.name)
            else:
                source = Source("buffer", self.buffer(slot.name))
                piece.take(slot.name, program.input_desc(i), source)
        if program is not None:
            piece.call(program)
            for name in [output.name for output in program.outputs]:
                key = f"updated.{name}" if name in self._shared else ""
                piece.give(piece.values[name], key, self.buffer(name))
        return self._prepared(piece) if piece.targets else None

    def copies(self, names: Sequence[str]) -> _Piece | None:
        """Return the piece that takes new values of parameters, None for no parameters."""
        piece = self._graph("copies")
        for name in names:
            piece.take(name, self.descs[name], Source("sent"), f"updated.{name}")
        for name, value in self._copied(piece, names).items():
            piece.give(value, buffer=self.buffer(name))
        return self._prepared(piece) if piece.targets else None


class StagedTraining:
    """A training in stages on a mesh. Use it as a context manager, or call `close`.

    With one replica, losses, weights and states have the bits of a `TrainingInstance` with
    `accumulation_steps` equal to `micro_batches`, on every schedule and carrier. Replicas add their
    gradients in the order of their numbers. `state_dict` is that of a `TrainingInstance`.

    `steps` and `forwards` count optimizer steps and micro-batches.
    """

    def __init__(
        self, model: Trainable, loss: Loss, optimizer: Optimizer, options: TrainingOptions,
        parallel: ParallelOptions, mesh: Mesh, *, seed: int = 0, owns_mesh: bool = False,
    ) -> None:  # fmt: skip
        """Compile the stages, and send programs and initial values to the devices.

        Raises:
            UsageError: The mesh has too few devices, or the options do not go together.
            CompileError: The graph cannot be differentiated or cut so.
        """
        self.options, self.parallel, self.mesh = options, parallel, mesh
        self.loss_fn, self.optimizer, self.seed = loss, optimizer, seed
        self._owns_mesh, self._changes = owns_mesh, optimizer.changes
        self._client: MeshClient = mesh.open_client("the training")
        self.steps = self.forwards = 0
        self._failure = ""
        if options.accumulation_steps != parallel.micro_batches:
            raise UsageError(
                "accumulation_steps is the number of micro-batches of a training in stages",
                expected=str(parallel.micro_batches), got=str(options.accumulation_steps),
            )  # fmt: skip
        staged = stages_of(model, loss, optimizer, options, parallel.stages)
        self._parameters = staged.parameters
        count = len(staged.stages)
        share = parallel.micro_batches // parallel.replicas
        #: The order of forward and backward passes on each device of a replica.
        self.schedule = schedule(parallel.schedule, count, share, parallel.chunks)
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
                _StagePieces(mesh, row[k % len(row)], k, stage, options, leaving[k], shared)
                for k, stage in enumerate(others if replica else staged.stages)
            ]
            for replica, row in enumerate(devices)
        ]
        self._first = first = self._stages[0]
        changed = sorted(name for each in first for name in each.changed)
        if parallel.replicas > 1 and changed:
            raise UsageError(
                "replicas of a model with states that forward replaces would have other states",
                got=", ".join(changed), remedy="train it in stages with replicas=1",
            )  # fmt: skip
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
        #: The tensors of a batch and the keys, by name, and the stages that have each kept tensor.
        self._inputs = _inputs_of(model, first, InputKind.ACTIVATION)
        self._keys = _inputs_of(model, first, InputKind.KEY)
        self._owners = {
            name: each
            for each in reversed(first)
            for name in each.descs
            if homes.get(name, each.number) == each.number
        }
        self.gradient_norm: float | None = None
        self._write(self._initial(model.values))

    def _devices(self, count: int) -> list[list[str]]:
        """Return the devices of each replica, `count` for each."""
        names, replicas = list(self.mesh.devices), self.parallel.replicas
        if len(names) < count * replicas:
            raise UsageError(
                "the mesh has too few devices for this training",
                expected=f"{count * replicas}: {count} for each of {replicas} replicas",
                got=f"{len(names)}: {', '.join(names)}",
            )
        return [names[k * count : (k + 1) * count] for k in range(replicas)]

    # -- a step ------------------------------------------------------------------------------------

    @takes(batches=LIST)
    def step(self, batches: Sequence[tuple[Any, Any]]) -> list[float]:
        """Train on micro-batches with one update for all of them; return their losses.

        After an error, weights, states and counters are as before the step, unless the update
        itself failed: then only `load_state_dict` or `close` is possible.

        Args:
            batches: Pairs of inputs and target, as for `TrainingInstance.step`.

        Raises:
            UsageError: There is another number of micro-batches, or one does not fit the model.
            TaskError: A loss is NaN or infinite, or a device could not go on.
        """
        self._check_usable()
        pairs = micro_batches_of(batches, self.parallel.micro_batches)
        values = [self._values(index, *pair) for index, pair in enumerate(pairs)]
        try:
            losses = self._passes(values)
            for index, loss in enumerate(losses):
                if not math.isfinite(loss):
                    raise TaskError(
                        f"the loss of step {self.steps} is {loss}",
                        where=f"micro-batch {index}",
                        remedy="the weights are as before this step: lower the learning rate, clip "
                        "gradients, or look at the batch",
                    )
            before = self._before_update()
        except BaseException:
            self._release()
            raise
        self._update(before)
        return losses

    def _values(self, index: int, inputs: Any, target: Any) -> dict[str, RemoteValue]:
        """Return the tensors and keys of a micro-batch; raise `UsageError`."""
        named = inputs if isinstance(inputs, Mapping) else {}
        given = () if named else inputs if isinstance(inputs, tuple) else (inputs,)
        types = [(name, desc.text()) for name, desc in self._inputs.items()]
        arrays = arranged("a micro-batch", types, given, named)
        self.loss_fn.check_label(np.asarray(target), self._prediction)
        label = self._first[-1].label
        placed = [*zip(self._inputs.items(), arrays, strict=True), ((LABEL, label), target)]
        values = {
            f"input.{name}": self._put(array, desc, f"{name!r} of micro-batch {index}")
            for (name, desc), array in placed
        }
        for name, desc in self._keys.items():
            kind = ValueType(desc.shape, desc.layout.data_type)
            key = random_key(self.seed, self.forwards + 1 + index, kind)
            values[f"input.{name}"] = self._put(key, desc, name)
        return values

    def _put(self, array: Any, desc: TensorDesc, what: str) -> RemoteValue:
        kind = desc.layout.data_type.in_arrays
        return self._client.put(to_wire(capture(array, desc.shape, kind, False, what)))

    def _passes(self, values: Sequence[dict[str, RemoteValue]]) -> list[float]:
        """Send all forward and backward passes; return the losses when all have ended."""
        client, share = self._client, len(values) // len(self._stages)
        runs = [client.begin_run() for _ in values]
        try:
            queues = [
                (r, deque(order)) for r in range(len(self._stages)) for order in self.schedule
            ]
            done: set[tuple[int, Action]] = set()
            while any(queue for _, queue in queues):
                for replica, queue in queues:
                    while queue and all(
                        (replica, each) in done for each in queue[0].needs(len(self._first))
                    ):
                        action = queue.popleft()
                        index = replica * share + action.micro_batch
                        pieces = self._stages[replica][action.stage]
                        self._send(pieces.of(action), runs[index], values[index])
                        done.add((replica, action))
            key = f"F{len(self._first) - 1}.{LOSS}"
            losses = [float(client.value(each[key])) for each in values]
            self._finish()
            return losses
        finally:
            for run in runs:
                client.end_run(run)

    def _send(self, piece: _Piece | None, run: int, values: dict[str, RemoteValue]) -> None:
        """Send a run of a piece on values by key; add the values that it answers."""
        if piece is not None:
            inputs = [values[key] for key in piece.sent]
            made = self._client.send(piece.prepared, run, inputs, saves=False)
            values.update(zip(piece.answered, made, strict=True))

    def _finish(self) -> None:
        for device in self._used:
            self._client.finish(device)

    def _release(self) -> None:
        """Let the devices go on after an error before the update."""
        for device in self._used:
            try:
                self._client.finish(device)
            except StitchError:
                self._client.write(device, {})

    def _before_update(self) -> dict[str, RemoteValue]:
        """Add the gradients of the replicas; return the rates and the factor of clipping."""
        client = self._client
        if self.optimizer.changes != self._changes:
            raise UsageError("settings of the optimizer other than the learning rate have changed",
                             remedy="compile the training again")  # fmt: skip
        rates = self.optimizer.rates(self.steps)
        values = {
            rate_name(n): client.put(np.asarray(rate, np.float32)) for n, rate in enumerate(rates)
        }
        run = client.begin_run()
        for sums in self._sums:
            for piece, addition in zip(sums, self._additions, strict=True):
                of_replica: dict[str, RemoteValue] = {}
                self._send(piece, run, of_replica)
                self._send(addition, run, of_replica)
        for piece in self._squares:
            self._send(piece, run, values)
        self._send(self._clipping, run, values)
        self._finish()
        client.end_run(run)
        return values

    def _update(self, values: dict[str, RemoteValue]) -> None:
        client = self._client
        self._failure = _HALF_UPDATED
        run = client.begin_run()
        for piece in (*self._updates, *self._copies):
            self._send(piece, run, values)
        self._finish()
        client.end_run(run)
        self._failure = ""
        self.steps += 1
        self.forwards += self.parallel.micro_batches
        if self._clipping is not None:
            self.gradient_norm = float(client.value(values[GRADIENT_NORM]))
        if self.steps % SAVE_EVERY == 0:
            for device in self._used:
                client.save(device)

    # -- tensors -----------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        self.mesh.open_client("the training")
        if self._failure:
            raise TaskError(self._failure, remedy="load_state_dict() of a checkpoint")

    def _initial(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the first values of all kept tensors; raise `UsageError` for missing ones."""
        arrays = {}
        for name, owner in self._owners.items():
            parameter, _, state = name.rpartition(".")
            found = values[parameter] if state == MASTER else values.get(name)
            if found is None:
                start = self.optimizer.start_of_slot(parameter, state)
                found = np.full(owner.descs[name].shape, start)
            arrays[name] = np.asarray(found)
        return arrays

    def _write(self, values: Mapping[str, Array]) -> None:
        """Set all persistent buffers, and go on after a failed update."""
        by_device: dict[str, dict[str, RemoteValue]] = {device: {} for device in self._used}
        for stages in self._stages:
            for each in stages:
                by_device[each.device] |= each.buffers(values)
        for device, buffers in by_device.items():
            self._client.write(device, buffers)
        self._failure = ""

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

    def state_dict(self) -> dict[str, Array]:
        """Return everything that the next step depends on, as `TrainingInstance.state_dict`."""
        self._check_usable()
        counts = {f"training.{name}": np.asarray(getattr(self, name), np.int64) for name in COUNTS}
        return self._read(self._owners) | counts

    @takes(state=MAPPING)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, also of a `TrainingInstance` or in other stages.

        Raises `UsageError` with what is missing, unknown, or of another shape or type.
        """
        self.mesh.open_client("the training")
        check_state(state, {name: owner.descs[name] for name, owner in self._owners.items()})
        self._failure = _HALF_UPDATED
        self._write({name: np.asarray(state[name]) for name in self._owners})
        self.steps, self.forwards, self.seed = (int(state[f"training.{k}"]) for k in COUNTS)

    def parameters(self) -> dict[str, Array]:
        """Return the weights by name; float32 masters if programs have another precision."""
        self._check_usable()
        slots = {p.name: p.beside(MASTER) if p.has_master else p.name for p in self._parameters}
        arrays = self._read(slots.values())
        return {name: arrays[slot] for name, slot in slots.items()}

    def gradients(self) -> dict[str, Array]:
        """Return the gradients of the last step, before clipping, by parameter."""
        self._check_usable()
        made: dict[str, Array] = {}
        for each in self._first:
            own = each.stage.parameters
            arrays = each.read([parameter.gradient for parameter in own]) if own else {}
            made |= {parameter.name: arrays[parameter.gradient] for parameter in own}
        return made

    def close(self) -> None:
        """End the training, and the mesh if it is its own. Closing twice is allowed."""
        if self._owns_mesh:
            self.mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StagedTraining: {len(self._first)} stages, step {self.steps}, {self.mesh!r}>"


def _inputs_of(
    model: Trainable, stages: Iterable[_StagePieces], kind: InputKind
) -> dict[str, TensorDesc]:
    """Return the inputs of a kind by name, in the order of the model."""
    descs = {
        slot.name: program.input_desc(i)
        for program in [each.stage.forward for each in stages]
        for i, slot in enumerate(program.inputs)
        if slot.kind is kind
    }
    return {slot.name: descs[slot.name] for slot in model.graph.inputs if slot.kind is kind}

"""The pieces of a stage of a training: task graphs between the persistent buffers of a device.

Values that only the backward pass of a stage reads stay on the device; the others are sent, under
keys that name them in a micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.mesh.client import PreparedPiece, RemoteValue
from stitch.mesh.mesh import Mesh, send_piece
from stitch.mesh.messages import Source, Target, from_wire, to_wire
from stitch.mesh.schedules import Action
from stitch.program import Array, InputSlot, Program, Role, TensorDesc
from stitch.tasks import Future, TaskGraph
from stitch.training import (
    CLIP_FACTOR,
    KEPT_KINDS,
    LABEL,
    LOSS,
    MORE,
    Stage,
    TrainingOptions,
    compilation,
    compile_stage,
    is_rate,
)
from stitch.ttb import Binary

_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class StagePiece:
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


class StagePieces:
    """The pieces of a stage on the device of a replica.

    Keys of a micro-batch's values: `F{stage}.{output}`, `B{stage}.{output}`, `input.{name}`.
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
        #: The sums of gradients by slot name, and the values of a pass that backward reads.
        self._gradients: dict[str, TensorDesc] = {}
        self._read_back: set[str] = set()
        if backward is not None:
            names = [slot.name for slot in backward.outputs]
            self._gradients = {
                parameter.gradient: backward.output_desc(names.index(parameter.gradient))
                for parameter in stage.parameters
            }
            read = {slot.name for slot in backward.inputs if self._is_of_pass(slot)}
            self._read_back = read - {each.slot for each in stage.returning}
        # The first micro-batch begins the sums of gradients and the next states.
        self.forwards = [self._forward(is_first=True)]
        self.forwards += [self._forward(is_first=False)] if self.changed else self.forwards
        self.backwards = (
            [] if backward is None
            else [self._backward(is_first=True), self._backward(is_first=False)]
        )  # fmt: skip

    def of(self, action: Action) -> StagePiece | None:
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

    def buffers(self, values: Mapping[str, Array], *, begins: bool) -> dict[str, RemoteValue]:
        """Return the persistent buffers of these slots for `MeshClient.write`; if the training
        `begins`, with sums of gradients of 0."""
        put = self._mesh.client.put
        made = {}
        for name, desc in self.descs.items():
            if name not in values:
                continue
            value = put(to_wire(values[name].astype(desc.layout.data_type.in_arrays.dtype)))
            made[self.buffer(name)] = value
            if name in self.changed:
                made[self.buffer(f"next.{name}")] = value
        for name, desc in self._gradients.items() if begins else ():
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

    def _prepared(self, piece: _PieceGraph) -> StagePiece:
        prepared = send_piece(self._mesh, self.device, piece.graph, piece.sources, piece.targets)
        return StagePiece(prepared, tuple(piece.sent), tuple(piece.answered))

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

    def _forward(self, *, is_first: bool) -> StagePiece:
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

    def _backward(self, *, is_first: bool) -> StagePiece:
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

    def sums(self) -> StagePiece | None:
        """Return the piece that answers the sums of gradients, None without gradients."""
        piece = self._graph("sums")
        for name, desc in self._gradients.items():
            piece.take(name, desc, Source("buffer", self.buffer(name)))
        for name, value in self._copied(piece, self._gradients).items():
            piece.give(value, f"sum.{name}")
        return self._prepared(piece) if self._gradients else None

    def addition(self) -> StagePiece | None:
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

    def squares(self) -> StagePiece | None:
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

    def clipping(self, graph: ComputationGraph) -> StagePiece:
        """Return the piece of the factor of clipping and of the norm."""
        program = compilation(Role.UPDATE, graph, self._machine, self._spaces).program
        piece = self._graph("clipping")
        for i, slot in enumerate(program.inputs):
            piece.take(slot.name, program.input_desc(i), Source("sent"), slot.name)
        piece.call(program)
        for output in program.outputs:
            piece.give(piece.values[output.name], output.name)
        return self._prepared(piece)

    def update(self) -> StagePiece | None:
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

    def copies(self, names: Sequence[str]) -> StagePiece | None:
        """Return the piece that takes new values of parameters, None for no parameters."""
        piece = self._graph("copies")
        for name in names:
            piece.take(name, self.descs[name], Source("sent"), f"updated.{name}")
        for name, value in self._copied(piece, names).items():
            piece.give(value, buffer=self.buffer(name))
        return self._prepared(piece) if piece.targets else None

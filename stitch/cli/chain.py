"""`Runnable`: what `stitch-run` runs, be it a chain of modules or a pipeline file.

Comes in: loaded programs and wires. Goes out: slots to fill, and a call that gives tensors. Must
not know: files of arrays, reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stitch.api import Device
from stitch.cli.module_files import Module
from stitch.errors import IncompatibleError
from stitch.linker import Wire
from stitch.program import Array, DataType, InputKind, ValueType
from stitch.runtime import GraphCall, LoadedProgram, PreparedGraph, Tensor


@dataclass(frozen=True, slots=True)
class RunInput:
    """An input that comes from outside; `given` is an array that it has unless told otherwise.

    `own` is what its program calls it; `name` tells it apart from those of other programs.
    """

    name: str
    type: ValueType
    kind: InputKind = InputKind.ACTIVATION
    given: Array | None = None
    own: str = ""


@dataclass(frozen=True, slots=True)
class RunOutput:
    """A result; `stored` is the type that it is stored in, which decides how exact it can be."""

    name: str
    type: ValueType
    stored: DataType


class Runnable(Protocol):
    """Runs on one device; `run` takes one array for each input, in order."""

    device: Device
    inputs: tuple[RunInput, ...]
    outputs: tuple[RunOutput, ...]

    @property
    def programs(self) -> tuple[LoadedProgram, ...]:
        """The loaded programs, in order."""

    @property
    def runs(self) -> int:
        """How many programs run in one pass."""

    def run(self, arrays: Sequence[Array]) -> tuple[Tensor, ...]:
        """One pass; gives the outputs, perhaps pending."""

    def forget(self) -> None:
        """Let go of everything that it keeps on the device."""


class Chain:
    """Modules in order, connected by wires; the outputs that feed nobody are its outputs."""

    def __init__(self, device: Device, modules: Sequence[Module], wires: Sequence[Wire]) -> None:
        self.device = device
        self._programs = [_loaded(device, module) for module in modules]
        feeds: list[dict[int, tuple[int, int]]] = [{} for _ in modules]
        for wire in wires:
            feeds[wire.consumer][wire.input] = (wire.producer, wire.output)
        taken = {source for fed in feeds for source in fed.values()}
        self._results = [
            (k, o)
            for k, module in enumerate(modules)
            for o in range(len(module.program.outputs))
            if (k, o) not in taken
        ]
        calls = list(map(GraphCall, self._programs, feeds))
        self._graph: PreparedGraph | None = PreparedGraph(calls, "chain", self._results)
        self._sources = self._graph.inputs
        self.inputs = self._named_inputs(modules)
        self.outputs = self._named_outputs(modules)

    def _named_inputs(self, modules: Sequence[Module]) -> tuple[RunInput, ...]:
        plain = [modules[k].program.inputs[i].name for k, i in self._sources]
        names = _told_apart(plain, [modules[k] for k, _ in self._sources], modules)
        inputs = []
        for name, (k, i) in zip(names, self._sources, strict=True):
            program = modules[k].program
            slot = program.inputs[i]
            kind = program.values[slot.value].type
            inputs.append(RunInput(name, kind, slot.kind, own=slot.name))
        return tuple(inputs)

    def _named_outputs(self, modules: Sequence[Module]) -> tuple[RunOutput, ...]:
        plain = [modules[k].program.outputs[o].name for k, o in self._results]
        names = _told_apart(plain, [modules[k] for k, _ in self._results], modules)
        outputs = []
        for name, (k, o) in zip(names, self._results, strict=True):
            program = modules[k].program
            value = program.values[program.outputs[o].value]
            outputs.append(RunOutput(name, value.type, value.desc.layout.data_type))
        return tuple(outputs)

    def run(self, arrays: Sequence[Array]) -> tuple[Tensor, ...]:
        """One pass; see `Runnable`."""
        assert self._graph is not None, "it was not forgotten"
        results = self._graph(*self._once(arrays))
        return results if isinstance(results, tuple) else (results,)

    def _once(self, arrays: Sequence[Array]) -> list[Array | Tensor]:
        """An array that several programs take is one tensor, which enters a space once."""
        times = Counter(map(id, arrays))
        tensors = {id(a): self.device.tensor(a, borrow=True) for a in arrays if times[id(a)] > 1}
        return [tensors.get(id(array), array) for array in arrays]

    @property
    def programs(self) -> tuple[LoadedProgram, ...]:
        """The loaded programs, in order."""
        return tuple(self._programs)

    @property
    def runs(self) -> int:
        """How many programs run in one pass: each module once."""
        return len(self._programs)

    def forget(self) -> None:
        """Drop the programs and what the pipeline keeps."""
        self._graph = None
        self._programs = []


def _loaded(device: Device, module: Module) -> LoadedProgram:
    try:
        return device.load(module.binary, module.program.name)
    except IncompatibleError as error:
        raise IncompatibleError(
            error.what, where=module.path, expected=error.expected, got=error.got,
            remedy=error.remedy,
        ) from error  # fmt: skip


def _told_apart(
    names: Sequence[str], owners: Sequence[Module], modules: Sequence[Module]
) -> list[str]:
    """Names as they are; where several slots share one, with their program's, or its index."""
    times, programs = Counter(names), Counter(m.program.name for m in modules)
    places = {id(module): at for at, module in reversed(list(enumerate(modules)))}
    told = []
    for name, owner in zip(names, owners, strict=True):
        title = owner.program.name
        called = title if programs[title] == 1 else places[id(owner)]
        told.append(name if times[name] == 1 else f"{called}.{name}")
    return told

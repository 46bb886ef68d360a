"""`Runnable`: what `stitch-run` runs, a chain of modules or a pipeline file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stitch.api import Device
from stitch.cli.module_files import ModuleFile
from stitch.cli.wiring import free_outputs
from stitch.errors import IncompatibleError
from stitch.linker import Wire
from stitch.program import Array, DataType, InputKind, ValueType
from stitch.runtime import LoadedProgram, PreparedGraph, Tensor, chain_graph
from stitch.ttb import initial_values


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
    """Runs on one device; `run` takes one array for each input, in order.

    `files`: what each program was read from, those of one file are compiled together; `runs`: how
    many programs run in one pass.
    """

    device: Device
    inputs: tuple[RunInput, ...]
    outputs: tuple[RunOutput, ...]
    programs: tuple[LoadedProgram, ...]
    files: tuple[object, ...]
    runs: int

    def run(self, arrays: Sequence[Array]) -> tuple[Tensor, ...]:
        """One pass; gives the outputs, perhaps pending."""

    def forget(self) -> None:
        """Let go of everything that it keeps on the device."""


class Chain:
    """Modules in order, connected by wires; the outputs that feed no input are its outputs."""

    def __init__(
        self, device: Device, modules: Sequence[ModuleFile], wires: Sequence[Wire]
    ) -> None:
        self.device = device
        self.programs = tuple([_loaded(device, module) for module in modules])
        self.files: tuple[object, ...] = tuple((m.path, m.program.name) for m in modules)
        self.runs = len(modules)
        feeds: list[dict[int, tuple[int, int]]] = [{} for _ in modules]
        for wire in wires:
            feeds[wire.consumer][wire.input] = (wire.producer, wire.output)
        results = free_outputs(modules, wires)
        called = _called(modules)
        table, sources = chain_graph(self.programs, feeds, "chain", results, called)
        self._graph: PreparedGraph | None = PreparedGraph(device, table, title="the chain")
        taken = [(modules[k].program, modules[k].program.inputs[i]) for k, i in sources]
        # States that nothing is said of begin with what their files hold.
        begun = [initial_values(module.binary, module.program) for module in modules]
        starts = [begun[k].get(slot.name) for (k, _), (_, slot) in zip(sources, taken, strict=True)]
        self.inputs = tuple([
            RunInput(name, program.values[slot.value].type, slot.kind, start, own=slot.name)
            for (name, _), (program, slot), start in zip(table.inputs, taken, starts, strict=True)
        ])  # fmt: skip
        given = [modules[k].program.values[modules[k].program.outputs[o].value] for k, o in results]
        self.outputs = tuple([
            RunOutput(name, value.type, value.desc.layout.data_type)
            for (name, _), value in zip(table.outputs, given, strict=True)
        ])  # fmt: skip

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

    def forget(self) -> None:
        """Drop the programs and what the pipeline keeps."""
        self._graph = None
        self.programs = ()


def _loaded(device: Device, module: ModuleFile) -> LoadedProgram:
    try:
        return device.load(module.binary, module.program.name)
    except IncompatibleError as error:
        error.where = module.path
        raise


def _called(modules: Sequence[ModuleFile]) -> list[str]:
    """What modules are called where slots are told apart: their programs' names, else indices."""
    times = Counter(module.program.name for module in modules)
    titles = [module.program.name for module in modules]
    return [title if times[title] == 1 else str(at) for at, title in enumerate(titles)]

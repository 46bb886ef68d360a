"""What `stitch-run` runs, a chain of modules or a pipeline file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from stitch import documents
from stitch.api import Device
from stitch.cli.module_files import ModuleFile
from stitch.cli.wiring import names_of
from stitch.errors import IncompatibleError
from stitch.linker import Port, ProgramNames, Wire
from stitch.mesh import Mesh, MeshGraph, RemoteTensor
from stitch.program import Array, DataType, InputKind, ValueType
from stitch.runtime import LoadedProgram, Tensor, chain_graph
from stitch.tasks import HasProgram
from stitch.ttb import initial_values

if TYPE_CHECKING:
    from stitch.documents import CheckedPipeline


@dataclass(frozen=True, slots=True)
class RunInput:
    """An input of a run.

    Args:
        name: Its name, unique among the run's inputs.
        given: The array that it has where no option names another.
        own: Its name within its program (in a chain of modules).
        port: Its module and its index there (in a chain of modules).
    """

    name: str
    type: ValueType
    kind: InputKind = InputKind.ACTIVATION
    given: Array | None = None
    own: str = ""
    port: Port | None = None


@dataclass(frozen=True, slots=True)
class RunOutput:
    """A result; `stored`, the type in device memory, decides how exact it can be."""

    name: str
    type: ValueType
    stored: DataType
    port: Port | None = None


class Chain:
    """Modules in order, connected by wires; outputs that feed no input are its outputs.

    `modules` has their names for `MODULE.SLOT`, `programs` those loaded on a device, `graphs` the
    task graphs on a mesh and how often a pass runs each; `runs` are the program runs of a pass.
    """

    def __init__(
        self, device: Device | Mesh, modules: Sequence[ModuleFile], wires: Sequence[Wire]
    ) -> None:
        self._device = device
        self.modules: ProgramNames | None = names_of(modules)
        self.programs: tuple[LoadedProgram, ...] = ()
        sources: Sequence[HasProgram] = modules
        if isinstance(device, Device):
            sources = self.programs = tuple([_loaded(device, module) for module in modules])
        self.runs = len(modules)
        feeds: list[dict[int, tuple[int, int]]] = [{} for _ in modules]
        for wire in wires:
            feeds[wire.consumer][wire.input] = (wire.producer, wire.output)
        fed = {(wire.producer, wire.output) for wire in wires}
        ports = [(k, o) for k, m in enumerate(modules) for o in range(len(m.program.outputs))]
        results = [port for port in ports if port not in fed]
        called = [self.modules.short_name(k) for k in range(len(modules))]
        graph, free = chain_graph(sources, feeds, "chain", results, called)
        run = device.prepare(graph)
        self._run: Callable[..., Any] | None = run
        self.graphs: tuple[tuple[MeshGraph, int], ...] = (
            ((run, 1),) if isinstance(run, MeshGraph) else ()
        )
        # States without an array of their own begin with the values of their files.
        starts = [initial_values(module.binary, module.program) for module in modules]
        inputs = []
        for name, (k, i) in zip(graph.inputs, free, strict=True):
            program, slot = modules[k].program, modules[k].program.inputs[i]
            start, kind = starts[k].get(slot.name), program.values[slot.value].type
            inputs.append(RunInput(name, kind, slot.kind, start, slot.name, (k, i)))
        self.inputs = tuple(inputs)
        outputs = []
        for name, (k, o) in zip(graph.outputs, results, strict=True):
            value = modules[k].program.values[modules[k].program.outputs[o].value]
            outputs.append(RunOutput(name, value.type, value.desc.layout.data_type, (k, o)))
        self.outputs = tuple(outputs)

    def run(self, arrays: Sequence[Array]) -> tuple[Tensor | RemoteTensor, ...]:
        """Run one pass with an array for each input; return the outputs, perhaps pending."""
        assert self._run is not None, "forget was called"
        results = self._run(*self._shared(arrays))
        return results if isinstance(results, tuple) else (results,)

    def _shared(self, arrays: Sequence[Array]) -> Sequence[Array | Tensor]:
        """Replace an array of several inputs by one tensor, which is copied to a space once."""
        device = self._device
        if not isinstance(device, Device):
            return arrays
        times = Counter(map(id, arrays))
        tensors = {id(a): device.tensor(a, borrow=True) for a in arrays if times[id(a)] > 1}
        return [tensors.get(id(array), array) for array in arrays]

    def forget(self) -> None:
        """Release the programs and the graph."""
        self._run = None
        self.programs = ()


def _loaded(device: Device, module: ModuleFile) -> LoadedProgram:
    try:
        return device.load(module.binary, module.program.name)
    except IncompatibleError as error:
        error.where = module.path
        raise


class PipelineRunnable:
    """The pipeline of a YAML file."""

    def __init__(self, device: Device | Mesh, checked: CheckedPipeline) -> None:
        self.modules: ProgramNames | None = None
        self._pipeline = documents.YamlPipeline(checked, device)
        self.inputs = tuple(RunInput(i.name, i.type, given=i.given) for i in checked.inputs)
        outputs = []
        for name, value in zip(self._pipeline.output_names, checked.outputs, strict=True):
            assert value.desc is not None, "the check refuses inputs as outputs"
            outputs.append(RunOutput(name, value.type, value.desc.layout.data_type))
        self.outputs = tuple(outputs)
        self.programs = tuple(self._pipeline.programs.values())
        self.graphs = self._pipeline.graphs
        self.runs = checked.file.runs

    def run(self, arrays: Sequence[Array]) -> tuple[Tensor | RemoteTensor, ...]:
        """Run one pass; see `Chain`."""
        return self._pipeline.run(arrays, borrow=True)

    def forget(self) -> None:
        """Release the programs."""
        self.programs = ()
        self._pipeline.forget()


#: What is ready to run on a device or on a mesh; the modules of a pipeline have no names.
Runnable: TypeAlias = Chain | PipelineRunnable

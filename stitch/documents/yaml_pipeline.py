"""`YamlPipeline`: a pipeline file on a device or a mesh, called with its inputs.

A value is freed after its last use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from stitch.argument_kinds import arranged
from stitch.documents.fitting import CheckedValue, check_pipeline
from stitch.documents.pipeline_form import InputEntry, PipelineFile, Reference, load_pipeline
from stitch.documents.pipeline_graphs import (
    Assign,
    GraphRun,
    PipelineRun,
    graph_runs,
    graphs_of,
)
from stitch.errors import FormatError, Problem, UsageError
from stitch.forms import read_array
from stitch.frozen_json import located
from stitch.machine import Machine, known_machines
from stitch.mesh import Mesh, MeshGraph, RemoteTensor
from stitch.program import Array, DataType, Program, TensorDesc, ValueType
from stitch.report import Device
from stitch.runtime import LoadedProgram, Tensor, capture
from stitch.ttb import Binary, load


@dataclass(frozen=True, slots=True)
class PipelineInput:
    """An input: its type, and the array of its file, if it has one."""

    name: str
    type: ValueType
    given: Array | None = None


def _read_input(entry: InputEntry, file: str, converted: list[Problem]) -> PipelineInput:
    """Read an input with the array of its file; append changes of its type to `converted`."""
    if entry.file is None:
        assert entry.shape is not None and entry.data_type is not None
        return PipelineInput(entry.name, ValueType(entry.shape, entry.data_type))
    array = read_array(entry.file, entry.array, entry.data_type, entry.shape)
    stored = DataType.from_dtype(array.dtype)
    kind = stored if entry.data_type is None else entry.data_type
    shape = array.shape if entry.shape is None else entry.shape
    what = f"input {entry.name!r}"
    with located(f"{file}:{entry.line}"):
        fitted = capture(array, shape, kind, True, what)
    if stored is not kind and kind.is_floating:
        detail = f"{what} is converted from {stored.value} to {kind.value}"
        converted.append(Problem("converted", f"{file}:{entry.line}", detail))
    fitted.flags.writeable = False
    return PipelineInput(entry.name, ValueType(shape, kind), fitted)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedPipeline:
    """A checked pipeline file with its binaries and input arrays.

    `warnings` lists conversions of input arrays.
    """

    file: PipelineFile
    binaries: Mapping[str, Binary]
    programs: Mapping[str, Program]
    inputs: tuple[PipelineInput, ...]
    outputs: tuple[CheckedValue, ...]
    warnings: tuple[Problem, ...] = ()

    @property
    def machine(self) -> str | Machine:
        """Return the machine of the file, or the one that its first module was compiled for.

        Raises `UsageError` if Stitch does not know that machine.
        """
        if self.file.device is not None:
            return self.file.device
        first = next(iter(self.binaries.values()))
        if first.origin is not None:
            return first.origin.machine
        name = first.machine.name
        if name not in known_machines():
            raise UsageError(
                f"{self.file.file} has no `device`, and its modules were compiled for {name!r}, "
                "a machine that Stitch does not ship",
                expected="`device: machine.yaml` in the file, or a device to run on",
            )
        return name


def read_pipeline(path: str | Path, *, strict_types: bool = False) -> CheckedPipeline:
    """Read and check a pipeline file, its binaries and its arrays.

    Args:
        path: The YAML file.
        strict_types: Refuse conversions between floating types.

    Raises:
        FormatError: Lists every defect.
        IncompatibleError: A binary has another version.
    """
    file = load_pipeline(path)
    binaries = {m.name: load(m.file) for m in file.modules}
    programs: dict[str, Program] = {}
    for module in file.modules:
        with located(f"{file.file}:{module.line}"):
            programs[module.name] = binaries[module.name].program(module.program or 0)
    converted: list[Problem] = []
    inputs = tuple([_read_input(entry, file.file, converted) for entry in file.inputs])
    if strict_types and converted:
        raise FormatError(
            f"{file.file}: strict types refuse conversions", problems=tuple(converted)
        )
    values = {one.name: CheckedValue(one.type) for one in inputs}
    outputs, changed = check_pipeline(file, programs, values, strict_types=strict_types)
    return CheckedPipeline(file, binaries, programs, inputs, outputs, (*converted, *changed))


class _Module(NamedTuple):
    """A program of a file, for a mesh."""

    binary: Binary
    program: Program


@final
class YamlPipeline:
    """A pipeline file on a device; `pipeline(x=...)` returns a tensor or a tuple of tensors.

    On a mesh, modules that name a device are there, and the results are remote tensors.
    """

    def __init__(self, checked: CheckedPipeline, device: Device | Mesh) -> None:
        self.device = device
        self.checked = checked
        self.inputs = checked.inputs
        self.output_names = tuple(name for name, _, _ in checked.file.outputs)
        #: The programs that are loaded on a device, by module.
        self.programs: dict[str, LoadedProgram] = {}
        #: By run, and whether it consumes what nothing reads afterwards.
        self._prepared: dict[tuple[int, bool], Callable[..., Any]] = {}
        #: The graphs on a mesh, and how often a pass runs each.
        self.graphs: tuple[tuple[MeshGraph, int], ...] = ()
        if isinstance(device, Mesh):
            modules = {name: _Module(checked.binaries[name], p)
                       for name, p in checked.programs.items()}  # fmt: skip
            places = _places(checked.file, device)
            machine = next(iter(device.devices.values())).machine
            self._runs, self._results = graphs_of(checked.file, modules, machine, places)
            found = {id(run): (device.prepare(run.graph), times)
                     for run, times in graph_runs(self._runs)}  # fmt: skip
            self.graphs = tuple(found.values())
            self._prepared = {(key, False): graph for key, (graph, _) in found.items()}
        else:
            self.programs = {
                module.name: device.load(checked.binaries[module.name], module.program or 0)
                for module in checked.file.modules
            }
            self._runs, self._results = graphs_of(checked.file, self.programs, device.machine)
        self._shared = _read_whole_by_several(self._runs)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run once, with arguments by position or name; return a tensor or a tuple of them.

        Raises `UsageError` for missing or surplus inputs, `LinkError`.
        """
        what = f"pipeline {self.checked.file.name!r}"
        types = [(one.name, one.type.text()) for one in self.inputs]
        defaults = {one.name: one.given for one in self.inputs if one.given is not None}
        results = self.run(arranged(what, types, arguments, named, defaults))
        return results[0] if len(results) == 1 else results

    def __repr__(self) -> str:
        inputs = ", ".join(f"{one.name}: {one.type.text()}" for one in self.inputs)
        outputs = ", ".join(self.output_names)
        return f"<YamlPipeline {self.checked.file.name}({inputs}) -> {outputs} on {self.device!r}>"

    def run(self, values: Sequence[Any], *, borrow: bool = False) -> tuple[Any, ...]:
        """Run once on a value for each input, in order; `borrow` as for a loaded program."""
        scope = {
            one.name: self._captured(one, value, borrow)
            for one, value in zip(self.inputs, values, strict=True)
        }
        self._run(self._runs, scope, {}, set())
        return tuple([scope[name] for name in self._results])

    def _captured(self, one: PipelineInput, value: Any, borrow: bool) -> Any:
        device = self.device
        if isinstance(value, Tensor | RemoteTensor):
            if value.shape != one.type.shape:
                raise UsageError(f"input {one.name!r} has another shape",
                                 expected=str(one.type.shape), got=str(value.shape))  # fmt: skip
            return value
        what = f"input {one.name!r}"
        allowed = None if isinstance(device, Mesh) else device.allowed_nbytes
        array = capture(value, one.type.shape, one.type.data_type, borrow, what, allowed)
        if array is not value:
            # Our own copy: steps may borrow it.
            array.flags.writeable = False
        if isinstance(device, Mesh) or one.name not in self._shared:
            return array
        # An input of several runs is one tensor, which is copied to a space once.
        return device.tensor(array, borrow=True)

    def _run(
        self, runs: Sequence[PipelineRun], scope: dict[str, Any], indices: Mapping[str, int],
        owned: set[str],
    ) -> None:  # fmt: skip
        """Run on the values of `scope`; `owned`: the names of those that have no other name."""
        for run in runs:
            if isinstance(run, GraphRun):
                self._run_graph(run, scope, indices, owned)
            elif isinstance(run, Assign):
                moved = owned & run.moved
                owned.difference_update(run.values, run.values.values())
                owned |= {name for name, value in run.values.items() if value in moved}
                scope.update([(name, scope[value]) for name, value in run.values.items()])
            else:
                turns: list[list[Any]] = [[] for _ in run.collected]
                first = indices.get(run.index, 0) + run.start
                for number in range(run.times):
                    at = {**indices, run.index: first + number * run.step}
                    self._run(run.body, scope, at, owned)
                    for (source, _), each in zip(run.collected, turns, strict=True):
                        each.append(scope[source])
                for (_, names), each in zip(run.collected, turns, strict=True):
                    scope.update(zip(names, each, strict=True))
            for name in run.drops:
                scope.pop(name, None)

    def _run_graph(
        self, run: GraphRun, scope: dict[str, Any], indices: Mapping[str, int], owned: set[str]
    ) -> None:
        device = self.device
        key = id(run), not isinstance(device, Mesh) and run.consumed <= owned
        if key not in self._prepared:
            assert isinstance(device, Device), "the graphs of a mesh are prepared"
            takes = [
                name for name, reference in zip(run.graph.inputs, run.inputs, strict=True)
                if reference.is_element or (key[1] and reference.name in run.consumed)
            ]  # fmt: skip
            self._prepared[key] = device.prepare(run.graph, takes=takes)
        # Arrays of a run are our own or read-only, or borrowed as the caller asked.
        called = self._prepared[key](*[
            _value_of(reference, scope, indices, future.desc)
            for reference, future in zip(run.inputs, run.graph.inputs.values(), strict=True)
        ])  # fmt: skip
        results = called if isinstance(called, tuple) else (called,)
        scope.update(zip(run.outputs, results, strict=True))
        owned.update(run.outputs)

    def forget(self) -> None:
        """Release the loaded programs; the pipeline cannot be called afterwards."""
        self.programs, self._prepared, self._runs, self.graphs = {}, {}, (), ()


def _value_of(
    reference: Reference, scope: Mapping[str, Any], indices: Mapping[str, int], desc: TensorDesc
) -> Any:
    """Return the value of an input of a graph, of type `desc`."""
    value = scope[reference.name]
    if isinstance(value, RemoteTensor) and (
        reference.is_element or value.dtype != desc.layout.data_type.in_arrays.dtype
    ):
        # Elements, and values of other types, pass through the client.
        value = value.numpy()
    if not reference.is_element:
        return value
    element = value[reference.at(indices)]
    return np.asarray(element) if isinstance(value, np.ndarray) else element


def _places(file: PipelineFile, mesh: Mesh) -> dict[str, str]:
    """Return the device of each module that names one; raise `UsageError` for an unknown one."""
    places = {}
    for module in file.modules:
        if module.device is not None:
            try:
                mesh.specification.entry(module.device)
            except UsageError as error:
                error.where = f"{file.file}:{module.line}"
                raise
            places[module.name] = module.device
    return places


def _read_whole_by_several(runs: Sequence[PipelineRun]) -> frozenset[str]:
    """Return the values that several runs of graphs read, and none reads an element of."""
    reads, sliced = Counter[str](), set[str]()
    for run, times in graph_runs(runs):
        for reference in run.inputs:
            reads[reference.name] += times
            if reference.is_element:
                sliced.add(reference.name)
    return frozenset(name for name, count in reads.items() if count > 1) - sliced

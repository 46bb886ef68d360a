"""Pipeline files in the commands: `stitch-run pipeline.yaml` and `stitch-compile --for`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stitch import api
from stitch.api import Device
from stitch.cli.chain import RunInput, RunOutput
from stitch.cli.command import say_aside
from stitch.cli.module_files import DEFAULT_TARGET, known_machine, replaced
from stitch.cli.rehearsal import Advice, Load, best_advice, rehearse, with_change
from stitch.documents import (
    CheckedPipeline,
    PipelineFile,
    YamlPipeline,
    load_pipeline,
    read_pipeline,
)
from stitch.errors import FormatError, UsageError
from stitch.graph import ComputationGraph, parse_placement
from stitch.linker import ProgramNames
from stitch.machine import Machine, load_machine
from stitch.planner import Cost, SlotChange
from stitch.program import Array, Program
from stitch.runtime import Tensor
from stitch.ttb import load


class PipelineRunnable:
    """A `Runnable` over a pipeline file."""

    def __init__(self, device: Device, checked: CheckedPipeline) -> None:
        self.device = device
        self.modules: ProgramNames | None = None
        self._pipeline = YamlPipeline(checked, device)
        self.inputs = tuple(RunInput(i.name, i.type, given=i.given) for i in checked.inputs)
        outputs = []
        for name, value in zip(self._pipeline.output_names, checked.outputs, strict=True):
            assert value.desc is not None, "the check refuses inputs as outputs"
            outputs.append(RunOutput(name, value.type, value.desc.layout.data_type))
        self.outputs = tuple(outputs)
        self.programs = tuple(self._pipeline.programs.values())
        self.files: tuple[object, ...] = tuple((m.file, m.program) for m in checked.file.modules)
        self.runs = checked.file.runs

    def run(self, arrays: Sequence[Array]) -> tuple[Tensor, ...]:
        """Run one pass; see `Runnable`."""
        return self._pipeline.run(arrays, borrow=True)

    def forget(self) -> None:
        """Release the programs."""
        self.programs = ()
        self._pipeline.forget()


def open_pipeline_file(
    options: argparse.Namespace, open_device: Callable[[argparse.Namespace, Machine], Device]
) -> tuple[Device, Load]:
    """Open the device of a pipeline file, or of `--device`; return it with the file's loader."""
    checked = read_pipeline(options.pipeline, strict_types=options.strict_types)
    for warning in checked.warnings:
        say_aside(f"stitch-run: warning: {warning}")
    machine = load_machine(options.device if options.device is not None else checked.machine)
    return open_device(options, machine), loader_of(checked)


def loader_of(checked: CheckedPipeline) -> Load:
    """Return a function that loads a pipeline on a device, with some programs replaced."""

    def load(device: Device, programs: Mapping[int, Program]) -> PipelineRunnable:
        names = [module.name for module in checked.file.modules]
        own, binaries = dict(checked.programs), dict(checked.binaries)
        for at, program in programs.items():
            name = names[at]
            binaries[name] = replaced(binaries[name], own[name], program)
            own[name] = program
        return PipelineRunnable(device, replace(checked, binaries=binaries, programs=own))

    return load


# `stitch-compile SOURCE -o FILE --for=pipeline.yaml`: compile a module for its pipeline.


def compiled_for(
    options: argparse.Namespace, graph: ComputationGraph, cache: api.CompileCache | None
) -> tuple[api.CompiledModel, Advice | None]:
    """Compile a module with the slot layouts for which its pipeline costs least.

    Returns the model, and the changes, or None if the original layouts are best. Raises
    `UsageError` if the pipeline has no such module, and all errors of compiling and planning.
    """
    file = load_pipeline(options.pipeline)
    output = Path(options.output).resolve()
    own = [at for at, module in enumerate(file.modules) if module.file.resolve() == output]
    if not own:
        listed = ", ".join(str(module.file) for module in file.modules)
        raise UsageError(
            f"{options.pipeline} has no module in the file {options.output}", where="--for",
            expected=f"-o FILE, one of {listed}",
        )  # fmt: skip
    for at, module in enumerate(file.modules):
        if at not in own and not module.file.exists():
            raise FormatError(
                f"module {module.file} of the pipeline does not exist", where=options.pipeline,
                remedy="compile the other modules of a pipeline first, without --for",
            )  # fmt: skip
    target = options.target or _machine_of(file, output)
    placement = [parse_placement(option) for option in options.placement]
    named = replace(graph, name=options.name or graph.name)
    fixed = {(option.side, named.slot_index(option)) for option in placement}

    def compiled(changes: Sequence[SlotChange]) -> api.CompiledModel:
        changed = named
        for change in changes:
            changed = with_change(changed, change)
        requested = changed.with_placement(*placement)
        return api.compile(requested, target=target, role=options.role, executor=options.executor,
                           math_fidelity=options.math_fidelity, cache=cache)  # fmt: skip

    model = compiled(())
    plan = loader_of(read_pipeline(options.pipeline, given={output: model.binary}))
    machine = load_machine(file.device or target)
    now = rehearse(machine, plan, {}, None)

    def price(changes: Sequence[SlotChange]) -> Cost:
        if not changes:
            return now.cost
        (program,) = compiled(changes).binary.programs
        return rehearse(machine, plan, dict.fromkeys(own, program), None).cost

    advice = best_advice(
        now, price, most=len(graph.inputs) + len(graph.outputs),
        allowed=lambda slot: slot.program == own[0] and (slot.side, slot.index) not in fixed,
    )  # fmt: skip
    return (model, None) if advice is None else (compiled(advice.changes), advice)


def _machine_of(file: PipelineFile, output: Path) -> str:
    """Return the machine of a pipeline without reading the file `output`."""
    if file.device is not None:
        return file.device
    others = [module.file for module in file.modules if module.file.resolve() != output]
    return known_machine(load(others[0]).machine.name, str(others[0])) if others else DEFAULT_TARGET

"""`stitch-run pipeline.yaml`: a pipeline file as something that a run can run.

The form of the file is in `stitch/documents/pipelines/pipeline_form.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stitch.api import Device
from stitch.cli.chain import RunInput, RunOutput
from stitch.cli.command import say_aside
from stitch.cli.module_files import replaced
from stitch.cli.rehearsal import Load
from stitch.documents import CheckedPipeline, YamlPipeline, read_pipeline
from stitch.machine import Machine, load_machine
from stitch.program import Array, Program
from stitch.runtime import Tensor


class PipelineRunnable:
    """A `Runnable` over a pipeline file."""

    def __init__(self, device: Device, checked: CheckedPipeline) -> None:
        self.device = device
        self._pipeline = YamlPipeline(checked, device)
        self.inputs = tuple(RunInput(i.name, i.type, given=i.given) for i in checked.inputs)
        outputs = []
        for name, value in zip(self._pipeline.output_names, checked.outputs, strict=True):
            assert value.desc is not None, "the check lets no input through as an output"
            outputs.append(RunOutput(name, value.type, value.desc.layout.data_type))
        self.outputs = tuple(outputs)
        self.programs = tuple(self._pipeline.programs.values())
        self.files: tuple[object, ...] = tuple((m.file, m.program) for m in checked.file.modules)
        self.runs = checked.file.runs

    def run(self, arrays: Sequence[Array]) -> tuple[Tensor, ...]:
        """One pass; see `Runnable`."""
        return self._pipeline.run(arrays, borrow=True)

    def forget(self) -> None:
        """Drop the programs."""
        self.programs = ()
        self._pipeline.forget()


def open_pipeline_file(
    words: argparse.Namespace, open_device: Callable[[argparse.Namespace, Machine], Device]
) -> tuple[Device, Load]:
    """The device for a pipeline file (`--device` goes before the file's own), and its loader."""
    checked = read_pipeline(words.pipeline, strict_types=words.strict_types)
    for warning in checked.warnings:
        say_aside(f"stitch-run: warning: {warning}")
    machine = load_machine(words.device if words.device is not None else checked.machine)
    return open_device(words, machine), loader_of(checked)


def loader_of(checked: CheckedPipeline) -> Load:
    """What loads a pipeline file on a device, with other programs for some of its modules."""

    def load(device: Device, programs: Mapping[int, Program]) -> PipelineRunnable:
        names = [module.name for module in checked.file.modules]
        own, binaries = dict(checked.programs), dict(checked.binaries)
        for at, program in programs.items():
            name = names[at]
            binaries[name] = replaced(binaries[name], own[name], program)
            own[name] = program
        return PipelineRunnable(device, replace(checked, binaries=binaries, programs=own))

    return load

"""`stitch-compile SOURCE -o FILE --for=pipeline.yaml`: a module, placed for its pipeline.

The module is the one whose file in the pipeline is what `-o` writes; what lies there so far does
not matter, and it need not be there. Slots get the places and fixed addresses with which one pass
of the pipeline costs least, each planned with the module compiled anew. What `--set` says stays;
what the source placement options for a slot gives way.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stitch import api
from stitch.cli.module_files import DEFAULT_TARGET, known_machine
from stitch.cli.pipeline_file import loader_of
from stitch.cli.rehearsal import Advice, chosen, placed, rehearse
from stitch.documents import PipelineFile, load_pipeline, read_pipeline
from stitch.errors import FormatError, UsageError
from stitch.graph import ComputationGraph, parse_placement
from stitch.machine import load_machine
from stitch.planner import Cost, SlotChange
from stitch.ttb import load


def compiled_for(
    words: argparse.Namespace, graph: ComputationGraph, cache: api.CompileCache | None
) -> tuple[api.CompiledModel, Advice | None]:
    """The module's model with which its pipeline costs least, and what was changed for that.

    Raises `UsageError` where the pipeline has no such module, and what compiling the module as it
    is, or reading or planning the pipeline with it, raises.
    """
    file = load_pipeline(words.pipeline)
    place = Path(words.output).resolve()
    own = [at for at, module in enumerate(file.modules) if module.file.resolve() == place]
    if not own:
        listed = ", ".join(str(module.file) for module in file.modules)
        raise UsageError(
            f"{words.pipeline} has no module in the file {words.output}", where="--for",
            expected=f"-o FILE, one of {listed}",
        )  # fmt: skip
    for at, module in enumerate(file.modules):
        if at not in own and not module.file.exists():
            raise FormatError(
                f"module {module.file} of the pipeline is not there", where=words.pipeline,
                remedy="compile the other modules of a pipeline first, without --for",
            )  # fmt: skip
    target = words.target or _machine_of(file, place)
    asked = [parse_placement(option) for option in words.placement]
    named = replace(graph, name=words.name or graph.name)
    fixed = {(option.side, named.slot_index(option)) for option in asked}

    def compiled(changes: Sequence[SlotChange]) -> api.CompiledModel:
        changed = named
        for change in changes:
            changed = placed(changed, change)
        requested = changed.with_placement(*asked)
        return api.compile(requested, target=target, role=words.role, executor=words.executor,
                           math_fidelity=words.math_fidelity, cache=cache)  # fmt: skip

    model = compiled(())
    plan = loader_of(read_pipeline(words.pipeline, given={place: model.binary}))
    machine = load_machine(file.device or target)
    now = rehearse(machine, plan, {}, None)

    def price(changes: Sequence[SlotChange]) -> Cost:
        if not changes:
            return now.cost
        (program,) = compiled(changes).binary.programs
        return rehearse(machine, plan, dict.fromkeys(own, program), None).cost

    advice = chosen(
        now, price, most=len(graph.inputs) + len(graph.outputs),
        allowed=lambda slot: slot.program == own[0] and (slot.side, slot.index) not in fixed,
    )  # fmt: skip
    return (model, None) if advice is None else (compiled(advice.changes), advice)


def _machine_of(file: PipelineFile, place: Path) -> str:
    """The machine of a pipeline, whatever lies in the file `place`."""
    if file.device is not None:
        return file.device
    others = [module.file for module in file.modules if module.file.resolve() != place]
    return known_machine(load(others[0]).machine.name, str(others[0])) if others else DEFAULT_TARGET

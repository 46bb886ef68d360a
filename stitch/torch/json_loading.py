"""`load`: what `dump` wrote, with torch's objects in their places again."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import IO, Any

from stitch.argument_kinds import PATH, READABLE, either, takes
from stitch.errors import UsageError
from stitch.files import text_of
from stitch.frontend import TrainableSource
from stitch.graph import objects_without_duplicates
from stitch.model import CompiledModel
from stitch.program import InputKind
from stitch.torch.module_json import KIND, restore_module
from stitch.torch.shared_module import share
from stitch.training import ModelReader, TorchOptimizer, parameter_names


@takes(file=either(PATH, READABLE))
def load(file: str | Path | IO[str], module: Any = None, optimizer: Any = None) -> Any:
    """Go on from what `dump` of a model, or of a `stitch.torch.nn.Module`, wrote.

    A model comes back as a `CompiledModel`; `optimizer`, over the parameters of `module`, steps it
    from then on, with the settings that it has itself, and the module's tensors are those of the
    training from its first call on. A module that torch runs gets its tensors
    back, `optimizer` its state, and the module is returned. Raises `FormatError`, `UsageError`.
    """
    # Of what torch.compile gives for a module, that module.
    inside = getattr(module, "_orig_mod", module)
    text = text_of(file)
    try:
        body = json.loads(text, object_pairs_hook=objects_without_duplicates)
    except (RecursionError, ValueError):
        body = None
    if isinstance(body, dict) and body.get("stitch") == KIND:
        if module is None:
            raise UsageError("this is the JSON of a module that torch runs",
                             remedy="load(file, module, optimizer)")  # fmt: skip
        restore_module(body, inside, optimizer)
        return module
    model = CompiledModel.load(StringIO(text))
    return model if optimizer is None else _stepped_by(model, inside, optimizer)


def _stepped_by(model: CompiledModel, module: Any, optimizer: Any) -> CompiledModel:
    training = model.training
    if training is None:
        raise UsageError("this model is for inference: no optimizer steps it")
    names = [parameter.name for parameter in training.programs.parameters]
    theirs = TorchOptimizer(optimizer, parameter_names(module, names))
    known, given = training.optimizer.config(), theirs.native.config()
    if _without_rates(known) != _without_rates(given):
        raise UsageError(
            "this model is trained by another optimizer", expected=repr(training.optimizer),
            got=repr(theirs.native),
        )  # fmt: skip
    theirs.goes_on_from(int(training.values.get("training.steps", 0)))
    graph = model.graph
    examples = {
        slot.name: graph.input_type(i)
        for i, slot in enumerate(graph.inputs) if slot.kind is InputKind.ACTIVATION
    }  # fmt: skip
    # The module gives the programs for batches of another size.
    source = TrainableSource(graph, module, examples)
    stepped = replace(
        training, optimizer=theirs.native, watchers=(partial(share, module),),
        reader=ModelReader(source, model.placement, frozenset(names)),
    )  # fmt: skip
    return replace(model, training=stepped)


def _without_rates(config: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's settings, but for what is no part of the update."""
    groups = [_without_rates(group) for group in config.get("groups", ())]
    kept = {word: v for word, v in config.items() if word not in ("lr", "schedule", "groups")}
    return kept | {"groups": groups}

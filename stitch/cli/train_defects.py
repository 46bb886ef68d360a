"""Every defect of a training at once: of its form, its machine, its weights, its model, its data.

Comes in: a draft of the training, and the error of its model if all of its form is sound. Goes out:
the one error to be raised. Looks at each part by itself, so that none hides another; only where
something is wrong anyway, as parts are read here that a sound training reads once. Must not know:
devices, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stitch import api
from stitch.cli.train_model import module_of, read_weights, shapes_of
from stitch.errors import FormatError, OutOfMemoryError, StitchError
from stitch.frontend.modules import read_trainable
from stitch.frontend.pipeline_yaml import raise_problems
from stitch.frontend.train_yaml import TrainDraft
from stitch.frontend.train_yaml_data import data_defects
from stitch.machine import load_machine


def defects_of(
    draft: TrainDraft, device: str | None, error: StitchError | None = None
) -> StitchError:
    """All that is wrong, in the order of the file; `error` itself where it is all that is."""
    if isinstance(error, OutOfMemoryError):
        return error  # Reading more would not help.
    log = draft.log
    formal = len(log.problems)
    if device is None and draft.target is not None:
        target = draft.target
        _look(draft, "target", lambda: load_machine(target))
    _look(draft, "weights", lambda: read_weights(draft.weights))
    _look(draft, "model", lambda: _model(draft))
    if error is not None and len(log.problems) == formal:
        log.note_error("bad_model", _line(draft, error), error)
    seen = len(log.problems)
    if draft.data is not None:
        data_defects(draft.data, None, log, draft.seed)
    if error is not None and seen == formal + 1 == len(log.problems):
        return error
    try:
        raise_problems(log, "training")
    except FormatError as found:
        return found
    raise AssertionError("a draft without defects is a training")


def _look(draft: TrainDraft, key: str, look: Callable[[], object]) -> None:
    try:
        look()
    except StitchError as error:
        draft.log.note_error(f"bad_{key}", draft.lines.get(key, 1), error)


def _model(draft: TrainDraft) -> None:
    if {Path(word).suffix.lower() for word in draft.model} == {".ttb"}:
        for word in draft.model:
            api.load(draft.folder / word)
    elif len(draft.model) == 1:
        module, examples, _ = module_of(draft.folder, draft.model[0])
        shapes = shapes_of(draft.folder / draft.model[0], draft.batch_size)
        read_trainable(module, examples, shapes)


def _line(draft: TrainDraft, error: StitchError) -> int:
    """The line that an error names, else that of the model."""
    file, _, rest = (error.where or "").partition(":")
    number = rest.partition(",")[0]
    if file == draft.log.file and number.isdigit():
        return int(number)
    return draft.lines.get("model", 1)

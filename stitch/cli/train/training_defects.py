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
from stitch.cli.train.trained_model import module_of, read_weights
from stitch.documents import TrainDraft, data_defects
from stitch.errors import FormatError, OutOfMemoryError, StitchError
from stitch.frontend import batched_shapes, read_trainable
from stitch.machine import load_machine


def defects_of(
    draft: TrainDraft, device: str | None, error: StitchError | None = None
) -> StitchError:
    """All that is wrong, in the order of the file; `error` itself where it is all that is."""
    if isinstance(error, OutOfMemoryError):
        return error  # Reading more would not help.
    log, target = draft.log, draft.target
    whole = [
        device is not None
        or target is None
        or _is_whole(draft, "target", lambda: load_machine(target)),
        _is_whole(draft, "weights", lambda: read_weights(draft.weights)),
        _is_whole(draft, "model", lambda: _model(draft)),
    ]
    if error is not None and all(whole):
        _note(draft, "bad_model", _line(draft, error), error)
    seen = len(log.problems)
    if draft.data is not None:
        data_defects(draft.data, None, log, draft.seed)
    if error is not None and whole.count(False) <= 1 and len(log.problems) == seen:
        return error
    try:
        log.raise_any("training")
    except FormatError as defects:
        return defects
    raise AssertionError("a draft without defects is a training")


def _is_whole(draft: TrainDraft, key: str, look: Callable[[], object]) -> bool:
    """Whether a part can be looked at; what is wrong with it is noted."""
    try:
        look()
    except StitchError as error:
        _note(draft, f"bad_{key}", draft.lines.get(key, 1), error)
        return False
    return True


def _note(draft: TrainDraft, kind: str, line: int, error: StitchError) -> None:
    """Note an error, or each defect of the file that it is about, under a line of the training."""
    if isinstance(error, FormatError) and error.problems:
        for problem in error.problems:
            draft.log.note(problem.kind, line, f"{problem.where}: {problem.detail}")
    else:
        draft.log.note_error(kind, line, error)


def _model(draft: TrainDraft) -> None:
    if {Path(word).suffix.lower() for word in draft.model} == {".ttb"}:
        for word in draft.model:
            api.load(draft.folder / word)
    elif len(draft.model) == 1:
        module, examples, _ = module_of(draft.folder, draft.model[0])
        shapes = batched_shapes(draft.folder / draft.model[0], draft.batch_size)
        read_trainable(module, examples, shapes)


def _line(draft: TrainDraft, error: StitchError) -> int:
    """The line that an error names, else that of the model."""
    file, _, rest = (error.where or "").partition(":")
    number = rest.partition(",")[0]
    if file == draft.log.file and number.isdigit():
        return int(number)
    return draft.lines.get("model", 1)

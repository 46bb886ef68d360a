"""The wiring: which cells of a training mean what, found once from the slots of its programs.

Comes in: the stitched programs of a step. Goes out: numbers of cells by what they are for. Must not
know: losses, optimizers, arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

from stitch.program import InputKind
from stitch.training.graphs import GRADIENT_NORM
from stitch.training.programs import LABEL, LOSS, TrainingPrograms
from stitch.training.stitching import NamedCells, Stitched


@dataclass(frozen=True, slots=True)
class Wiring:
    """Numbers of cells. `inputs` are the batch's names; `keys` inputs of forward by position."""

    inputs: tuple[str, ...]
    batch: tuple[int, ...]
    keys: tuple[int, ...]
    #: State that forward replaces; that of it whose value before forward is what backward reads.
    buffers: tuple[int, ...]
    reread: tuple[int, ...]
    prediction: int
    label: int
    loss: int
    gradients: tuple[int, ...]
    #: What only backward still needs: gone once it is queued. What only one step needs.
    passing: tuple[int, ...]
    momentary: tuple[int, ...]


def wiring_of(
    programs: TrainingPrograms, cells: NamedCells, forward: Stitched, loss: Stitched,
    backward: Stitched,
) -> Wiring:  # fmt: skip
    """The wiring of the stitched programs of a step."""
    slots, numbers = programs.forward.inputs, cells.numbers
    inputs = tuple(slot.name for slot in slots if slot.kind is InputKind.ACTIVATION)
    batch = tuple(numbers[name] for name in inputs)
    keys = tuple(i for i, slot in enumerate(slots) if slot.kind is InputKind.KEY)
    buffers = tuple(
        number for number, slot in zip(forward.inputs, slots, strict=True)
        if slot.kind is InputKind.STATE and number in forward.outputs
    )  # fmt: skip
    gradients = tuple(numbers[parameter.gradient] for parameter in programs.parameters)
    prediction, label, judged = numbers[programs.prediction], numbers[LABEL], numbers[LOSS]
    passing = [n for n in forward.outputs if n not in buffers and n != prediction]
    passing += [n for n in loss.outputs if n != judged]
    norm = [numbers[GRADIENT_NORM]] if GRADIENT_NORM in numbers else []
    return Wiring(
        inputs, batch, keys, buffers, tuple(n for n in buffers if n in backward.inputs),
        prediction, label, judged, gradients, tuple(passing),
        (*passing, *batch, label, judged, *norm),
    )  # fmt: skip

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
    """Numbers of cells. `inputs` are the batch's names, `keys` those of other inputs of forward."""

    inputs: tuple[str, ...]
    keys: tuple[str, ...]
    #: State that forward replaces; that of it whose value before forward is what backward reads.
    buffers: tuple[int, ...]
    reread: tuple[int, ...]
    prediction: int
    loss: int
    gradients: tuple[int, ...]
    #: What only backward still needs: gone once it is queued. What only one step needs. The same
    #: with the prediction: gone with the next forward pass.
    passing: tuple[int, ...]
    momentary: tuple[int, ...]
    of_a_pass: tuple[int, ...]


def wiring_of(
    programs: TrainingPrograms, cells: NamedCells, forward: Stitched, loss: Stitched,
    backward: Stitched,
) -> Wiring:  # fmt: skip
    """The wiring of the stitched programs of a step."""
    slots, numbers = programs.forward.inputs, cells.numbers
    inputs = tuple(slot.name for slot in slots if slot.kind is InputKind.ACTIVATION)
    keys = tuple(slot.name for slot in slots if slot.kind is InputKind.KEY)
    buffers = tuple(
        number for number, slot in zip(forward.inputs, slots, strict=True)
        if slot.kind is InputKind.STATE and number in forward.outputs
    )  # fmt: skip
    gradients = tuple(numbers[parameter.gradient] for parameter in programs.parameters)
    prediction, judged = numbers[programs.prediction], numbers[LOSS]
    passing = [n for n in forward.outputs if n not in buffers and n != prediction]
    passing += [n for n in loss.outputs if n != judged]
    names = [*inputs, LABEL, LOSS, *({GRADIENT_NORM} & numbers.keys())]
    momentary = (*passing, *[numbers[name] for name in names])
    return Wiring(
        inputs, keys, buffers, tuple(n for n in buffers if n in backward.inputs), prediction,
        judged, gradients, tuple(passing), momentary, (*momentary, prediction),
    )  # fmt: skip

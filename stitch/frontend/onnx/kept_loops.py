"""Loops that stay loops: a body of ONNX's becomes the body of one scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from stitch.frontend.onnx.node_refusals import Unsupported
from stitch.frontend.onnx.values import Bound, Dependencies, Given
from stitch.graph import LayerMethods, SymbolicTensor, scan

#: Loops of at most so many rounds are written out: a few copies of a body are optimised together,
#: and cost less than going round.
UNROLLED_ROUNDS = 4

T = TypeVar("T")
Tensors = Sequence[SymbolicTensor]


@dataclass(slots=True)
class Loops:
    """From how many rounds on loops stay; how many have, and how many could not after all; how
    often a body was written."""

    unroll: int = UNROLLED_ROUNDS
    kept: int = 0
    given_up: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class LoopForm:
    """What a loop goes over: sequences along their axis 0, some from their ends."""

    op: str
    count: int
    states: Sequence[Given]
    sequences: Tensors = ()
    taken_backward: Sequence[bool] = ()
    given_backward: Sequence[bool] = ()


class LoopWriter(Protocol):
    """What a loop asks of the walk over a model."""

    loops: Loops
    dependencies: Dependencies
    #: The graph, and the bodies within it that are being written, the innermost last.
    inside: list[LayerMethods]

    def attempt(self, write: Callable[[], T]) -> T | None:
        """What a function writes; None, and nothing said of it, where some of it is refused."""


#: One round: its results, by states and elements.
Round = Callable[[Tensors, Tensors], Sequence[Bound]]


def keep_loop(writer: LoopWriter, form: LoopForm, write: Round) -> list[SymbolicTensor] | None:
    """The last states and what rounds give; None for a loop that has to be written out."""
    if form.count <= writer.loops.unroll:
        return None
    results = writer.attempt(lambda: _scanned(writer, form, write))
    if results is None:
        writer.loops.given_up += 1
    else:
        writer.loops.kept += 1
    return results


def _scanned(writer: LoopWriter, form: LoopForm, write: Round) -> list[SymbolicTensor]:
    """The loop as a scan; raises `StitchError` where it cannot be one."""
    around = writer.inside[-1]
    first = _tensors(form, form.states)
    results: list[SymbolicTensor] = []

    def body(states: Tensors, elements: Tensors) -> tuple[Tensors, Tensors]:
        note, taken = writer.dependencies.note, [*states, *elements]
        for source, inner in zip([*first, *form.sequences], taken, strict=True):
            note("Scan", [source], [inner])
        builders: list[Any] = [tensor.builder for tensor in taken[:1]]
        writer.inside += builders
        try:
            results.extend(_tensors(form, write(states, elements)))
        finally:
            del writer.inside[len(writer.inside) - len(builders) :]
        # A state is what it was first, or after the round before.
        for source, state, after in zip(first, states, results, strict=False):
            note("Scan", [source, after], [state])
        return results[: len(states)], results[len(states) :]

    last, given = scan(
        around, body, first, form.sequences, count=form.count,
        taken_backward=form.taken_backward, given_backward=form.given_backward,
    )  # fmt: skip
    made = [*last, *given]
    if not made or _is_known(made[0]):
        raise Unsupported(form.op)
    for inner, outer in zip(results, made, strict=True):
        writer.dependencies.note("Scan", [inner], [outer])
    return made


def _tensors(form: LoopForm, values: Sequence[Bound]) -> list[SymbolicTensor]:
    """Values as tensors; sequences of tensors and values that were refused go round in no scan."""
    tensors = [value for value in values if isinstance(value, SymbolicTensor)]
    if len(tensors) != len(values):
        raise Unsupported(form.op)
    return tensors


def _is_known(result: SymbolicTensor) -> bool:
    """Whether the scan that made this reads nothing but small constants."""
    builder: Any = result.builder
    operands = [SymbolicTensor(builder, value) for value in builder.operations[-1].inputs]
    return all(builder.known_data(operand) is not None for operand in operands)

"""What a body reads from around it, said so that it can be found again in another graph.

Comes in: the tensors that a body read; the meaning of its function, which has places for the values
and arrays that are closed over. Goes out: a recipe; by it, and by the same places in another graph,
the tensors there. Must not know functions over nests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from stitch.fractal.meanings import Meaning
from stitch.graph import SymbolicTensor
from stitch.program import ABSENT, Array, Operation


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that the function closes over, by its place."""

    place: int


@dataclass(frozen=True, slots=True)
class _ClosedArray:
    """An array that it closes over, by its place."""

    place: int


@dataclass(frozen=True, slots=True, eq=False)
class _Constant:
    """Data that the function made."""

    data: Array


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """A result of an operation on results of steps before, None for what it is not given."""

    operation: Operation
    output: int
    operands: tuple[int | None, ...]


_Step: TypeAlias = _Value | _ClosedArray | _Constant | _Made


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """Steps, each on those before it, and which of them are wanted."""

    steps: tuple[_Step, ...]
    wanted: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of data that it holds."""
        return sum(step.data.nbytes for step in self.steps if isinstance(step, _Constant))

    def tensors(self, meaning: Meaning, owner: Any) -> tuple[SymbolicTensor, ...]:
        """The tensors, as those of a builder, where these values and arrays stand at the places."""
        found: list[Any] = []
        for step in self.steps:
            match step:
                case _Value(place):
                    found.append(meaning.values[place])
                case _ClosedArray(place):
                    found.append(meaning.arrays[place])
                case _Constant(data):
                    found.append(data)
                case _Made(operation, output, operands):
                    given = [None if at is None else found[at] for at in operands]
                    found.append(_applied(operation, given, owner)[output])
        return tuple([owner.tensor(found[at]) for at in self.wanted])


def _applied(operation: Operation, given: Sequence[Any], owner: Any) -> Any:
    """An operation once more, in the innermost graph that its operands are of."""
    tensors = [each for each in given if isinstance(each, SymbolicTensor)]
    builder: Any = tensors[0].builder.innermost(tensors) if tensors else owner  # type: ignore[attr-defined]
    with builder.at(operation.location):
        return builder.apply(
            operation.op, given, len(operation.outputs), operation.attributes, operation.domain
        )


def recipe_for(wanted: Sequence[SymbolicTensor], meaning: Meaning, owner: Any) -> Recipe | None:
    """How tensors of a builder come from what a function closes over; None if that is not known."""
    steps = _Steps(meaning, owner)
    numbers = [steps.number(tensor) for tensor in wanted]
    known = [number for number in numbers if number is not None]
    return Recipe(tuple(steps.steps), tuple(known)) if len(known) == len(numbers) else None


class _Steps:
    """The steps so far, by builder and value."""

    def __init__(self, meaning: Meaning, owner: Any) -> None:
        self.steps: list[_Step] = []
        self._owner = owner
        self._known: dict[tuple[int, int], int | None] = {}
        for place, value in enumerate(meaning.values):
            self._known.setdefault((id(value.builder), value.index), self._add(_Value(place)))
        self._meaning = meaning

    def number(self, tensor: SymbolicTensor) -> int | None:
        """The step that gives a tensor."""
        key = id(tensor.builder), tensor.index
        if key not in self._known:
            self._known[key] = self._found(tensor)
        return self._known[key]

    def _found(self, tensor: SymbolicTensor) -> int | None:
        builder: Any = tensor.builder
        outer = builder.standing_for(tensor.index)
        if outer is not None:
            return self.number(outer)
        data = builder.constants.of_value(tensor.index)
        if data is not None:
            return self._constant(builder, tensor, data)
        for operation in reversed(builder.operations):
            if tensor.index in operation.outputs:
                return self._made(builder, operation, operation.outputs.index(tensor.index))
        return None

    def _constant(self, builder: Any, tensor: SymbolicTensor, data: Array) -> int | None:
        if not builder.is_unnamed_constant(tensor):
            return None
        for place, array in enumerate(self._meaning.arrays):
            if builder.constants.held(array) is data:
                return self._add(_ClosedArray(place))
        return self._add(_Constant(data))

    def _made(self, builder: Any, operation: Operation, output: int) -> int | None:
        if operation.body != ABSENT or not any(i != ABSENT for i in operation.inputs):
            return None
        operands: list[int | None] = []
        for index in operation.inputs:
            if index == ABSENT:
                operands.append(None)
                continue
            number = self.number(SymbolicTensor(builder, index))
            if number is None:
                return None
            operands.append(number)
        return self._add(_Made(operation, output, tuple(operands)))

    def _add(self, step: _Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

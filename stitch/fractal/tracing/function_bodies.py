"""User functions become bodies of loops: traced in a body of the builder's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from stitch.fractal.value_forms import ValueForm
from stitch.graph import SymbolicTensor, trace_body
from stitch.program import Body, ValueType

Tensors: TypeAlias = Sequence[SymbolicTensor]
#: From the builder of a body and its inputs: the form of the function's value, and its tensors.
Function: TypeAlias = Callable[[Any, Tensors], tuple[ValueForm, Tensors]]


@dataclass(frozen=True, slots=True)
class FunctionBody:
    """A body in a graph that is being written, and the tensors around that it reads."""

    body: Body
    captured: tuple[SymbolicTensor, ...]
    form: ValueForm


def function_body(
    owner: Any, kinds: Sequence[tuple[str, ValueType]], function: Function, *, copies: int = 1
) -> FunctionBody:
    """Trace a function into a body, for inputs of these names and types.

    `copies`: so many times each tensor of the value is given, all of them one after the other.
    """
    forms: list[ValueForm] = []

    def whole(builder: Any, inputs: Tensors) -> Tensors:
        form, tensors = function(builder, inputs)
        forms.append(form)
        return [*tensors] * copies

    body, captured = trace_body(owner, kinds, whole)
    return FunctionBody(body, captured, forms[0])

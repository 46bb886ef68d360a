"""User functions become bodies of loops, each traced once for the types of what it is given.

A body is kept by what its function means and by the types of states and elements; so it serves all
lengths, in all graphs. What the function reads from around its body is said by places: a value that
it closes over, an array, or what operations outside of the body make of such. Comes in: a call, a
builder, types. Goes out: a body in the builder's graph, the tensors that it reads there, the form
of the function's value. Must not know which loop runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stitch.fractal.current import NestCall
from stitch.fractal.kept_programs import Kept
from stitch.fractal.meanings import Meaning, MeaningReader, UnreadableError
from stitch.fractal.programs import write_operations
from stitch.fractal.tracing.captured_values import Recipe, recipe_for
from stitch.fractal.value_forms import ValueForm
from stitch.graph import SymbolicTensor, trace_body
from stitch.program import Body, BodyPool, ValueType

#: Bodies that are kept, and bytes of what they hold.
MAX_BODIES, MAX_BODY_NBYTES = 4096, 1 << 26

Tensors = Sequence[SymbolicTensor]
Kinds = Sequence[tuple[str, ValueType]]
#: From the builder of a body and its inputs: the form of the function's value, and its tensors.
Function = Callable[[Any, Tensors], tuple[ValueForm, Tensors]]


@dataclass(frozen=True, slots=True)
class FunctionBody:
    """A body in a graph that is being written, and the tensors around that it reads."""

    body: Body
    captured: tuple[SymbolicTensor, ...]
    form: ValueForm


@dataclass(frozen=True, slots=True)
class _KeptBody:
    """The same for any graph: `inner` are the bodies that its operations carry."""

    body: Body
    inner: tuple[Body, ...]
    recipe: Recipe
    form: ValueForm

    @property
    def nbytes(self) -> int:
        held = sum(c.data.nbytes for body in (self.body, *self.inner) for c in body.constants)
        return held + self.recipe.nbytes + 256 * len(self.body.values)


#: Those of all functions of this process.
BODIES: Kept[_KeptBody] = Kept(MAX_BODIES, lambda: MAX_BODY_NBYTES)


def function_body(
    call: NestCall, what: Hashable, owner: Any, kinds: Kinds, function: Function, *, copies: int = 1
) -> FunctionBody:  # fmt: skip
    """The body of a call's function, for inputs of these names and types; traced only where it is
    not kept.

    `what`: all that `function` does beside calling the call's own. `copies`: so many times each
    tensor of the value is given, all of them one after the other.
    """
    found = kept_body(call, what, owner, kinds, function, copies=copies)
    return _traced(owner, kinds, function, copies) if found is None else found


def kept_body(
    call: NestCall, what: Hashable, owner: Any, kinds: Kinds, function: Function, *, copies: int = 1
) -> FunctionBody | None:  # fmt: skip
    """The same; None where what the function means cannot be told."""
    meaning = _meaning(call, owner)
    if meaning is None:
        return None
    key = meaning.key, what, tuple([kind for _, kind in kinds]), copies
    known = BODIES.get(key)
    if known is not None:
        return _placed(known, meaning, owner)
    made = _traced(owner, kinds, function, copies)
    _keep(key, call, meaning, owner, made)
    return made


def _traced(owner: Any, kinds: Kinds, function: Function, copies: int) -> FunctionBody:
    forms: list[ValueForm] = []

    def whole(builder: Any, inputs: Tensors) -> Tensors:
        form, tensors = function(builder, inputs)
        forms.append(form)
        return [*tensors] * copies

    body, captured = trace_body(owner, kinds, whole)
    return FunctionBody(body, captured, forms[0])


def inlined(body: FunctionBody, given: Tensors, owner: Any) -> Tensors:
    """What a body makes of these, its operations written where it would be carried."""
    return write_operations(body.body, owner.bodies.bodies, [*given, *body.captured], owner)


def _meaning(call: NestCall, owner: Any) -> Meaning | None:
    """What a call's function means in the graph of a builder, if it can be told."""

    def form(value: SymbolicTensor) -> Hashable:
        builder: Any = value.builder
        if builder is not owner and not owner.is_inside(builder):
            raise UnreadableError("it reads a tensor of another graph")
        known = builder.known_data(value)
        data = None if known is None else (known.dtype.name, known.tobytes())
        return value.type, builder.is_unnamed_constant(value), data

    reader = MeaningReader(form)
    try:
        return reader.meaning((
            reader.of(call.function), reader.of(call.arguments), reader.of(call.named)
        ))  # fmt: skip
    except UnreadableError:
        return None


def _placed(known: _KeptBody, meaning: Meaning, owner: Any) -> FunctionBody:
    """A kept body in a graph that is being written."""
    body = known.body
    if known.inner:
        numbers = owner.bodies.add_all(known.inner)
        body = _renumbered(body, numbers)
    return FunctionBody(body, known.recipe.tensors(meaning, owner), known.form)


def _keep(key: Hashable, call: NestCall, before: Meaning, owner: Any, made: FunctionBody) -> None:
    """Keep what was traced, unless the function changed what it reads."""
    after = _meaning(call, owner)
    recipe = recipe_for(made.captured, before, owner)
    if after is None or after.key != before.key or recipe is None:
        return
    pool = BodyPool()
    numbers = pool.add_all(owner.bodies.bodies, {o.body for o in made.body.operations})
    kept = _KeptBody(
        _renumbered(made.body, numbers), tuple(pool.bodies), recipe, made.form
    )  # fmt: skip
    BODIES.put(key, kept, kept.nbytes + before.nbytes)


def _renumbered(body: Body, numbers: dict[int, int]) -> Body:
    operations = tuple([replace(o, body=numbers[o.body]) for o in body.operations])
    return replace(body, operations=operations)

"""Loops and branches: a Python function of one round becomes the body of a Scan.

The function is traced once. Tensors of the surrounding graph that it reads become operands shared
by all rounds; small constants are copied. A data-dependent branch is a scan of at most one round
whose condition is the branch's, so the branch that is not taken is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from stitch.errors import CompileError
from stitch.graph import numpy_functions
from stitch.graph.constant_pool import SMALL_NBYTES
from stitch.graph.emitter import Emitter, OperandLike
from stitch.graph.layer_methods import LayerMethods
from stitch.graph.source_location import mistake
from stitch.graph.symbolic import SymbolicTensor
from stitch.program import CONDITION, MAX_ROUNDS, SCAN, Array, Body, ScanForm, ValueType

Tensors = Sequence[SymbolicTensor]
Operands = Sequence[OperandLike]
#: Maps the states and elements of a round to the next states and the results of the round.
Round = Callable[[Tensors, Tensors], tuple[Operands, Operands]]


@final
class BodyBuilder(LayerMethods):
    """Builds a body within another graph; `build` ends it.

    `captured` lists the tensors of the surrounding builder that the body reads, in the order of
    the inputs they become.
    """

    __slots__ = ("_at", "_inputs", "_is_done", "around", "captured")

    def __init__(self, name: str, around: Emitter) -> None:
        super().__init__(name, around.bodies)
        self.around = around
        self.captured: list[SymbolicTensor] = []
        self._inputs: list[int] = []
        self._at: dict[int, SymbolicTensor] = {}
        self._is_done = False

    def input(self, name: str, kind: ValueType) -> SymbolicTensor:
        """Add the next input of the body."""
        tensor = self._value(name, kind)
        self._inputs.append(tensor.index)
        return tensor

    def is_inside(self, other: Emitter) -> bool:
        return not self._is_done and (self.around is other or self.around.is_inside(other))

    def tensor(self, given: OperandLike, like: SymbolicTensor | None = None) -> SymbolicTensor:
        """Convert an operand, as in every builder.

        A tensor of the surrounding graph becomes an input; an unnamed small constant is copied.
        """
        builder: Any = given.builder if isinstance(given, SymbolicTensor) else None
        if builder is None and isinstance(given, np.ndarray) and given.nbytes > SMALL_NBYTES:
            return self.tensor(self.around.tensor(given))  # Defined in the surrounding graph.
        if builder is None or builder is self or builder.is_inside(self):
            return super().tensor(given, like)
        if not self.is_inside(builder):
            return super().tensor(given, like)  # Raises: it belongs to another graph.
        outer = self.around.tensor(given)
        found = self._at.get(outer.index)
        if found is None:
            data = self._copied(outer)
            if data is not None:
                found = self.constant(data)
            else:
                found = self.input(outer.name, outer.type)
                self.captured.append(outer)
            self._at[outer.index] = found
        return found

    def _where(self) -> str:
        return self._location or self.around._where()

    def _copied(self, outer: SymbolicTensor) -> Array | None:
        """Return the data of an outer tensor to copy into the body; None to capture it instead."""
        if outer.type.nbytes > SMALL_NBYTES:
            return None
        # A named constant may be a trained parameter, and so may be what is computed from it.
        if outer.data_type.is_floating and not self.around.is_unnamed_constant(outer):
            return None
        return self.around.known_data(outer)

    def _check_open(self) -> None:
        super()._check_open()
        self._check_unfinished()

    def _check_unfinished(self) -> None:
        if self._is_done:
            raise CompileError(
                "a tensor was used outside of the loop that computes it",
                where=self.around._where(),
                remedy="use the arguments of a loop function only inside it; return what is "
                "needed after the loop",
            )

    def close(self) -> None:
        """Accept no more tensors or operations."""
        self._is_done = True

    def build(self, outputs: Operands) -> Body:
        """Return the body with these outputs and close the builder."""
        values = []
        for output in outputs:
            tensor = self.tensor(output)
            # An output must be computed in the body, and must not be an output already.
            if tensor.index not in self._made:
                tensor = self.identity(tensor)
            self._made.discard(tensor.index)
            values.append(tensor.index)
        self.close()
        return Body(
            tuple(self._inputs), tuple(values), tuple(self._values), tuple(self._operations),
            self._constants.constants(),
        )  # fmt: skip

    numpy_ufunc = numpy_functions.call_ufunc
    numpy_function = numpy_functions.call_function


#: Like `Round`; the builder of the body comes first.
RoundInBody = Callable[[BodyBuilder, Tensors, Tensors], tuple[Operands, Operands]]


def scan(
    builder: Emitter,
    f: Round,
    states: Operands,
    sequences: Tensors,
    *,
    count: int | None = None,
    taken_backward: Sequence[bool] = (),
    given_backward: Sequence[bool] = (),
) -> tuple[tuple[SymbolicTensor, ...], tuple[SymbolicTensor, ...]]:
    """Apply a function round by round; return the last states and the stacked results.

    Args:
        builder: The builder to write to.
        f: Maps states and elements of a round to the next states and the results of the round.
        states: The states before the first round.
        sequences: Tensors of equal length; a round takes one element of axis 0 of each.
        count: The number of rounds; required if there are no sequences.
        taken_backward: For each sequence, whether rounds take its elements last to first.
        given_backward: For each result, whether the first round's is stacked last.

    Returns:
        The states after the last round, and the results stacked along a new axis 0.

    Raises:
        CompileError: Sequences differ in length, or a state changes its type.

    >>> import numpy as np
    >>> from stitch.graph import ComputationGraphBuilder
    >>> b = ComputationGraphBuilder("sums")
    >>> xs = b.input("xs", (4, 2), "float32")
    >>> (last,), (sums,) = scan(
    ...     b, lambda s, x: ([s[0] + x[0]], [s[0] + x[0]]), [np.zeros(2, np.float32)], [xs])
    >>> last.shape, sums.shape
    ((2,), (4, 2))
    """
    return scan_in_body(
        builder, lambda _, before, elements: f(before, elements), states, sequences, count=count,
        taken_backward=taken_backward, given_backward=given_backward,
    )  # fmt: skip


def scan_in_body(
    builder: Emitter,
    f: RoundInBody,
    states: Operands,
    sequences: Tensors,
    *,
    count: int | None = None,
    taken_backward: Sequence[bool] = (),
    given_backward: Sequence[bool] = (),
    has_condition: bool = False,
) -> tuple[tuple[SymbolicTensor, ...], tuple[SymbolicTensor, ...]]:
    """Like `scan`; the function gets the builder of the body as its first argument.

    With `has_condition`, a round runs only while the first state is true; `count` is the maximum.
    """
    owner = builder.innermost([*states, *sequences])
    first = [owner.tensor(state) for state in states]
    lists = [owner.tensor(sequence) for sequence in sequences]
    count = _rounds(lists, count)
    kinds = [
        *[(f"state_{i}", t.type) for i, t in enumerate(first)],
        *[(f"element_{i}", _element(t)) for i, t in enumerate(lists)],
    ]

    def whole(body: BodyBuilder, given: Tensors) -> Sequence[SymbolicTensor]:
        before, elements = given[: len(first)], given[len(first) :]
        after, made = f(body, before, elements)
        if len(after) != len(before):
            raise CompileError(
                "the function of a round returns another number of states than it takes",
                where=owner._where(),
                expected=str(len(before)), got=str(len(after)),
            )  # fmt: skip
        states = [body.tensor(s, like) for s, like in zip(after, before, strict=True)]
        return [*states, *[body.tensor(each) for each in made]]

    body, captured = trace_body(owner, kinds, whole)
    return scan_of(
        owner, body, captured, first, lists, count=count, taken_backward=taken_backward,
        given_backward=given_backward, has_condition=has_condition,
    )  # fmt: skip


def trace_body(
    owner: Emitter,
    kinds: Sequence[tuple[str, ValueType]],
    f: Callable[[BodyBuilder, Tensors], Operands],
) -> tuple[Body, tuple[SymbolicTensor, ...]]:
    """Trace a function of tensors of these names and types as a body.

    Returns the body and the tensors of `owner` that it captures: its further inputs.
    """
    builder = BodyBuilder(f"{owner.name}_round", owner)
    inputs = [builder.input(name, kind) for name, kind in kinds]
    try:
        body = builder.build(f(builder, inputs))
    finally:
        builder.close()
    return body, tuple(builder.captured)


def scan_of(
    owner: Emitter,
    body: Body,
    captured: Tensors,
    states: Operands,
    sequences: Tensors,
    *,
    count: int | None = None,
    taken_backward: Sequence[bool] = (),
    given_backward: Sequence[bool] = (),
    has_condition: bool = False,
) -> tuple[tuple[SymbolicTensor, ...], tuple[SymbolicTensor, ...]]:
    """Like `scan_in_body`, for a body: its inputs are states, elements and captured tensors."""
    first = [owner.tensor(state) for state in states]
    lists = [owner.tensor(sequence) for sequence in sequences]
    collected = len(body.outputs) - len(first)
    form = ScanForm(
        _rounds(lists, count), len(first), len(lists), collected,
        tuple(taken_backward) or (False,) * len(lists),
        tuple(given_backward) or (False,) * collected, has_condition,
    )  # fmt: skip
    operands = [*first, *lists, *captured]
    for problem in form.problems(body.input_types, body.output_types, [t.index for t in operands]):
        raise CompileError(f"the body of a scan does not fit: {problem}", where=made_at(body))
    results = owner.carry(SCAN[1], SCAN[0], body, operands, form.attributes)
    return results[: form.states], results[form.states :]


def _rounds(lists: Tensors, count: int | None) -> int:
    """Return the number of rounds; raise `CompileError` if it is ambiguous."""
    lengths = {t.shape[:1] for t in lists} | ({(count,)} if count is not None else set())
    if len(lengths) != 1 or () in lengths:
        raise mistake(
            "the sequences of a scan must have one length",
            got=", ".join(t.type.text() for t in lists) or "no sequences, and no count",
        )
    ((rounds,),) = lengths
    return int(rounds)


def _element(sequence: SymbolicTensor) -> ValueType:
    return ValueType(sequence.shape[1:], sequence.data_type)


def made_at(body: Body) -> str:
    """Return the source location of the last operation of a body."""
    return body.operations[-1].location if body.operations else ""


# --------------------------------------------------------------------------------------------------
# Data-dependent control flow: branches, and loops with a condition.

#: Maps the operands, as tensors of the body, to the results of the branch.
Branch = Callable[[Tensors], Operands]
#: Maps states and operands to the condition for a further round, and to the next states.
LoopCondition = Callable[[Tensors], OperandLike]
LoopUpdate = Callable[[Tensors], Operands]


def choose(
    builder: Emitter,
    condition: SymbolicTensor,
    branches: tuple[Branch, Branch],
    operands: Tensors,
    kinds: Sequence[ValueType] | None = None,
) -> tuple[SymbolicTensor, ...]:
    """Return the results of the first branch if the condition is true, else of the second.

    Args:
        builder: The builder to write to.
        condition: One boolean.
        branches: The two branches; both must return values of the types `kinds`.
        operands: Tensors passed to the branch.
        kinds: Result types; by default found by tracing the first branch once more.

    Raises:
        CompileError: A branch returns other types, or `condition` is not one boolean.

    >>> from stitch.graph import ComputationGraphBuilder
    >>> b = ComputationGraphBuilder("size")
    >>> x = b.input("x", (2,), "float32")
    >>> branches = (lambda given: [b.sqrt(given[0])], lambda given: [b.neg(given[0])])
    >>> (chosen,) = choose(b, b.greater(b.reduce_sum(x), 0), branches, [x], [x.type])
    >>> chosen.shape
    (2,)
    """
    owner: Any = builder.innermost([condition, *operands])
    taken = _truth(owner, condition)
    if kinds is None:
        trial, _ = trace_body(
            owner, [], lambda body, _: branches[0](list(map(body.tensor, operands)))
        )
        kinds = trial.output_types
    states: Sequence[SymbolicTensor] = [
        owner.broadcast(np.zeros((), kind.data_type.dtype), kind.shape) for kind in kinds
    ]
    for is_taken, branch in zip((taken, owner.logical_not(taken)), branches, strict=True):
        states = _once(owner, is_taken, states, branch, operands)
    return tuple(states)


def repeat_while(
    builder: Emitter, condition: LoopCondition, f: LoopUpdate, states: Operands,
    operands: Tensors = (),
) -> tuple[SymbolicTensor, ...]:  # fmt: skip
    """Apply `f` to the states while `condition` of them is true; return the last states.

    Both functions get the states, then the operands. What they compute from operands alone is part
    of the round. At most `MAX_ROUNDS` rounds run.

    Raises:
        CompileError: A state changes its type.

    >>> from stitch.graph import ComputationGraphBuilder
    >>> b = ComputationGraphBuilder("doubled")
    >>> x = b.input("x", (2,), "float32")
    >>> (last,) = repeat_while(
    ...     b, lambda s: b.less(b.reduce_sum(s[0]), 100), lambda s: [b.add(s[0], s[0])], [x])
    >>> last.shape
    (2,)
    """
    owner = builder.innermost([*states, *operands])
    first = [owner.tensor(state) for state in states]

    def round_(body: BodyBuilder, before: Tensors, _: Tensors) -> tuple[Tensors, Tensors]:
        read = [body.tensor(operand) for operand in operands]
        made = f([*before[1:], *read])
        after = [body.tensor(s, like) for s, like in zip(made, before[1:], strict=True)]
        return [_truth(body, body.tensor(condition([*after, *read]))), *after], []

    goes_on = _truth(owner, owner.tensor(condition([*first, *operands])))
    last, _ = scan_in_body(
        owner, round_, [goes_on, *first], [], count=MAX_ROUNDS, has_condition=True
    )
    return last[1:]


def _once(
    owner: Emitter, is_taken: SymbolicTensor, states: Tensors, branch: Branch, operands: Tensors
) -> tuple[SymbolicTensor, ...]:
    """Return the results of a branch if it is taken, else `states`."""

    def round_(body: BodyBuilder, *_: Tensors) -> tuple[Operands, Tensors]:
        return [np.asarray(False), *branch([body.tensor(operand) for operand in operands])], []

    last, _ = scan_in_body(owner, round_, [is_taken, *states], [], count=1, has_condition=True)
    return last[1:]


def _truth(builder: Any, condition: SymbolicTensor) -> SymbolicTensor:
    """Return a condition as a tensor of shape ()."""
    if condition.data_type is not CONDITION.data_type or condition.size != 1:
        raise CompileError(
            "a condition must be one boolean", expected=CONDITION.text(), got=condition.type.text()
        )
    if not condition.shape:
        return condition
    truth: SymbolicTensor = builder.reshape(condition, ())
    return truth

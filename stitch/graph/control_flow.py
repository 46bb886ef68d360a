"""Loops: a Python function on the tensors of one round becomes the body of a scan.

The function runs once. Tensors of the graph around that it reads become operands that all rounds
share; small constants are copied.

What data decide while a program runs: one of two sides, and how often a loop goes round.

Both are scans with a condition: a side is a loop of at most one round, so the side that is not
taken is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from stitch.errors import CompileError
from stitch.graph import numpy_functions
from stitch.graph.constant_pool import SMALL_NBYTES
from stitch.graph.emitter import Emitter, Given
from stitch.graph.layer_methods import LayerMethods
from stitch.graph.source_location import mistake
from stitch.graph.symbolic import SymbolicTensor
from stitch.program import CONDITION, MAX_ROUNDS, SCAN, Array, Body, ScanForm, ValueType

# --------------------------------------------------------------------------------------------------
# Loops: trace a Python function of one round into the body of a scan.

Tensors = Sequence[SymbolicTensor]
#: From states and the elements of a round: the states after it, and what it gives.
Round = Callable[[Tensors, Tensors], tuple[Sequence[Given], Sequence[Given]]]


@final
class BodyBuilder(LayerMethods):
    """Builds a body within a graph; `build` ends it.

    `captured` are the tensors of the builder around it that it reads, in the order of the inputs
    that stand for them.
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
        """The next input of the body."""
        tensor = self._value(name, kind)
        self._inputs.append(tensor.index)
        return tensor

    def is_inside(self, other: Emitter) -> bool:
        """Whether this builds a body within what the other builds; no body is, that is finished."""
        around = self.around
        return not self._is_done and (around is other or around.is_inside(other))

    def tensor(self, given: Given, like: SymbolicTensor | None = None) -> SymbolicTensor:
        """As of every builder; a tensor from around becomes an input, a small constant without a
        name its copy."""
        builder: Any = given.builder if isinstance(given, SymbolicTensor) else None
        if builder is None and isinstance(given, np.ndarray) and given.nbytes > SMALL_NBYTES:
            return self.tensor(self.around.tensor(given))  # Defined in the surrounding graph.
        if builder is None or builder is self or builder.is_inside(self):
            return super().tensor(given, like)
        if not self.is_inside(builder):
            return super().tensor(given, like)  # It says so.
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
        """The data of a tensor from around that the body has for itself."""
        if outer.type.nbytes > SMALL_NBYTES:
            return None
        # What has a name may be trained, and so may be what is computed from it.
        if outer.data_type.is_floating and not self.around.is_unnamed_constant(outer):
            return None
        return self.around.known_data(outer)

    def _check_open(self) -> None:
        super()._check_open()
        self._check_unfinished()

    def _check_unfinished(self) -> None:
        if self._is_done:
            raise CompileError(
                "a tensor escaped from the loop that it belongs to",
                where=self.around._where(),
                remedy="use what a function is given only inside it; what is wanted later it gives "
                "as a result",
            )

    def close(self) -> None:
        """No tensor of the graph around becomes part of it any more."""
        self._is_done = True

    def build(self, outputs: Sequence[Given]) -> Body:
        """The body that makes these; the builder takes no more operations after it."""
        values = []
        for output in outputs:
            tensor = self.tensor(output)
            # An output is made here, and is one only once.
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


#: The same, from the builder of the body as well.
RoundInBody = Callable[[BodyBuilder, Tensors, Tensors], tuple[Sequence[Given], Sequence[Given]]]


def scan(
    builder: Emitter,
    f: Round,
    states: Sequence[Given],
    sequences: Tensors,
    *,
    count: int | None = None,
    taken_backward: Sequence[bool] = (),
    given_backward: Sequence[bool] = (),
) -> tuple[tuple[SymbolicTensor, ...], tuple[SymbolicTensor, ...]]:
    """The last states, and what rounds give, collected along a new axis 0.

    `f(states, elements)` gives the states after a round and what it gives; element i of a round is
    one of axis 0 of sequence i, from the last to the first where `taken_backward`. `count` is told
    where there are no sequences. Raises `CompileError` for sequences that differ in length, and
    states that change their type.

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
    states: Sequence[Given],
    sequences: Tensors,
    *,
    count: int | None = None,
    taken_backward: Sequence[bool] = (),
    given_backward: Sequence[bool] = (),
    has_condition: bool = False,
) -> tuple[tuple[SymbolicTensor, ...], tuple[SymbolicTensor, ...]]:
    """As `scan`, whose function is given the builder of the body first. Of rounds that have neither
    states nor elements, nothing else says where they are written. `has_condition`: a round runs
    only while the first state is true, and `count` is the most."""
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
                "a round gives another number of states than it takes", where=owner._where(),
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
    f: Callable[[BodyBuilder, Tensors], Sequence[Given]],
) -> tuple[Body, tuple[SymbolicTensor, ...]]:
    """What a function does with tensors of these names and types as a body, and the tensors of
    `owner` that it reads: they stand for its further inputs."""
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
    states: Sequence[Given],
    sequences: Tensors,
    *,
    count: int | None = None,
    taken_backward: Sequence[bool] = (),
    given_backward: Sequence[bool] = (),
    has_condition: bool = False,
) -> tuple[tuple[SymbolicTensor, ...], tuple[SymbolicTensor, ...]]:
    """As `scan_in_body`, of a body: its inputs are states, elements, what is captured."""
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
    """How many rounds there are."""
    lengths = {t.shape[:1] for t in lists} | ({(count,)} if count is not None else set())
    if len(lengths) != 1 or () in lengths:
        raise mistake(
            "a scan goes over sequences of one length",
            got=", ".join(t.type.text() for t in lists) or "no sequences, and no count",
        )
    ((rounds,),) = lengths
    return int(rounds)


def _element(sequence: SymbolicTensor) -> ValueType:
    return ValueType(sequence.shape[1:], sequence.data_type)


def made_at(body: Body) -> str:
    """The line that made the last operation of a body."""
    return body.operations[-1].location if body.operations else ""


# --------------------------------------------------------------------------------------------------
# Data-dependent control flow: branches, and loops with a condition.

#: From the operands, as the body of a side has them, to its results.
Side = Callable[[Tensors], Sequence[Given]]
#: From states and operands to whether a further round runs, and to the states after it.
Asked = Callable[[Tensors], Given]
Following = Callable[[Tensors], Sequence[Given]]


def choose(
    builder: Emitter,
    condition: SymbolicTensor,
    sides: tuple[Side, Side],
    operands: Tensors,
    kinds: Sequence[ValueType] | None = None,
) -> tuple[SymbolicTensor, ...]:
    """The results of the first side where the condition, one truth value, is true, else of the
    second. Both make values of these types; raises `CompileError` where one does not. Types that
    are not told are found by writing the first side once more.

    >>> from stitch.graph import ComputationGraphBuilder
    >>> b = ComputationGraphBuilder("size")
    >>> x = b.input("x", (2,), "float32")
    >>> sides = (lambda given: [b.sqrt(given[0])], lambda given: [b.neg(given[0])])
    >>> (chosen,) = choose(b, b.greater(b.reduce_sum(x), 0), sides, [x], [x.type])
    >>> chosen.shape
    (2,)
    """
    owner: Any = builder.innermost([condition, *operands])
    asked = _truth(owner, condition)
    if kinds is None:
        trial, _ = trace_body(owner, [], lambda body, _: sides[0](list(map(body.tensor, operands))))
        kinds = trial.output_types
    states: Sequence[SymbolicTensor] = [
        owner.broadcast(np.zeros((), kind.data_type.dtype), kind.shape) for kind in kinds
    ]
    for is_taken, side in zip((asked, owner.logical_not(asked)), sides, strict=True):
        states = _once(owner, is_taken, states, side, operands)
    return tuple(states)


def repeat_while(
    builder: Emitter,
    asked: Asked,
    f: Following,
    states: Sequence[Given],
    operands: Tensors = (),
) -> tuple[SymbolicTensor, ...]:
    """The states when `asked` of them is false; until then `f` of them is what they are next.

    Both are given the operands behind the states: what is computed of them alone is part of the
    round too, which may never run. At most `MAX_ROUNDS` rounds are run. Raises `CompileError` for
    states that change their type.

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
        return [_truth(body, body.tensor(asked([*after, *read]))), *after], []

    goes_on = _truth(owner, owner.tensor(asked([*first, *operands])))
    last, _ = scan_in_body(
        owner, round_, [goes_on, *first], [], count=MAX_ROUNDS, has_condition=True
    )
    return last[1:]


def _once(
    owner: Emitter, is_taken: SymbolicTensor, states: Tensors, side: Side, operands: Tensors
) -> tuple[SymbolicTensor, ...]:
    """What a side makes where it is taken, else the states."""

    def round_(body: BodyBuilder, *_: Tensors) -> tuple[Sequence[Given], Tensors]:
        return [np.asarray(False), *side([body.tensor(operand) for operand in operands])], []

    last, _ = scan_in_body(owner, round_, [is_taken, *states], [], count=1, has_condition=True)
    return last[1:]


def _truth(builder: Any, condition: SymbolicTensor) -> SymbolicTensor:
    """A condition without axes."""
    if condition.data_type is not CONDITION.data_type or condition.size != 1:
        raise CompileError(
            "a condition is one truth value", expected=CONDITION.text(), got=condition.type.text()
        )
    if not condition.shape:
        return condition
    truth: SymbolicTensor = builder.reshape(condition, ())
    return truth

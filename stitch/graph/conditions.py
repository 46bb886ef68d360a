"""What data decide while a program runs: one of two sides, and how often a loop goes round.

Both are scans with a condition: a side is a loop of at most one round, so the side that is not
taken is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stitch.errors import CompileError
from stitch.graph.emitter import Emitter, Given
from stitch.graph.loops import BodyBuilder, Tensors, scan_in_body, trace_body
from stitch.graph.symbolic import SymbolicTensor
from stitch.program import CONDITION, MAX_ROUNDS, ValueType

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

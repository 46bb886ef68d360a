"""Loops on tensors: a scan of known length becomes the steps of its rounds, one after the other.

Elements of sequences and of results are views, and states alternate between two tensors, so a round
copies nothing. Rounds use the same temporary tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stitch.program import Array, Body, Operation, ScanForm, is_scan
from stitch.runtime.executors.cuda_graphs import Launch
from stitch.runtime.executors.executor import Thunk

#: Steps of a scan that is unrolled at most; nodes of a CUDA graph.
MOST_STEPS = 20_000
#: Elements of a value that is computed when a round is bound, at most: it is stored once a round.
MOST_FOLDED = 1024
#: The steps of a round, and its results that are known before it runs, by number.
BoundRound = tuple[Sequence[Thunk], Mapping[int, Array]]
#: Binds a round to the tensors of its operands (absent ones are None), those that are known, by
#: number, and the tensors of its results.
BindRound = Callable[
    [Sequence[torch.Tensor | None], Mapping[int, Array], Sequence[torch.Tensor]], BoundRound
]


class LeftToHost(Exception):
    """A round has an operation that the device cannot compute."""


class TensorPool:
    """Temporary tensors that the bindings of a program use in turn.

    >>> pool = TensorPool(torch.device("cpu"))
    >>> one, other = pool.take((2, 3), torch.float32), pool.take((2, 3), torch.float32)
    >>> pool.restart()
    >>> pool.take((2, 3), torch.float32) is one, one is other, pool.nbytes
    (True, False, 48)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}
        self._taken: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
        self.nbytes = 0

    def restart(self) -> None:
        """Make all tensors available again, in the same order."""
        self._taken.clear()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that was not taken since the last `restart`."""
        key = tuple(shape), dtype
        number = self._taken.get(key, 0)
        self._taken[key] = number + 1
        tensors = self._tensors.setdefault(key, [])
        if number == len(tensors):
            tensors.append(torch.empty(key[0], dtype=dtype, device=self._device))
            self.nbytes += tensors[-1].nbytes
        return tensors[number]


def fewest_steps(operation: Operation, bodies: Sequence[Body]) -> int:
    """Return a lower bound of the steps of an operation: one per operation of each round."""
    if not is_scan(operation):
        return 1
    inside = sum(fewest_steps(each, bodies) for each in bodies[operation.body].operations)
    return ScanForm.of(operation).count * inside


def unroll(
    form: ScanForm, operands: Sequence[torch.Tensor | None], known: Mapping[int, Array],
    results: Sequence[torch.Tensor], repeated: Mapping[int, int], pool: TensorPool,
    bind: BindRound,
) -> list[Thunk] | None:  # fmt: skip
    """Return the steps of all rounds of a scan; None if there are too many.

    Args:
        form: Its form, with at least one round and without a condition.
        operands: Contiguous tensors of the operands' own types.
        known: The operands that are constants; rounds know integers among them, and compute what
            depends on these alone (a number of the round, an index) when they are bound.
        results: Contiguous tensors of the results' own types; none overlaps an operand.
        repeated: Results that duplicate others, by number; rounds do not write them.
        pool: Where states are between rounds.
        bind: Binds a round.
    """
    many, first, steps = form.states, form.states + form.sequences, list[Any]()
    sequences, shared = operands[many:first], operands[first:]
    whole_numbers = {i: array for i, array in known.items() if array.dtype.kind in "iub"}
    shared_numbers = {i: array for i, array in whole_numbers.items() if i >= first}
    known_states = {i: array for i, array in whole_numbers.items() if i < many}
    states = list(operands[:many])
    #: A state that is collected lies in the results.
    rows = {state: number for number, state in repeated.items() if state < many}
    others = [
        result if form.count == 1 or state in rows else pool.take(result.shape, result.dtype)
        for state, result in enumerate(results[:many])
    ]
    for number in range(form.count):
        left = form.count - 1 - number
        rows_taken = [left if back else number for back in form.taken_backward]
        elements = [
            None if whole is None else whole[row]
            for whole, row in zip(sequences, rows_taken, strict=True)
        ]
        given = [
            whole[left if back else number]
            for whole, back in zip(results[many:], form.given_backward, strict=True)
        ]
        after = [
            given[rows[state] - many] if state in rows else others[state] if left % 2
            else results[state]
            for state in range(many)
        ]  # fmt: skip
        written = [*after, *given]
        taken = {many + i: row for i, row in enumerate(rows_taken)}
        elements_known = {i: whole_numbers[i][taken[i]] for i in taken.keys() & whole_numbers}
        inside = shared_numbers | known_states | elements_known
        bound, found = bind([*states, *elements, *shared], inside, written)
        known_states = {i: array for i, array in found.items() if i < many}
        steps += bound
        for copy, source in repeated.items():
            if rows.get(source) != copy:
                steps.append(Launch(written[copy].copy_, written[source]))
        if not number and len(steps) * form.count > MOST_STEPS:
            return None
        states = list(after)
    steps += [Launch(results[state].copy_, states[state]) for state in rows]
    return steps

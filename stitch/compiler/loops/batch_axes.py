"""Write scans into another graph, as they are or for a whole batch at once.

In a batch, states and elements get a batch axis in front; values that are equal for all batch
elements are computed once. A loop over a batch whose body is one scan becomes that scan for the
whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stitch import ops
from stitch.compiler.dependence import propagate_over_rounds, reachable_from
from stitch.graph import BodyBuilder, SymbolicTensor, WriteUnbatched, scan, scan_in_body, vmap
from stitch.program import ABSENT, Array, Body, Operation, ScanForm, is_scan


def vmap_scan(
    builder: Any,
    body: Body,
    form: ScanForm,
    context: ops.BatchingContext,
    write_unbatched: WriteUnbatched,
) -> tuple[SymbolicTensor, ...]:
    """Write a scan for the whole batch; return its results with the batch axis first."""
    first = form.states + form.sequences
    varies = states_that_vary(body, form, context.batched)
    states = [
        context.broadcast(i) if varies[i] else context.operands[i] for i in range(form.states)
    ]
    sequences = [
        _swapped(builder, context.operands[i]) if context.batched[i] else context.operands[i]
        for i in range(form.states, first)
    ]
    flags = [*varies, *context.batched[form.states :]]
    shared = list(context.operands[first:])
    given: list[bool] = []

    def round_(inside: BodyBuilder, before: Sequence[Any], elements: Sequence[Any]) -> Any:
        vmapped = vmap(
            body, [*before, *elements, *shared], flags, context.batch_size, inside, write_unbatched
        ).results
        after = [
            add_batch_axis(inside, r.tensor, r.is_batched, context.batch_size)
            if wanted
            else r.tensor
            for r, wanted in zip(vmapped, varies, strict=False)
        ]
        given[:] = [r.is_batched for r in vmapped[form.states :]]
        return after, [r.tensor for r in vmapped[form.states :]]

    last, collected = scan_in_body(
        builder, round_, states, sequences, count=form.count,
        taken_backward=form.taken_backward, given_backward=form.given_backward,
    )  # fmt: skip
    results = [
        add_batch_axis(builder, t, is_batched, context.batch_size)
        for t, is_batched in zip(last, varies, strict=True)
    ]
    results += [
        add_batch_axis(
            builder, _swapped(builder, t) if is_batched else t, is_batched, context.batch_size
        )
        for t, is_batched in zip(collected, given, strict=True)
    ]
    return tuple(results)


def write_scan(
    builder: Any, body: Body, form: ScanForm, operands: Sequence[Any],
    written: Callable[[Sequence[Any], BodyBuilder], Sequence[Any]],
) -> Sequence[SymbolicTensor]:  # fmt: skip
    """Write a scan as it is; `written` writes its body for the operands of a round."""
    first = form.states + form.sequences
    shared = list(operands[first:])
    if not form.count and not first:
        kinds = [form.whole(kind) for kind in body.output_types]
        return [builder.constant(np.empty(k.shape, k.data_type.dtype)) for k in kinds]

    def round_(inside: BodyBuilder, states: Sequence[Any], elements: Sequence[Any]) -> Any:
        tensors = written([*states, *elements, *shared], inside)
        return tensors[: form.states], tensors[form.states :]

    last, collected = scan_in_body(
        builder, round_, operands[: form.states], operands[form.states : first],
        count=form.count, taken_backward=form.taken_backward, given_backward=form.given_backward,
        has_condition=form.has_condition,
    )  # fmt: skip
    return (*last, *collected)


def loop_over_batch(
    builder: Any, context: ops.BatchingContext,
    written: Callable[[Sequence[Any], Any], Sequence[Any]],
) -> Sequence[SymbolicTensor]:  # fmt: skip
    """Write a loop over the batch elements of a context; return results with the batch axis first.

    `written` writes the operation for the operands of one batch element.
    """
    stacked = [o for o, batched in zip(context.operands, context.batched, strict=True) if batched]

    def element(_: Any, elements: Sequence[SymbolicTensor]) -> Any:
        inside: Any = elements[0].builder
        rest = iter(elements)
        operands = [
            next(rest) if batched else o
            for o, batched in zip(context.operands, context.batched, strict=True)
        ]
        return [], written(operands, inside)

    _, results = scan(builder, element, [], stacked)
    return results


def expand_operation(
    builder: Any, operation: Operation, bodies: Sequence[Body], context: ops.BatchingContext,
    write_unbatched: WriteUnbatched,
) -> Sequence[Any]:  # fmt: skip
    """Write an operator without a batching rule as a loop, or expand a body that is no loop."""
    if operation.body < 0:
        return loop_over_batch(
            builder, context, lambda operands, inside: inside.repeat(
                operation, operands, [operation.op.lower()] * len(operation.outputs),
                context.output_types,
            ),
        )  # fmt: skip
    body = bodies[operation.body]
    made = vmap(
        body, context.operands, context.batched, context.batch_size, builder, write_unbatched
    ).results
    if not any(context.batched):
        return [r.tensor for r in made]
    return [add_batch_axis(builder, r.tensor, r.is_batched, context.batch_size) for r in made]


def states_that_vary(body: Body, form: ScanForm, batched: Sequence[bool]) -> list[bool]:
    """Return which states differ within the batch, at first or after some round."""
    varies, _ = propagate_over_rounds(
        [i for i, flag in enumerate(batched) if flag], body.inputs, body.outputs, form.states,
        lambda of: reachable_from(body.operations, of),
    )  # fmt: skip
    return [i in varies for i in range(form.states)]


def _swapped(builder: Any, tensor: SymbolicTensor) -> SymbolicTensor:
    """Exchange the first two axes (batch elements and rounds)."""
    order = [1, 0, *range(2, len(tensor.shape))]
    swapped: SymbolicTensor = builder.transpose(tensor, order)
    return swapped


def add_batch_axis(builder: Any, tensor: Any, is_batched: bool, batch_size: int) -> Any:
    """Return the tensor with a batch axis in front; repeat it if it is not batched."""
    if is_batched:
        return tensor
    given = builder.tensor(tensor)
    return builder.apply("Expand", [given, [batch_size, *given.shape]], 1, {})[0]


def reverse_first_axis(builder: Any, tensor: Any) -> Any:
    """Reverse the first axis."""
    return builder.index(tensor, slice(None, None, -1))


def ordered_elements(builder: Any, form: ScanForm, operands: Sequence[Any]) -> list[Any]:
    """Return the sequences of a stateless loop in one order.

    That is the order of rounds, or its reverse if all sequences are taken backward.
    """
    turns = [back != _is_backward(form) for back in form.taken_backward]
    sequences = operands[form.states : form.states + form.sequences]
    return [
        reverse_first_axis(builder, s) if turn else s
        for s, turn in zip(sequences, turns, strict=True)
    ]


def ordered_results(builder: Any, form: ScanForm, results: Sequence[Any]) -> list[Any]:
    """Return results of rounds in the order in which the loop collects them."""
    turns = [back != _is_backward(form) for back in form.given_backward]
    return [
        reverse_first_axis(builder, r) if turn else r
        for r, turn in zip(results, turns, strict=True)
    ]


def _is_backward(form: ScanForm) -> bool:
    return bool(form.taken_backward) and all(form.taken_backward)


#: An operand of a scan: a value, or data.
Source = int | Array


@dataclass(frozen=True, slots=True)
class BatchedScan:
    """A scan for a batch.

    Attributes:
        operation: The operation that it replaces.
        body: Number of its body.
        form: Its form.
        batch_size: Number of batch elements; 0 without a batch axis.
        operands: Its operands.
        batched: Whether each operand has a batch axis in front; all results have one.
        results: Values of the results, `ABSENT` without readers.
    """

    operation: Operation
    body: int
    form: ScanForm
    batch_size: int
    operands: tuple[Source, ...]
    batched: tuple[bool, ...]
    results: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The number of scans of the cell that it stands for."""
        return max(1, self.batch_size)


def batched_scan_of(
    operation: Operation, bodies: Sequence[Body], batched_bodies: Collection[int]
) -> BatchedScan:
    """Return an operation as a `BatchedScan`.

    For a loop whose body is in `batched_bodies`, that is the scan in its body for all its rounds.
    """
    form = ScanForm.of(operation)
    if operation.body not in batched_bodies:
        return BatchedScan(
            operation, operation.body, form, 0, operation.inputs, (False,) * len(operation.inputs),
            operation.outputs,
        )  # fmt: skip
    around = bodies[operation.body]
    (inner,) = [o for o in around.operations if is_scan(o)]
    data = {c.value: c.data for c in around.constants}
    places = {v: i for i, v in enumerate(around.inputs)}
    renamed = {o.inputs[0]: o.outputs[0] for o in around.operations if o is not inner}
    given = dict(zip(around.outputs, operation.outputs, strict=True))
    return BatchedScan(
        operation, inner.body, ScanForm.of(inner), form.count,
        tuple([operation.inputs[places[v]] if v in places else data[v] for v in inner.inputs]),
        tuple([places.get(v, form.sequences) < form.sequences for v in inner.inputs]),
        tuple([given.get(renamed.get(v, v), given.get(v, ABSENT)) for v in inner.outputs]),
    )  # fmt: skip


def batched_scan(
    builder: Any, scan: BatchedScan, bodies: Sequence[Body], operation: Operation,
    context: ops.BatchingContext, write_unbatched: WriteUnbatched,
) -> Sequence[Any]:  # fmt: skip
    """Write the loop that `scan` replaces; return its results, None without readers."""
    at = dict(zip(operation.inputs, context.operands, strict=True))
    body = bodies[scan.body]
    inner = replace(
        context,
        input_types=tuple(scan.form.operand_types(body.input_types)),
        output_types=tuple(scan.form.result_types(body.output_types)),
        operands=tuple([
            at[v] if isinstance(v, int) else builder.constant(v) for v in scan.operands
        ]),
        batched=scan.batched, batch_size=scan.batch_size, constants=(None,) * len(scan.operands),
    )  # fmt: skip
    results = vmap_scan(builder, body, scan.form, inner, write_unbatched)
    made = dict(zip(scan.results, results, strict=True))
    return [made[v] if v != ABSENT else None for v in operation.outputs]


def nested_batch(
    builder: Any, scan: BatchedScan, bodies: Sequence[Body], operation: Operation,
    context: ops.BatchingContext, write_unbatched: WriteUnbatched,
) -> Sequence[Any]:  # fmt: skip
    """Write a loop over a batch for the batch of a context, as one scan with both batch axes."""
    within = BodyBuilder("body", builder)
    types = [kind for kind in context.input_types if kind is not None]
    inner = replace(
        context, builder=within, batched=(False,) * len(types), batch_size=1,
        operands=tuple([within.input(f"input_{i}", kind) for i, kind in enumerate(types)]),
    )  # fmt: skip
    alone = batched_scan(within, scan, bodies, operation, inner, write_unbatched)
    body = within.build([result for result in alone if result is not None])
    operands, batched, batch_size = context.operands, context.batched, context.batch_size
    made = iter(vmap(body, operands, batched, batch_size, builder, write_unbatched).results)
    return [
        None if result is None
        else add_batch_axis(builder, (given := next(made)).tensor, given.is_batched, batch_size)
        for result in alone
    ]  # fmt: skip

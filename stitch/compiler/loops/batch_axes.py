"""Scans written into another graph, as they are or for many lanes at once: then with the body
lifted, states and elements with a lane axis in front.

What differs between no two lanes is computed once.

Loops over lanes that are no more than a scan for each: such a scan for all lanes, by itself or
for the lanes of others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stitch import ops
from stitch.compiler.dependence import in_some_round, reached
from stitch.graph import BodyBuilder, SymbolicTensor, Unliftable, lift, scan, scan_in_body
from stitch.program import ABSENT, Array, Body, Operation, ScanForm, is_scan

# --------------------------------------------------------------------------------------------------
# Scans written into another graph, as they are or for many lanes at once: then with the body
# lifted, states and elements with a lane axis in front.


def lifted_scan(
    builder: Any, body: Body, form: ScanForm, context: ops.BatchingContext, unliftable: Unliftable
) -> tuple[SymbolicTensor, ...]:
    """The results of a scan for all lanes."""
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
        lifted = lift(
            body, [*before, *elements, *shared], flags, context.batch_size, inside, unliftable
        ).results
        after = [
            in_lanes(inside, r.tensor, r.is_batched, context.batch_size) if wanted else r.tensor
            for r, wanted in zip(lifted, varies, strict=False)
        ]
        given[:] = [r.is_batched for r in lifted[form.states :]]
        return after, [r.tensor for r in lifted[form.states :]]

    last, collected = scan_in_body(
        builder, round_, states, sequences, count=form.count,
        taken_backward=form.taken_backward, given_backward=form.given_backward,
    )  # fmt: skip
    results = [
        in_lanes(builder, t, is_batched, context.batch_size)
        for t, is_batched in zip(last, varies, strict=True)
    ]
    results += [
        in_lanes(builder, _swapped(builder, t) if is_batched else t, is_batched, context.batch_size)
        for t, is_batched in zip(collected, given, strict=True)
    ]
    return tuple(results)


def in_rounds(
    builder: Any, body: Body, form: ScanForm, operands: Sequence[Any],
    written: Callable[[Sequence[Any], BodyBuilder], Sequence[Any]],
) -> Sequence[SymbolicTensor]:  # fmt: skip
    """The results of a scan as it is; `written` writes its body on operands of a round."""
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


def lane_by_lane(
    builder: Any, context: ops.BatchingContext,
    written: Callable[[Sequence[Any], Any], Sequence[Any]],
) -> Sequence[SymbolicTensor]:  # fmt: skip
    """A loop over the lanes of a context, in which `written` writes an operation on the operands of
    one lane; all results have the lane axis in front."""
    lanes = [o for o, batched in zip(context.operands, context.batched, strict=True) if batched]

    def lane(_: Any, elements: Sequence[SymbolicTensor]) -> Any:
        inside: Any = elements[0].builder
        rest = iter(elements)
        operands = [
            next(rest) if batched else o
            for o, batched in zip(context.operands, context.batched, strict=True)
        ]
        return [], written(operands, inside)

    _, results = scan(builder, lane, [], lanes)
    return results


def by_itself(
    builder: Any, operation: Operation, bodies: Sequence[Body], context: ops.BatchingContext,
    unliftable: Unliftable,
) -> Sequence[Any]:  # fmt: skip
    """An operator without a rule: a loop over the lanes; a body that is no loop: what it is."""
    if operation.body < 0:
        return lane_by_lane(
            builder, context, lambda operands, inside: inside.repeat(
                operation, operands, [operation.op.lower()] * len(operation.outputs),
                context.output_types,
            ),
        )  # fmt: skip
    body = bodies[operation.body]
    size = context.batch_size
    made = lift(body, context.operands, context.batched, size, builder, unliftable).results
    if not any(context.batched):
        return [r.tensor for r in made]
    return [in_lanes(builder, r.tensor, r.is_batched, context.batch_size) for r in made]


def states_that_vary(body: Body, form: ScanForm, batched: Sequence[bool]) -> list[bool]:
    """Which states differ from lane to lane: at first, or after some round."""
    varies, _ = in_some_round(
        [i for i, flag in enumerate(batched) if flag], body.inputs, body.outputs, form.states,
        lambda of: reached(body.operations, of),
    )  # fmt: skip
    return [i in varies for i in range(form.states)]


def _swapped(builder: Any, tensor: SymbolicTensor) -> SymbolicTensor:
    """Lanes and rounds in the other order."""
    order = [1, 0, *range(2, len(tensor.shape))]
    swapped: SymbolicTensor = builder.transpose(tensor, order)
    return swapped


def in_lanes(builder: Any, tensor: Any, is_batched: bool, lanes: int) -> Any:
    """A tensor with a lane axis in front, also where it is the same for all lanes."""
    if is_batched:
        return tensor
    given = builder.tensor(tensor)
    return builder.apply("Expand", [given, [lanes, *given.shape]], 1, {})[0]


def from_last_to_first(builder: Any, tensor: Any) -> Any:
    """A sequence in the other order."""
    return builder.index(tensor, slice(None, None, -1))


def elements_in_order(builder: Any, form: ScanForm, operands: Sequence[Any]) -> list[Any]:
    """The sequences of a loop without states, all in the order of its rounds; where each is taken
    from the last on, that is as good an order."""
    turns = [back != _is_backward(form) for back in form.taken_backward]
    sequences = operands[form.states : form.states + form.sequences]
    return [
        from_last_to_first(builder, s) if turn else s
        for s, turn in zip(sequences, turns, strict=True)
    ]


def results_in_order(builder: Any, form: ScanForm, results: Sequence[Any]) -> list[Any]:
    """What the rounds give, in that order, as the loop collects it."""
    turns = [back != _is_backward(form) for back in form.given_backward]
    return [
        from_last_to_first(builder, r) if turn else r
        for r, turn in zip(results, turns, strict=True)
    ]


def _is_backward(form: ScanForm) -> bool:
    return bool(form.taken_backward) and all(form.taken_backward)


# --------------------------------------------------------------------------------------------------
# Loops over lanes that are no more than a scan for each: such a scan for all lanes, by itself or
# for the lanes of others.

#: An operand of a scan: a value of the list that the scan stands in, or data.
Source = int | Array


@dataclass(frozen=True, slots=True)
class LaneScan:
    """A scan for so many lanes; none where it has no lane axis. `batched` operands have one in
    front, and so have all results: `results` are their values, `ABSENT` where they are unread."""

    operation: Operation
    body: int
    form: ScanForm
    lanes: int
    operands: tuple[Source, ...]
    batched: tuple[bool, ...]
    results: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many scans of the cell it is."""
        return max(1, self.lanes)


def lane_scan_of(
    operation: Operation, bodies: Sequence[Body], lane_bodies: Collection[int]
) -> LaneScan:
    """The scan that an operation is: as such, or the one for the lanes of a loop whose body is
    among `lane_bodies`."""
    form = ScanForm.of(operation)
    if operation.body not in lane_bodies:
        return LaneScan(
            operation, operation.body, form, 0, operation.inputs, (False,) * len(operation.inputs),
            operation.outputs,
        )  # fmt: skip
    around = bodies[operation.body]
    (inner,) = [o for o in around.operations if is_scan(o)]
    data = {c.value: c.data for c in around.constants}
    places = {v: i for i, v in enumerate(around.inputs)}
    renamed = {o.inputs[0]: o.outputs[0] for o in around.operations if o is not inner}
    given = dict(zip(around.outputs, operation.outputs, strict=True))
    return LaneScan(
        operation, inner.body, ScanForm.of(inner), form.count,
        tuple([operation.inputs[places[v]] if v in places else data[v] for v in inner.inputs]),
        tuple([places.get(v, form.sequences) < form.sequences for v in inner.inputs]),
        tuple([given.get(renamed.get(v, v), given.get(v, ABSENT)) for v in inner.outputs]),
    )  # fmt: skip


def scan_of_lanes(
    builder: Any, scan: LaneScan, bodies: Sequence[Body], operation: Operation,
    context: ops.BatchingContext, unliftable: Unliftable,
) -> Sequence[Any]:  # fmt: skip
    """The results of a loop over lanes, which `scan` is, from that one; None for what is unread."""
    at = dict(zip(operation.inputs, context.operands, strict=True))
    body = bodies[scan.body]
    inner = replace(
        context,
        input_types=tuple(scan.form.operand_types(body.input_types)),
        output_types=tuple(scan.form.result_types(body.output_types)),
        operands=tuple([
            at[v] if isinstance(v, int) else builder.constant(v) for v in scan.operands
        ]),
        batched=scan.batched, lanes=scan.lanes, constants=(None,) * len(scan.operands),
    )  # fmt: skip
    results = lifted_scan(builder, body, scan.form, inner, unliftable)
    made = dict(zip(scan.results, results, strict=True))
    return [made[v] if v != ABSENT else None for v in operation.outputs]


def lanes_of_lanes(
    builder: Any, scan: LaneScan, bodies: Sequence[Body], operation: Operation,
    context: ops.BatchingContext, unliftable: Unliftable,
) -> Sequence[Any]:  # fmt: skip
    """The results of a loop over lanes for the lanes of a context: from one scan for its own lanes,
    which is then for those."""
    within = BodyBuilder("body", builder)
    types = [kind for kind in context.input_types if kind is not None]
    inner = replace(
        context, builder=within, batched=(False,) * len(types), lanes=1,
        operands=tuple([within.input(f"input_{i}", kind) for i, kind in enumerate(types)]),
    )  # fmt: skip
    alone = scan_of_lanes(within, scan, bodies, operation, inner, unliftable)
    body = within.build([result for result in alone if result is not None])
    operands, batched, lanes = context.operands, context.batched, context.lanes
    made = iter(lift(body, operands, batched, lanes, builder, unliftable).results)
    return [
        None if result is None
        else in_lanes(builder, (given := next(made)).tensor, given.is_batched, lanes)
        for result in alone
    ]  # fmt: skip

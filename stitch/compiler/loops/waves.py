"""Waves: a loop in a loop, each layer over what the layer before made, runs along its diagonals.

The first rounds hold layers back that have nothing to read yet; what layers compute past the end of
the sequence nobody reads, so that no operation may be among it that can fail there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.compiler.dependence import reached
from stitch.compiler.loops.lanes import in_lanes
from stitch.graph import Unliftable, lift, scan
from stitch.ops import RESHAPING, definition_of
from stitch.program import ABSENT, Body, Operation, ScanForm, is_scan


@dataclass(frozen=True, slots=True)
class Wave:
    """The inner scan of an outer body, which of its operands is the sequence that the layer before
    made, and which of its results the one for the next; `rest` makes its other operands."""

    inner: Operation
    form: ScanForm
    taken: int
    given: int
    rest: Body
    #: The order of the state's axes in which it is that sequence, where it is another one.
    turned: tuple[int, ...] = ()


def wave_of(body: Body, form: ScanForm) -> Wave | None:
    """The wave that an outer scan is; None if it is none."""
    scans = [o for o in body.operations if is_scan(o) and ScanForm.of(o).states]
    if form.states != 1 or form.count < 2 or len(scans) != 1 or any(form.taken_backward):
        return None
    inner, inside = scans[0], ScanForm.of(scans[0])
    same, first = _same_values(body), inside.states
    state, final = body.inputs[0], same.get(body.outputs[0], body.outputs[0])
    if (
        inside.sequences != 1 or any(inside.taken_backward) or any(inside.given_backward)
        or any(form.given_backward) or not inside.count or inside.has_condition
    ):  # fmt: skip
        return None
    read, after = same.get(inner.inputs[first], inner.inputs[first]), final
    turned: tuple[int, ...] = ()
    if read != state:
        ways = _there_and_back(body, same, read, final)
        if ways is None or ways[0] != state:
            return None
        _, after, turned = ways
    # All that is collected around is the sequence itself, and nothing else of the inner scan is
    # read.
    if after not in inner.outputs[first:] or any(same.get(v, v) != final for v in body.outputs):
        return None
    depends, handed = {state}, {state, read, after, final}
    others = []
    for operation in body.operations:
        if operation is inner:
            depends.update(v for v in operation.outputs if v != ABSENT)
        elif depends.isdisjoint(operation.inputs):
            others.append(operation)
        elif all(same.get(v, v) in handed for v in operation.outputs):
            depends.update(operation.outputs)
        else:
            return None
    wanted = [v for i, v in enumerate(inner.inputs) if i != first]
    if not depends.isdisjoint(wanted):
        return None
    made = {v for o in others for v in o.outputs}
    rest = Body(
        body.inputs[1:], tuple(dict.fromkeys(v for v in wanted if v in made)), body.values,
        tuple(others), body.constants,
    )  # fmt: skip
    return Wave(inner, inside, first, inner.outputs.index(after) - first, rest, turned)


def _there_and_back(
    body: Body, same: dict[int, int], read: int, final: int
) -> tuple[int, int, tuple[int, ...]] | None:
    """What is read with its axes in another order, what is made before they are put back, and the
    order; None where it is not so: lanes stand around a sequence, and inside its elements."""
    makers = {v: o for o in body.operations for v in o.outputs}
    there, back = makers.get(read), makers.get(final)
    if (
        there is None
        or back is None
        or {(there.domain, there.op), (back.domain, back.op)} != {("", "Transpose")}
    ):
        return None
    order, other = (o.attributes.get("perm") for o in (there, back))
    if not isinstance(order, tuple) or not isinstance(other, tuple):
        return None
    if [order[int(axis)] for axis in other] != list(range(len(order))):
        return None
    source, made = there.inputs[0], back.inputs[0]
    return same.get(source, source), same.get(made, made), tuple(map(int, order))


def _same_values(body: Body) -> dict[int, int]:
    """Values that are others under another name, or in another shape and back."""
    same: dict[int, int] = {}
    for operation in body.operations:
        if operation.domain or operation.op not in RESHAPING:
            continue
        source = operation.inputs[0]
        source, result = same.get(source, source), operation.outputs[0]
        if body.values[source].type == body.values[result].type:
            same[result] = source
    return same


def can_fail(inner: Body, form: ScanForm, bodies: Sequence[Body], *, elements: bool = True) -> bool:
    """Whether a round of an inner scan may raise where the sequence has ended: some operation looks
    at data, an index say, that differs from round to round; in states alone, without `elements`."""
    differs = inner.inputs[: form.states + form.sequences * elements]
    return _looks(inner, set(differs), bodies)


def _looks(body: Body, differs: set[int], bodies: Sequence[Body]) -> bool:
    """Whether any operation looks at data of which some `differs`."""
    differs = reached(body.operations, differs)
    for operation in body.operations:
        if differs.isdisjoint(operation.inputs):
            continue
        if operation.body != ABSENT:
            inside = bodies[operation.body]
            if _looks(inside, set(inside.inputs), bodies):
                return True
        # No operator looks at what its first operand holds.
        elif definition_of(operation).checks and not differs.isdisjoint(operation.inputs[1:]):
            return True
    return False


def written_wave(
    builder: Any, wave: Wave, inner: Body, form: ScanForm, operands: Sequence[Any],
    unliftable: Unliftable,
) -> list[Any]:  # fmt: skip
    """The results of the outer scan, of this form, on these operands."""
    depth, length = form.count, wave.form.count
    sequence, elements = operands[0], operands[1 : 1 + form.sequences]
    if wave.turned:
        sequence = builder.transpose(sequence, wave.turned)
    back = [int(axis) for axis in np.argsort(wave.turned)]
    shared = operands[1 + form.sequences :]
    flags = [*[True] * len(elements), *[False] * len(shared)]
    made = lift(wave.rest, [*elements, *shared], flags, depth, builder, unliftable).results
    known: dict[int, tuple[Any, bool]] = {
        v: (r.tensor, r.is_batched) for v, r in zip(wave.rest.outputs, made, strict=True)
    }
    for value, tensor, flag in zip(wave.rest.inputs, [*elements, *shared], flags, strict=True):
        known[value] = (tensor, flag)
    for constant in wave.rest.constants:
        known.setdefault(constant.value, (constant.data, False))
    inputs = [
        known[v] for i, v in enumerate(wave.inner.inputs) if i != wave.taken
    ]  # fmt: skip
    states = [in_lanes(builder, *each, depth) for each in inputs[: wave.form.states]]
    weights = inputs[wave.form.states :]
    leaf = sequence.shape[1:]
    register = in_lanes(builder, builder.index(sequence, 0), False, depth)
    padding = in_lanes(builder, builder.index(sequence, length - 1), False, depth - 1)
    padded = builder.concat([sequence, padding], 0)
    body_flags = [*[True] * (wave.form.states + 1), *[batched for _, batched in weights]]
    everything = form.collected > 0

    def cells(before: Sequence[Any], x: Any, mask: Any | None) -> Any:
        inside: Any = before[0].builder
        *held, made_before = before
        shifted = inside.concat([inside.unsqueeze(x, 0), inside.index(
            made_before, slice(0, depth - 1))], 0)  # fmt: skip
        results = lift(
            inner, [*held, shifted, *[w for w, _ in weights]], body_flags, depth, inside, unliftable
        ).results
        tensors = [in_lanes(inside, r.tensor, r.is_batched, depth) for r in results]
        after = tensors[: wave.form.states]
        if mask is not None:
            after = [
                inside.where(inside.reshape(mask, (depth, *[1] * (len(t.shape) - 1))), t, old)
                for t, old in zip(after, held, strict=True)
            ]
        made_now = tensors[wave.form.states + wave.given]
        given = [made_now] if everything or mask is not None else [inside.index(made_now, -1)]
        return [*after, made_now], given

    held = [*states, register]
    lanes = np.arange(depth)
    masks = builder.constant(lanes[None, :] <= np.arange(depth - 1)[:, None])
    after_ramp, ramp = scan(
        builder, lambda s, x: cells(s, x[0], x[1]), held,
        [builder.index(padded, slice(0, depth - 1)), masks],
    )  # fmt: skip
    _, main = scan(
        builder, lambda s, x: cells(s, x[0], None), list(after_ramp),
        [builder.index(padded, slice(depth - 1, None))],
    )  # fmt: skip
    if not everything:
        return [builder.transpose(main[0], back) if back else main[0]]
    rows = builder.reshape(builder.concat([ramp[0], main[0]], 0), (-1, *leaf))
    places = (np.arange(length)[None, :] + lanes[:, None]) * depth + lanes[:, None]
    layers = builder.reshape(builder.gather(rows, places.ravel(), 0), (depth, length, *leaf))
    if back:
        layers = builder.transpose(layers, [0, *(axis + 1 for axis in back)])
    return [builder.index(layers, -1), *[layers] * form.collected]

"""What a schedule of a loop costs, by an estimate from types and the rates of a machine.

Comes in: bodies, how many lanes they are computed for, rates. Goes out: seconds. It weighs
schedules against each other, and is no promise. Must not know: schedules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cache

from stitch.compiler.loops.lane_scans import lane_scan_of
from stitch.compiler.loops.lanes import states_that_vary
from stitch.machine import LoopRates, Machine, load_machine
from stitch.ops import RESHAPING, is_elementwise, multiply_adds
from stitch.program import ABSENT, Body, Operation, ScanForm, Value, is_scan

#: They move nothing where kernels take views.
_VIEWS = RESHAPING | {"Slice", "Split", "Transpose"}


def rates_of(machine: Machine) -> LoopRates:
    """The rates of a machine's loops, or of the machine `host`."""
    return machine.loops or _host_rates()


@cache
def _host_rates() -> LoopRates:
    rates = load_machine("host").loops
    assert rates is not None
    return rates


class LoopCosts:
    """Seconds of bodies, by the rates of one machine; loops over lanes whose body is among
    `lane_bodies` will be scans for all of them."""

    def __init__(
        self, rates: LoopRates, bodies: Sequence[Body], lane_bodies: Collection[int] = ()
    ) -> None:
        self.rates, self.bodies, self.lane_bodies = rates, bodies, lane_bodies
        #: Of loops in bodies: by body, form, lanes, and which inputs differ or are constants.
        self._known: dict[Hashable, float] = {}

    def scan(
        self, body: Body, form: ScanForm, lanes: int = 1, batched: Collection[int] | None = None,
        fixed: Collection[int] = (),
    ) -> float:  # fmt: skip
        """All rounds of a scan, for so many lanes; `batched`: the inputs of the body that differ
        from lane to lane (all); `fixed`: those that are constants."""
        seconds = self.rounds(body, form.count, lanes, batched, fixed)
        return seconds + self._streaming(body, form, lanes, batched)

    def rounds(
        self, body: Body, count: int, lanes: int = 1, batched: Collection[int] | None = None,
        fixed: Collection[int] = (),
    ) -> float:  # fmt: skip
        """So many rounds, but for what their sequences bring: that is the same for all schedules of
        a loop with states."""
        return count * (self.rates.round_seconds + self.round(body, lanes, batched, fixed))

    def round(
        self, body: Body, lanes: int = 1, batched: Collection[int] | None = None,
        fixed: Collection[int] = (),
    ) -> float:  # fmt: skip
        """One round of a body for so many lanes; `batched`: the inputs that differ from lane to
        lane (all); `fixed`: those that are constants."""
        varies = set(body.inputs if batched is None else batched) if lanes > 1 else set()
        constant = {*fixed, *(c.value for c in body.constants)}
        touched: dict[int, int] = {}
        made: set[int] = set()
        #: Values that something else reads or makes than long passes over elements.
        kept = {*body.inputs, *body.outputs}
        seconds = 0.0
        for operation in body.operations:
            made.update(operation.outputs)
            if operation.inputs and constant.issuperset(operation.inputs):
                constant.update(operation.outputs)  # Computed beforehand, or before the loop.
                continue
            if not varies.isdisjoint(operation.inputs):
                varies.update(operation.outputs)
            times = lanes if any(v in varies for v in operation.outputs) else 1
            if is_scan(operation):
                seconds += self._carried(operation, times, varies, constant)
                continue
            if operation.op in _VIEWS and not operation.domain:
                continue
            seconds += self.rates.operation_seconds
            seconds += self._product(operation, body.values, times, constant - varies)
            passes = _passes_over_elements(operation, body, varies)
            for value in (*operation.inputs, *operation.outputs):
                if value != ABSENT:
                    if not passes:
                        kept.add(value)
                    touched[value] = _nbytes(body, value) * (lanes if value in varies else 1)
        return seconds + self._carrying(touched, made, kept)

    def _carried(
        self, operation: Operation, lanes: int, varies: Collection[int], constant: Collection[int]
    ) -> float:
        """A loop in a body, of which some operands differ from lane to lane, or are constants."""
        scan = lane_scan_of(operation, self.bodies, self.lane_bodies)
        form, body, lanes = scan.form, self.bodies[scan.body], lanes * scan.rows
        known = [not isinstance(v, int) or v in constant for v in scan.operands]
        differ = [
            lanes > 1 and (inside or (isinstance(v, int) and v in varies))
            for v, inside in zip(scan.operands, scan.batched, strict=True)
        ]
        fixed = tuple([i for i, flag in enumerate(known) if flag and not differ[i]])
        key = scan.body, form, lanes, tuple(differ), fixed
        if key not in self._known:
            if lanes > 1:
                differ[: form.states] = states_that_vary(body, form, differ)
            batched = [v for v, flag in zip(body.inputs, differ, strict=True) if flag]
            first = form.states + form.sequences
            constants = [body.inputs[i] for i in fixed if i >= first]
            self._known[key] = self.scan(body, form, lanes, batched, constants)
        return self._known[key]

    def _streaming(
        self, body: Body, form: ScanForm, lanes: int, batched: Collection[int] | None
    ) -> float:
        """What elements and what is collected take beside a round's bytes: each is copied between
        its sequence, from afar where there is much of all, and the round."""
        elements = body.inputs[form.states : form.states + form.sequences]
        nbytes = 0
        for value in (*elements, *body.outputs[form.states :]):
            differs = lanes > 1 and (batched is None or value not in elements or value in batched)
            nbytes += form.count * _nbytes(body, value) * (lanes if differs else 1)
        copied = nbytes / self.rates.near_bytes_per_second
        return copied + self._passing(nbytes, nbytes - self.rates.near_nbytes)

    def _product(
        self, operation: Operation, values: Sequence[Value], times: int, constant: Collection[int]
    ) -> float:
        """What a product takes for its arithmetic: by a constant matrix it is faster, as that is
        rearranged once."""
        flops = 2 * multiply_adds(operation, values) * times
        if not flops:
            return 0.0
        is_packed = operation.inputs[1] in constant
        rates = self.rates
        return flops / (rates.packed_flops_per_second if is_packed else rates.flops_per_second)

    def _carrying(
        self, touched: Mapping[int, int], made: Collection[int], kept: Collection[int]
    ) -> float:
        """What a round reads and writes. Of what comes from outside, which comes back a round
        later, less and less is near the more there is; and so of what it makes itself, but for what
        goes from one pass over elements to the next, piece by piece."""
        outside = sum(n for value, n in touched.items() if value not in made)
        inside = sum(n for value, n in touched.items() if value in made and value in kept)
        passed, near = sum(touched.values()) - outside - inside, self.rates.near_nbytes
        seconds = self._passing(outside, 2 * (outside - near)) + self._passing(passed, 0)
        return seconds + self._passing(inside, inside - near)

    def _passing(self, nbytes: int, beyond: int) -> float:
        """So many bytes, of which some are beyond what is near."""
        far = min(nbytes, max(0, beyond))
        rates = self.rates
        return (nbytes - far) / rates.near_bytes_per_second + far / rates.far_bytes_per_second


def _nbytes(body: Body, value: int) -> int:
    kind = body.values[value].type
    return math.prod(kind.shape) * kind.data_type.dtype.itemsize


def _passes_over_elements(operation: Operation, body: Body, varies: Collection[int]) -> bool:
    """Whether each element of the result is of those at its own place, or of single numbers."""
    if operation.body != ABSENT or not is_elementwise(operation):
        return False
    result = operation.outputs[0]
    shape, differs = body.values[result].type.shape, result in varies
    return all(
        (body.values[v].type.shape == shape and (v in varies) == differs)
        or (v not in varies and math.prod(body.values[v].type.shape) == 1)
        for v in operation.inputs
        if v != ABSENT
    )

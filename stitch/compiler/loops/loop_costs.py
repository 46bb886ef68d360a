"""What a schedule of a loop costs, by an estimate from types and the rates of a machine.

Comes in: bodies, how many lanes they are computed for, rates. Goes out: seconds. It weighs
schedules against each other, and is no promise. Must not know: schedules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache

from stitch.machine import LoopRates, Machine, load_machine
from stitch.ops import RESHAPING, multiply_adds
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
    """Seconds of bodies, by the rates of one machine."""

    def __init__(self, rates: LoopRates, bodies: Sequence[Body]) -> None:
        self.rates, self.bodies = rates, bodies
        #: By a body's identity and lanes; with the body, whose identity no other has meanwhile.
        self._known: dict[tuple[int, int], tuple[Body, float]] = {}

    def scan(self, body: Body, form: ScanForm, lanes: int = 1) -> float:
        """All rounds of a scan, for so many lanes."""
        return form.count * (self.rates.round_seconds + self.round(body, lanes))

    def round(self, body: Body, lanes: int = 1, batched: Collection[int] | None = None) -> float:
        """One round of a body for so many lanes; `batched`: the inputs that differ from lane to
        lane (all)."""
        key = id(body), lanes
        if batched is None and key in self._known:
            return self._known[key][1]
        inputs = set(body.inputs if batched is None else batched)
        seconds = self.operations(body.operations, body.values, lanes, inputs)
        if batched is None:
            self._known[key] = body, seconds
        return seconds

    def operations(
        self, operations: Sequence[Operation], values: Sequence[Value], lanes: int,
        batched: Collection[int],
    ) -> float:  # fmt: skip
        """Operations one after the other, for so many lanes."""
        varies = set(batched)
        touched: dict[int, int] = {}
        made: set[int] = set()
        seconds = 0.0
        for operation in operations:
            made.update(operation.outputs)
            operands = [v for v in (*operation.inputs, *operation.outputs) if v != ABSENT]
            if lanes > 1 and not varies.isdisjoint(operation.inputs):
                varies.update(operation.outputs)
            times = lanes if any(v in varies for v in operation.outputs) else 1
            if is_scan(operation):
                body = self.bodies[operation.body]
                seconds += self.scan(body, ScanForm.of(operation), times)
                continue
            if operation.op in _VIEWS and not operation.domain:
                continue
            flops = 2 * multiply_adds(operation, values) * times
            seconds += self.rates.operation_seconds + flops / self.rates.flops_per_second
            for value in operands:
                kind = values[value].type
                nbytes = math.prod(kind.shape) * kind.data_type.dtype.itemsize
                touched[value] = nbytes * (lanes if value in varies else 1)
        return seconds + self._carrying(touched, made)

    def _carrying(self, touched: Mapping[int, int], made: Collection[int]) -> float:
        """What a round reads and writes. What it makes is read at once, and near; what comes from
        outside comes back a round later, and less and less of it from near the more there is."""
        rates = self.rates
        nbytes = sum(n for value, n in touched.items() if value not in made)
        inside = sum(touched.values()) - nbytes
        far = min(nbytes, 2 * max(0, nbytes - rates.near_nbytes))
        near = nbytes - far + inside
        return near / rates.near_bytes_per_second + far / rates.far_bytes_per_second

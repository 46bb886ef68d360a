"""What a schedule of a loop costs, by an estimate from types and the rates of a machine.

Comes in: bodies, how many lanes they are computed for, rates. Goes out: seconds. It weighs
schedules against each other, and is no promise. Must not know: schedules, executors but by the
names that rates have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

from stitch.errors import UsageError, closest
from stitch.machine import LOOP_EXECUTORS, LoopRates, Machine, load_machine
from stitch.ops import RESHAPING, multiply_adds
from stitch.program import ABSENT, Body, Operation, ScanForm, Value, is_scan

#: They only move elements: what some executors see in place, and what all copy.
_VIEWS = frozenset({"Expand", "Slice", "Split", "Transpose"})
_COPIES = frozenset({"Concat", "Gather"})
#: Of what they read, they read what they give.
_PICKS = frozenset({"Gather", "Slice"})
#: One function of the processor's, or of NumPy's, each; of others there are several to a result.
_PLAIN = frozenset({
    "Abs", "Add", "And", "Cast", "Clip", "Div", "Equal", "Exp", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "Log", "MatMul", "Max", "Min", "Mul", "Neg", "Not",
    "Or", "Reciprocal", "ReduceMax", "ReduceMin", "ReduceSum", "Relu", "Sqrt", "Sub", "Tanh",
    "Where",
})  # fmt: skip
#: Functions of whole rows: several times the steps of one of single elements.
_OVER_ROWS = frozenset({
    "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LogSoftmax",
    "RMSNormalization", "Softmax",
})  # fmt: skip
_STEPS_OVER_ROWS = 7
#: The executor for which programs are compiled where nobody says which: that of devices.
DEFAULT_EXECUTOR = "numpy"
#: Names of executors that compute as another does, or as the cheapest of others.
_COMPUTE_AS = {"auto": ("numpy", "onnxruntime"), "null": (DEFAULT_EXECUTOR,)}
#: The names by which rates are asked for.
RATED_EXECUTORS = (*LOOP_EXECUTORS, *_COMPUTE_AS)


def check_executor(executor: str | None) -> None:
    """Raises `UsageError` for an executor of which no machine has rates."""
    if executor is not None and executor not in RATED_EXECUTORS:
        raise UsageError(
            f"no rates of loops are known of an executor {executor!r}",
            expected=", ".join(RATED_EXECUTORS),
            remedy=closest(executor, RATED_EXECUTORS)
            or "leave it out: those of the default are taken",
        )


def rated_executor(name: str) -> str | None:
    """The executor of a device, where rates are known of it; None for one that somebody brings."""
    return name if name in RATED_EXECUTORS else None


def rates_of(machine: Machine, executor: str | None = None) -> tuple[LoopRates, ...]:
    """The rates that weigh schedules for an executor: those of a machine, or of the machine `host`
    where it describes none of that executor; of several the cheapest decides."""
    name = executor or DEFAULT_EXECUTOR
    known = {rates.executor: rates for rates in (*_host_rates(), *machine.loops)}
    return tuple([known[each] for each in _COMPUTE_AS.get(name, (name,))])


@cache
def _host_rates() -> tuple[LoopRates, ...]:
    return load_machine("host").loops


class LoopCosts:
    """Seconds of bodies, by the rates of one machine."""

    def __init__(self, rates: LoopRates, bodies: Sequence[Body]) -> None:
        self.rates, self.bodies = rates, bodies
        #: Of the bodies that operations carry, by index and lanes.
        self._known: dict[tuple[int, int], float] = {}

    def scan(
        self, body: Body, form: ScanForm, lanes: int = 1, fixed: Collection[int] = ()
    ) -> float:
        """All rounds of a scan, for so many lanes; `fixed`: inputs of the body that are
        constants."""
        read = {v for operation in body.operations for v in operation.inputs}
        elements = body.inputs[form.states : form.states + form.sequences]
        moved = [*read.intersection(elements), *body.outputs[form.states :]]
        around = self.rates.round_seconds + len(moved) * self.rates.element_seconds
        return form.count * (around + self.round(body, lanes, fixed=fixed))

    def round(
        self, body: Body, lanes: int = 1, batched: Collection[int] | None = None,
        fixed: Collection[int] = (),
    ) -> float:  # fmt: skip
        """One round of a body for so many lanes; `batched`: the inputs that differ from lane to
        lane (all)."""
        varies = set(body.inputs if batched is None else batched) if lanes > 1 else set()
        constant = {*fixed, *(c.value for c in body.constants)}
        touched: dict[int, int] = {}
        passes: Counter[int] = Counter()
        spread = 0
        made: set[int] = set()
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
                seconds += self._inside(operation, times)
                continue
            seconds += self._call(operation)
            seconds += self._product(operation, body.values, times, constant, varies)
            for value in self._passed(operation):
                nbytes = _nbytes(body.values[value], lanes if value in varies else 1)
                touched[value] = nbytes
                passes[value] += 1
            if times > 1 and operation.op == "Concat" and not self.rates.has_views:
                # What is the same for all lanes is there for each, before it is joined to others.
                same = [v for v in operation.inputs if v not in varies]
                spread += 3 * sum(_nbytes(body.values[v], times) for v in same)
        return seconds + self._carrying(touched, passes, made) + self._spreading(spread)

    def _call(self, operation: Operation) -> float:
        """What an operation takes beside its FLOPs and bytes."""
        rates = self.rates
        if operation.domain:
            return rates.function_seconds
        if rates.has_views and operation.op in _COPIES:
            # A call for each piece that is copied, or for what is picked and whether it is there.
            return rates.operation_seconds * len(operation.inputs)
        if operation.op in RESHAPING | _VIEWS | _COPIES:
            return rates.movement_seconds
        if operation.op in _PLAIN:
            return rates.operation_seconds
        return rates.function_seconds * (_STEPS_OVER_ROWS if operation.op in _OVER_ROWS else 1)

    def _passed(self, operation: Operation) -> Iterator[int]:
        """The values of which an operation reads or writes all elements: none where it is a view;
        where it picks some, as many as it gives."""
        values = (*operation.inputs, *operation.outputs)
        if not operation.domain:
            if operation.op in RESHAPING or (self.rates.has_views and operation.op in _VIEWS):
                return
            if operation.op in _PICKS:
                values = operation.outputs
        yield from (value for value in values if value != ABSENT)

    def _inside(self, operation: Operation, lanes: int) -> float:
        """All rounds of a loop in a body."""
        key = operation.body, lanes
        if key not in self._known:
            body, form = self.bodies[operation.body], ScanForm.of(operation)
            self._known[key] = self.scan(body, form, lanes)
        return self._known[key]

    def _product(
        self, operation: Operation, values: Sequence[Value], times: int,
        constant: Collection[int], varies: Collection[int],
    ) -> float:  # fmt: skip
        """What a product takes for its arithmetic: by a constant matrix it is faster, as that is
        rearranged once."""
        flops = 2 * multiply_adds(operation, values) * times
        if not flops:
            return 0.0
        rates, weight = self.rates, operation.inputs[1]
        if len(values[weight].type.shape) > 2 or weight in varies:
            matrices = times * math.prod(values[operation.outputs[0]].type.shape[:-2])
            return flops / rates.flops_per_second + matrices * rates.matrix_seconds
        # One matrix, for all rows: those of a batch are one tall matrix.
        is_packed = weight in constant
        rate = rates.packed_flops_per_second if is_packed else rates.flops_per_second
        return flops / rate + rates.matrix_seconds

    def _carrying(
        self, touched: Mapping[int, int], passes: Mapping[int, int], made: Collection[int]
    ) -> float:
        """What a round reads and writes, each value in so many passes. Of what comes from outside,
        which comes back a round later, less and less is near the more there is; and so of what it
        makes itself."""
        seconds, near = 0.0, self.rates.near_nbytes
        for times, values in (
            (2, [v for v in touched if v not in made]), (1, [v for v in touched if v in made])
        ):  # fmt: skip
            nbytes = sum(touched[v] for v in values)
            passing = sum(touched[v] * passes[v] for v in values)
            far = min(1.0, max(0, times * (nbytes - near)) / max(1, nbytes))
            # What is written far away is fetched before it.
            written = 0 if times > 1 else nbytes
            seconds += self._passing(passing, far) + self._far(written * far)
        return seconds

    def _spreading(self, nbytes: int) -> float:
        """What is written out and read again."""
        return self._passing(nbytes, max(0.0, 1 - self.rates.near_nbytes / max(1, nbytes)))

    def _far(self, nbytes: float) -> float:
        return nbytes / self.rates.far_bytes_per_second

    def _passing(self, nbytes: int, far: float) -> float:
        """So many bytes, of which a part is far."""
        near = nbytes * (1 - far) / self.rates.near_bytes_per_second
        return near + self._far(nbytes * far)


def _nbytes(value: Value, times: int) -> int:
    """Bytes of a value, for so many lanes."""
    return times * math.prod(value.type.shape) * value.type.data_type.dtype.itemsize

"""What a schedule of a loop costs, by an estimate from types and the rates of a machine.

It weighs schedules against each other, and is no promise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import cache

from stitch.compiler.dependence import reached
from stitch.compiler.loops.batch_axes import batched_scan_of, states_that_vary
from stitch.errors import UsageError, closest
from stitch.machine import LOOP_EXECUTORS, LoopRates, Machine, load_machine
from stitch.ops import RESHAPING, is_elementwise, multiply_adds
from stitch.program import ABSENT, Body, Operation, ScanForm, Value, is_scan

# --------------------------------------------------------------------------------------------------
# Per-operation overhead of a round, and the operands whose bytes do not count.

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


def call_seconds(operation: Operation, rates: LoopRates) -> float:
    """What an operation takes beside its FLOPs and bytes."""
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


def passed_over(operation: Operation, rates: LoopRates) -> Iterator[int]:
    """The values of which an operation reads or writes all elements: none where it is a view; where
    it picks some, as many as it gives."""
    values = (*operation.inputs, *operation.outputs)
    if not operation.domain:
        if operation.op in RESHAPING or (rates.has_views and operation.op in _VIEWS):
            return
        if operation.op in _PICKS:
            values = operation.outputs
    yield from (value for value in values if value != ABSENT)


class LoopCosts:
    """Seconds of bodies, by the rates of one machine; loops over a batch whose body is among
    `batched_bodies` will be scans for all of them."""

    def __init__(
        self, rates: LoopRates, bodies: Sequence[Body], batched_bodies: Collection[int] = ()
    ) -> None:
        self.rates, self.bodies, self.batched_bodies = rates, bodies, batched_bodies
        #: Of loops in bodies: by body, form, batch elements, and which inputs differ or are
        #: constants.
        self._known: dict[Hashable, float] = {}

    def scan(
        self, body: Body, form: ScanForm, batch_size: int = 1,
        batched: Collection[int] | None = None,
        fixed: Collection[int] = (),
    ) -> float:  # fmt: skip
        """All rounds of a scan, for a batch of that size; `batched`: the inputs of the body that
        differ within the batch (all); `fixed`: those that are constants.
        """
        turns = form.likely_rounds * self.turn(body, form, batch_size, batched, fixed)
        return self.rates.loop_seconds + turns + self._streaming(body, form, batch_size, batched)

    def turn(
        self, body: Body, form: ScanForm, batch_size: int = 1,
        batched: Collection[int] | None = None,
        fixed: Collection[int] = (),
    ) -> float:  # fmt: skip
        """One round of a scan, but for the bytes of its sequences."""
        read = {v for operation in body.operations for v in operation.inputs}
        elements = body.inputs[form.states : form.states + form.sequences]
        moved = len(read.intersection(elements)) + len(body.outputs[form.states :])
        around = self.rates.round_seconds + moved * self.rates.element_seconds
        return around + self.round(body, batch_size, batched, fixed)

    def round(
        self, body: Body, batch_size: int = 1, batched: Collection[int] | None = None,
        fixed: Collection[int] = (),
    ) -> float:  # fmt: skip
        """One round of a body for a batch of that size; `batched`: the inputs that differ from
        batch element to batch element (all); `fixed`: those that are constants.
        """
        varies = reached(
            body.operations, (body.inputs if batched is None else batched) if batch_size > 1 else ()
        )
        constant = {*fixed, *(c.value for c in body.constants)}
        touched: dict[int, int] = {}
        passes: Counter[int] = Counter()
        spread = 0
        made: set[int] = set()
        #: Values that something else reads or makes than long passes over elements.
        kept = {*body.inputs, *body.outputs}
        seconds = 0.0
        for operation in body.operations:
            made.update(operation.outputs)
            if operation.inputs and constant.issuperset(operation.inputs):
                constant.update(operation.outputs)  # Computed beforehand, or before the loop.
                continue
            times = batch_size if any(v in varies for v in operation.outputs) else 1
            if is_scan(operation):
                seconds += self._carried(operation, times, varies, constant)
                continue
            seconds += call_seconds(operation, self.rates)
            seconds += self._product(operation, body.values, times, constant, varies)
            is_kept = not _passes_over_elements(operation, body, varies)
            for value in passed_over(operation, self.rates):
                if is_kept:
                    kept.add(value)
                touched[value] = _nbytes(body, value) * (batch_size if value in varies else 1)
                passes[value] += 1
            if times > 1 and operation.op == "Concat" and not self.rates.has_views:
                # What is the same for the whole batch is there for each, before it is joined to
                # others.
                same = [v for v in operation.inputs if v not in varies]
                spread += 3 * sum(_nbytes(body, v) * times for v in same)
        seconds += self._passing(spread, spread - self.rates.near_nbytes)
        return seconds + self._carrying(touched, passes, made, kept)

    def _carried(
        self,
        operation: Operation,
        batch_size: int,
        varies: Collection[int],
        constant: Collection[int],
    ) -> float:
        """A loop in a body, of which some operands differ within the batch, or are constants."""
        scan = batched_scan_of(operation, self.bodies, self.batched_bodies)
        form, body, batch_size = scan.form, self.bodies[scan.body], batch_size * scan.rows
        known = [not isinstance(v, int) or v in constant for v in scan.operands]
        differ = [
            batch_size > 1 and (inside or (isinstance(v, int) and v in varies))
            for v, inside in zip(scan.operands, scan.batched, strict=True)
        ]
        fixed = tuple([i for i, flag in enumerate(known) if flag and not differ[i]])
        key = scan.body, form, batch_size, tuple(differ), fixed
        if key not in self._known:
            if batch_size > 1:
                differ[: form.states] = states_that_vary(body, form, differ)
            batched = [v for v, flag in zip(body.inputs, differ, strict=True) if flag]
            first = form.states + form.sequences
            constants = [body.inputs[i] for i in fixed if i >= first]
            self._known[key] = self.scan(body, form, batch_size, batched, constants)
        return self._known[key]

    def _streaming(
        self, body: Body, form: ScanForm, batch_size: int, batched: Collection[int] | None
    ) -> float:
        """What elements and what is collected take beside a round, which reads or writes them:
        where there is much of all, they are far; some executors copy them, near to each round."""
        elements = body.inputs[form.states : form.states + form.sequences]
        nbytes = 0
        for value in (*elements, *body.outputs[form.states :]):
            differs = batch_size > 1 and (
                batched is None or value not in elements or value in batched
            )
            nbytes += form.count * _nbytes(body, value) * (batch_size if differs else 1)
        passes = 3 if self.rates.copies_elements else 1
        far = nbytes - self.rates.near_nbytes
        return self._passing(passes * nbytes, far) - self._passing(nbytes, 0)

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
        self, touched: Mapping[int, int], passes: Mapping[int, int], made: Collection[int],
        kept: Collection[int],
    ) -> float:  # fmt: skip
        """What a round reads and writes, each value in so many passes. Of what comes from outside,
        which comes back a round later, less and less is near the more there is; and so of what it
        makes itself, but for what goes from one pass over elements to the next, piece by piece."""
        outside = [v for v in touched if v not in made]
        inside = [v for v in touched if v in made and v in kept]
        handed = sum(touched[v] * passes[v] for v in touched if v in made and v not in kept)
        seconds, near = self._passing(handed, 0), self.rates.near_nbytes
        for times, values in ((2, outside), (1, inside)):
            nbytes = sum(touched[v] for v in values)
            passing = sum(touched[v] * passes[v] for v in values)
            far = min(1.0, max(0, times * (nbytes - near)) / max(1, nbytes))
            seconds += self._passing(passing, passing * far)
            if values is inside:
                # What is written far away is fetched before it.
                seconds += nbytes * far / self.rates.far_bytes_per_second
        return seconds

    def _passing(self, nbytes: int, beyond: float) -> float:
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


# --------------------------------------------------------------------------------------------------
# Rates by executor.

#: The executor assumed if the options name none: the default of a device.
DEFAULT_EXECUTOR = "numpy"
#: Names of executors that compute as another does, or as the cheapest of others.
_COMPUTE_AS = {
    "auto": ("numpy", "onnxruntime"),
    "null": (DEFAULT_EXECUTOR,),
}
#: The names by which rates are asked for.
RATED_EXECUTORS = (*LOOP_EXECUTORS, *_COMPUTE_AS)


def check_executor(executor: str | None) -> None:
    """Raises `UsageError` for an executor of which no machine has rates."""
    if executor is not None and executor not in RATED_EXECUTORS:
        raise UsageError(
            f"there is no executor {executor!r}",
            expected=", ".join(RATED_EXECUTORS),
            remedy=closest(executor, RATED_EXECUTORS)
            or "leave it out: those of the default are taken",
        )


def rated_executor(name: str) -> str | None:
    """Return `name` if rates for it are known, None for a custom executor."""
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

"""Estimated cost of loop schedules, from types and the rates of a machine.

The estimates compare schedules with each other; they are no predictions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import cache

from stitch.compiler.dependence import reachable_from
from stitch.compiler.loops.batch_axes import batched_scan_of, states_that_vary
from stitch.errors import unknown
from stitch.machine import LOOP_EXECUTORS, LoopRates, Machine, load_machine
from stitch.ops import RESHAPING, is_elementwise, multiply_adds
from stitch.option_values import is_torch_device
from stitch.program import ABSENT, Body, Operation, ScanForm, Value, is_scan

#: Operators that move elements: some executors implement them as views, all can copy.
_VIEWS = frozenset({"Expand", "Slice", "Split", "Transpose"})
_COPIES = frozenset({"Concat", "Gather"})
#: Operators that read as many elements as they return.
_PICKS = frozenset({"Gather", "Slice"})
#: Operators that are one function of NumPy's or the processor's; others are several.
_PLAIN = frozenset({
    "Abs", "Add", "And", "Cast", "Clip", "Div", "Equal", "Exp", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "Log", "MatMul", "Max", "Min", "Mul", "Neg", "Not",
    "Or", "Reciprocal", "ReduceMax", "ReduceMin", "ReduceSum", "Relu", "Sqrt", "Sub", "Tanh",
    "Where",
})  # fmt: skip
#: Operators on whole rows: several times the steps of an elementwise one.
_OVER_ROWS = frozenset({
    "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LogSoftmax",
    "RMSNormalization", "Softmax",
})  # fmt: skip
_STEPS_OVER_ROWS = 7


def call_seconds(operation: Operation, rates: LoopRates) -> float:
    """Return the seconds of an operation apart from its FLOPs and bytes."""
    if operation.domain:
        return rates.function_seconds
    if rates.has_views and operation.op in _COPIES:
        # One call per copied piece, or to select elements and to check the indices.
        return rates.operation_seconds * len(operation.inputs)
    if operation.op in RESHAPING | _VIEWS | _COPIES:
        return rates.movement_seconds
    if operation.op in _PLAIN:
        return rates.operation_seconds
    return rates.function_seconds * (_STEPS_OVER_ROWS if operation.op in _OVER_ROWS else 1)


def accessed_values(operation: Operation, rates: LoopRates) -> Iterator[int]:
    """Yield the values of which an operation accesses all elements; none for views.

    An operator that selects elements accesses as many as it returns.
    """
    values = (*operation.inputs, *operation.outputs)
    if not operation.domain:
        if operation.op in RESHAPING or (rates.has_views and operation.op in _VIEWS):
            return
        if operation.op in _PICKS:
            values = operation.outputs
    yield from (value for value in values if value != ABSENT)


class LoopCosts:
    """Seconds of bodies at the rates of one machine.

    A loop over a batch whose body is in `batched_bodies` counts as one scan for the whole batch.
    """

    def __init__(
        self, rates: LoopRates, bodies: Sequence[Body], batched_bodies: Collection[int] = ()
    ) -> None:
        self.rates, self.bodies, self.batched_bodies = rates, bodies, batched_bodies
        #: Nested loops by body, form, batch size, varying inputs and constant inputs.
        self._known: dict[Hashable, float] = {}

    def scan(
        self, body: Body, form: ScanForm, batch_size: int = 1,
        batched: Collection[int] | None = None,
        fixed: Collection[int] = (),
    ) -> float:  # fmt: skip
        """Return the seconds of all rounds of a scan.

        Args:
            body: Its body.
            form: Its form.
            batch_size: The number of batch elements.
            batched: Inputs of the body that differ within the batch; all by default.
            fixed: Inputs of the body that are constants.
        """
        turns = form.likely_rounds * self.turn(body, form, batch_size, batched, fixed)
        sequences = self._sequence_seconds(body, form, batch_size, batched)
        return self.rates.loop_seconds + turns + sequences

    def turn(
        self, body: Body, form: ScanForm, batch_size: int = 1,
        batched: Collection[int] | None = None,
        fixed: Collection[int] = (),
    ) -> float:  # fmt: skip
        """Return the seconds of a round of a scan without access to its sequences; see `scan`."""
        read = {v for operation in body.operations for v in operation.inputs}
        elements = body.inputs[form.states : form.states + form.sequences]
        moved = len(read.intersection(elements)) + len(body.outputs[form.states :])
        around = self.rates.round_seconds + moved * self.rates.element_seconds
        return around + self.round(body, batch_size, batched, fixed)

    def round(
        self, body: Body, batch_size: int = 1, batched: Collection[int] | None = None,
        fixed: Collection[int] = (),
    ) -> float:  # fmt: skip
        """Return the seconds of one execution of a body; arguments as in `scan`."""
        varies = reachable_from(
            body.operations, (body.inputs if batched is None else batched) if batch_size > 1 else ()
        )
        constant = {*fixed, *(c.value for c in body.constants)}
        touched: dict[int, int] = {}
        passes: Counter[int] = Counter()
        spread = 0
        made: set[int] = set()
        #: Values that some operation other than a chunked elementwise pass accesses.
        kept = {*body.inputs, *body.outputs}
        seconds = 0.0
        for operation in body.operations:
            made.update(operation.outputs)
            if operation.inputs and constant.issuperset(operation.inputs):
                constant.update(operation.outputs)  # Computed by folding, or before the loop.
                continue
            times = batch_size if any(v in varies for v in operation.outputs) else 1
            if is_scan(operation):
                seconds += self._nested_seconds(operation, times, varies, constant)
                continue
            seconds += call_seconds(operation, self.rates)
            seconds += self._product(operation, body.values, times, constant, varies)
            is_kept = not _passes_over_elements(operation, body, varies)
            for value in accessed_values(operation, self.rates):
                if is_kept:
                    kept.add(value)
                touched[value] = _nbytes(body, value) * (batch_size if value in varies else 1)
                passes[value] += 1
            if times > 1 and operation.op == "Concat" and not self.rates.has_views:
                # An operand that is equal in the whole batch is expanded before the Concat.
                same = [v for v in operation.inputs if v not in varies]
                spread += 3 * sum(_nbytes(body, v) * times for v in same)
        seconds += self._byte_seconds(spread, spread - self.rates.near_nbytes)
        return seconds + self._access_seconds(touched, passes, made, kept)

    def _nested_seconds(
        self, operation: Operation, batch_size: int, varies: Collection[int],
        constant: Collection[int],
    ) -> float:  # fmt: skip
        """Return the seconds of a nested loop, some of whose operands vary or are constant."""
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

    def _sequence_seconds(
        self, body: Body, form: ScanForm, batch_size: int, batched: Collection[int] | None
    ) -> float:
        """Return the extra seconds of sequences and collected results.

        Large ones are far from the processor; some executors copy them for each round.
        """
        elements = body.inputs[form.states : form.states + form.sequences]
        nbytes = 0
        for value in (*elements, *body.outputs[form.states :]):
            differs = batch_size > 1 and (
                batched is None or value not in elements or value in batched
            )
            nbytes += form.count * _nbytes(body, value) * (batch_size if differs else 1)
        passes = 3 if self.rates.copies_elements else 1
        far = nbytes - self.rates.near_nbytes
        return self._byte_seconds(passes * nbytes, far) - self._byte_seconds(nbytes, 0)

    def _product(
        self, operation: Operation, values: Sequence[Value], times: int,
        constant: Collection[int], varies: Collection[int],
    ) -> float:  # fmt: skip
        """Return the seconds of the arithmetic of a matrix product.

        A constant matrix is packed once, which makes its products faster.
        """
        flops = 2 * multiply_adds(operation, values) * times
        if not flops:
            return 0.0
        rates, weight = self.rates, operation.inputs[1]
        if len(values[weight].type.shape) > 2 or weight in varies:
            matrices = times * math.prod(values[operation.outputs[0]].type.shape[:-2])
            return flops / rates.flops_per_second + matrices * rates.matrix_seconds
        # One matrix for all rows: the rows of a batch form one tall matrix.
        is_packed = weight in constant
        rate = rates.packed_flops_per_second if is_packed else rates.flops_per_second
        return flops / rate + rates.matrix_seconds

    def _access_seconds(
        self, touched: Mapping[int, int], passes: Mapping[int, int], made: Collection[int],
        kept: Collection[int],
    ) -> float:  # fmt: skip
        """Return the seconds of reading and writing the values of a round, once per pass.

        The more bytes a round accesses, the smaller the share that stays in near memory. Values
        passed between elementwise operations are computed in chunks and stay near.
        """
        outside = [v for v in touched if v not in made]
        inside = [v for v in touched if v in made and v in kept]
        handed = sum(touched[v] * passes[v] for v in touched if v in made and v not in kept)
        seconds, near = self._byte_seconds(handed, 0), self.rates.near_nbytes
        for times, values in ((2, outside), (1, inside)):
            nbytes = sum(touched[v] for v in values)
            passing = sum(touched[v] * passes[v] for v in values)
            far = min(1.0, max(0, times * (nbytes - near)) / max(1, nbytes))
            seconds += self._byte_seconds(passing, passing * far)
            if values is inside:
                # Far memory is read before it is written.
                seconds += nbytes * far / self.rates.far_bytes_per_second
        return seconds

    def _byte_seconds(self, nbytes: int, beyond: float) -> float:
        """Return the seconds of accessing bytes, `beyond` of which are in far memory."""
        far = min(nbytes, max(0, beyond))
        rates = self.rates
        return (nbytes - far) / rates.near_bytes_per_second + far / rates.far_bytes_per_second


def _nbytes(body: Body, value: int) -> int:
    kind = body.values[value].type
    return math.prod(kind.shape) * kind.data_type.dtype.itemsize


def _passes_over_elements(operation: Operation, body: Body, varies: Collection[int]) -> bool:
    """Whether each element of the result depends on one element, or scalars, of the operands."""
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


#: The default executor of a device.
DEFAULT_EXECUTOR = "numpy"
#: The executor of cards, and the machine that describes them.
CUDA = "cuda"
#: Executors that compute like another one, or like the cheapest of several.
_COMPUTE_AS = {"auto": ("numpy", "onnxruntime"), "null": (DEFAULT_EXECUTOR,)}
#: Executors for which there are rates.
RATED_EXECUTORS = (*LOOP_EXECUTORS, *_COMPUTE_AS)


def check_executor(executor: str | None) -> None:
    """Raise `UsageError` for an executor without rates."""
    if executor is not None and rated_executor(executor) is None:
        what, remedy = f"there is no executor {executor!r}", "omit it to use the default's rates"
        raise unknown(what, executor, RATED_EXECUTORS, remedy=remedy)


def rated_executor(name: str) -> str | None:
    """Return the executor with the rates of `name`, None for a custom executor."""
    if is_torch_device(name):
        return CUDA
    return name if name in RATED_EXECUTORS else None


def rates_of(machine: Machine, executor: str | None = None) -> tuple[LoopRates, ...]:
    """Return the rates used to choose schedules for an executor.

    They are the machine's own, or else those of the machines `host` and `cuda`. For an executor
    that computes like several, the cheapest decides. Without one, a machine with rates of the
    executor `cuda` is a card.
    """
    own = {rates.executor: rates for rates in machine.loops}
    default = CUDA if CUDA in own else DEFAULT_EXECUTOR
    name = rated_executor(executor or default) or default
    known = {**_default_rates(), **own}
    return tuple([known[each] for each in _COMPUTE_AS.get(name, (name,))])


@cache
def _default_rates() -> dict[str, LoopRates]:
    machines = map(load_machine, ("host", CUDA))
    return {rates.executor: rates for machine in machines for rates in machine.loops}

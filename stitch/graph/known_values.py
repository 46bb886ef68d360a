"""Known values: small arrays of a graph that can be computed before it runs (shapes, axes)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from stitch import ops
from stitch.errors import StitchError
from stitch.program import (
    ABSENT,
    Array,
    Operation,
    ValueType,
    has_symbols,
    is_deferred,
    is_symbolic,
)

#: Larger results count as data and stay unknown; shapes, axes and indices are smaller.
MAX_KNOWN_ELEMENTS = 4096
#: Work limit per operation: few operands can ask for an arbitrarily long computation.
MAX_STEPS = 1 << 24


class KnownValues:
    """Data of values by index. Constants are stored; operations are evaluated on demand."""

    __slots__ = ("_arrays", "_makers")

    def __init__(self, constants: Mapping[int, Array] | None = None) -> None:
        self._arrays: dict[int, Array | None] = dict(constants or {})
        self._makers: dict[int, tuple[Operation, tuple[ValueType | None, ...]]] = {}

    def add_constant(self, index: int, data: Array) -> None:
        """Store the data of a constant."""
        self._arrays[index] = data

    def add_operation(self, operation: Operation, operands: Sequence[ValueType | None]) -> None:
        """Register an operation whose results may be evaluated.

        Operations with bodies and foreign operators are ignored: their results stay unknown.
        """
        if operation.body != ABSENT or operation.is_foreign:
            return
        for index in operation.outputs:
            if index != ABSENT:
                self._makers[index] = (operation, tuple(operands))

    def operands(self, operation: Operation) -> tuple[Array | None, ...]:
        """Return the data of each operand, None where it is unknown."""
        return tuple(None if i == ABSENT else self.get(i) for i in operation.inputs)

    def get(self, index: int) -> Array | None:
        """Return the data of a value, or None if it depends on inputs, is large, or fails.

        Uses an explicit stack: chains may be longer than Python's recursion limit.
        """
        pending = [index]
        while pending:
            wanted = pending[-1]
            if wanted in self._arrays or wanted not in self._makers:
                pending.pop()
                continue
            operation, operands = self._makers[wanted]
            sources = [i for i in operation.inputs if i != ABSENT]
            if operands and ops.known_by_type(operation, operands[0]) is not None:
                sources = []
            if any(self._is_unknown(i) for i in sources):
                self._arrays[wanted] = None
                continue
            missing = [i for i in sources if i not in self._arrays]
            if missing:
                pending.extend(missing)
            else:
                self._compute(operation, operands)
        return self._arrays.get(index)

    def _is_unknown(self, index: int) -> bool:
        if index in self._arrays:
            data = self._arrays[index]
            return data is None or (not is_deferred(data) and data.size > MAX_KNOWN_ELEMENTS)
        return index not in self._makers

    def _compute(self, operation: Operation, operands: tuple[ValueType | None, ...]) -> None:
        results: Sequence[Array | None]
        try:
            results = self._evaluate(operation, operands)
        except StitchError:
            results = [None] * len(operation.outputs)
        for index, data in zip(operation.outputs, results, strict=True):
            if index != ABSENT:
                self._arrays[index] = data

    def _evaluate(
        self, operation: Operation, operands: tuple[ValueType | None, ...]
    ) -> Sequence[Array | None]:
        asked = ops.known_by_type(operation, operands[0]) if operands else None
        if asked is not None:
            return [asked]
        arrays = self.operands(operation)
        types = ops.infer_operation(operation, operands, arrays)
        given = [data for data in arrays if data is not None]
        if any(is_deferred(data) or has_symbols(data) for data in given):
            results = ops.symbolic_results(operation, arrays, types)
            return ops.deferred_results(operation, arrays, types) if results is None else results
        if any(is_symbolic(size) for kind in types for size in kind.shape):
            return ops.deferred_results(operation, arrays, types)
        steps = ops.estimated_steps(operation, operands, types)
        if steps > MAX_STEPS or any(math.prod(kind.shape) > MAX_KNOWN_ELEMENTS for kind in types):
            return [None] * len(types)
        read = [None if data is None else np.asarray(data) for data in arrays]
        return ops.evaluate_operation(operation, read)

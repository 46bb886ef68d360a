"""An elementwise operation written together with its slope, in others' words.

Comes in: an operation whose operator says how (`OpDef.with_slope`), and the values of its graph.
Goes out: the operations that stand for it, their constants, and the value of the slope. Types
narrower than float32 are computed in float32 and rounded at the end, as kernels do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from stitch import ops
from stitch.program import Constant, DataType, Operation, Value, ValueType


class SlopedOperation:
    """The operations; new values are appended to `values`."""

    def __init__(self, operation: Operation, values: list[Value]) -> None:
        definition = ops.lookup(operation.op, operation.domain)
        assert definition.with_slope is not None, f"{operation.op} does not say its slope"
        self.location = operation.location
        self.values = values
        self.operations: list[Operation] = []
        self.constants: list[Constant] = []
        source, result = operation.inputs[0], operation.outputs[0]
        kind = values[source].type
        self.computed = DataType.from_dtype(kind.data_type.compute_dtype)
        x = self._cast(source, self.computed)
        attributes = ops.resolve_attributes(definition, operation.attributes, operation.location)
        y, slope = definition.with_slope(self, x, attributes)
        #: The value of the slope, in the operand's type.
        self.slope = self._cast(slope, kind.data_type)
        last = self._cast(y, kind.data_type)
        # What makes the result makes the value that the graph knows it as.
        named = {last: result}
        self.operations = [
            replace(
                o,
                inputs=tuple(named.get(v, v) for v in o.inputs),
                outputs=tuple(named.get(v, v) for v in o.outputs),
            )
            for o in self.operations
        ]

    def apply(self, op: str, *operands: Any, **attributes: Any) -> int:
        """One operation with one result, a value of the graph; numbers become constants."""
        inputs = tuple(self._number(o) if isinstance(o, float) else int(o) for o in operands)
        (kind,) = ops.infer_types(op, [self.values[v].type for v in inputs], attributes=attributes)
        return self._add(op, inputs, kind, attributes)

    def _add(self, op: str, inputs: tuple[int, ...], kind: ValueType, attributes: Any) -> int:
        made = self._value(op.lower(), kind)
        self.operations.append(Operation(op, inputs, (made,), attributes, "", self.location))
        return made

    def _value(self, name: str, kind: ValueType) -> int:
        self.values.append(Value(f"{name}.{len(self.values)}", kind))
        return len(self.values) - 1

    def _number(self, number: float) -> int:
        made = self._value("number", ValueType((), self.computed))
        self.constants.append(Constant(made, np.array(number, self.computed.dtype)))
        return made

    def _cast(self, value: int, wanted: DataType) -> int:
        kind = self.values[value].type
        if kind.data_type is wanted:
            return value
        return self.apply("Cast", value, to=ops.onnx_code(wanted))

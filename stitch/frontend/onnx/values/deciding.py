"""Which inputs of a model decide shapes: found where typing asks for data that is not known.

Comes in: the operations made so far, and a call that could not be typed. Goes out: the operand
whose data was asked for, and the inputs that it is computed from. Must not know: examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stitch import ops
from stitch.errors import CompileError
from stitch.frontend.onnx.calls import NodeCall
from stitch.graph import SymbolicTensor
from stitch.program import Array

#: Operators that look at the shape of their operand only.
_SHAPE_ONLY = frozenset({"Shape", "Size", "ConstantOfShape", "EyeLike"})


class _Known(tuple[Any, ...]):
    """Known data by operand; `missing` lists the operands that were asked for and not known."""

    missing: list[int]

    def __getitem__(self, index: Any) -> Any:
        operand = super().__getitem__(index)
        if operand is None:
            self.missing.append(index)
        return operand


def asked_operand(call: NodeCall, known: Sequence[Array | None], outputs: int) -> int | None:
    """The operand whose data inference asked for last before it failed; None if for none."""
    asked = _Known(known)
    asked.missing = []
    try:
        definition = ops.lookup(call.op, call.domain)
        context = ops.InferenceContext(
            call.op,
            tuple(None if t is None else t.type for t in call.inputs),
            asked,
            ops.resolve_attributes(definition, call.attributes),
            outputs,
        )
        definition.infer(context)
    except CompileError:
        return asked.missing[-1] if asked.missing else None
    return None


class Dependencies:
    """What values are computed from, and which inputs some operator wants to know."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[int, ...]] = {}
        self._inputs: dict[int, tuple[str, SymbolicTensor]] = {}
        #: Inputs that decide a shape, in the order in which they were found.
        self.wanted: dict[str, None] = {}

    def add_input(self, name: str, tensor: SymbolicTensor) -> None:
        """Declares an input of the graph."""
        self._inputs[tensor.index] = (name, tensor)

    def note(
        self, op: str, operands: Sequence[SymbolicTensor | None], results: Sequence[SymbolicTensor]
    ) -> None:
        """Remembers what the results of an operation are computed from."""
        read = () if op in _SHAPE_ONLY else tuple(t.index for t in operands if t is not None)
        for tensor in results:
            self._sources[tensor.index] = read

    def want(self, tensor: SymbolicTensor, *, integers_only: bool = False) -> None:
        """Notes the inputs that a value is computed from as wanted.

        With `integers_only`, does nothing where one of them is of real numbers.
        """
        slots: dict[str, SymbolicTensor] = {}
        pending, seen = [tensor.index], {tensor.index}
        while pending:
            index = pending.pop()
            if index in self._inputs:
                name, slot = self._inputs[index]
                slots[name] = slot
            for source in self._sources.get(index, ()):
                if source not in seen:
                    seen.add(source)
                    pending.append(source)
        if not integers_only or all(slot.dtype.kind in "iub" for slot in slots.values()):
            self.wanted.update(dict.fromkeys(slots))

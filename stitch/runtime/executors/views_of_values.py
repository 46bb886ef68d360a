"""Values that need no bytes of their own: they are other values, seen with another shape.

Comes in: a program. Goes out: which operations copy nothing, where the bytes that they would copy
stay as they are for as long as the copy would be read. Must not know who computes.
"""

from __future__ import annotations

from collections.abc import Callable

from stitch.program import ABSENT, Array, Operation, Program
from stitch.runtime.executors.staging import is_direct

#: The same bytes in another shape.
RESHAPING = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})
#: NumPy's functions for these repeat a short operand by themselves.
REPEATING = frozenset({"Add", "Sub", "Mul"})


class ViewsOfValues:
    """Finds the operations of a program whose output can be a view of their first input."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.slots = {s.value for s in program.outputs}
        self.readers: dict[int, list[int]] = {}
        for index, operation in enumerate(program.operations):
            for value in operation.inputs:
                self.readers.setdefault(value, []).append(index)
        self.candidates = frozenset(
            index for index, o in enumerate(program.operations) if self._is_candidate(o)
        )

    def _is_candidate(self, operation: Operation) -> bool:
        if operation.domain or len(operation.outputs) != 1:
            return False
        source, made = operation.inputs[0], operation.outputs[0]
        values = self.program.values
        if made in self.slots or not (is_direct(values[source]) and is_direct(values[made])):
            return False
        if operation.op in RESHAPING:
            return True
        if operation.op != "Expand" or values[source].type.shape == values[made].type.shape:
            return False
        users = [self.program.operations[i] for i in self.readers.get(made, ())]
        return all(u.op in REPEATING and not u.domain for u in users) and len(
            values[source].type.shape
        ) <= len(values[made].type.shape)

    def only_readers(self, value: int) -> frozenset[int] | None:
        """Who reads a value; None if that is seen outside the program, or through a view."""
        found = frozenset(self.readers.get(value, ()))
        return None if value in self.slots or found & self.candidates else found

    def last_read(self, value: int) -> int:
        """The index of the last operation that reads a value, also through views of it."""
        last = -1
        for index in self.readers.get(value, ()):
            last = max(last, index)
            if index in self.candidates:
                last = max(last, self.last_read(self.program.operations[index].outputs[0]))
        return last

    def view(self, index: int, source: Array, place: Callable[[int], Array]) -> Array | None:
        """The output of an operation as a view of its input; None where it must be copied.

        `place` tells where a value is written.
        """
        operation = self.program.operations[index]
        if index not in self.candidates or not source.flags.c_contiguous:
            return None
        made = operation.outputs[0]
        start, stop = source.ctypes.data, source.ctypes.data + source.nbytes
        for later in self.program.operations[index + 1 : self.last_read(made) + 1]:
            for value in later.outputs:
                if value == ABSENT:
                    continue
                written = place(value)
                first = written.ctypes.data
                if first < stop and start < first + written.nbytes:
                    return None
        if operation.op == "Expand":
            return source
        return source.reshape(self.program.values[made].type.shape)

"""Scans: operations whose body runs for `count` rounds, and the roles of their operands.

Operands are initial states, sequences (each round reads one element of axis 0), and shared values.
Results are final states, and the outputs of all rounds stacked along a new axis 0. This is ONNX's
`Scan` with axis 0; the outer values that its body reads are shared operands here.

With `has_condition` a round runs only while the first state, a bool, is true: `count` is a limit,
and there are no sequences and stacked results, because shapes are static. That is ONNX's `Loop`;
with a count of one, a branch of `If`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stitch.program.data_type import DataType
from stitch.program.operation import ABSENT, AttributeValue, Operation, ValueType

#: Domain and name of the operator.
SCAN = ("stitch", "Scan")
#: Numbers, then directions.
ATTRIBUTES = (
    "count", "num_states", "num_scan_inputs", "scan_input_directions", "scan_output_directions",
    "has_condition",
)  # fmt: skip
#: The most rounds of one scan.
MAX_ROUNDS = 1 << 31
#: How many rounds are taken to run, in estimates, where data decide.
LIKELY_ROUNDS = 8
#: What decides whether a round runs.
CONDITION = ValueType((), DataType.BOOL)


def is_scan(operation: Operation) -> bool:
    """Return whether an operation runs its body in rounds.

    >>> is_scan(Operation("Scan", (0,), (1,), {"count": 3}, "stitch", body=0))
    True
    """
    return (operation.domain, operation.op) == SCAN


@dataclass(frozen=True, slots=True)
class ScanForm:
    """The rounds (with a condition their limit), states, sequences and collected results of a scan.

    Sequences and results may go backward; with a condition a round runs while the first state is
    true.
    """

    count: int
    states: int
    sequences: int
    collected: int
    taken_backward: tuple[bool, ...]
    given_backward: tuple[bool, ...]
    has_condition: bool = False

    @staticmethod
    def of(operation: Operation) -> ScanForm:
        """Parse a scan's attributes; raise `ValueError` for contradictions."""
        return ScanForm.read(operation.attributes, len(operation.inputs), len(operation.outputs))

    @staticmethod
    def read(attributes: Mapping[str, AttributeValue], operands: int, results: int) -> ScanForm:
        """Parse attributes for these numbers of operands and results; raise `ValueError`."""
        unknown = sorted(set(attributes) - set(ATTRIBUTES))
        if unknown:
            raise ValueError(f"a scan has no attribute {unknown[0]!r}")
        if "count" not in attributes:
            raise ValueError("it does not say its count of rounds")
        count, states, sequences = (_whole(attributes, name) for name in ATTRIBUTES[:3])
        if count > MAX_ROUNDS:
            raise ValueError(f"count {count} is more than {MAX_ROUNDS}")
        if states + sequences > operands:
            raise ValueError(f"{states} states and {sequences} sequences, {operands} operands")
        collected = results - states
        if collected < 0:
            raise ValueError(f"{states} states, {results} results")
        taken = _directions(attributes, "scan_input_directions", sequences)
        given = _directions(attributes, "scan_output_directions", collected)
        asks = attributes.get("has_condition", 0)
        if not _is_direction(asks):
            raise ValueError(f"has_condition is {asks!r}, not 0 or 1")
        if asks and (not states or sequences or collected):
            raise ValueError(
                "a scan with a condition has states, of which it is the first, no sequences, and "
                f"collects nothing: {states} states, {sequences} sequences, {collected} collected"
            )
        return ScanForm(count, states, sequences, collected, taken, given, bool(asks))

    @property
    def sides(self) -> int:
        """Return how often executors bind the body: states alternate between two buffers."""
        return min(self.count, 2 if self.states else 1)

    @property
    def likely_rounds(self) -> int:
        """Return the number of rounds, for estimates."""
        return min(self.count, LIKELY_ROUNDS) if self.has_condition else self.count

    @property
    def attributes(self) -> dict[str, Any]:
        """Return the attributes of such an operation."""
        directions = {
            "scan_input_directions": self.taken_backward,
            "scan_output_directions": self.given_backward,
        }
        return {
            "count": self.count,
            "num_states": self.states,
            "num_scan_inputs": self.sequences,
            **{k: tuple(map(int, given)) for k, given in directions.items() if any(given)},
            **({"has_condition": 1} if self.has_condition else {}),
        }

    def whole(self, element: ValueType) -> ValueType:
        """Return the type of a sequence of such elements."""
        return ValueType((self.count, *element.shape), element.data_type)

    def operand_types(self, inside: Sequence[ValueType | None]) -> list[ValueType | None]:
        """Return the types of the operands, from the inputs of the body."""
        before = self.states + self.sequences
        whole = [None if k is None else self.whole(k) for k in inside[self.states : before]]
        return [*inside[: self.states], *whole, *inside[before:]]

    def result_types(self, inside: Sequence[ValueType | None]) -> list[ValueType | None]:
        """Return the types of the results, from the outputs of the body."""
        whole = [None if kind is None else self.whole(kind) for kind in inside[self.states :]]
        return [*inside[: self.states], *whole]

    def problems(
        self,
        takes: Sequence[ValueType | None],
        makes: Sequence[ValueType | None],
        operands: Sequence[int],
    ) -> Iterator[str]:
        """Yield why a body with these inputs and outputs cannot run in rounds."""
        if ABSENT in operands:
            yield "an operand of a scan is always there"
        for i in range(min(self.states, len(takes), len(makes))):
            before, after = takes[i], makes[i]
            if before is not None and after is not None and before != after:
                yield f"state {i} is {before.text()}, and {after.text()} after a round"
        if self.has_condition and takes and takes[0] not in (None, CONDITION):
            yield f"its condition is {takes[0].text()}, not {CONDITION.text()}"
        for kind in (*takes, *makes):
            if kind is not None and kind.data_type.is_narrow:
                yield f"no round takes or makes {kind.data_type.value}"


def _whole(attributes: Mapping[str, AttributeValue], name: str) -> int:
    value = attributes.get(name, 0)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}, not a whole number")
    return value


def _directions(attributes: Mapping[str, AttributeValue], name: str, many: int) -> tuple[bool, ...]:
    given = attributes.get(name, ())
    if given == ():
        return (False,) * many
    if not isinstance(given, tuple) or len(given) != many or not all(map(_is_direction, given)):
        raise ValueError(f"{name} is {given!r}, not {many} times 0 (forward) or 1 (backward)")
    return tuple(map(bool, given))


def _is_direction(given: object) -> bool:
    return isinstance(given, int) and given in (0, 1)

"""Scans: operations whose body runs once for each of `count` rounds; which of their operands and
results are what.

Operands are the first states, then sequences, of which each round takes one element of axis 0, then
what all rounds share. Results are the last states, then what each round gives, collected along a
new axis 0. The body takes states, elements and what is shared, and makes states and elements. This
is `Scan` of ONNX with axis 0 throughout; what its body reads from outside is shared here.

With `has_condition` the first state is a truth value, and a round runs only while it is true:
`count` is the most rounds then, and there are no sequences and nothing is collected, since lengths
are known before anything runs. That is ONNX's `Loop`; with a count of one it is a side of an `If`.
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
    """Whether an operation runs its body in rounds.

    >>> is_scan(Operation("Scan", (0,), (1,), {"count": 3}, "stitch", body=0))
    True
    """
    return (operation.domain, operation.op) == SCAN


@dataclass(frozen=True, slots=True)
class ScanForm:
    """How many rounds, with a condition the most; how many operands are states and sequences, and
    results collected; which of the sequences are taken, and which of the results given, from the
    last place to the first; whether a round runs only while the first state is true."""

    count: int
    states: int
    sequences: int
    collected: int
    taken_backward: tuple[bool, ...]
    given_backward: tuple[bool, ...]
    has_condition: bool = False

    @staticmethod
    def of(operation: Operation) -> ScanForm:
        """The form of a scan; raises `ValueError` where its attributes do not fit each other."""
        return ScanForm.read(operation.attributes, len(operation.inputs), len(operation.outputs))

    @staticmethod
    def read(attributes: Mapping[str, AttributeValue], operands: int, results: int) -> ScanForm:
        """The form by attributes and how many operands and results there are; raises `ValueError`
        as `of` does."""
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
        """How often executors bind a body: states lie in two buffers that take turns."""
        return min(self.count, 2 if self.states else 1)

    @property
    def likely_rounds(self) -> int:
        """How many rounds it has, for estimates."""
        return min(self.count, LIKELY_ROUNDS) if self.has_condition else self.count

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of an operation of this form."""
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
        """The type of a sequence of such elements."""
        return ValueType((self.count, *element.shape), element.data_type)

    def operand_types(self, inside: Sequence[ValueType | None]) -> list[ValueType | None]:
        """What the operands are, by what the body takes."""
        before = self.states + self.sequences
        whole = [None if k is None else self.whole(k) for k in inside[self.states : before]]
        return [*inside[: self.states], *whole, *inside[before:]]

    def result_types(self, inside: Sequence[ValueType | None]) -> list[ValueType | None]:
        """What the results are, by what the body makes."""
        whole = [None if kind is None else self.whole(kind) for kind in inside[self.states :]]
        return [*inside[: self.states], *whole]

    def problems(
        self,
        takes: Sequence[ValueType | None],
        makes: Sequence[ValueType | None],
        operands: Sequence[int],
    ) -> Iterator[str]:
        """What of a body, by what it takes and makes, cannot run in rounds."""
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

"""Scans for `stitch-inspect`: how many rounds, what goes from round to round, what each takes and
gives, by the names of values.

Comes in: an operation that is a scan, a body. Goes out: data for JSON, lines for people. Must not
know: files, the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stitch.program import Body, Operation, ScanForm, is_scan, name_of
from stitch.report import counted


def scan_form(
    operation: Operation, names: Callable[[Sequence[int]], list[str]]
) -> dict[str, Any]:  # fmt: skip
    """A scan by what its operands and results are; `names` says what values are called."""
    form = ScanForm.of(operation)
    given, made = names(operation.inputs), names(operation.outputs)
    end = form.states + form.sequences
    return {
        "count": form.count,
        **({"has_condition": True} if form.has_condition else {}),
        "states": [
            {"first": first, "last": last}
            for first, last in zip(given[: form.states], made[: form.states], strict=True)
        ],
        "sequences": _directed(given[form.states : end], form.taken_backward),
        "shared": given[end:],
        "collected": _directed(made[form.states :], form.given_backward),
    }


def _directed(names: Sequence[str], backward: Sequence[bool]) -> list[dict[str, Any]]:
    return [{"name": n, "backward": back} for n, back in zip(names, backward, strict=True)]


def scan_line(form: Mapping[str, Any], body: int) -> str:
    """A scan in a line.

    >>> none = {"sequences": [], "shared": [], "collected": []}
    >>> scan_line({"count": 3, "states": [{"first": "a", "last": "b"}], **none}, 0)
    '3 rounds of body 0: states a to b'
    >>> scan_line({"count": 3, "states": [], "has_condition": True, **none}, 0)
    'at most 3 rounds, while the first state is true, of body 0'
    """
    states = [f"{s['first']} to {s['last'] or '_'}" for s in form["states"]]
    parts = (
        ("states", states),
        ("an element each of", _listed(form["sequences"])),
        ("shared", form["shared"]),
        ("collected in", _listed(form["collected"])),
    )
    said = "; ".join(f"{word} {', '.join(names)}" for word, names in parts if names)
    rounds = counted(form["count"], "round")
    if form.get("has_condition"):
        rounds = f"at most {rounds}, while the first state is true,"
    return f"{rounds} of body {body}" + (f": {said}" if said else "")


def _listed(sequences: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{s['name'] or '_'}{' (backward)' if s['backward'] else ''}" for s in sequences]


def body_lines(body: Body, index: int) -> Iterator[str]:
    """A body as text, the scans in it in words as well."""
    first = 1 + len(body.constants)
    for number, line in enumerate(body.lines(index)):
        yield line
        operation = body.operations[number - first] if number >= first else None
        if operation is not None and is_scan(operation):
            said = scan_form(operation, lambda held: [name_of(body.values, v) for v in held])
            yield f"      {scan_line(said, operation.body)}"

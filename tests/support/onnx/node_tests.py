"""ONNX's own node tests, run through front end, compiler and executor, and what becomes of each.

Run as a script it prints the counts and, with `--write`, renews the checked-in table.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

import stitch
from stitch.errors import StitchError
from stitch.frontend.onnx import calls
from stitch.frontend.onnx.protos import READABLE_OPSET
from stitch.program import Array

TABLE = Path(__file__).parents[2] / "conformance" / "onnx_coverage.md"
RIGHT, REFERENCE, REFUSED = "right", "right by ONNX's reference", "refused"
#: Several operators round several times, what made the expected values sometimes only once: their
#: results may differ by two steps of a narrow type. One operator keeps the tolerance of the case.
_TWO_STEPS = {"bfloat16": 2.0**-6, "float16": 2.0**-9}
WRONG, CRASH, NEWER = "wrong", "crash", "newer opset"
#: Cases by name, compiled: `compiled_case`. Executors run the same models.
_models: dict[tuple[str, int | None], tuple[bool, list[stitch.CompiledModel]]] = {}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one case; `detail` is one line."""

    case: str
    op: str
    outcome: str
    detail: str = ""


@cache
def cases() -> tuple[Any, ...]:
    """Every node test of the installed onnx package, by name."""
    # onnx reads the source of each case, for its documentation.
    unread = patch("onnx.backend.test.case.base.process_snippet", return_value=("", ""))
    with unread, warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return tuple(sorted(load_model_tests(kind="node"), key=lambda case: str(case.name)))


def opset_of(case: Any) -> int:
    """The version of ONNX's own domain that a case imports."""
    found = [entry.version for entry in case.model.opset_import if entry.domain in ("", "ai.onnx")]
    return int(max(found, default=0))


def operator_of(case: Any) -> str:
    """The operator that a case is about: the one node, or the first word of an expanded one."""
    nodes = case.model.graph.node
    if len(nodes) == 1 and "_expanded" not in case.name:
        return str(nodes[0].op_type)
    return "(several)" if "_expanded" not in case.name else "(expanded functions)"


@contextmanager
def _counting_reference() -> Iterator[list[str]]:
    """Inside, the operators that the front end gives to ONNX's reference implementation."""
    used: list[str] = []
    plain = calls.reference_results

    def noted(node: Any, *rest: Any) -> Any:
        used.append(node.op_type)
        return plain(node, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stitch.frontend.onnx.node_walk.reference_results", noted)
        yield used


def run(case: Any, device: stitch.Device, unroll: int | None = None) -> Verdict:
    """Compile and run a case; nothing but an interrupt comes out of here."""
    op = operator_of(case)
    if opset_of(case) > READABLE_OPSET:
        return Verdict(case.name, op, NEWER)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            used, models = compiled_case(case, unroll)
            pairs = zip(case.data_sets, models, strict=True)
            problem = next(filter(None, (_differs(case, *pair, device) for pair in pairs)), "")
    except StitchError as error:
        return Verdict(case.name, op, REFUSED, reason_of(error, case.name))
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        return Verdict(case.name, op, CRASH, f"{type(error).__name__}: {text}")
    return Verdict(case.name, op, WRONG if problem else REFERENCE if used else RIGHT, problem)


def reason_of(error: StitchError, title: str) -> str:
    """Why something is refused, in one line, without the names of values and nodes."""
    lines = str(error.what).splitlines()
    text = lines[1].removeprefix("  - ") if len(lines) > 1 else lines[0]
    if text.startswith("operator "):
        return text.partition(f": {title}")[0]
    if text.startswith("input "):
        return text.partition(": ")[2]
    return text.partition(": ")[2] if text.startswith("test_") else text


def compiled_case(case: Any, unroll: int | None = None) -> tuple[bool, list[stitch.CompiledModel]]:
    """Whether ONNX's reference had a part in it, and a model for each data set; made once."""
    key = case.name, unroll
    if key not in _models:
        with _counting_reference() as used:
            models = [stitch.compile(case.model, _feeds(case, d), target="host", unroll=unroll)
                      for d in case.data_sets]  # fmt: skip
        _models[key] = bool(used), models
    return _models[key]


def _feeds(case: Any, data_set: Any) -> dict[str, Any]:
    names = [info.name for info in case.model.graph.input]
    return {name: _array(value) for name, value in zip(names, data_set[0], strict=False)}


def _differs(
    case: Any, data_set: Any, compiled: stitch.CompiledModel, device: stitch.Device
) -> str:
    """How the results of one data set differ from what the case expects; empty if they do not."""
    program = device.load(compiled)
    results = program(*flat(_feeds(case, data_set).values()))
    expected = data_set[1]
    made = results if isinstance(results, tuple) else (results,)
    expected = flat([_array(value) for value in expected])
    if len(made) != len(expected):
        return f"{len(made)} outputs of {len(expected)}"
    several = sum(len(p.operations) for p in compiled.binary.programs) > 1
    for index, (ours, theirs) in enumerate(zip(made, expected, strict=True)):
        array = ours.numpy()
        rtol = max(case.rtol, _TWO_STEPS.get(array.dtype.name, 0.0) if several else 0.0)
        problem = difference(array, theirs, rtol, case.atol)
        if problem:
            return f"output {index}: {problem}"
    return ""


def flat(values: Iterable[Any]) -> list[Any]:
    """The tensors of values: those of a sequence one by one, none of an empty optional value."""
    found: list[Any] = []
    for value in values:
        found += flat(value) if isinstance(value, list) else [] if value is None else [value]
    return found


def _array(value: Any) -> Any:
    """An array of a case; None (an empty optional value) stays what it is."""
    if isinstance(value, list):
        return [_array(one) for one in value]
    if value is None:
        return None
    if hasattr(value, "SerializeToString"):
        return numpy_helper.to_array(value)
    return np.asarray(value)


def difference(ours: Array, theirs: Any, rtol: float, atol: float) -> str:
    """How two arrays differ, as ONNX's own runner compares them; empty if they do not."""
    if not isinstance(theirs, np.ndarray):
        return f"{ours.dtype} array for {type(theirs).__name__}"
    if ours.dtype != theirs.dtype:
        return f"type {ours.dtype} for {theirs.dtype}"
    if ours.shape != theirs.shape:
        return f"shape {ours.shape} for {theirs.shape}"
    if ours.dtype.kind in "iub":
        wrong = int((ours != theirs).sum())
        return f"{wrong} of {ours.size} elements" if wrong else ""
    mine, other = ours.astype(np.float64), theirs.astype(np.float64)
    close = np.isclose(mine, other, rtol=rtol, atol=atol, equal_nan=True)
    if close.all():
        return ""
    with np.errstate(all="ignore"):
        return f"{int((~close).sum())} of {close.size} elements, by {abs(mine - other).max():.3g}"


def run_all(chosen: Iterable[Any]) -> list[Verdict]:
    """The verdicts of some cases, one device for all."""
    with stitch.open_device("host") as device:
        return [run(case, device) for case in chosen]


def table_text(verdicts: Sequence[Verdict]) -> str:
    """The coverage table: totals, then one line per operator with a refused case."""
    totals = Counter(v.outcome for v in verdicts)
    lines = [
        "# What holds of ONNX's node tests", "",
        "Written by `python -m tests.support.onnx.node_tests --write`; a test compares it.", "",
        "Executor: numpy. Cases of opsets above 28 are refused by the version of the model.", "",
        "| outcome | cases |", "|---|---:|",
        *(f"| {o} | {totals[o]} |" for o in (RIGHT, REFERENCE, REFUSED, WRONG, CRASH, NEWER)), "",
        "Operators with refused cases:", "",
        "| operator | right | refused | why refused |", "|---|---:|---:|---|",
    ]  # fmt: skip
    by_op: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.outcome != NEWER:
            by_op[verdict.op].append(verdict)
    lines += [
        _row(op, found)
        for op, found in sorted(by_op.items())
        if any(verdict.outcome == REFUSED for verdict in found)
    ]
    return "\n".join(lines) + "\n"


def _row(op: str, verdicts: Sequence[Verdict]) -> str:
    right = sum(v.outcome in (RIGHT, REFERENCE) for v in verdicts)
    refused = Counter(v.detail for v in verdicts if v.outcome == REFUSED)
    reasons = "; ".join(
        f"{text.replace('|', '/')} ({count})" for text, count in sorted(refused.items())
    )
    return f"| {op} | {right} | {sum(refused.values())} | {reasons} |"


def main(arguments: Sequence[str]) -> None:
    """Print the counts and every case that is not right; `--write` renews the table."""
    words = [a for a in arguments if not a.startswith("--")]
    chosen = [c for c in cases() if not words or any(w in c.name for w in words)]
    verdicts = run_all(chosen)
    for verdict in verdicts:
        if verdict.outcome not in (RIGHT, REFERENCE, NEWER):
            print(f"{verdict.outcome}: {verdict.case} [{verdict.op}] {verdict.detail}")
    print(dict(Counter(v.outcome for v in verdicts)))
    if "--write" in arguments and not words:
        TABLE.write_text(table_text(verdicts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

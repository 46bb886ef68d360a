"""The form of `loops` in a machine's description: the caches, and the rates of each executor.

Comes in: the values of the form. Goes out: `LoopRates`, one for each executor that is described.
Must not know: how schedules are weighed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stitch.forms import Flag, Form, Row, Whole, as_written
from stitch.machine.figure_kinds import NOT_NEGATIVE, POSITIVE
from stitch.machine.machine import LOOP_EXECUTORS, LoopRates

_EXECUTOR = Form(
    "rates of an executor",
    as_written,
    Row("has_views", Flag(), needed=True),
    Row("copies_elements", Flag(), needed=True),
    Row("loop_seconds", NOT_NEGATIVE, needed=True),
    Row("round_seconds", NOT_NEGATIVE, needed=True),
    Row("element_seconds", NOT_NEGATIVE, needed=True),
    Row("operation_seconds", NOT_NEGATIVE, needed=True),
    Row("function_seconds", NOT_NEGATIVE, needed=True),
    Row("movement_seconds", NOT_NEGATIVE, needed=True),
    Row("matrix_seconds", NOT_NEGATIVE, needed=True),
    Row("flops_per_second", POSITIVE, needed=True),
    Row("packed_flops_per_second", POSITIVE, needed=True),
)
LOOPS = Form(
    "loops",
    as_written,
    Row("near_nbytes", Whole(1), needed=True),
    Row("near_bytes_per_second", POSITIVE, needed=True),
    Row("far_bytes_per_second", POSITIVE, needed=True),
    *(
        Row(each, _EXECUTOR, needed_without=" ".join(e for e in LOOP_EXECUTORS if e != each))
        for each in LOOP_EXECUTORS
    ),
)


def loop_rates(values: Mapping[str, Any] | None) -> tuple[LoopRates, ...]:
    """The rates of each executor that is described, with the caches, which all have."""
    if values is None:
        return ()
    caches = {key: value for key, value in values.items() if key not in LOOP_EXECUTORS}
    described = {each: values[each] for each in LOOP_EXECUTORS if values[each] is not None}
    return tuple(LoopRates(each, **rates, **caches) for each, rates in described.items())

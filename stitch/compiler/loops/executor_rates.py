"""Whose rates weigh the schedules of loops: those of the executor that will compute."""

from __future__ import annotations

from functools import cache

from stitch.errors import UsageError, closest
from stitch.machine import LOOP_EXECUTORS, LoopRates, Machine, load_machine

#: The executor for which programs are compiled where nobody says which: that of devices.
DEFAULT_EXECUTOR = "numpy"
#: Names of executors that compute as another does, or as the cheapest of others.
_COMPUTE_AS = {
    "auto": ("numpy", "onnxruntime"),
    "null": (DEFAULT_EXECUTOR,),
}
#: The names by which rates are asked for.
RATED_EXECUTORS = (*LOOP_EXECUTORS, *_COMPUTE_AS)


def check_executor(executor: str | None) -> None:
    """Raises `UsageError` for an executor of which no machine has rates."""
    if executor is not None and executor not in RATED_EXECUTORS:
        raise UsageError(
            f"there is no executor {executor!r}",
            expected=", ".join(RATED_EXECUTORS),
            remedy=closest(executor, RATED_EXECUTORS)
            or "leave it out: those of the default are taken",
        )


def rated_executor(name: str) -> str | None:
    """The executor of a device, where rates are known of it; None for one that somebody brings."""
    return name if name in RATED_EXECUTORS else None


def rates_of(machine: Machine, executor: str | None = None) -> tuple[LoopRates, ...]:
    """The rates that weigh schedules for an executor: those of a machine, or of the machine `host`
    where it describes none of that executor; of several the cheapest decides."""
    name = executor or DEFAULT_EXECUTOR
    known = {rates.executor: rates for rates in (*_host_rates(), *machine.loops)}
    return tuple([known[each] for each in _COMPUTE_AS.get(name, (name,))])


@cache
def _host_rates() -> tuple[LoopRates, ...]:
    return load_machine("host").loops

"""The page of a device that no recorder watched: its history, in the order of first runs.

The history has each plan with its number of runs, but not how runs of several plans alternated.
So a plan's runs are shown one after the other, and tensors that later plans do not list are
dropped between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from stitch.memory import LENT_ADDRESSES
from stitch.planner import Cost, Plan
from stitch.report.explanation import Place, counted, explain, touched_at_start, touched_buffers
from stitch.report.page.page_writer import PageExtras, page_text
from stitch.report.run_record import RunRecord
from stitch.runtime import Account, RuntimeDevice

_NOTE = (
    "From the device's history: runs of one plan are shown one after the other. A record "
    "(stitch-run --record, stitch.report.Recorder) has the order of all runs."
)


def device_page(
    device: RuntimeDevice, curves: Mapping[str, Sequence[float]] = MappingProxyType({})
) -> str:
    """Run the queue and return the page of a device's history; see `Device.report`."""
    with device.at_rest():
        account = device.history.account()
        now: dict[Place, tuple[int, str]] = {
            (space, address): (size, origin)
            for space, use in device.memory_use().items()
            for address, size, origin in use.buffers
        }
    total, earlier = account.total, account.earlier
    cost = Cost(total.copies, total.nbytes, total.seconds, total.program_seconds)
    plans = {index: plan for index, (plan, _) in enumerate(account.plans)}
    events = tuple(_events(account, now))
    notes = [_NOTE]
    if earlier.copies:
        notes.append(
            f"{counted(earlier.copies, 'copy', 'copies')} of older or failed plans, "
            f"{earlier.nbytes} B, are not shown."
        )
    record = RunRecord(device.machine, plans, events, cost)
    name = f"{device.machine.name}, {account.period}"
    return page_text(
        {name: record}, PageExtras(explain(device), notes, curves=curves), f"Stitch report: {name}"
    )


def _events(account: Account, now: Mapping[Place, tuple[int, str]]) -> Iterator[Mapping[str, Any]]:
    """Yield the events of the history, and those that lead to the present contents."""
    live: dict[Place, int] = {}
    for index, (plan, times) in enumerate(account.plans):
        listed = _listed(plan)
        for place, size in list(live.items()):
            if listed.get(place) != size:
                yield _region("free", place, live.pop(place))
        yield from [{"event": "run", "plan": index}] * times
        started = touched_at_start(plan)
        live = {place: size for place, size in live.items() if place not in started}
        for place, buffer in touched_buffers(plan, plan.final_buffers).items():
            live[place] = buffer.size_per_bank
    for line in account.writes:
        event = {"event": "write", "nbytes": line.nbytes, "desc": line.target,
                 "seconds": line.seconds}  # fmt: skip
        yield from [event] * line.times
    for line in account.reads:
        event = {"event": "read", "nbytes": line.nbytes, "desc": line.source}
        yield from [event] * line.times
    for place, size in live.items():
        if place not in now or now[place][0] != size:
            yield _region("free", place, size)
    for place, (size, origin) in now.items():
        if live.get(place) != size:
            yield _region("reserve", place, size) | {"origin": origin}


def _listed(plan: Plan) -> dict[Place, int]:
    return {
        (b.space, b.address): b.size_per_bank
        for b in plan.request.buffers
        if b.address is not None and b.address < LENT_ADDRESSES
    }


def _region(event: str, place: Place, size: int) -> dict[str, Any]:
    return {"event": event, "space": place[0].value, "address": place[1], "size_per_bank": size}

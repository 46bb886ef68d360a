"""Schedules of pipelines: which stage runs which micro-batch when, as data.

A schedule is a pure function of (kind, stages, micro-batches, stages per device): an order of
forward and backward actions for each device. A device runs its actions in that order, each as soon
as what it needs has arrived; nothing else orders them. Results never depend on the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from stitch.argument_kinds import TEXT, WHOLE, takes
from stitch.errors import UsageError, closest


class Action(NamedTuple):
    """One micro-batch through one stage, forward or backward.

    >>> str(Action(1, 4, is_backward=True))
    '1B4'
    """

    stage: int
    micro_batch: int
    is_backward: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{'B' if self.is_backward else 'F'}{self.micro_batch}"

    def needs(self, stages: int) -> tuple[Action, ...]:
        """Return the actions whose results it reads, of a pipeline of so many stages."""
        if not self.is_backward:
            return (Action(self.stage - 1, self.micro_batch),) if self.stage else ()
        own = Action(self.stage, self.micro_batch)
        if self.stage == stages - 1:
            return (own,)
        return own, Action(self.stage + 1, self.micro_batch, is_backward=True)


#: The order of actions of each device.
Schedule = tuple[tuple[Action, ...], ...]
SCHEDULES = ("gpipe", "1f1b", "interleaved")


@takes(kind=TEXT, stages=WHOLE, micro_batches=WHOLE, chunks=WHOLE)
def schedule(kind: str, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Return the order of actions of each device.

    Args:
        kind: `gpipe`, all forwards before all backwards; `1f1b`, a backward after each forward as
            soon as possible, so that the device of stage k saves the values of at most
            `stages - k` micro-batches; `interleaved`, 1f1b with `chunks` stages per device, which
            shortens the bubble and saves more. Stage s is on device `s % devices`.
        stages: The number of stages, a multiple of `chunks`.
        micro_batches: The number of micro-batches of a step, at least 1; fewer than stages is
            allowed.
        chunks: The stages per device; 1 but for `interleaved`.

    Raises:
        UsageError: An unknown kind, or numbers that no schedule has.

    >>> print(schedule_text(schedule("1f1b", 2, 3)))
    device 0: 0F0 0F1 0B0 0F2 0B1 0B2
    device 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    if kind not in SCHEDULES:
        raise UsageError(
            f"there is no schedule {kind!r}{closest(kind, SCHEDULES, '; ')}",
            expected="one of " + ", ".join(SCHEDULES),
        )
    for what, number in (("stages", stages), ("micro-batches", micro_batches), ("chunks", chunks)):
        if number < 1:
            raise UsageError(f"a schedule of {number} {what}", expected=f"1 or more {what}")
    if stages % chunks:
        raise UsageError(
            f"{stages} stages cannot be {chunks} on each device",
            expected="a number of stages that is a multiple of the chunks",
        )
    if chunks > 1 and kind != "interleaved":
        raise UsageError(
            f"the schedule {kind!r} has one stage per device", got=f"chunks={chunks}",
            remedy="schedule 'interleaved' has several",
        )  # fmt: skip
    devices = stages // chunks
    groups = _groups(micro_batches, devices)
    orders = []
    for device in range(devices):
        own = range(device, stages, devices)
        forward = [Action(s, m) for group in groups for s in own for m in group]
        backward = [Action(s, m, True) for group in groups for s in reversed(own) for m in group]
        if kind == "gpipe":
            warm_up = len(forward)
        elif chunks == 1:
            warm_up = devices - 1 - device
        else:
            warm_up = (chunks - 1) * len(groups[0]) + 2 * (devices - 1 - device)
        orders.append(_alternating(forward, backward, warm_up))
    return tuple(orders)


def _groups(micro_batches: int, devices: int) -> list[range]:
    """Divide the micro-batches into groups as even as possible, each of at least `devices`.

    The chunks of a device take turns after each group.
    """
    count = max(1, micro_batches // devices)
    ends = [-(-micro_batches * k // count) for k in range(count + 1)]
    return [range(*two) for two in pairwise(ends)]


def _alternating(
    forward: Sequence[Action], backward: Sequence[Action], warm_up: int
) -> tuple[Action, ...]:
    """Return `warm_up` forwards, then a forward and a backward in turn, then the backwards left."""
    order = list(forward[:warm_up])
    for ahead, back in zip(forward[warm_up:], backward, strict=False):
        order += (ahead, back)
    return (*order, *backward[len(forward[warm_up:]) :])


def check_schedule(orders: Sequence[Sequence[Action]]) -> None:
    """Check a schedule by running it without times.

    Raises:
        UsageError: An action is missing or doubled, a stage is on two devices, or the devices
            would wait for each other; names the actions.
    """
    homes: dict[int, int] = {}
    seen: dict[Action, int] = {}
    for device, order in enumerate(orders):
        for action in order:
            home = homes.setdefault(action.stage, device)
            if action in seen:
                raise UsageError(f"the schedule runs {action} twice",
                                 where=f"devices {seen[action]} and {device}")  # fmt: skip
            if home != device:
                raise UsageError(f"stage {action.stage} is on two devices: {home} and {device}")
            seen[action] = device
    stages = max(homes, default=-1) + 1
    micro_batches = max((action.micro_batch for action in seen), default=-1) + 1
    every = {
        Action(stage, m, back)
        for stage in range(stages) for m in range(micro_batches) for back in (False, True)
    }  # fmt: skip
    if every != seen.keys():
        apart = sorted(every ^ seen.keys())
        raise UsageError(
            f"the schedule misses or has too many actions: {' '.join(map(str, apart[:8]))}",
            expected=f"each of {stages} stages and {micro_batches} micro-batches, both ways",
        )
    done: set[Action] = set()
    waiting = [list(reversed(order)) for order in orders]
    progress = True
    while progress:
        progress = False
        for order in waiting:
            while order and done.issuperset(order[-1].needs(stages)):
                done.add(order.pop())
                progress = True
    stuck = [f"device {d} at {order[-1]}" for d, order in enumerate(waiting) if order]
    if stuck:
        raise UsageError("the devices of the schedule wait for each other: " + ", ".join(stuck))


def saved_sets(orders: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Return, by stage, the most micro-batches at once whose values wait for their backward.

    >>> saved_sets(schedule("1f1b", 4, 8)), saved_sets(schedule("gpipe", 4, 8))
    ((4, 3, 2, 1), (8, 8, 8, 8))
    """
    most: dict[int, int] = {}
    now: dict[int, int] = {}
    for order in orders:
        for stage, _, is_backward in order:
            now[stage] = now.get(stage, 0) + (-1 if is_backward else 1)
            most[stage] = max(most.get(stage, 0), now[stage])
    return tuple(most[stage] for stage in sorted(most))


def schedule_text(orders: Sequence[Sequence[Action]]) -> str:
    """Return a schedule as text, a line per device; `2B5`: stage 2, backward, micro-batch 5."""
    return "\n".join(
        f"device {device}: {' '.join(map(str, order))}" for device, order in enumerate(orders)
    )

"""What a device has done, kept as plans and counts: reports are made from it when asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stitch.planner import Execute, Plan
from stitch.program import Space, TensorDesc

if TYPE_CHECKING:
    from stitch.runtime.plans import ReadyPlan


class Tally:
    """How often one plan ran. It outlives the bound plan, which holds programs and arrays."""

    __slots__ = ("plan", "runs", "staging_nbytes")

    def __init__(self, plan: Plan, staging_nbytes: int) -> None:
        self.plan = plan
        self.staging_nbytes = staging_nbytes
        self.runs = 0


#: Plans that are listed one by one; what older ones did is only added up.
MAX_PLANS = 512


@dataclass(frozen=True, slots=True)
class Totals:
    """Program runs and copies, added up; `seconds` are simulated."""

    programs: int = 0
    copies: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class History:
    """How often each plan ran, in the order of first runs, and what the host read back."""

    def __init__(self) -> None:
        self._plans: dict[int, Tally] = {}
        #: What plans did that are no longer listed one by one.
        self.earlier = Totals()
        self._moves: dict[Space, list[int]] = {}
        self._reads: dict[int, tuple[TensorDesc, list[int]]] = {}

    def ran(self, ready: ReadyPlan) -> None:
        """A plan ran once more (the count is the plan's own)."""
        self.repeated(ready.index, ready.tally)

    def repeated(self, key: int, tally: Tally) -> None:
        """Work that `tally` describes and counts was done once more; `key` is its own."""
        if key not in self._plans and len(self._plans) >= MAX_PLANS:
            self._fold(self._plans.pop(next(iter(self._plans))))
        self._plans[key] = tally

    def _fold(self, tally: Tally) -> None:
        times, plan = tally.runs, tally.plan
        tally.runs = 0
        self.earlier = Totals(
            self.earlier.programs + times * sum(isinstance(s, Execute) for s in plan.steps),
            self.earlier.copies + times * len(plan.copies),
            self.earlier.nbytes + times * sum(step.nbytes for step in plan.copies),
            self.earlier.seconds + times * plan.seconds,
        )

    def moved(self, space: Space, nbytes: int) -> None:
        """An earlier result was moved aside for a plan that runs again."""
        counts = self._moves.setdefault(space, [0, 0])
        counts[0] += 1
        counts[1] += nbytes

    @property
    def moves(self) -> tuple[tuple[Space, int, int], ...]:
        """Results moved aside: space, how often, bytes in all."""
        return tuple((space, times, nbytes) for space, (times, nbytes) in self._moves.items())

    def read(self, key: int, desc: TensorDesc, nbytes: int) -> None:
        """The host read a tensor."""
        found = self._reads.get(key)
        if found is None:
            found = self._reads[key] = (desc, [0, 0])
        counts = found[1]
        counts[0] += 1
        counts[1] += nbytes

    @property
    def reads(self) -> tuple[tuple[TensorDesc, int, int], ...]:
        """What the host read back: descriptor, how often, bytes in all."""
        return tuple((desc, times, nbytes) for desc, (times, nbytes) in self._reads.values())

    @property
    def plans(self) -> tuple[tuple[Plan, int], ...]:
        """Every plan that ran, with how often."""
        return tuple((tally.plan, tally.runs) for tally in self._plans.values())

    @property
    def staging(self) -> tuple[int, ...]:
        """Bytes of kernel staging of each plan, in the same order."""
        return tuple(tally.staging_nbytes for tally in self._plans.values())

    def clear(self) -> None:
        """Begin anew (counts of replayed plans go on from zero)."""
        for tally in self._plans.values():
            tally.runs = 0
        self._plans.clear()
        self.earlier = Totals()
        self._reads.clear()
        self._moves.clear()

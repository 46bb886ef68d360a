"""One run of the checker through a plan: what it has seen so far, and what it found wrong."""

from __future__ import annotations

import math

from stitch.errors import Problem
from stitch.planner.checker.symbolic_memory import SymbolicMemory
from stitch.planner.plan import Plan
from stitch.program import Space


class Inspection:
    """Where the run stands; the parts of the checker say what they find through it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.machine = plan.request.machine
        self.symbolic_memory = SymbolicMemory(plan.request)
        self.residents = frozenset(b.number for b in plan.request.buffers)
        self.problems: list[Problem] = []
        self.next_task = 0
        #: Resident buffers that were read, moved or freed; regions taken (bytes per bank).
        self.read: set[int] = set()
        self.used: list[tuple[Space, int, int]] = []
        self.index = 0

    def say(self, kind: str, detail: str) -> None:
        """A problem at the current step."""
        self.problems.append(Problem(kind, f"step {self.index}", detail))

    def reads(self, buffer: int) -> None:
        """The plan depends on this buffer, if it is a resident."""
        if buffer in self.residents:
            self.read.add(buffer)

    def check_seconds(self, claimed: float, taken: float) -> None:
        """What a step says that it takes is what its copies and transfers take."""
        if not math.isclose(claimed, taken, rel_tol=1e-9):
            self.say("seconds", f"{claimed} s are claimed, its copies take {taken} s")

    def region(self, what: str, space: Space, address: int, size: int) -> bool:
        """Whether a region (bytes per bank) is in range and aligned; says so if not."""
        if space not in self.machine.shape.spaces:
            self.say("address", f"{what}: the machine has no {space.value}")
            return False
        shape = self.machine.shape.space(space)
        if address < shape.base or address + size > shape.limit or address % shape.granule:
            where = f"[{address:#x}, {address + size:#x}) of {space.value}"
            self.say("address", f"{what} at {where} is out of range or misaligned")
            return False
        return True

"""What copies of tensors cost: bytes by their descriptors, time by how they spread over cores."""

from __future__ import annotations

from functools import lru_cache
from operator import itemgetter

from stitch.machine import Machine, copy_counts, footprint
from stitch.planner.plan import Copy, Plan
from stitch.program import Space, TensorDesc


@lru_cache(maxsize=8192)
def copy_cost(machine: Machine, source: TensorDesc, target: TensorDesc) -> tuple[int, float]:
    """Bytes written (`Footprint.own_nbytes`) and simulated seconds of one copy.

    What is asked again, for the same machine and descriptors, is looked up.
    """
    bare = source.without_address(), target.without_address()
    if bare != (source, target):
        return copy_cost(machine, *bare)
    seconds = machine.copy_seconds(copy_counts(source, target, machine))
    return footprint(target, machine.shape).own_nbytes, seconds


def foreseen_cost(plan: Plan) -> tuple[float, int]:
    """Simulated seconds of a plan's copies and moves, and then of bringing back to L1 what has been
    there, is not when it is done, and is predicted to be read; then the bytes of both that pass
    from one space to another."""
    request = plan.request
    seen = {(r.value, i.desc) for r in request.residents for i in r.instances}
    seen |= {(step.made, step.target.desc) for step in plan.steps if isinstance(step, Copy)}
    left = {r.value: {i.desc for i in r.instances} for r in plan.final_values}
    predicted = {value for value, _ in request.later} & left.keys()
    back = [
        min((copy_cost(request.machine, other, desc) for other in left[value]), key=itemgetter(1))
        for value, desc in seen
        if value in predicted and desc.layout.space is Space.L1 and desc not in left[value]
    ]
    seconds = plan.seconds + sum(seconds for _, seconds in back)
    nbytes = plan.carried_nbytes + sum(nbytes for nbytes, _ in back)
    # To the femtosecond: the order of a sum is no difference.
    return round(seconds, 15), nbytes

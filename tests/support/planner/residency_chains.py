"""Chains without a request: random ones, two tensors that alternate; Belady's cover of any."""

from __future__ import annotations

from random import Random

from stitch.planner.residency import Holder, Stay, StayChain
from tests.support.planner.small_requests import desc_of

DESC = desc_of(16)


def chain_of_uses(
    uses: list[int], sizes: list[int], dirty: list[bool], room: int, least: float = 0.1
) -> StayChain:
    """Task t uses tensor `uses[t]`; a copy takes `least` and a thousandth for each byte."""
    last: dict[int, int] = {}
    stays: list[Stay] = []
    excess = [sizes[v] - room for v in uses]
    for task, v in enumerate(uses):
        if v in last and last[v] + 1 < task:
            back = sizes[v] / 1000 + least
            stays.append(Stay(v, last[v] + 1, task, sizes[v], back, dirty[v]))
        last[v] = task
    for stay in stays:
        for task in range(stay.first, stay.end):
            excess[task] += stay.nbytes
    holders = tuple(
        Holder(frozenset({v}), DESC, size / 900 + least) for v, size in enumerate(sizes)
    )
    return StayChain(holders, tuple(stays), tuple(excess))


def random_chain(seed: int, *, tasks: int, tensors: int) -> StayChain:
    """Tensors of a few sizes, used in any order, in room for about half of them."""
    random = Random(seed)
    sizes = [random.choice((100, 100, 200, 300, 400)) for _ in range(tensors)]
    dirty = [random.random() < 0.5 for _ in range(tensors)]
    uses = [random.randrange(tensors) for _ in range(tasks)]
    room = max(*sizes, int(sum(sizes) * 0.55))
    return chain_of_uses(uses, sizes, dirty, room)


def alternating(rounds: int, *, size: int, room: int) -> StayChain:
    """Two clean tensors in turn that do not fit together; to bring one back takes one second."""
    uses = [t % 2 for t in range(2 * rounds)]
    chain = chain_of_uses(uses, [size, size], [False, False], room, 1 - size / 1000)
    assert all(abs(stay.back_seconds - 1) < 1e-6 for stay in chain.stays)
    return chain


def farthest_first(chain: StayChain) -> tuple[Stay, ...] | None:
    """Belady's cover: whenever room lacks, the stay whose next use is farthest gives way."""
    gone: list[Stay] = []
    for task, excess in enumerate(chain.excess):
        left = excess - sum(s.nbytes for s in gone if s.first <= task < s.end)
        while left > 0:
            rest = [s for s in chain.stays if s.first <= task < s.end and s not in gone]
            if not rest:
                return None
            gone.append(max(rest, key=lambda s: s.end))
            left -= gone[-1].nbytes
    return tuple(gone)

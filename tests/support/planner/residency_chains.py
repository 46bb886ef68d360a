"""Chains without a request: random ones; Belady's cover of any.
Requests of drawn networks whose tensors lack room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from stitch.machine import Machine
from stitch.planner import PlanRequest
from stitch.planner.residency import Holder, Stay, StayChain
from stitch.program import Layout, Space, TensorDesc
from tests.support.planner.small_requests import DRAM, F32, Scene, desc_of, program

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


# -- requests ---------------------------------------------------------------------------------


class DrawnNetwork:
    """A request under construction: operations over tensors of a few units, weights in DRAM.

    A unit is a count of bytes in each bank of L1; sizes are drawn, up to `SPREAD` times what a
    family asks for.
    """

    SPREAD = 4

    def __init__(self, machine: Machine, unit_nbytes: int, random: Random) -> None:
        assert machine.shape.dram is not None
        self.scene, self.random, self.unit_nbytes = Scene(machine), random, unit_nbytes
        self.sizes: dict[int, int] = {}
        self._free_address = machine.shape.dram.base

    def weight(self, units: int) -> int:
        units = self.random.randrange(1, units * self.SPREAD + 1)
        value = self.scene.tensor(self._desc(units, DRAM), self._free_address, keep=True)
        self._free_address += self.scene.buffers[-1].size_per_bank
        self.sizes[value] = units
        return value

    def run(self, units: int, *inputs: int, keep: bool = False) -> int:
        units = self.random.randrange(1, units * self.SPREAD + 1)
        descs = [self._desc(self.sizes[value]) for value in inputs]
        what = program(f"p{len(self.scene.tasks)}", descs, [self._desc(units)])
        (value,) = self.scene.run(what, *inputs, keep=keep)
        self.sizes[value] = units
        return value

    def request(self) -> PlanRequest:
        """The request, in an L1 that holds the largest task and up to three units more."""
        asked = self.scene.request()
        l1 = asked.machine.shape.l1
        assert l1 is not None
        most = max(
            sum(self.sizes[value] for value in {*task.inputs, *task.outputs})
            for task in asked.tasks
        )
        room = (most + self.random.randrange(4)) * self.unit_nbytes
        room += self.random.choice((0, 0, 16, self.unit_nbytes // 2))
        l1 = replace(l1, limit=l1.base + room)
        shape = replace(asked.machine.shape, l1=l1)
        return replace(asked, machine=replace(asked.machine, shape=shape))

    def _desc(self, units: int, space: Space = Space.L1) -> TensorDesc:
        banks = self.scene.machine.shape.space(Space.L1).banks
        return TensorDesc((self.unit_nbytes * units * banks // 16, 4), Layout(F32, space))


def _random_skips(net: DrawnNetwork, random: Random) -> int:
    weights = [net.weight(random.randrange(1, 5)) for _ in range(random.randrange(5, 9))]
    results = [net.run(random.randrange(1, 5), weights[0])]
    for _ in range(random.randrange(20, 36)):
        inputs = [random.choice(weights)]
        inputs += [random.choice(results[-6:])] if random.random() < 0.7 else []
        inputs += [random.choice(results)] if random.random() < 0.3 else []
        results.append(net.run(random.randrange(1, 5), *dict.fromkeys(inputs)))
    return results[-1]


def _u_net(net: DrawnNetwork, random: Random) -> int:
    depth = random.randrange(3, 6)
    weights, x = [net.weight(random.randrange(1, 4)) for _ in range(2 * depth)], net.weight(4)
    for _ in range(random.randrange(1, 4)):
        skips = []
        for weight in weights[:depth]:
            x = net.run(random.randrange(1, 5), x, weight)
            skips.append(x)
        for weight in weights[depth:]:
            x = net.run(2, net.run(random.randrange(1, 5), x, weight), skips.pop())
    return x


def _residual(net: DrawnNetwork, random: Random) -> int:
    weights = [net.weight(random.randrange(1, 4)) for _ in range(random.randrange(4, 8))]
    x = net.weight(3)
    for weight in weights * random.randrange(2, 4):
        before = x
        for _ in range(random.randrange(1, 4)):
            x = net.run(random.randrange(1, 5), x, weight)
        x = net.run(3, x, before)
    return x


def _encoder_decoder(net: DrawnNetwork, random: Random) -> int:
    encoder, decoder = ([net.weight(random.randrange(1, 4)) for _ in range(4)] for _ in range(2))
    encoded = [net.weight(2)]
    for weight in encoder:
        encoded.append(net.run(random.randrange(1, 4), encoded[-1], weight))
    x = encoded[-1]
    for _ in range(random.randrange(2, 4)):
        x = net.run(2, encoded[-1])
        for weight in decoder:
            x = net.run(random.randrange(1, 4), x, weight)
            x = net.run(random.randrange(1, 4), x, random.choice(encoded))
    return x


def _long_lived(net: DrawnNetwork, random: Random) -> int:
    weights, x = [net.weight(random.randrange(1, 4)) for _ in range(6)], net.weight(2)
    old = [x := net.run(random.randrange(1, 5), x, weight) for weight in weights[:3]]
    for _ in range(random.randrange(15, 28)):
        x = net.run(random.randrange(1, 6), x, random.choice(weights))
        if random.random() < 0.2:
            x = net.run(random.randrange(1, 4), x, random.choice(old))
        if random.random() < 0.1:
            old.append(x)
    for value in dict.fromkeys(old):
        x = net.run(2, x, value) if value != x else x
    return x


FAMILIES: dict[str, Callable[[DrawnNetwork, Random], int]] = {
    "random skips": _random_skips, "U-net": _u_net, "residual": _residual,
    "encoder-decoder": _encoder_decoder, "long-lived": _long_lived,
}  # fmt: skip


def drawn_request(family: str, seed: int, machine: Machine, unit_nbytes: int) -> PlanRequest:
    """A network of a family, whose tensors do not all fit into L1 as a rule."""
    random = Random(f"{family} {seed}")
    net = DrawnNetwork(machine, unit_nbytes, random)
    net.run(1, FAMILIES[family](net, random), keep=True)
    return net.request()

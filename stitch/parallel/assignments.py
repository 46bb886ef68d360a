"""Which device has which place in a plan: orders of the devices of a specification."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import permutations

from stitch.mesh import MachineSpecification
from stitch.parallel.plans import Plan

#: Devices of which all orders are tried. Of more, the order of the file, a chain along the fastest
#: links from each device, and what `exchanges` makes of the best of these.
EXACT_DEVICES = 5
#: Bytes by which links are compared.
_PROBE = 1 << 20


def fastest_order(
    specification: MachineSpecification, used: int,
    plan: Callable[[tuple[str, ...], float], Plan | None], limit: float,
) -> Plan | None:  # fmt: skip
    """Return the fastest plan of all orders of `used` devices that are tried.

    Args:
        plan: Returns the plan of an order that takes less than so many seconds, or None.
        limit: The seconds that plans must be below.
    """
    best = None
    for order in orders(specification, used):
        best = plan(order, limit if best is None else best.seconds) or best
    tried = None
    while best is not None and best is not tried:
        tried = best
        choices = [tried.order, *exchanges(specification, tried.order)]
        for order in different(specification, choices):
            if order != tried.order:
                best = plan(order, best.seconds) or best
    return best


def orders(specification: MachineSpecification, used: int) -> list[tuple[str, ...]]:
    """Return orders of `used` devices: all that differ in machines or links, or a choice.

    Devices with equal machines and links are interchangeable, so equal devices have one order.

    >>> orders(MachineSpecification.of(4, "tiny"), 3)
    [('device0', 'device1', 'device2')]
    """
    names = tuple(specification.devices)
    if len(names) <= EXACT_DEVICES:
        return list(different(specification, permutations(names, used)))
    chains = [_chain(specification, name) for name in names]
    return list(different(specification, [order[:used] for order in (names, *chains)]))


def exchanges(
    specification: MachineSpecification, order: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:  # fmt: skip
    """Yield the orders that differ in two places, or in a device that is not used, where all orders
    are too many."""
    if len(specification.devices) <= EXACT_DEVICES:
        return
    names = [*order, *(name for name in specification.devices if name not in order)]
    for i in range(len(order)):
        for j in range(i + 1, len(names)):
            swapped = list(names)
            swapped[i], swapped[j] = names[j], names[i]
            yield tuple(swapped[: len(order)])


def different(
    specification: MachineSpecification, of: Iterable[tuple[str, ...]]
) -> Iterator[tuple[str, ...]]:  # fmt: skip
    """Yield the first of orders with the same machines and links at the same places."""
    seen: set[Hashable] = set()
    for order in of:
        machines = tuple([specification.devices[name].machine for name in order])
        links = tuple([_link(specification, a, b) for a in order for b in order if a != b])
        if (machines, links) not in seen:
            seen.add((machines, links))
            yield order


def _link(specification: MachineSpecification, source: str, target: str) -> Hashable:
    """Return what a link is like, None without one."""
    described = {(link.source, link.target) for link in specification.links}
    if described and (source, target) not in described:
        return None
    link = specification.link(source, target)
    return link.latency_seconds, link.bytes_per_second, link.curve


def _chain(specification: MachineSpecification, first: str) -> tuple[str, ...]:
    """Return all devices, each but the first the one with the fastest link from that before."""

    def seconds(source: str, target: str) -> tuple[bool, float]:
        missing = _link(specification, source, target) is None
        return missing, 0.0 if missing else specification.link(source, target).seconds(_PROBE)

    chain, rest = [first], [name for name in specification.devices if name != first]
    while rest:
        chain.append(min(rest, key=lambda name: seconds(chain[-1], name)))
        rest.remove(chain[-1])
    return tuple(chain)

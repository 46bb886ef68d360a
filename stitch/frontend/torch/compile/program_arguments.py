"""What one program is called with: a value for each of its arguments, torch's tensors.

What comes again is known by where it begins, and parameters, which are the most, all at once; of
the rest `SharedStorage` says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from stitch.errors import UsageError
from stitch.frontend.torch.compile.shared_storage import (
    CALLS_BETWEEN_LOOKS,
    ArgumentSlot,
    SharedStorage,
)
from stitch.program import Array
from stitch.runtime import Tensor

#: Called by C for one tensor after the other: no line of Python runs for what stays where it is.
_ADDRESS = torch.Tensor.data_ptr


@dataclass(frozen=True, slots=True, eq=False)
class _Sorting:
    """Which arguments are known how. `lasting`: the static ones that are lent, `pick`: what takes
    them from all, `addresses`: where they begin, while no more places than `taken_back` were taken
    back; `moving`: the others, with their places."""

    lasting: tuple[ArgumentSlot, ...]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    addresses: list[int]
    taken_back: int
    moving: list[tuple[int, ArgumentSlot]]


def refuse_tangents(arguments: Iterable[Any]) -> None:
    """Raise `UsageError`: programs compute no tangents, and would lose them."""
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise UsageError(
            "forward-mode derivatives do not go through compiled graphs",
            expected="arguments without tangents", got="a dual tensor",
            remedy='call the module that was compiled, or compile with backend="aot_eager"',
        )  # fmt: skip


class ProgramArguments:
    """The arguments of one program, call by call; the device's lock is held."""

    __slots__ = (
        "__weakref__", "_last_call", "_slots", "_sorting", "_storage", "_values", "stay",
    )  # fmt: skip

    def __init__(self, storage: SharedStorage, slots: Iterable[ArgumentSlot]) -> None:
        self._storage, self._slots = storage, tuple(slots)
        #: What stood for each in the last call; None for an array, which is not kept.
        self._values: list[Tensor | None] = [None] * len(self._slots)
        #: Whether these are lent, and were the same in the call before.
        self.stay = False
        self._last_call = 0
        self._sorting = self._sorted(())
        storage.await_looks(self)

    def arrays(self, tensors: Sequence[Any]) -> list[Array]:
        """A call begins, with these arguments of its graph: the arrays among what stands for
        them."""
        storage, values = self._storage, self._values
        self._last_call = storage.calls = now = storage.calls + 1
        if now % CALLS_BETWEEN_LOOKS == 0:
            storage.look()
        arrays: list[Array] = []
        stay, sort = True, False
        sorting = self._sorting
        if sorting.addresses:
            is_same = list(map(_ADDRESS, sorting.pick(tensors))) == sorting.addresses
            if is_same and sorting.taken_back == storage.taken_back:
                storage.recognised += len(sorting.lasting)
            else:
                sorting = self._sort(())
                sort = True
        for place, slot in sorting.moving:
            tensor, lent, before = tensors[slot.position], slot.lent, values[place]
            if slot.is_fresh and tensor.is_contiguous():
                arrays.append(storage.as_array(tensor))
                stay &= before is None
                values[place] = None
                continue
            # Whoever owns what lies there now: it has the type and shape that it had, and is read
            # in place, or else compared.
            if (
                lent is not None
                and lent.tensor is before
                and tensor.data_ptr() == slot.address
                and not lent.is_taken_back
                and tensor.is_contiguous()
                and not tensor.is_neg()
            ):
                lent.last_call = now
                storage.recognised += 1
                continue
            one = storage.argument(tensor, slot)
            if not isinstance(one, Tensor):
                arrays.append(one)
                stay &= before is None
                values[place] = None
                continue
            # What is not lent, such as another program's result, never stays.
            stay = False
            values[place] = one
            sort |= slot.is_static and _is_lent(slot, one)
        self.stay = stay
        if sort:
            places = enumerate(self._slots)
            self._sort([at for at, s in places if s.is_static and _is_lent(s, values[at])])
        return arrays

    def all_of(self, arrays: Iterable[Array]) -> list[Any]:
        """What stands for the arguments of the call that has begun, with its arrays, and what
        follows these."""
        rest = iter(arrays)
        values = [next(rest) if value is None else value for value in self._values]
        values.extend(rest)
        return values

    def look(self) -> None:
        """Say of what is asked for all at once when that was."""
        for slot in self._sorting.lasting:
            if slot.lent is not None:
                slot.lent.last_call = self._last_call

    def _sort(self, lasting: Sequence[int]) -> _Sorting:
        """These are known all at once from now on, by where they begin."""
        self.look()
        # All at once: an interrupt finds none that is asked for neither way.
        made = self._sorting = self._sorted(lasting)
        return made

    def _sorted(self, lasting: Sequence[int]) -> _Sorting:
        slots = self._slots
        known = tuple([slots[at] for at in lasting])
        # What picks one gives that, not a tuple of it: so it is picked twice.
        picked = known * 2 if len(known) == 1 else known
        others = sorted(set(range(len(slots))).difference(lasting))
        return _Sorting(
            known, itemgetter(*[slot.position for slot in picked]) if picked else tuple,
            [slot.address for slot in picked], self._storage.taken_back,
            [(at, slots[at]) for at in others],
        )  # fmt: skip


def _is_lent(slot: ArgumentSlot, value: Tensor | None) -> bool:
    return slot.lent is not None and slot.lent.tensor is value

"""`Facts`: what packages derived from operations, computed once for all programs that have them.

What follows from an operation alone (inferred types, bytes, whether an executor can run it) are
facts of its form, which the layers of a network share, and programs at several sizes: most of their
operations do not depend on what is sized. What follows from the order of operations and values
alone are facts of the list of operations, which is one object at all sizes.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from stitch.program.contents import Array
from stitch.program.operation import ABSENT, Constant, Operation, Value

#: Entries of each table, the oldest is dropped first; and lists of operations that are numbered.
MAX_FORMS, MAX_LISTS = 1 << 13, 64
#: Constant operands of at most so many bytes are equal by their elements, others by identity.
COMPARED_NBYTES = 256

#: Domains whose operators stay as they are: ONNX's and Stitch's.
OWN_DOMAINS = ("", "stitch")

Fact = TypeVar("Fact")


class Facts:
    """Derived values by key: each package has keys of its own."""

    __slots__ = ("__weakref__", "known")

    def __init__(self) -> None:
        self.known: dict[Hashable, Any] = {}

    def get(self, key: Hashable, compute: Callable[..., Fact], *arguments: Any) -> Fact:
        """Return the value of a key, computed once.

        >>> facts = Facts()
        >>> facts.get("most", max, 3, 4), facts.get("most", max, 5, 6)
        (4, 4)
        """
        found: Fact
        try:
            found = self.known[key]
        except KeyError:
            found = self.known[key] = compute(*arguments)
        return found


class _Numbers:
    """Numbers equal keys alike. A number is never given to another key, also not once its own was
    dropped, so that numbers can be parts of keys."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._next = itertools.count()

    def of(self, key: Hashable) -> int:
        found = self._known.get(key)
        if found is None:
            found = self._known.setdefault(key, next(self._next))
            _drop_oldest(self._known, MAX_FORMS)
        return found


def _drop_oldest(table: dict[Any, Any], most: int) -> None:
    if len(table) > most:
        with suppress(RuntimeError):  # Another thread has added to it.
            table.pop(next(iter(table)), None)


_numbers = _Numbers()
_forms: dict[Hashable, Facts] = {}
#: By identity: an array (not kept alive), and its number.
_arrays: dict[int, tuple[weakref.ref[Array], int]] = {}
#: By identity: operations, and their facts.
_lists: dict[int, tuple[Sequence[Operation], Facts]] = {}


def operation_forms(
    values: Sequence[Value], operations: tuple[Operation, ...], constants: Sequence[Constant]
) -> tuple[Facts, ...]:
    """Return the facts of each operation of a program or body, shared by all operations of its
    form: of equal operator, attributes, types of operands and results, and constant operands.

    An operation with a body has its own, and one of a plugin, which may be registered again.
    """
    number = _numbers.of
    numbers = [number(value.type) for value in values]
    numbers.append(ABSENT)  # At index `ABSENT`.
    for constant in constants:
        numbers[constant.value] = number((numbers[constant.value], _data_key(constant.data)))
    forms = []
    signatures = list_facts(operations).get("signatures", _signatures, operations)
    for operation, signature in zip(operations, signatures, strict=True):
        key = (
            signature,
            tuple([numbers[v] for v in operation.inputs]),
            tuple([numbers[v] for v in operation.outputs]),
        )
        form = _forms.get(key)
        if form is None:
            form = Facts()
            if operation.body == ABSENT and operation.domain in OWN_DOMAINS:
                form = _forms.setdefault(key, form)
                _drop_oldest(_forms, MAX_FORMS)
        forms.append(form)
    return tuple(forms)


def list_facts(operations: tuple[Operation, ...]) -> Facts:
    """Return the facts of a list of operations, which are those of all programs with this list."""
    found = _lists.get(id(operations))
    if found is None or found[0] is not operations:
        found = _lists[id(operations)] = operations, Facts()
        _drop_oldest(_lists, MAX_LISTS)
    return found[1]


def _signatures(operations: Sequence[Operation]) -> list[int]:
    """Return a number for each operation, equal for equal operators with equal attributes."""
    return [
        # repr distinguishes 1 from 1.0 and 0.0 from -0.0; `==` does not.
        _numbers.of((o.op, o.domain, o.opset, o.math_fidelity, o.body == ABSENT, *[
            (name, repr(o.attributes[name])) for name in sorted(o.attributes)
        ]))
        for o in operations
    ]  # fmt: skip


def _data_key(data: Array) -> Hashable:
    if data.nbytes <= COMPARED_NBYTES:
        return data.tobytes()
    at = id(data)
    found = _arrays.get(at)
    if found is None or found[0]() is not data:

        def forget(reference: weakref.ref[Array]) -> None:
            if _arrays.get(at, (None,))[0] is reference:
                _arrays.pop(at, None)

        found = _arrays[at] = weakref.ref(data, forget), _numbers.of(("array", object()))
    return found[1]

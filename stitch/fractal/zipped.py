"""`Zipped`: several nests of one length, accessed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from stitch.errors import UsageError
from stitch.fractal.fractal_tensor import Element, FractalTensor, is_several
from stitch.program import Array

#: A nest, or several of one length.
Nest: TypeAlias = "FractalTensor | Zipped"


class Zipped:
    """Nests of one length: element i is the tuple of the parts' elements i.

    >>> pairs = zip(FractalTensor([1, 2]), FractalTensor([[7], [8, 9]]))
    >>> [(int(a), b.tolist()) for a, b in pairs]
    [(1, [7]), (2, [8, 9])]
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Nest]) -> None:
        self.parts = tuple(parts)

    @property
    def length(self) -> int:
        return self.parts[0].length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, chosen: int | slice | Sequence[int] | Array | FractalTensor) -> Any:
        """Return a tuple of elements, or several elements as `Zipped`."""
        parts = [part[chosen] for part in self.parts]
        is_some = isinstance(chosen, slice) or is_several(chosen)
        return Zipped(parts) if is_some else tuple(parts)

    def __iter__(self) -> Iterator[tuple[Element, ...]]:
        return (self[number] for number in range(self.length))

    def tolist(self) -> list[Any]:
        """Return tuples of the parts' elements as nested lists."""
        parts = [part.tolist() for part in self.parts]
        return [tuple([part[number] for part in parts]) for number in range(self.length)]

    def __repr__(self) -> str:
        return f"zip({', '.join(map(repr, self.parts))})"


def zip(*nests: Nest | tuple[Any, ...]) -> Nest:  # as the field calls it
    """Zip nests of one length without copying; a single nest is returned itself.

    Raises `UsageError` for lengths that differ.

    >>> len(zip(FractalTensor([1, 2]), FractalTensor([3, 4])))
    2
    """
    parts = [as_nest("zip", each) for each in nests]
    if not parts:
        raise UsageError("zip needs at least one FractalTensor")
    for number, part in enumerate(parts):
        if part.length != parts[0].length:
            raise UsageError(
                "zip was called with nests of different lengths",
                expected=f"{parts[0].length}, as the first one",
                got=f"{part.length}, argument {number}",
                remedy="slice the longer one: xs[:n]",
            )
    return parts[0] if len(parts) == 1 else Zipped(parts)


def as_nest(call: str, value: object) -> Nest:
    """Return a nest; a tuple of nests, as functions with several results return, is zipped.

    Raises `TypeError` for anything else.
    """
    if isinstance(value, FractalTensor | Zipped):
        return value
    if type(value) is tuple and value:
        return zip(*value)
    shown = " ".join(repr(value).split())
    remedy = "convert lists, arrays and tensors by FractalTensor(...)"
    if callable(value):
        remedy = f"the function comes first: {call}(function, nest)"
    raise TypeError(
        f"{call} takes a FractalTensor (or several, zipped), not {type(value).__name__}: "
        f"{shown if len(shown) <= 60 else shown[:57] + '...'}\n  try: {remedy}"
    )


def each_part(call: str, nest: object, access: Callable[[FractalTensor], FractalTensor]) -> Any:
    """Apply an access function to a nest; for zipped nests return a tuple."""
    whole = as_nest(call, nest)
    if isinstance(whole, FractalTensor):
        return access(whole)
    return tuple([each_part(call, part, access) for part in whole.parts])

"""What the bytes of a space hold, symbolically: ranges that name a content and a place in it.

A content is a number given to every write. Bytes that are moved keep their content, so a tensor
is intact exactly where its range reads as one piece of one content. What is not in the map is
garbage. Knows nothing of plans, buffers or layouts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple


class ContentPiece(NamedTuple):
    """Bytes `[start, end)`; the first one is byte `offset` of content `content`."""

    start: int
    end: int
    content: int
    offset: int

    def cut(self, start: int, end: int) -> ContentPiece:
        """The part of it inside `[start, end)`."""
        first = max(start, self.start)
        return ContentPiece(
            first, min(end, self.end), self.content, self.offset + first - self.start
        )


class ByteMap:
    """Disjoint pieces by address.

    >>> space = ByteMap()
    >>> space.write(0, 8, content=1)
    >>> space.move(0, 4, 8)
    >>> [tuple(piece) for piece in space.read(0, 12)]
    [(0, 4, 1, 0), (4, 12, 1, 0)]
    """

    __slots__ = ("_pieces", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[ContentPiece] = []

    def read(self, start: int, end: int) -> tuple[ContentPiece, ...]:
        """The pieces inside `[start, end)`, cut to it; what continues its neighbour joins it."""
        first, last = self._touched(start, end)
        pieces: list[ContentPiece] = []
        for piece in self._pieces[first:last]:
            part = piece.cut(start, end)
            before = pieces[-1] if pieces else None
            if (
                before is not None
                and before.end == part.start
                and before.content == part.content
                and before.offset + before.end - before.start == part.offset
            ):
                pieces[-1] = before._replace(end=part.end)
            else:
                pieces.append(part)
        return tuple(pieces)

    def erase(self, start: int, end: int) -> None:
        """`[start, end)` now holds garbage."""
        self._replace(start, end, [])

    def write(self, start: int, end: int, content: int) -> None:
        """`[start, end)` now holds a content from its first byte."""
        self._replace(start, end, [ContentPiece(start, end, content, 0)])

    def put(self, pieces: tuple[ContentPiece, ...], start: int, end: int, shift: int) -> None:
        """`[start, end)` now holds pieces read elsewhere, `shift` bytes further, and no others."""
        moved = [p._replace(start=p.start + shift, end=p.end + shift) for p in pieces]
        self._replace(start, end, moved)

    def move(self, source: int, target: int, nbytes: int) -> None:
        """Copy a range as memmove does."""
        pieces = self.read(source, source + nbytes)
        self.put(pieces, target, target + nbytes, target - source)

    def _touched(self, start: int, end: int) -> tuple[int, int]:
        first = bisect_right(self._starts, start)
        if first and self._pieces[first - 1].end > start:
            first -= 1
        return first, bisect_left(self._starts, end, lo=first)

    def _replace(self, start: int, end: int, pieces: list[ContentPiece]) -> None:
        first, last = self._touched(start, end)
        if first < last:
            before, after = self._pieces[first], self._pieces[last - 1]
            if before.start < start:
                pieces = [before.cut(before.start, start), *pieces]
            if after.end > end:
                pieces = [*pieces, after.cut(end, after.end)]
        self._pieces[first:last] = pieces
        self._starts[first:last] = [p.start for p in pieces]

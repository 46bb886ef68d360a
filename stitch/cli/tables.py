"""Tables as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str]
) -> Iterator[str]:
    """Yield the header and the rows, aligned: to the left in the columns `left`.

    >>> list(table_lines(["name", "us"], [["a", "1.5"], ["long", "12"]], {"name"}))
    ['name   us', 'a     1.5', 'long   12']
    """
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for line in (columns, *rows):
        parts = [
            word.ljust(width) if name in left else word.rjust(width)
            for name, word, width in zip(columns, line, widths, strict=True)
        ]
        yield "  ".join(parts).rstrip()

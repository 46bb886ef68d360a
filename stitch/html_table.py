"""A small HTML table, the `_repr_html_` of objects in notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

#: Rows and characters of a cell beyond these are left out.
MAX_ROWS, MAX_CHARACTERS = 12, 160


def html_table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in which every text is escaped.

    >>> html_table("a <b>", ["x"], [["<i>"]])
    '<table><caption>a &lt;b&gt;</caption><tr><th>x</th></tr><tr><td>&lt;i&gt;</td></tr></table>'
    """
    listed = [list(row) for row in rows]
    lines = [_row("th", heads), *(_row("td", row) for row in listed[:MAX_ROWS])]
    if len(listed) > MAX_ROWS:
        lines.append(_row("td", [f"and {len(listed) - MAX_ROWS} more"]))
    return f"<table><caption>{_text(caption)}</caption>{''.join(lines)}</table>"


def _row(tag: str, cells: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells) + "</tr>"


def _text(cell: object) -> str:
    text = str(cell)
    if len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS] + " ..."
    return html.escape("".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text))

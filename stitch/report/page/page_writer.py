"""Write a report page: one HTML file that needs no other file and makes no request.

The page holds the data of a record (`page_data`) as JSON, deflated and in base64. A content
security policy allows the page's own scripts and style by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stitch.files import text_of
from stitch.report.page.page_data import page_data
from stitch.report.run_copies import Difference
from stitch.report.run_record import RunRecord

#: Characters of a title beyond these are cut off.
MAX_TITLE = 200
_SHIPPED = Path(__file__).parent
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
#: Lines of code without a string, a regular expression or a division, and spaces to remove there.
_CODE = re.compile("""^[^"'`/\n]+$""", re.MULTILINE)
_SPACED = re.compile(r" *([=,;:?{}()<>*&|]) *")
_SLOT = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True, slots=True)
class PageExtras:
    """What a page shows beside a record.

    Args:
        explained: The text of `explain`, shown without JavaScript.
        notes: Sentences for the top of the page.
        error: The error that ended the run.
        budgets: Each limit of the run as text, and whether the run kept it.
        curves: Name → values by training step: loss, learning rate, steps per second.
        tracks: Track name → slices on the wall clock: name, begin and end in microseconds.
        difference: How the first record differs from an older one.
        sweep: Column → values, of a table of simulated passes; the first column is the figure that
            was varied. Missing numbers are None.
    """

    explained: str = ""
    notes: Sequence[str] = ()
    error: str | None = None
    budgets: Sequence[tuple[str, bool]] = ()
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    tracks: Mapping[str, Sequence[tuple[str, float, float]]] = field(default_factory=dict)
    difference: Difference | None = None
    sweep: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


def page_text(
    records: Mapping[str, RunRecord], extras: PageExtras | None = None, title: str = "Stitch report"
) -> str:
    """Return a report page.

    Args:
        records: The records by name; the page shows the first, and lets the reader choose. There
            may be none beside a sweep.
        extras: What the page shows beside them.
        title: The title of the page.

    Raises:
        FormatError: An event of a record is malformed.
    """
    extras = PageExtras() if extras is None else extras
    body = {
        "runs": [{"name": name} | page_data(record) for name, record in records.items()],
        "notes": list(extras.notes), "error": extras.error, "budgets": list(extras.budgets),
        "curves": {name: _finite(values) for name, values in extras.curves.items()},
        "tracks": {name: list(slices) for name, slices in extras.tracks.items()},
        "difference": _changes(extras.difference),
        "sweep": {name: list(values) for name, values in extras.sweep.items()},
    }  # fmt: skip
    packed = zlib.compress(json.dumps(body, separators=(",", ":")).encode())
    plain = extras.explained or "No text was kept of this run."
    shown = (*extras.notes, *([f"error: {extras.error}"] if extras.error else ()), plain)
    parts = _fixed_parts() | {
        "title": _escaped(title[:MAX_TITLE]), "text": _escaped("\n".join(shown)),
        "data": base64.b64encode(packed).decode("ascii"),
    }  # fmt: skip
    return _SLOT.sub(lambda slot: parts[slot[1]], parts["page"])


def _changes(change: Difference | None) -> dict[str, Any]:
    """Return the data of a difference."""
    if change is None:
        return {}
    lines = [
        [is_more, line.times, line.kind, line.nbytes, line.seconds,
         f"{line.source} -> {line.target}", f"{line.reason} {line.link_text()}".strip()]
        for is_more, lines in ((True, change.more), (False, change.fewer))
        for line in lines
    ]  # fmt: skip
    added = [change.added.copies, change.added.nbytes, change.added.seconds]
    return {"added": added, "lines": lines, "unequal": list(change.unequal)}


def _finite(values: Sequence[float]) -> list[float | None]:
    """Return values as JSON has them: None for NaN and infinities."""
    return [v if v == v and abs(v) != float("inf") else None for v in map(float, values)]


def _escaped(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return html.escape(_CONTROL.sub(lambda c: f"\\u{ord(c[0]):04x}", text))


@functools.cache
def _fixed_parts() -> dict[str, str]:
    """Return the page's template, its scripts and style, and the policy that allows them."""
    vendor = _SHIPPED / "vendor"
    page, css, js = [
        _unindented(text_of(_SHIPPED / f"page.{suffix}")) for suffix in ("html", "css", "js")
    ]
    js = _CODE.sub(lambda line: _SPACED.sub(r"\1", line[0]), js)
    uplot = text_of(vendor / "uPlot.iife.min.js").strip()
    licence = " ".join(text_of(vendor / "LICENSE").split())
    uplot = f"/*! uPlot, {licence} */\n{uplot}"
    css = f"{css}\n{text_of(vendor / 'uPlot.min.css')}"
    scripts = " ".join(_hashed(script) for script in (uplot, js))
    policy = f"default-src 'none'; script-src {scripts}; style-src {_hashed(css)}"
    return {"page": page, "css": css, "js": js, "uplot": uplot, "policy": policy}


def _unindented(text: str) -> str:
    """Return code without indentation and lines of comments, a tenth of it.

    No literal there takes several lines.
    """
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if not line.startswith("//"))


def _hashed(text: str) -> str:
    """Return the source expression of a script or a style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

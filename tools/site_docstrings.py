"""Griffe extension of the documentation site: turns what docstrings have of doctest and of
reStructuredText into Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: Lines from a prompt up to the next empty one, as doctest reads them.
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class MarkdownDocstrings(griffe.Extension):
    """Surrounds examples with fences, and ends the line before a literal block with one colon."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one module, class, function or attribute."""
        if obj.docstring is not None:
            text = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)

"""What `explain` prints, without what differs from one computer to the next."""

from __future__ import annotations

import re


def without_the_computers_bytes(text: str) -> str:
    """The text, with no numbers in the line on the host's memory.

    >>> without_the_computers_bytes("  host memory: at most 5 B claimed, 7 B allowed")
    '  host memory: at most N B claimed, N B allowed'
    """
    return re.sub(
        r"^ *host memory: .*$", lambda line: re.sub(r"\d+", "N", line[0]), text, flags=re.MULTILINE
    )

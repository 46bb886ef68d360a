"""On what terms an executor runs linked programs: the same bits or not, and after how many runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """What an executor says of programs that could be linked into one.

    `obstacle`: why the linked program would not give the same bits; empty where it would.
    `repeats`: after how many runs of the programs one after the other they are linked; None where
    that gains nothing. It rests on what the programs are, never on a clock.
    """

    obstacle: str = ""
    repeats: int | None = None

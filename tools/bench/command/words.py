"""Types of words: argparse names the option, and exits with 2, where a word is none."""

from __future__ import annotations

import argparse


def from_zero(text: str) -> int:
    """A whole number from 0 on."""
    return _at_least(0, text)


def from_one(text: str) -> int:
    """A whole number from 1 on."""
    return _at_least(1, text)


def part(text: str) -> float:
    """A part of a whole."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    # What is no number at all (nan) is in no range.
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no part from 0 to 1: 0.1 is ten per cent")
    return found


def extents(text: str) -> tuple[int, ...]:
    """The shape of a tensor of two dimensions or more, such as 2048x2048."""
    sizes = text.split("x")
    if len(sizes) < 2 or not all(_digits(size) and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 2048x2048")
    return tuple(map(int, sizes))


def _at_least(least: int, text: str) -> int:
    if not _digits(text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
    return int(text)


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20

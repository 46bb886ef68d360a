"""Shards read by shards: which piece of one end overlaps which of the other, along an axis.

Comes in: lengths and steps of both ends. Goes out: stretches of the axis, each in one piece of each
end. Must not know: routers, prices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stitch.machine.network import Array


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps:
    """The stretches of an axis that lie in one piece of each end, in order: the piece of the source
    (`own`) and of the target, which part of the axis each is, and whether it lies in the second
    half of the target's piece."""

    own: Array
    piece: Array
    part: Array
    is_late: Array

    def given(self) -> tuple[float, float]:
        """Which part of the axis the busiest piece of the source gives to one half of the pieces;
        and in turn: where these take theirs in order, all at once, the busiest of each turn."""
        count = len(self.own)
        half = self.piece * 2 + self.is_late
        first = np.empty(count, bool)
        first[0] = True
        np.not_equal(half[1:], half[:-1], out=first[1:])
        pieces = int(self.own[-1]) + 1
        if first.all():
            parts = np.bincount(self.is_late * pieces + self.own, self.part)
            busiest = float(parts.max())
            return busiest, busiest
        order = np.arange(count)
        turn = order - np.maximum.accumulate(order * first)
        turns = int(turn.max()) + 1
        key = (self.is_late * turns + turn) * pieces + self.own
        halves = 1 + int(self.is_late.any())
        parts = np.bincount(key, self.part, halves * turns * pieces)
        by_turn = parts.reshape(halves, turns, pieces)
        return float(by_turn.sum(1).max()), float(by_turn.max(2).sum(1).max())


def overlaps_along(
    lengths: tuple[int, int], steps: tuple[int, int], page: int, *, is_halved: bool
) -> Overlaps:
    """By the length and the step of source and target; a half is of whole pages."""
    # Padded differently both ends have other lengths: then they are laid over each other.
    (own_length, length), (own, step) = lengths, steps
    half = -(-step // page // 2) * page if is_halved else step
    if own_length != length:
        own, step, half = own * length, step * own_length, half * own_length
        length *= own_length
    finest = min(own, half)
    if own % finest == step % finest == half % finest == 0:
        at = np.append(np.arange(0, length, finest), length)
    else:
        cuts = {*range(0, length, own), *range(0, length, step), *range(half, length, step)}
        at = np.array([*sorted(cuts), length])
    start = at[:-1]
    piece = start // step
    return Overlaps(start // own, piece, (at[1:] - start) / length, start - piece * step >= half)

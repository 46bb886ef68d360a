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
    (`own`) and of the target, which part of the axis each is, whether it lies in the second half of
    the target's piece, and whether it is the first of its half. Not halved, no stretch is late."""

    own: Array
    piece: Array
    part: Array
    is_late: Array
    is_first: Array
    is_halved: bool

    def given(self) -> tuple[float, float]:
        """Which part of the axis the busiest piece of the source gives to one half of the pieces;
        and in turn: where these take theirs in order, all at once, the busiest of each turn."""
        pieces, halves = int(self.own[-1]) + 1, 1 + self.is_halved
        if self.is_first.all():
            turns, turn = 1, np.zeros(1, np.int64)
        else:
            order = np.arange(len(self.own))
            turn = order - np.maximum.accumulate(order * self.is_first)
            turns = int(turn.max()) + 1
        row = self.is_late * turns + turn if self.is_halved else turn
        parts = np.bincount(row * pieces + self.own, self.part, halves * turns * pieces)
        if turns == 1:
            busiest = float(parts.max())
            return busiest, busiest
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
        ends = (np.arange(0, length, own), np.arange(0, length, step))
        halves = (np.arange(half, length, step),) if is_halved else ()
        at = np.concatenate((*ends, *halves, (length,)))
        at.sort()
        is_new = np.empty(len(at), bool)
        is_new[0] = True
        np.not_equal(at[1:], at[:-1], out=is_new[1:])
        at = at[is_new]
    start = at[:-1]
    piece = start // step
    offset = start - piece * step
    is_late, is_first = offset >= half, offset == 0
    if is_halved:
        is_first |= offset == half
    return Overlaps(start // own, piece, (at[1:] - start) / length, is_late, is_first, is_halved)

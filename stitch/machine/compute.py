"""`Compute`: how fast a machine computes, as a roofline.

A program takes the time to launch it, and then the longer of two: that of its arithmetic, each type
at its own rate, and that of its bytes, each space at its own. Rates are peaks: the time is a lower
bound, good for weighing a copy against a program, and no promise of what silicon does.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stitch.program import DataType, Space


@dataclass(frozen=True, slots=True)
class Compute:
    """Peak rates of all cores together, and what launching a program costs.

    `flops_per_second`: sums of products (a multiply and an add are two) by the type of their
    operands; types that are not listed, and all other arithmetic, go at
    `other_flops_per_second`. `bytes_per_second`: what programs read and write, by space.
    """

    launch_seconds: float
    flops_per_second: tuple[tuple[DataType, float], ...]
    other_flops_per_second: float
    bytes_per_second: tuple[tuple[Space, float], ...]

    def seconds(
        self, products: Mapping[DataType, int], other_flops: int, nbytes: Mapping[Space, int]
    ) -> float:
        """Simulated seconds of a program: FLOPs in products by type, other FLOPs, bytes by space.

        >>> compute = Compute(1.0, ((DataType.BFLOAT16, 4.0),), 2.0, ())
        >>> compute.seconds({DataType.BFLOAT16: 8}, 4, {})
        5.0
        """
        rates, spaces = dict(self.flops_per_second), dict(self.bytes_per_second)
        arithmetic = other_flops / self.other_flops_per_second
        for kind, flops in products.items():
            arithmetic += flops / rates.get(kind, self.other_flops_per_second)
        carrying = sum(n / spaces[space] for space, n in nbytes.items() if space in spaces)
        return self.launch_seconds + max(arithmetic, carrying)

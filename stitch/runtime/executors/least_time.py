"""The least time that a program, or a copy, takes on one thread of the host, by its counts.

So what is said to take long does; what is said to take little may take more.

Rates: two units that multiply and add 16 numbers of float32 at 3.1 GHz do 100 multiply-adds a
nanosecond (server cores with AVX-512; NumPy's and PyTorch's products reach 88 where
`torch_executor` was measured). Such a core takes up to 100 bytes a nanosecond from its second-level
cache (64 a cycle, of which half is seen): some eight elements of an addition, which reads two
arrays and writes one; and it copies half as many bytes as it touches.
"""

from __future__ import annotations

from stitch.linker import expanded
from stitch.ops import program_work
from stitch.program import Program

#: In a microsecond: operations of products, elements of other operators, bytes copied.
FLOPS, ELEMENTS, COPIED = 200_000.0, 8_000.0, 50_000.0


def least_microseconds(program: Program) -> float:
    """What one run takes at least; of operations with bodies, what these take."""
    work = program_work(expanded(program))
    return sum(work.products.values()) / FLOPS + work.other_flops / ELEMENTS


def least_copy_microseconds(nbytes: int) -> float:
    """What copying so many bytes takes at least.

    >>> least_copy_microseconds(5_000_000)
    100.0
    """
    return nbytes / COPIED

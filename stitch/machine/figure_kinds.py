"""Kinds of figures that machines' descriptions have: rates, times and counts of cycles.

Within their bounds whatever is added up of figures is a finite number.
"""

from __future__ import annotations

from stitch.forms import Number

#: Bytes, operations or cycles a second, bytes a cycle.
POSITIVE = Number(least=1e-6, below=1e30, is_float=True)
#: Seconds, cycles, hops.
NOT_NEGATIVE = Number(least=0, below=1e15, is_float=True)

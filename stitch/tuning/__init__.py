"""Tuning: what operations take on this machine, measured, as a table of prices.

Comes in: how large operands shall be, how often each is tried. Goes out: a YAML file that
`open_device(prices=)` takes. A file is used only where it is named, so a choice never follows from
a clock at run time. Must not know: who divides programs by prices.
"""

from stitch.tuning.tuner import measured_text, tune

__all__ = ["measured_text", "tune"]

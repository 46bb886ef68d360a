"""Traces: what a device does on its clocks, as a Chrome trace (Perfetto and chrome://tracing).

Comes in: a device's events. Goes out: lines of the Trace Event Format, as data or in a file. It
changes nothing.
"""

from stitch.report.trace.chrome_trace import ChromeTrace

__all__ = ["ChromeTrace"]

"""Traces: what a device does on its clocks, as a Chrome trace (Perfetto and chrome://tracing).

It changes nothing.
"""

from stitch.report.trace.chrome_trace import ChromeTrace

__all__ = ["ChromeTrace"]

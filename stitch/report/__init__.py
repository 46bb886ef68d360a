"""Reports: what a device did and what it holds, for people and for programs.

Comes in: a device's history and events. Goes out: text and plain data. Nothing depends on it; it
changes nothing.
"""

from stitch.report.explain import (
    CopyLine,
    copy_lines,
    explain,
    other_lines,
    plan_json,
    totals_json,
)
from stitch.report.memory import host_memory_line, memory_report, memory_view, memory_views
from stitch.report.reported_device import Device

__all__ = [
    "CopyLine", "Device", "copy_lines", "explain", "host_memory_line", "memory_report",
    "memory_view", "memory_views", "other_lines", "plan_json", "totals_json",
]  # fmt: skip

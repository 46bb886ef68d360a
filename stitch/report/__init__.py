"""Reports: what a device did and what it holds, for people and for programs.

Nothing depends on it; it changes nothing. What only a run's files need (traces, records) is loaded
when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand
from stitch.report.opened_device import MACHINE, open_device
from stitch.report.reported_device import Device

if TYPE_CHECKING:
    from stitch.report.explanation import (
        CopyLine,
        copy_lines,
        counted,
        explain,
        memory_report,
        memory_views,
        other_lines,
        plan_json,
        totals_json,
    )
    from stitch.report.operations import (
        REFERENCE,
        ComparedResult,
        OperationComparison,
        OperationLine,
        OperationStore,
        Tolerances,
        Verdict,
        compare,
    )
    from stitch.report.record_replay import RunRecord, read_record, replay
    from stitch.report.run_difference import Difference, difference, read_copies
    from stitch.report.run_record import Recorder
    from stitch.report.spool import is_compressed
    from stitch.report.trace import ChromeTrace
    from stitch.report.visualizer import VisualizerFolder
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "explanation": "CopyLine copy_lines counted explain memory_report memory_views "
            "other_lines plan_json totals_json",
            "operations": "REFERENCE ComparedResult OperationComparison OperationLine "
            "OperationStore Tolerances Verdict compare",
            "record_replay": "RunRecord read_record replay",
            "run_difference": "Difference difference read_copies",
            "run_record": "Recorder",
            "spool": "is_compressed",
            "trace": "ChromeTrace",
            "visualizer": "VisualizerFolder",
        },
    )

__all__ = [
    "MACHINE", "REFERENCE", "ChromeTrace", "ComparedResult", "CopyLine", "Device", "Difference",
    "OperationComparison", "OperationLine", "OperationStore", "Recorder", "RunRecord",
    "Tolerances", "Verdict", "VisualizerFolder", "compare", "copy_lines", "counted", "difference",
    "explain", "is_compressed", "memory_report", "memory_views", "open_device", "other_lines",
    "plan_json", "read_copies", "read_record", "replay", "totals_json",
]  # fmt: skip

"""Reports of a device's work and memory; traces and records are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand
from stitch.report.device import MACHINE, Device, open_device

if TYPE_CHECKING:
    from stitch.report.budgets import (
        BUDGET_KEYS,
        PEAK_KEYS,
        Budget,
        BudgetResult,
        amount,
        amount_text,
        check_budgets,
        parse_budgets,
    )
    from stitch.report.chrome_trace import ChromeTrace
    from stitch.report.event_report import is_compressed
    from stitch.report.explanation import (
        CopyLine,
        copy_lines,
        counted,
        explain,
        memory_report,
        memory_views,
        other_lines,
        peaks_of,
        plan_json,
        plan_peaks,
        totals_json,
    )
    from stitch.report.operations import (
        ComparedResult,
        OperationComparison,
        OperationLine,
        Tolerances,
        Verdict,
        compare,
    )
    from stitch.report.page import PageExtras, page_text
    from stitch.report.run_copies import (
        Difference,
        RunCopies,
        difference,
        machine_digest,
        read_copies,
    )
    from stitch.report.run_record import Recorder, RunRecord, read_record, replay, replay_record
    from stitch.report.trace_events import SIMULATED, TICK, WALL, slice_line, track_names
    from stitch.report.visualizer import VisualizerFolder
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "explanation": "CopyLine copy_lines counted explain memory_report memory_views "
            "other_lines peaks_of plan_json plan_peaks totals_json",
            "operations": "ComparedResult OperationComparison OperationLine "
            "Tolerances Verdict compare",
            "run_copies": "Difference RunCopies difference machine_digest read_copies",
            "run_record": "Recorder RunRecord read_record replay replay_record",
            "budgets": "BUDGET_KEYS Budget BudgetResult PEAK_KEYS amount amount_text check_budgets "
            "parse_budgets",
            "event_report": "is_compressed",
            "page": "PageExtras page_text",
            "chrome_trace": "ChromeTrace",
            "trace_events": "SIMULATED TICK WALL slice_line track_names",
            "visualizer": "VisualizerFolder",
        },
    )

__all__ = [
    "BUDGET_KEYS", "MACHINE", "PEAK_KEYS", "SIMULATED", "TICK", "WALL", "Budget",
    "BudgetResult", "ChromeTrace", "ComparedResult", "CopyLine", "Device", "Difference",
    "OperationComparison", "OperationLine", "PageExtras", "Recorder", "RunCopies", "RunRecord",
    "Tolerances", "Verdict", "VisualizerFolder", "amount", "amount_text", "check_budgets",
    "compare", "copy_lines", "counted", "difference", "explain", "is_compressed",
    "machine_digest", "memory_report", "memory_views", "open_device", "other_lines", "page_text",
    "parse_budgets", "peaks_of", "plan_json", "plan_peaks", "read_copies", "read_record",
    "replay", "replay_record", "slice_line", "totals_json", "track_names",
]  # fmt: skip

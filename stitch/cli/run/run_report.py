"""What `stitch-run` says about a run: statistics, copies, and all of it as JSON.

Comes in: a device after the run, measurements, verdicts. Goes out: text and plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stitch import api
from stitch.cli.chain import Runnable
from stitch.cli.device_costs import peaks_of
from stitch.cli.run.passes import Measured
from stitch.cli.run.run_outputs import Verdict
from stitch.model import PRODUCER
from stitch.report import CopyLine, memory_views, other_lines, plan_json, totals_json


def statistics_text(measured: Measured) -> str:
    """One line: how many passes, and p50, p90, p99 in microseconds."""
    by_name = measured.percentiles()
    listed = "  ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in by_name.items())
    return f"{len(measured.seconds)} timed passes: {listed}"


def copies_text(lines: Sequence[CopyLine]) -> str:
    """One line per copy, with its reason."""
    return "\n".join(
        f"  {line.kind} x{line.times} {line.nbytes} B  {line.source} -> {line.target}\n"
        f"    {line.reason}"
        for line in lines
    )


def result_json(
    device: api.Device,
    runnable: Runnable,
    measured: Measured,
    verdicts: Mapping[int, Verdict],
    code: int,
    failures: Sequence[str],
) -> dict[str, Any]:
    """Everything as plain data, the form of `run_results.json`."""
    account = device.account()
    return {
        "result": {0: "pass", 1: "mismatch"}.get(code, "error"),
        "exit_code": code,
        "errors": list(failures),
        "producer": PRODUCER,
        "machine": device.machine.name,
        "executor": device.executor,
        "inputs": [{"name": i.name, "type": i.type.text()} for i in runnable.inputs],
        "outputs": [{"name": o.name, "type": o.type.text()} for o in runnable.outputs],
        "comparisons": [
            {
                "result": index,
                "name": verdict.name,
                "passed": verdict.passed,
                "detail": verdict.text,
                "max_abs_difference": verdict.max_abs_difference,
                "pcc": verdict.pcc,
            }
            for index, verdict in sorted(verdicts.items())
        ],
        "passes": measured.passes,
        "seconds": measured.percentiles(),
        "copies_per_pass": measured.copies,
        "totals": totals_json(account.period, account.total),
        "memory_writes": {"writes": account.writes_seen, "nbytes": account.nbytes_seen},
        "plans": [plan_json(plan) | {"runs": times} for plan, times in account.plans],
        "other_copies": [asdict(line) for line in other_lines(account)],
        "older_copies": totals_json("older or failed plans", account.earlier),
        "reads": {
            "times": sum(read.times for read in account.reads),
            "nbytes": sum(read.times * read.nbytes for read in account.reads),
        },
        "peak_bytes_per_bank": peaks_of(device),
        "memory": memory_views(device),
        "host_memory": {
            "peak_nbytes": device.peak_nbytes,
            "allowed_nbytes": device.allowed_nbytes,
        },
    }

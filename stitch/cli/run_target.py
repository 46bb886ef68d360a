"""Where a run takes place: one device, or the devices of a mesh. Each runs passes, and reports."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from stitch import api
from stitch.cli.chain import Runnable
from stitch.cli.command import say_aside
from stitch.cli.device_costs import check_device_capacity, memory_text, planned_copies
from stitch.errors import UsageError
from stitch.files import OutputFiles
from stitch.machine import Machine
from stitch.mesh import DryRun, Mesh, dry_run, open_mesh, specification_of, trace_bytes, wall_tracks
from stitch.option_values import DEFAULT_WINDOW, IN_FLIGHT
from stitch.program import Array
from stitch.report import (
    ChromeTrace,
    PageExtras,
    Recorder,
    VisualizerFolder,
    counted,
    machine_digest,
    memory_views,
    other_lines,
    page_text,
    peaks_of,
    plan_json,
    read_record,
    totals_json,
)


@dataclass(slots=True)
class Measured:
    """Measurements of the passes.

    Args:
        seconds: The wall time of each timed pass; on a mesh passes overlap, and have none.
        whole_seconds: The wall time of all timed passes.
        timed: Their number.
        passes: The number of all passes.
        copies: The largest number of writes to memory spaces in one pass, except those of host
            arrays.
    """

    seconds: list[float] = field(default_factory=list)
    whole_seconds: float = 0.0
    timed: int = 0
    passes: int = 0
    copies: int = 0


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p90, p99, min, max and mean of times, in seconds."""
    if not seconds:
        return {}
    return {
        **{f"p{rank}": float(np.percentile(seconds, rank)) for rank in (50, 90, 99)},
        "min": min(seconds), "max": max(seconds), "mean": float(np.mean(seconds)),
    }  # fmt: skip


def percentiles_text(seconds: Sequence[float]) -> str:
    """Return percentiles in microseconds."""
    by_name = percentiles(seconds)
    return "  ".join(f"{name} {value * 1e6:.1f} us" for name, value in by_name.items())


def _title(options: argparse.Namespace) -> str:
    """Return the title of the page of a run: what ran."""
    files = options.module if options.pipeline is None else [options.pipeline]
    return f"Stitch report: {', '.join(Path(file).name for file in files)}"


#: Called after each pass.
Tick: TypeAlias = Callable[[], None]


#: Adds the files of reports, at the end of a run: the page shows the extras. After an error only
#: the page, of what ran before it.
AddReports: TypeAlias = Callable[[OutputFiles, PageExtras], None]


@dataclass(frozen=True, slots=True)
class OneDevice:
    """A device of this process."""

    opened: api.Device

    @property
    def computes(self) -> bool:
        """Return whether results exist."""
        return self.opened.computes

    @contextmanager
    def observed(self, options: argparse.Namespace) -> Iterator[AddReports]:
        """Begin the reports of the options, before programs are loaded."""
        with ExitStack() as stack:
            reports: list[ChromeTrace | VisualizerFolder] = []
            if options.trace is not None:
                reports.append(ChromeTrace(self.opened, options.trace))
                stack.callback(reports[-1].forget)
            if options.visualizer is not None:
                reports.append(VisualizerFolder(self.opened, options.visualizer))
                stack.callback(reports[-1].forget)
            recorder = None
            if options.record is not None or options.report is not None:
                recorder = Recorder(self.opened)

            def add(files: OutputFiles, extras: PageExtras) -> None:
                if extras.error is None:
                    extras = replace(extras, explained=self.opened.explain())
                    for report in reports:
                        report.add_to(files)
                if recorder is not None and options.record is not None:
                    files[options.record] = recorder.text()
                if recorder is not None and options.report is not None:
                    files[options.report] = page_text(
                        {"this run": recorder.record()}, extras, _title(options)
                    )

            yield add

    def check(self, runnable: Runnable) -> None:
        """Raise `OutOfMemoryError` if a program or an input exceeds the memory of the machine."""
        check_device_capacity(self.opened, runnable)

    def run_passes(
        self, runnable: Runnable, arrays: Sequence[Array], warmup: int, timed: int,
        measured: Measured, tick: Tick,
    ) -> list[Array]:  # fmt: skip
        """Run all passes and time them; return the last results (none without data)."""
        device = self.opened
        for index in range(warmup + timed):
            before = device.history.seen()[0] - device.history.whole().entries
            began = time.perf_counter()
            tensors = runnable.run(arrays)
            device.flush()
            seconds = time.perf_counter() - began
            wrote = device.history.seen()[0] - device.history.whole().entries - before
            measured.copies = max(measured.copies, wrote)
            measured.passes += 1
            tick()
            if index >= warmup:
                measured.timed += 1
                measured.seconds.append(seconds)
            if index < warmup + timed - 1:
                del tensors
        if device.computes:
            return [tensor.numpy() for tensor in tensors]
        measured.copies = planned_copies(device)
        return []

    def explain(self) -> str:
        """Describe every copy."""
        return self.opened.explain()

    def memory(self) -> str:
        """Describe the memory."""
        return memory_text(self.opened)

    def statistics(self, measured: Measured) -> str:
        """Describe the times of the passes."""
        many = counted(measured.timed, "timed pass", "timed passes")
        return f"{many}: {percentiles_text(measured.seconds)}"

    def as_json(self, measured: Measured) -> dict[str, Any]:
        """Return all reports as plain data."""
        device, account = self.opened, self.opened.account()
        return {
            "machine": device.machine.name,
            "machine_digest": machine_digest(device.machine),
            "executor": device.executor,
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


@dataclass(slots=True)
class SeveralDevices:
    """The devices of a mesh."""

    opened: Mesh
    backend: str
    #: The plans of the graphs of a run without data, and how often a pass runs each.
    plans: list[tuple[DryRun, int]] = field(default_factory=list)
    #: By device, the seconds of runs of pieces in the timed passes: the last of each loop that the
    #: client has records of. And how long these took in all.
    pieces: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    piece_seconds: float = 0.0

    @property
    def computes(self) -> bool:
        """See `OneDevice`."""
        return self.opened.computes

    @contextmanager
    def observed(self, options: argparse.Namespace) -> Iterator[AddReports]:
        """See `OneDevice`."""

        def add(files: OutputFiles, extras: PageExtras) -> None:
            mesh = self.opened
            if (options.trace, options.report) == (None, None):
                return
            trace = mesh.trace()
            if options.trace is not None and extras.error is None:
                files[options.trace] = trace_bytes(trace, options.trace)
            if options.report is not None:
                shown = replace(extras, explained=mesh.explain(), tracks=wall_tracks(trace))
                records = {name: read_record(mesh.report(name, "record")) for name in mesh.devices}
                files[options.report] = page_text(records, shown, _title(options))

        yield add

    def check(self, runnable: Runnable) -> None:
        """Return: `mesh.prepare` has checked each device."""

    def run_passes(
        self, runnable: Runnable, arrays: Sequence[Array], warmup: int, timed: int,
        measured: Measured, tick: Tick,
    ) -> list[Array]:  # fmt: skip
        """See `OneDevice`; passes overlap. Without data there is none but what is planned."""
        mesh = self.opened
        if not mesh.computes:
            self.plans[:] = [(dry_run(run, timed), times) for run, times in runnable.graphs]
            return []
        for index in range(warmup + timed):
            if index == warmup:
                mesh.wait()
                first, began = mesh.client.runs, time.perf_counter()
            tensors = runnable.run(arrays)
            measured.passes += 1
            tick()
        mesh.wait()
        for name, count in mesh.client.restarts.items():
            if count:
                times = counted(count, "time")
                say_aside(f"the server of device {name!r} ended and was started again {times}")
        measured.whole_seconds += time.perf_counter() - began
        measured.timed += timed
        records = [record for record in mesh.client.records if record.run >= first]
        for record in records:
            self.pieces[record.device].append(record.end - record.begin)
        self.piece_seconds += max(r.end for r in records) - min(r.begin for r in records)
        return [tensor.numpy() for tensor in tensors]

    def explain(self) -> str:
        """See `OneDevice`; a run without data begins with its plan."""
        lines = []
        for plan, times in self.plans:
            lines += [f"a graph that a pass runs {times} times:"] if times > 1 else []
            lines.append(plan.text())
        if lines:
            lines.append("the copies of two runs of each graph:")
        return "\n".join([*lines, self.opened.explain()])

    def memory(self) -> str:
        """See `OneDevice`."""
        return self.opened.memory_report()

    def statistics(self, measured: Measured) -> str:
        """See `OneDevice`."""
        if not measured.timed:
            return "no timed pass"
        many = counted(measured.timed, "timed pass", "timed passes")
        lines = [
            f"{many} in {measured.whole_seconds:.3f} s, at most {self.opened.in_flight} at a time: "
            f"{measured.timed / measured.whole_seconds:.1f} passes/s"
        ]
        for name, seconds in self.pieces.items():
            busy = sum(seconds) / self.piece_seconds
            lines.append(
                f"device {name}: {counted(len(seconds), 'run')} of pieces, {busy:.0%} busy: "
                f"{percentiles_text(seconds)}"
            )
        return "\n".join(lines)

    def as_json(self, measured: Measured) -> dict[str, Any]:
        """See `OneDevice`."""
        mesh = self.opened
        body: dict[str, Any] = {
            "mesh": mesh.specification.name,
            "backend": self.backend,
            "in_flight": mesh.in_flight,
        }
        if self.plans:
            body["plans"] = [
                {"runs": times, "seconds": plan.timeline.makespan, "text": plan.text()}
                for plan, times in self.plans
            ]
        if measured.timed:
            body["passes_per_second"] = measured.timed / measured.whole_seconds
            body["pieces"] = {name: percentiles(each) for name, each in self.pieces.items()}
        return body | mesh.statistics()


#: What runs passes, and what is reported of it.
RunTarget: TypeAlias = OneDevice | SeveralDevices


def one_device(target: RunTarget) -> api.Device:
    """Return the device of a run with options that only one device has."""
    assert isinstance(target, OneDevice), "refused for several devices"
    return target.opened


#: Options that only a run on one device has, and their defaults.
ONE_DEVICE_OPTIONS = {
    "expected_operations": None, "visualizer": None, "record": None, "save_artifacts": False,
    "max_copies": None, "check_memory_leak": False, "check_memory": False, "threads": None,
    "prices": None, "inter_op_threads": 1, "window": DEFAULT_WINDOW,
}  # fmt: skip
#: Options that only a run on several devices has.
SEVERAL_DEVICES_OPTIONS = ("backend", "address", "in_flight")


def refuse_for_one(options: argparse.Namespace) -> None:
    """Raise `UsageError` for options that have no effect on one device."""
    for name in SEVERAL_DEVICES_OPTIONS:
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name} has no effect without --devices",
                remedy="--devices=2, --devices=two.yaml, or `devices:` in the pipeline file",
            )


def open_several(
    options: argparse.Namespace, machine: Machine, devices: str | int
) -> SeveralDevices:
    """Open a mesh for a run; raise `UsageError` for options that only one device has.

    Args:
        options: Those of the command.
        machine: That of each device, where `devices` is a number.
        devices: A number, or the path of a machine specification.
    """
    alone = [w for w, value in ONE_DEVICE_OPTIONS.items() if getattr(options, w) != value]
    if alone:
        raise UsageError(
            f"--{alone[0]} is for a run on one device, and this one has several",
            got=f"devices: {devices}", remedy=f"leave out --{alone[0]}, or the devices",
        )  # fmt: skip
    if options.device is not None and not str(devices).isdecimal():
        raise UsageError(
            "the machine specification names the machines, and --device does too",
            got=f"devices: {devices}, --device={options.device}", remedy="leave out --device",
        )  # fmt: skip
    executor = options.executor or "numpy"
    backend = options.backend or "local"
    if options.dry_run:
        executor = "null"
    mesh = open_mesh(
        specification_of(devices, machine),
        backend="local" if executor == "null" else backend,
        executor=executor,
        in_flight=IN_FLIGHT if options.in_flight is None else options.in_flight,
        address=options.address,
        strict_types=options.strict_types,
        trace=options.trace is not None or options.report is not None,
    )
    return SeveralDevices(mesh, backend)

"""One pass over modules, planned without data, with assertions about its copies.

The pytest plugin (`stitch.pytest_plugin`) gives it to tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stitch import api
from stitch.argument_kinds import WHOLE
from stitch.budget import parse_nbytes
from stitch.cli.module_files import (
    ModuleFile,
    machine_for,
    read_modules,
    with_unique_names,
)
from stitch.cli.rehearsal import Rehearsal, rehearse, rehearse_pipeline
from stitch.cli.run_comparison import changes
from stitch.cli.wiring import wires_of
from stitch.documents import MODULE, kind_of, read_pipeline
from stitch.errors import IncompatibleError, OutOfMemoryError, StitchError, UsageError
from stitch.files import make_folder, read_text, write_files
from stitch.machine import Machine, load_machine
from stitch.option_values import DEFAULT_TARGET
from stitch.report import CopyLine, counted, machine_digest, plan_json, plan_peaks
from stitch.ttb import Binary

#: The option of pytest that writes snapshots.
UPDATE = "--stitch-update"
_COMPILED = (".yaml", ".yml", ".onnx")


class PlannedPass:
    """One pass over modules, planned without data.

    Its copies are those between buffers in memory, as `stitch run --max_copies` counts them: not
    those of the arrays that a caller passes.
    """

    def __init__(
        self, folder: Path, update: bool, machine: Machine | None, rehearsal: Rehearsal | None,
        error: StitchError | None,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._update = update
        self._rehearsal = rehearsal
        self._machine = machine
        self._error = error

    def _planned(self) -> Rehearsal:
        __tracebackhide__ = True
        if self._rehearsal is None:
            raise AssertionError(f"the pass does not fit: {self._error}")
        return self._rehearsal

    @property
    def lines(self) -> tuple[CopyLine, ...]:
        """The distinct copies, each with its bytes, reason, link and source lines."""
        return self._planned().copies

    @property
    def copies(self) -> int:
        """The number of copies."""
        return sum(line.times for line in self.lines)

    @property
    def nbytes(self) -> int:
        """The bytes of the copies."""
        return sum(line.times * line.nbytes for line in self.lines)

    def assert_copies(self, at_most: int) -> None:
        """Fail if the pass makes more copies; the message names each link and source line."""
        __tracebackhide__ = True
        _check_bound("assert_copies", at_most)
        if self.copies > at_most:
            many = counted(self.copies, "copy", "copies")
            self._fail(f"{many} in one pass, at most {at_most} allowed")

    def assert_bytes(self, at_most: int | str) -> None:
        """Fail if the copies have more bytes than a number, or a text such as `"4KiB"`."""
        __tracebackhide__ = True
        most = parse_nbytes(at_most) if isinstance(at_most, str) else at_most
        _check_bound("assert_bytes", most)
        if self.nbytes > most:
            self._fail(f"{self.nbytes} B copied in one pass, at most {most} B allowed")

    def assert_fits(self) -> None:
        """Fail if the modules or their tensors exceed the memory of the machine."""
        __tracebackhide__ = True
        self._planned()

    def assert_matches(self, name: str) -> None:
        """Compare with the snapshot `name`; the option `--stitch-update` writes it instead.

        The snapshot has the copies (those of arrays as well), the bytes in use and the times.
        Commit it: the file is `stitch_snapshots/NAME.json` beside the test. Source lines may
        change.
        """
        __tracebackhide__ = True
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"a snapshot's name has letters, digits and . _ - only: {name!r}")
        path = self._folder / f"{name}.json"
        text = json.dumps(self._snapshot(), indent=1) + "\n"
        if self._update:
            make_folder(path.parent)
            write_files({path: text})
            return
        remedy = f"run pytest {UPDATE}, and commit the file"
        if not path.exists():
            raise AssertionError(f"there is no snapshot {path}\n  try: {remedy}")
        try:
            found = changes(read_text(path), text)
        except StitchError as error:
            raise AssertionError(f"{error}\n  snapshot: {path}\n  try: {remedy}") from None
        if found:
            raise AssertionError("\n".join([
                f"the plan differs from the snapshot {path}", *found,
                f"  if this is right: {remedy}",
            ]))  # fmt: skip

    def _snapshot(self) -> dict[str, Any]:
        """Return the pass in the form of a result file, which `stitch diff` reads."""
        planned = self._planned()
        assert self._machine is not None
        peaks = plan_peaks([plan for plan, _ in planned.plans])
        return {
            "result": "plan",
            "machine": self._machine.name,
            "machine_digest": machine_digest(self._machine),
            "totals": asdict(planned.cost),
            "plans": [plan_json(plan) | {"runs": times} for plan, times in planned.plans],
            "other_copies": [],
            "older_copies": dict.fromkeys(asdict(planned.cost), 0),
            "peak_bytes_per_bank": {space.value: size for space, size in peaks.items()},
        }

    def _fail(self, what: str) -> None:
        __tracebackhide__ = True
        lines = [what]
        for line in self.lines:
            lines.append(f"  {line.text()}")
            lines += [f"    {text}" for text in (line.reason, line.link_text()) if text]
        raise AssertionError("\n".join(lines))


def _check_bound(call: str, at_most: object) -> None:
    """Raise `UsageError` for a bound that no pass could exceed or keep: NaN, a text, a negative."""
    WHOLE.check(call, "at_most", at_most)
    if isinstance(at_most, int) and at_most < 0:
        raise UsageError(f"{call} takes a number of at least 0 as at_most", got=str(at_most))


def plan_pass(
    sources: Sequence[Any], target: Any = None, wires: Sequence[str] = (), *, snapshots: Path,
    update: bool = False,
) -> PlannedPass:  # fmt: skip
    """Plan one pass over modules, or over a pipeline file.

    Args:
        sources: Modules in run order (paths, compiled models, binaries), or the path of a pipeline.
        target: The machine, by default that of the first module.
        wires: Values of `--wire`.
        snapshots: The folder of `assert_matches`.
        update: Whether `assert_matches` writes its snapshot.

    Raises:
        StitchError: A module cannot be read or compiled, or modules do not fit each other. A pass
            that exceeds the memory of the machine fails each assertion instead.
    """
    try:
        machine, rehearse = _prepared(sources, target, wires)
        try:
            return PlannedPass(snapshots, update, machine, rehearse(), None)
        except IncompatibleError as error:  # The module is compiled for a larger machine.
            return PlannedPass(snapshots, update, machine, None, error)
    except OutOfMemoryError as error:
        return PlannedPass(snapshots, update, None, None, error)


def _prepared(
    sources: Sequence[Any], target: Any, wires: Sequence[str]
) -> tuple[Machine, Callable[[], Rehearsal]]:
    """Read and compile modules; return the machine, and a function that plans one pass."""
    if not sources:
        raise UsageError("stitch_plan has no modules", remedy='stitch_plan("a.ttb", "b.ttb")')
    first = sources[0]
    if len(sources) == 1 and _suffix(first) in (".yaml", ".yml") and kind_of(first) != MODULE:
        checked = read_pipeline(first)
        machine = load_machine(checked.machine if target is None else target)
        return machine, lambda: rehearse_pipeline(checked, machine)
    modules = with_unique_names([_module(one, at, target) for at, one in enumerate(sources)])
    connections = wires_of(modules, wires)
    machine = machine_for(None, modules) if target is None else load_machine(target)
    return machine, lambda: rehearse(modules, connections, machine)


def _suffix(source: Any) -> str:
    return Path(source).suffix.lower() if isinstance(source, str | Path) else ""


def _module(source: Any, at: int, target: Any) -> ModuleFile:
    """Read or compile a module: a path, a compiled model or a binary."""
    if isinstance(source, str | Path) and _suffix(source) not in _COMPILED:
        return read_modules([str(source)])[0]
    if isinstance(source, str | Path):
        label = Path(source).stem
        source = api.compile(source, target=DEFAULT_TARGET if target is None else target)
    else:
        label = f"module {at}"
    binary = getattr(source, "binary", source)
    if not isinstance(binary, Binary):
        raise UsageError(
            "this is no module", expected="a path, a compiled model or a binary",
            got=f"{type(source).__name__}", remedy="stitch.compile(module, example_inputs)",
        )  # fmt: skip
    return ModuleFile(label, label, binary, binary.programs[0])

"""`--save_artifacts`: a run's inputs, outputs, programs, plans and reports as files in a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stitch import api
from stitch.cli.chain import Runnable
from stitch.cli.output_checks import JSON, NPY, TEXT
from stitch.files import FileBatch, make_folder
from stitch.forms import npy_bytes
from stitch.program import Array
from stitch.report import memory_views, plan_json

_SAFE = re.compile(r"[^A-Za-z0-9_.-]")


def add_artifacts(
    batch: FileBatch,
    folder: str,
    device: api.Device,
    runnable: Runnable,
    arrays: Sequence[Array],
    results: Sequence[Array],
) -> None:
    """Adds the files of a run to the batch; makes the folders."""
    places = _Places.of(folder, runnable)
    for part in ("inputs", "outputs", "programs"):
        make_folder(Path(folder) / part)
    for path, array in zip(places.inputs, arrays, strict=True):
        batch.add(path, npy_bytes(array))
    for path, array in zip(places.outputs, results, strict=False):  # Without data there are none.
        batch.add(path, npy_bytes(array))
    for path, program in zip(places.programs, runnable.programs, strict=True):
        batch.add(path, program.program.text())
    plans = [plan_json(plan) | {"runs": times} for plan, times in device.history.plans]
    batch.add(places.plans, json.dumps(plans, indent=2) + "\n")
    batch.add(places.memory, json.dumps(memory_views(device), indent=2) + "\n")
    batch.add(places.explain, device.explain() + "\n")


def artifact_kinds(folder: str, runnable: Runnable) -> dict[Path, str]:
    """The files that `add_artifacts` will add, and of which kind each is."""
    places = _Places.of(folder, runnable)
    return {
        **dict.fromkeys((*places.inputs, *places.outputs), NPY),
        **dict.fromkeys((*places.programs, places.explain), TEXT),
        **dict.fromkeys((places.plans, places.memory), JSON),
    }


@dataclass(frozen=True, slots=True)
class _Places:
    """Where each artifact goes."""

    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    programs: tuple[Path, ...]
    plans: Path
    memory: Path
    explain: Path

    @staticmethod
    def of(folder: str, runnable: Runnable) -> _Places:
        root = Path(folder)

        def each(part: str, names: Iterable[str], suffix: str) -> tuple[Path, ...]:
            return tuple(
                root / part / f"{at}-{_safe(name)}{suffix}" for at, name in enumerate(names)
            )

        return _Places(
            each("inputs", (slot.name for slot in runnable.inputs), ".npy"),
            each("outputs", (slot.name for slot in runnable.outputs), ".npy"),
            each("programs", (program.name for program in runnable.programs), ".txt"),
            root / "plans.json", root / "memory.json", root / "explain.txt",
        )  # fmt: skip


def _safe(name: str) -> str:
    """A slot's name as part of a file's name: names from files are data, never paths."""
    return _SAFE.sub("_", name)[:80]

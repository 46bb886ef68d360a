"""`--save_artifacts`: a run's inputs, outputs, programs, plans and reports as files in a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from stitch import api
from stitch.cli.chain import RunInput, Runnable, RunOutput
from stitch.cli.output_checks import JSON, NPY, TEXT
from stitch.files import OutputFiles, make_folder
from stitch.forms import npy_bytes
from stitch.program import Array
from stitch.report import memory_views, plan_json
from stitch.runtime import LoadedProgram

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_REPORTS = ("plans.json", "memory.json", "explain.txt")


def add_artifacts(
    batch: OutputFiles,
    folder: str,
    device: api.Device,
    runnable: Runnable,
    arrays: Sequence[Array],
    results: Sequence[Array],
) -> None:
    """Adds the files of a run to the batch; makes the folders."""
    places = _places(folder, runnable)
    for part in places:
        make_folder(Path(folder) / part)
    for path, array in zip(places["inputs"], arrays, strict=True):
        batch.add(path, npy_bytes(array))
    for path, array in zip(places["outputs"], results, strict=False):  # Without data none are.
        batch.add(path, npy_bytes(array))
    for path, program in zip(places["programs"], runnable.programs, strict=True):
        batch.add(path, program.program.text())
    plans = [plan_json(plan) | {"runs": times} for plan, times in device.history.plans]
    texts = json.dumps(plans, indent=2), json.dumps(memory_views(device), indent=2)
    for name, text in zip(_REPORTS, (*texts, device.explain()), strict=True):
        batch.add(Path(folder) / name, text + "\n")


def artifact_kinds(folder: str, runnable: Runnable) -> dict[Path, str]:
    """The files that `add_artifacts` will add, and of which kind each is."""
    places = _places(folder, runnable)
    plans, memory, explain = (Path(folder) / name for name in _REPORTS)
    return {
        **dict.fromkeys((*places["inputs"], *places["outputs"]), NPY),
        **dict.fromkeys((*places["programs"], explain), TEXT),
        **dict.fromkeys((plans, memory), JSON),
    }


def _places(folder: str, runnable: Runnable) -> dict[str, tuple[Path, ...]]:
    """Where the artifacts of each part go: names from files are data, never paths."""
    parts: tuple[tuple[str, Sequence[RunInput | RunOutput | LoadedProgram], str], ...] = (
        ("inputs", runnable.inputs, ".npy"), ("outputs", runnable.outputs, ".npy"),
        ("programs", runnable.programs, ".txt"),
    )  # fmt: skip
    return {
        part: tuple(
            Path(folder) / part / f"{at}-{_UNSAFE.sub('_', one.name)[:80]}{suffix}"
            for at, one in enumerate(named)
        )
        for part, named, suffix in parts
    }

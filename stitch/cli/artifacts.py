"""`--save_artifacts`: a run's inputs, outputs, programs, plans and reports as files in a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from stitch import api
from stitch.cli.array_files import npy_bytes
from stitch.cli.chain import Runnable
from stitch.files import FileBatch, make_folder
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
    root = Path(folder)
    for part in ("inputs", "outputs", "programs"):
        make_folder(root / part)
    for index, (slot, array) in enumerate(zip(runnable.inputs, arrays, strict=True)):
        batch.add(root / "inputs" / f"{index}-{_safe(slot.name)}.npy", npy_bytes(array))
    for index, array in enumerate(results):
        name = _safe(runnable.outputs[index].name)
        batch.add(root / "outputs" / f"{index}-{name}.npy", npy_bytes(array))
    for index, program in enumerate(runnable.programs):
        name = f"{index}-{_safe(program.name)}.txt"
        batch.add(root / "programs" / name, program.program.text())
    plans = [plan_json(plan) | {"runs": times} for plan, times in device.history.plans]
    batch.add(root / "plans.json", json.dumps(plans, indent=2) + "\n")
    batch.add(root / "memory.json", json.dumps(memory_views(device), indent=2) + "\n")
    batch.add(root / "explain.txt", device.explain() + "\n")


def _safe(name: str) -> str:
    """A slot's name as part of a file's name: names from files are data, never paths."""
    return _SAFE.sub("_", name)[:80]

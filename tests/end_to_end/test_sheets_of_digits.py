"""The example that reads sheets: what it finds and writes, its trace, a file that is no image."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

import stitch
from tests.support.stitched_models import several
from tests.support.trace_format import Checked, checked

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
SHEETS = 12
#: What is done with each sheet, in order.
TASKS = ("decoded", "resized", "detector", "cut", "classifier", "written")
MODULES = ("sheets", "sheet_networks", "train_sheets", "read_sheets")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example has run as a user would run it, with what it printed."""
    folder = tmp_path_factory.mktemp("sheets")
    script, trace = DIGITS / "read_sheets.py", folder / "trace.json.gz"
    done = subprocess.run(
        [sys.executable, str(script), f"--folder={folder / 'out'}", f"--trace={trace}"],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    (folder / "printed.txt").write_text(done.stdout, encoding="utf-8")
    return folder


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Its modules, which import each other by their bare names."""
    monkeypatch.syspath_prepend(str(DIGITS))
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        del sys.modules[name]


def trace_of(folder: Path) -> Checked:
    return checked(json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes())))


def test_nearly_all_digits_are_found_and_read_and_nothing_else_is(folder: Path) -> None:
    printed = (folder / "printed.txt").read_text(encoding="utf-8")
    total, found, right, boxes = (
        int(re.findall(pattern, printed, re.MULTILINE)[0])
        for pattern in (r"^found +\d+ of (\d+) digits on 12 sheets$", r"^found +(\d+) ",
                        r"^read right +(\d+) ", r"^not there +\d+ of (\d+) boxes$")
    )  # fmt: skip
    assert total > 80
    assert 0.97 * total <= found <= total and right >= 0.95 * total and boxes <= 1.03 * total


def test_the_files_hold_the_digits_that_were_drawn(
    folder: Path, example: dict[str, ModuleType]
) -> None:
    drawn = example["sheets"].draw_sheets("held_out", SHEETS, example["read_sheets"].SEED)
    right = total = 0
    for i, sheet in enumerate(drawn):
        with Image.open(folder / "out" / f"sheet{i}.png") as image:
            np.testing.assert_array_equal(np.asarray(image), sheet.image)
        told = json.loads((folder / "out" / f"sheet{i}.json").read_text(encoding="utf-8"))
        read = Counter(digit["digit"] for digit in told["digits"])
        right += (read & Counter(sheet.labels.tolist())).total()
        total += len(sheet.labels)
        for digit in told["digits"]:
            off = np.abs(sheet.boxes - np.array(digit["box"])).max(axis=1)
            assert off.min() < 10, "pixels, at each edge"
            assert 0.1 < digit["probability"] <= 1
    assert right >= 0.95 * total
    assert len(list((folder / "out").glob("sheet*.json"))) == SHEETS
    assert not list((folder / "out").glob(".*")), "no file is left half written"


def test_its_trace_has_each_task(folder: Path) -> None:
    found = trace_of(folder)
    ran = Counter(each.name for each in found.slices if each.kind in ("program", "host"))
    assert ran == dict.fromkeys(TASKS, SHEETS)


def test_a_file_that_is_no_image_stops_its_own_sheet_only(
    tmp_path: Path, example: dict[str, ModuleType]
) -> None:
    reading, drawing = example["read_sheets"], example["sheets"]
    images = drawing.write_sheets(drawing.draw_sheets("held_out", 3, 0), tmp_path)
    images[1].write_bytes(b"no image")
    with stitch.open_device(reading.MACHINE) as device:
        graph = reading.task_graph(device, reading.compile_programs(tmp_path), images)
        run = device.prepare(graph)
        with pytest.raises(UnidentifiedImageError) as caught:
            run()
        assert any("host function 'decoded'" in note for note in caught.value.__notes__)
        assert sorted(p.name for p in tmp_path.glob("*.json")) == ["sheet0.json", "sheet2.json"]
        drawing.write_sheets(drawing.draw_sheets("held_out", 3, 0), tmp_path)
        counts = [count.item() for count in several(run())]
    told = [json.loads(image.with_suffix(".json").read_text(encoding="utf-8")) for image in images]
    assert counts == [len(each["digits"]) for each in told]


@pytest.mark.campaign("training")
def test_training_again_reads_as_well(
    tmp_path: Path, example: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = example["train_sheets"]
    for name in ("train_sheets", "sheet_networks", "read_sheets"):
        monkeypatch.setattr(example[name], "WEIGHTS", tmp_path / "sheets.npz")
    training.main()
    monkeypatch.setattr(sys, "argv", ["read_sheets.py", "--sheets=40"])
    assert example["read_sheets"].main() == 0

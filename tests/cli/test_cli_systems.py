"""System descriptors on the command line: compiled for, run on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run

FILES = Path(__file__).resolve().parents[1] / "conformance" / "tenstorrent"


@pytest.fixture
def descriptors(here: Path) -> None:
    for file in FILES.glob("*.ttsys"):
        shutil.copy(file, here)


@pytest.mark.usefixtures("descriptors")
def test_a_module_is_compiled_for_a_descriptor_and_runs_on_it(cli: Run) -> None:
    made = cli("compile", "a.yaml", "-o", "mine.ttb", "--target=p150.ttsys")
    assert made.code == 0, made.err
    said = json.loads(cli("inspect", "mine.ttb", "--json").out)
    assert said["machine"]["name"] == "p150"
    assert said["machine"]["spaces"]["l1"]["granule"] == 64
    done = cli("run", "--module=mine.ttb", "--device=p150.ttsys", "--init=randn")
    assert done.code == 0, done.err
    shipped = cli("run", "--module=mine.ttb", "--device=blackhole_p150", "--init=randn")
    assert shipped.code == 0, shipped.err


@pytest.mark.usefixtures("descriptors")
def test_a_pipeline_names_a_descriptor_beside_it(cli: Run, here: Path) -> None:
    folder = here / "inner"
    folder.mkdir()
    shutil.copy(here / "a.ttb", folder)
    shutil.copy(here / "n300-llmbox.ttsys", folder)
    (folder / "p.yaml").write_text(
        "device: n300-llmbox.ttsys:2\nmodules: {a: a.ttb}\n"
        "inputs: {x: {shape: [4, 8], type: float32}}\n"
        "steps:\n  - {run: a, inputs: {x: x}, outputs: [y]}\noutputs: [y]\n"
    )
    done = cli("run", "inner/p.yaml", "--init=randn")
    assert done.code == 0, done.err


@pytest.mark.usefixtures("descriptors")
def test_a_descriptor_is_no_module(cli: Run) -> None:
    for words in (("run", "--module=p150.ttsys"), ("inspect", "p150.ttsys")):
        done = cli(*words)
        assert done.code == 3 and "system descriptor of tt-mlir" in done.err

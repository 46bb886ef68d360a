"""System descriptors on the command line: inspected, compiled for, run on."""

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
def test_a_descriptor_is_inspected(cli: Run) -> None:
    done = cli("inspect", "p150.ttsys")
    assert done.code == 0
    assert "system descriptor of version 0.0.3758" in done.out
    assert "machine p150: blackhole, 10x11 cores" in done.out
    assert "l1 110 x [111104, 1540096) B, pages at 16, tensors at 64" in done.out
    assert "times of copies and programs: as blackhole_p150" in done.out
    many = cli("inspect", "n300-llmbox.ttsys").out
    assert "8 chips, 14 links" in many
    assert "n300-llmbox:4, n300-llmbox:5, n300-llmbox:6, n300-llmbox:7: wormhole_b0" in many


@pytest.mark.usefixtures("descriptors")
def test_a_descriptor_is_json_for_programs(cli: Run) -> None:
    said = json.loads(cli("inspect", "n150.ttsys", "--json").out)
    assert (said["version"], len(said["chips"])) == ("0.0.3758", 1)
    (chip,) = said["chips"]
    assert (chip["architecture"], chip["machine"]["name"]) == ("wormhole_b0", "n150")
    assert chip["machine"]["spaces"]["l1"] == {
        "banks": 64, "base": 103_840, "limit": 1_466_368, "alignment": 16, "granule": 32,
    }  # fmt: skip
    assert chip["descriptor"]["dram_unreserved_end"] == 1_073_118_784
    assert chip["sources"]["l1.base"] == "n150.ttsys, chip 0: l1_unreserved_base"


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
def test_a_descriptor_is_inspected_by_itself(cli: Run) -> None:
    done = cli("inspect", "p150.ttsys", "a.ttb")
    assert done.code == 2 and "no other files" in done.err
    wrong = cli("inspect", "p150.ttsys:3")
    assert wrong.code != 0


@pytest.mark.usefixtures("descriptors")
def test_a_descriptor_is_no_module(cli: Run) -> None:
    done = cli("run", "--module=p150.ttsys")
    assert done.code != 0 and "system descriptor of tt-mlir" in done.err

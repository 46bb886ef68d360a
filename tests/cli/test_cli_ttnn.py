"""TTNN binaries on the command line: shown, checked against each other, planned, never computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest

import stitch
from tests.support.files.ttnn_files import HEAD, LAYER, REAL, STRANGERS

Cli = Callable[..., Any]


@pytest.fixture
def binaries(here: Path) -> Path:
    """A folder with the TTNN files, and two modules of ours beside them."""
    for path, name in ((REAL, "real"), (LAYER, "layer"), (HEAD, "head"), (STRANGERS, "strange")):
        copy(path, here / f"{name}.ttnn")
    rows = np.zeros((64, 96), np.float32)
    stitch.compile(lambda x: x + x, [rows], name="double").save(here / "double.ttb")
    stitch.compile(
        lambda x: x + x, [np.zeros((320, 128), np.float32)], name="wide",
        placement=["input.0.space=dram"],
    ).save(here / "wide.ttb")  # fmt: skip
    return here


def test_inspect_shows_version_machine_slots_and_lives(cli: Cli, binaries: Path) -> None:
    done = cli("inspect", "real.ttnn")
    assert (done.code, done.err) == (0, "")
    assert "TTNN 0.0.249, written by tt-mlir at commit abb97a9b3e0f17b5" in done.out
    assert "machine wormhole_b0: 8x8 cores" in done.out
    assert "input  arg0: 64x128xbf16 in bf16:host:row_major:interleaved" in done.out
    assert "t7: 64x96xbf16:dram:tile:interleaved, 2048 B per bank, operations 5 to 8" in done.out


def test_operations_are_shown_with_their_text_and_place(cli: Cli, binaries: Path) -> None:
    out = cli("inspect", "real.ttnn", "--section=operations").out
    assert "t7.1: 64x96xbf16 = ttnn.MatmulOp(t4, t6, t7)\n" in out
    assert '%6 = "ttnn.matmul"(%2, %4, %5), at "simple_matmul_ttnn.mlir":19:10\n' in out
    assert "    ttnn.GetDeviceOp()\n" in out


def test_json_has_the_whole_text_of_an_operation(cli: Cli, binaries: Path) -> None:
    found = json.loads(cli("inspect", "real.ttnn", "--json", "--section=all").out)
    assert found["origin"]["version"] == "0.0.249"
    (program,) = found["programs"]
    assert program["operations"][6]["attributes"]["text"].endswith('mlir":19:10)')
    assert len(program["lives"]) == 6
    assert "host" not in program["memory"]


def test_a_binary_chains_with_itself_without_a_copy(cli: Cli, binaries: Path) -> None:
    done = cli("inspect", "layer.ttnn", "layer.ttnn", "--wire=0.result0=1.arg0", "--json")
    found = json.loads(done.out)
    assert (found["copy_count"], found["links"][0]["conversions"]) == (0, [])
    assert found["peak_bytes_per_bank"]["l1"] == 3 * 8192


def test_a_hand_over_that_copies_says_bytes_and_what_another_layout_saves(
    cli: Cli, binaries: Path
) -> None:  # fmt: skip
    done = cli("inspect", "layer.ttnn", "head.ttnn", "--wire=layer.result0=head.arg0", "--json")
    found = json.loads(done.out)
    (copy_line,) = found["copies"]
    assert copy_line["nbytes"] == 320 * 128 * 2
    assert copy_line["source"].endswith("height_sharded(2x8 cores,32x128)")
    assert found["advice"] == [
        "compile layer with output result0 in bf16:l1:tile:block_sharded(5x2 cores,64x64): "
        f"-1 copy, -81920 B, -{copy_line['seconds'] * 1e6:.1f} us a pass"
    ]
    assert any("temporaries in DRAM" in line for line in found["lacking"])


@pytest.mark.parametrize(
    ("first", "second"), [("real.ttnn", "double.ttb"), ("layer.ttnn", "wide.ttb")]
)
def test_foreign_binaries_stitch_with_ours(
    cli: Cli, binaries: Path, first: str, second: str
) -> None:
    done = cli("inspect", first, second, "--json")
    found = json.loads(done.out)
    assert found["machine"] == "wormhole_b0"
    assert found["copy_count"] == 1


def test_a_run_without_data_takes_foreign_binaries(cli: Cli, binaries: Path) -> None:
    done = cli("run", "layer.ttnn", "head.ttnn", "--wire=layer.result0=head.arg0",
               "--executor=null", "--explain")  # fmt: skip
    assert done.code == 0
    assert "wormhole_b0: 2 program runs" in done.out
    assert "note: layer.ttnn: temporaries in DRAM (2176 B per bank) are in no plan" in done.err


def test_a_device_that_does_not_fit_is_answered_with_the_machine_of_the_file(
    cli: Cli, binaries: Path
) -> None:
    done = cli("run", "real.ttnn", "--executor=null", "--device=blackhole_p150")
    assert done.code == 4
    assert "try: run it on the machine that its file describes: stitch-run without" in done.err
    assert "again, with its own compiler, for 'blackhole_p150'" in done.err


def test_a_run_with_data_is_refused_in_one_message(cli: Cli, binaries: Path) -> None:
    done = cli("run", "real.ttnn")
    assert done.code == 4
    assert "program 'forward' is opaque" in done.err
    assert "try: stitch-run --executor=null" in done.err


def test_linking_refuses_opaque_programs(cli: Cli, binaries: Path) -> None:
    done = cli("link", "layer.ttnn", "wide.ttb", "-o", "both.ttb")
    assert done.code == 6
    assert "program 'layer' is opaque" in done.err
    assert not (binaries / "both.ttb").exists()


def test_a_pipeline_file_takes_foreign_binaries(cli: Cli, binaries: Path) -> None:
    (binaries / "chain.yaml").write_text(
        "modules: {first: layer.ttnn, second: layer.ttnn}\n"
        "inputs: {x: {shape: [320, 128], type: bfloat16}, w: {shape: [128, 128], type: float32}}\n"
        "steps:\n"
        "  - {run: first, inputs: [x, w], outputs: [h]}\n"
        "  - {run: second, inputs: [h, w], outputs: [y]}\n"
        "outputs: [y]\n"
    )
    done = cli("run", "chain.yaml", "--dry_run")
    assert (done.code, done.out.count("wormhole_b0: 2 program runs")) == (0, 1)


def test_beside_programs_whose_time_is_known_they_are_counted(cli: Cli, binaries: Path) -> None:
    out = cli("run", "real.ttnn", "double.ttb", "--wire=0.0=1.0", "--dry_run").out
    assert " us simulated, without 1 run of opaque programs" in out
    assert "opaque ones" not in cli("run", "double.ttb", "--dry_run").out


def test_a_file_without_checksums_is_not_said_to_be_unchanged(cli: Cli, binaries: Path) -> None:
    out = cli("inspect", "real.ttnn", "--verify=full").out
    assert "the file has no checksums" in out
    assert "all checksums match" not in out

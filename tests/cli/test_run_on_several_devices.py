"""`stitch-run --devices`: the outputs of one device, one report of all, and wrong options."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch.cli import compile_main, run_main
from tests.cli.conftest import Run
from tests.cli.test_cli_run import STATEFUL

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
CHAIN = ("run", "a.ttb", "b.ttb", "--input=x=@x.npy")
#: Links so fast that a second device helps.
SPECIFICATION = """\
devices:
  left:  {machine: wormhole_n150}
  right: {machine: wormhole_n150}
links:
  - {from: left, to: right, latency_seconds: 0, bytes_per_second: 1.0e+18}
"""


def test_the_digits_on_two_devices_give_the_bytes_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("features", "classifier"):
        words = (str(DIGITS / f"{name}.yaml"), "-o", f"{name}.ttb")
        assert compile_main(words) == 0
    with np.load(DIGITS / "digits.npz") as digits:
        np.save("x.npy", digits["images"][digits["held_out"]] / np.float32(16))
    Path("two.yaml").write_text(SPECIFICATION)
    run = ("features.ttb", "classifier.ttb", "--input=@x.npy", "--num_runs=3")
    assert run_main((*run, "--output=@one.npy")) == 0
    several = ("--backend=local", "--devices=two.yaml", "--result_file=r.json")
    assert run_main((*run, "--output=@two.npy", *several)) == 0
    told = json.loads(Path("r.json").read_text())
    assert [each["totals"]["programs"] for each in told["devices"].values()] == [3, 3]
    assert (told["messages"]["Run"], told["crossings"]) == (2 * 3, 3)
    assert Path("two.npy").read_bytes() == Path("one.npy").read_bytes()


def test_one_report_tells_of_all_devices(cli: Run) -> None:
    Path("two.yaml").write_text(SPECIFICATION)
    done = cli(*CHAIN, "--devices=two.yaml", "--explain", "--memory", "--print_statistics",
               "--num_runs=4", "--warmup_runs=1", "--loops=2", "--in_flight=3", "--trace=t.json",
               "--result_file=r.json")  # fmt: skip
    assert done.code == 0, done.err
    assert "8 timed passes in " in done.out
    assert "at most 3 at a time" in done.out
    assert "mesh two: 20 runs of pieces, 10 values travelled, 0 restarts" in done.out
    told = json.loads(Path("r.json").read_text())
    assert told["result"] == "pass"
    assert (told["mesh"], told["backend"], told["in_flight"]) == ("two", "local", 3)
    assert told["passes"] == 10
    assert list(told["devices"]) == ["left", "right"]
    for name, device in told["devices"].items():
        assert f"device {name} (wormhole_n150)" in done.out
        assert (device["pid"], device["restarts"]) == (os.getpid(), 0)
        assert device["totals"]["programs"] == 10
    assert (told["messages"]["Run"], told["crossings"]) == (2 * 10, 10)
    trace = json.loads(Path("t.json").read_text())
    pieces = [line for line in trace["traceEvents"] if line.get("cat") == "piece"]
    assert len(pieces) == 2 * 10


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--backend=local",), 2, "--backend has no effect without --devices"),
        (("--address=auto",), 2, "--address has no effect without --devices"),
        (("--in_flight=2",), 2, "--in_flight has no effect without --devices"),
        (("--devices=2", "--in_flight=0"), 2, "takes an integer of at least 1, not '0'"),
        (("--devices=2", "--backend=rai"), 2, "takes local or ray, not 'rai': did you mean"),
        (("--devices=2", "--address=auto"), 2, "the address is of a Ray cluster"),
        (("--devices=0",), 2, "this number of devices is not possible"),
        (("--devices=65",), 2, "expected: 1 to 64"),
        (("--devices=nowhere.yaml",), 3, "nowhere.yaml"),
        (("--devices=wrong.yaml",), 3, "self_link"),
        (("--devices=two.yaml", "--device=tiny"), 2, "--device does too"),
        (("--devices=2", "--visualizer=v"), 2, "--visualizer is for a run on one device"),
        (("--devices=2", "--expected_operations=reference"), 2, "--expected_operations is for"),
        (("--devices=2", "--record=r.json"), 2, "--record is for a run on one device"),
        (("--devices=2", "--save_artifacts"), 2, "--save_artifacts is for a run on one device"),
        (("--devices=2", "--max_copies=3"), 2, "--max_copies is for a run on one device"),
        (("--devices=2", "--window=3"), 2, "--window is for a run on one device"),
        (("--devices=2", "--dry_run", "--output=@y.npy"), 2, "--dry_run executes nothing"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_error(
    cli: Run, words: tuple[str, ...], code: int, said: str
) -> None:
    Path("two.yaml").write_text(SPECIFICATION)
    Path("wrong.yaml").write_text(SPECIFICATION.replace("to: right", "to: left"))
    done = cli(*CHAIN, *words)
    assert done.code == code, done.err
    assert said in done.err
    assert done.err.count("stitch-run: ") == 1


def test_an_error_on_a_device_ends_the_run_and_is_in_the_result_file(cli: Run) -> None:
    spec: Any = SPECIFICATION.replace("wormhole_n150", "tiny")
    Path("two.yaml").write_text(spec)
    done = cli(*CHAIN, "--devices=two.yaml", "--result_file=r.json")
    assert done.code == 4, done.err
    assert "tiny" in done.err
    assert json.loads(Path("r.json").read_text())["exit_code"] == 4


def test_outputs_are_compared_and_every_pass_begins_with_the_states_of_the_files(
    cli: Run,
) -> None:
    Path("counts.py").write_text(STATEFUL)
    done = cli("compile", "--entry=counts.py:make", "--target=tiny", "--split=2", "-o", "m.ttb")
    assert done.code == 0, done.err
    run = ("run", "m.0.ttb", "m.1.ttb", "--input=x=2xf32=1 2", "--num_runs=3")
    assert cli(*run, "--output=@one.npz").code == 0
    Path("two.yaml").write_text(SPECIFICATION.replace("wormhole_n150", "tiny"))
    done = cli(*run, "--output=@two.npz", "--devices=two.yaml", "--expected_output=@one.npz")
    assert done.code == 0, done.err
    assert "[SUCCESS] 3 results as expected" in done.out
    assert Path("two.npz").read_bytes() == Path("one.npz").read_bytes()
    done = cli(*run, "--devices=2", "--expected_output=count=i64=7")
    assert done.code == 1, done.err
    assert "[FAILED] result[" in done.out


def test_a_dry_run_tells_pieces_traffic_memory_and_time_and_computes_nothing(cli: Run) -> None:
    Path("two.yaml").write_text(SPECIFICATION)
    done = cli("run", "a.ttb", "b.ttb", "--devices=two.yaml", "--dry_run", "--num_runs=5",
               "--result_file=r.json")  # fmt: skip
    assert done.code == 0, done.err
    (plan,) = json.loads(Path("r.json").read_text())["plans"]
    assert plan["runs"] == 1 and plan["seconds"] > 0
    assert "two: 2 pieces on 2 devices, 5 micro-batches" in done.out
    assert "left -> right: 1 value, 128 B a micro-batch" in done.out
    assert "right (wormhole_n150): busy" in done.out
    assert "planned only" in done.out
    assert "result[0]" not in done.out


PIPELINE = """\
devices: two.yaml
modules:
  first: {file: a.ttb, device: right}
  cell: {file: cell.ttb, device: left}
inputs:
  x: {shape: [4, 8], type: float32}
  xs: {shape: [3, 4, 8], type: float32}
steps:
  - {run: first, inputs: {x: x}, outputs: {y: h}}
  - repeat: 3
    carry: {h: h_new}
    collect: {hs: h_new}
    steps:
      - {run: cell, inputs: {x: "xs[i]", h: h}, outputs: {h_next: h_new}}
  - {run: first, inputs: [h], outputs: [last]}
outputs: {result: last, states: hs}
"""


def test_a_pipeline_file_runs_on_the_devices_that_it_names(cli: Run) -> None:
    Path("two.yaml").write_text(SPECIFICATION)
    Path("p.yaml").write_text(PIPELINE)
    Path("one.yaml").write_text(
        PIPELINE.replace("devices: two.yaml\n", "").replace(", device: right", "")
        .replace(", device: left", "")
    )  # fmt: skip
    np.save("xs.npy", np.arange(96, dtype=np.float32).reshape(3, 4, 8))
    given = ("--input=x=@x.npy", "--input=xs=@xs.npy")
    assert cli("run", "one.yaml", *given, "--output=@one.npz").code == 0
    done = cli("run", "p.yaml", *given, "--output=@two.npz", "--result_file=r.json")
    assert done.code == 0, done.err
    assert Path("two.npz").read_bytes() == Path("one.npz").read_bytes()
    devices = json.loads(Path("r.json").read_text())["devices"]
    assert devices["right"]["totals"]["programs"] >= 2
    assert devices["left"]["totals"]["programs"] >= 3
    done = cli("run", "p.yaml", "--dry_run")
    assert done.code == 0, done.err
    assert "two: 3 pieces on 2 devices" in done.out
    # `--devices` wins over the file, whose modules name devices that it does not have.
    done = cli("run", "p.yaml", *given, "--devices=2")
    assert done.code == 2
    assert "no device 'right'" in done.err and "p.yaml:3" in done.err


def test_ray_that_is_not_installed_is_one_error(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "stitch.mesh.ray_carrier", raising=False)
    done = cli(*CHAIN, "--devices=2", "--backend=ray")
    assert done.code == 2
    assert "needs 'ray', which is not installed" in done.err
    assert "pip install 'stitch-runtime[ray]'" in done.err


@pytest.mark.campaign("mesh")
def test_on_ray_every_device_has_a_process_and_the_outputs_are_those_of_one(cli: Run) -> None:
    pytest.importorskip("ray")
    Path("two.yaml").write_text(SPECIFICATION)
    assert cli(*CHAIN, "--output=@one.npy").code == 0
    done = cli(*CHAIN, "--output=@two.npy", "--devices=two.yaml", "--backend=ray",
               "--num_runs=3", "--result_file=r.json", "--trace=t.json")  # fmt: skip
    assert done.code == 0, done.err
    assert Path("two.npy").read_bytes() == Path("one.npy").read_bytes()
    told = json.loads(Path("r.json").read_text())
    pids = {device["pid"] for device in told["devices"].values()}
    assert len(pids | {os.getpid()}) == 3
    assert (told["messages"]["Run"], told["crossings"]) == (2 * 3, 3)
    clocks = json.loads(Path("t.json").read_text())["otherData"]["clocks"]
    assert all(clock["error_seconds"] < 0.5 for clock in clocks.values())

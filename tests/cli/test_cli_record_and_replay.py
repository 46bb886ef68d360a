"""`--record` and `--replay`: allocator events happen again exactly, and a difference is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import FormatError
from stitch.report.run_record import Recorder, read_record, replay
from tests.support.stitched_models import one

Cli = Callable[..., Any]


@pytest.fixture
def recording(cli: Cli) -> dict[str, Any]:
    """What a run of three passes recorded."""
    run = ("run", "--module=a.ttb", "--module=b_dram.ttb", "--init=ones", "--loops=3")
    assert cli(*run, "--record=run.json").code == 0
    body: dict[str, Any] = json.loads(Path("run.json").read_text())
    return body


def test_a_recording_replays(cli: Cli, recording: dict[str, Any]) -> None:
    done = cli("run", "--replay=run.json")
    assert done.code == 0 and "[SUCCESS]" in done.out and "3 plan runs" in done.out
    kinds = {event["event"] for event in recording["events"]}
    assert kinds == {"reserve", "run", "free", "read"}


def test_the_same_run_records_the_same_events(cli: Cli, recording: dict[str, Any]) -> None:
    run = ("run", "--module=a.ttb", "--module=b_dram.ttb", "--init=ones", "--loops=3")
    assert cli(*run, "--record=again.json").code == 0
    again = json.loads(Path("again.json").read_text())
    assert again["events"] == recording["events"]


def test_a_record_without_source_locations_replays(cli: Cli, recording: dict[str, Any]) -> None:
    for plan in recording["plans"].values():
        for task in plan["request"]["tasks"]:
            assert task["transformation"].pop("input_locations") in (["a.yaml:7"], ["b.yaml:5"])
            assert task["transformation"].pop("output_locations") in (["a.yaml:8"], ["b.yaml:5"])
    Path("run.json").write_text(json.dumps(recording))
    assert cli("run", "--replay=run.json").code == 0


@pytest.mark.parametrize("step", ["Allocate", "Free"])
def test_a_missing_step_is_named(cli: Cli, recording: dict[str, Any], step: str) -> None:
    steps = recording["plans"]["1"]["steps"]
    steps.remove(next(s for s in steps if s["is"] == step))
    Path("run.json").write_text(json.dumps(recording))
    done = cli("run", "--replay=run.json")
    assert done.code == 6 and "differs from the record" in done.err
    assert re.search(r"event \d+ \(event=run plan=1\)", done.err)


def test_a_shifted_address_is_named_with_its_event(cli: Cli, recording: dict[str, Any]) -> None:
    reserved = recording["events"][0]
    assert reserved["event"] == "reserve"
    recording["events"].insert(1, dict(reserved))
    Path("run.json").write_text(json.dumps(recording))
    done = cli("run", "--replay=run.json")
    assert done.code == 6 and "event 1 (event=reserve" in done.err and "taken" in done.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body.update(stitch="model"), "no record"),
        (lambda body: body.update(version=3), "another version"),
        (lambda body: body.update(events=3), "events"),
        (lambda body: body["machine"].pop("shape"), "no 'shape'"),
        (lambda body: body["machine"]["shape"].update(name=3), "machine.shape.name"),
        (lambda body: body["plans"]["1"].update(steps=[{"is": "Burn"}]), "steps[0]"),
        (lambda body: body["plans"]["1"].update(steps=[{"is": "Free", "block": "0"}]), "block"),
        (lambda body: body["plans"].update(x=1), "not a number"),
        (lambda body: body["plans"]["1"]["request"]["tasks"][0]["inputs"].clear(), "tasks[0]"),
        (lambda body: body["events"].append({"event": "sing"}), "unknown event"),
        (
            lambda body: body["events"].append({"event": "run", "plan": 99}),
            "lacks the plan",
        ),
        (
            lambda body: body["events"].append({"event": "run", "plan": []}),
            "lacks the plan",
        ),
        (lambda body: body["events"].append({"event": "free", "space": "sky"}), "no space"),
        (lambda body: body["events"].append({"event": "free", "space": "l1"}), "address"),
    ],
)
def test_a_file_that_is_no_sound_recording_is_refused(
    cli: Cli, recording: dict[str, Any], change: Callable[[dict[str, Any]], object], said: str
) -> None:
    change(recording)
    Path("run.json").write_text(json.dumps(recording))
    done = cli("run", "--replay=run.json")
    assert done.code == 3 and said in done.err, done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 5000, '{"stitch": "run"}', "\udcff"])
def test_texts_that_are_no_recording_are_refused(text: str) -> None:
    with pytest.raises(FormatError):
        replay(text)


def test_moves_evictions_and_kept_results_replay(here: Path) -> None:
    # A small machine whose L1 overflows: results wait in DRAM and come back.
    builder = stitch.ComputationGraphBuilder("grow")
    x = builder.input("x", (64, 64), "float32")
    builder.output("y", x + 1.0)
    placement = ("input.x.space=l1", "output.y.space=l1")
    model = stitch.compile(builder.build(), target="tiny", placement=placement)
    with stitch.open_device("tiny", window=1) as device:
        recorder = Recorder(device)
        grow = device.load(model)
        kept = [grow(np.full((64, 64), i, np.float32)) for i in range(6)]
        again = [grow(tensor) for tensor in kept]
        assert [float(one(t).numpy()[0, 0]) for t in again] == [i + 2.0 for i in range(6)]
        del kept[::2]
        device.flush()
        text = recorder.text()
    done = replay(text)
    assert done.runs >= 12 and done.machine == "tiny"
    assert any(step.kind == "evict" for plan in read_record(text).plans.values()
               for step in plan.copies if hasattr(step, "kind"))  # fmt: skip


@pytest.mark.parametrize(
    "runs", [("--num_runs=5",), ("--num_runs=3", "--warmup_runs=2", "--loops=2")]
)
@pytest.mark.parametrize("window", ["--window=1", "--window=3", "--window=64"])
def test_explain_trace_record_and_result_file_of_one_run_agree(
    cli: Cli, runs: tuple[str, ...], window: str
) -> None:
    done = cli("run", "--module=a.ttb", "--module=b_dram.ttb", "--init=ones", *runs, window,
               "--explain", "--record=run.json", "--trace=trace.json", "--result_file=r.json",
               "--memory")  # fmt: skip
    assert done.code == 0, done.err
    said = re.search(r", (\d+) cop(?:y|ies), (\d+) B, .* \(whole run\)$", done.out, re.M)
    seen = re.search(r"the spaces saw (\d+) writes by copies and moves, (\d+) B$", done.out, re.M)
    assert said is not None and seen is not None and said.groups() == seen.groups()
    result, trace, record = (
        json.loads(Path(name).read_text()) for name in ("r.json", "trace.json", "run.json")
    )
    totals = {"period": "whole run", "copies": int(said[1]), "nbytes": int(said[2])}
    for found in (result["totals"], trace["otherData"], record["totals"]):
        assert totals.items() <= found.items()
    assert result["memory_writes"] == {"writes": int(said[1]), "nbytes": int(said[2])}
    listed = [(copy, plan["runs"]) for plan in result["plans"] for copy in plan["copies"]]
    listed += [(copy, 1) for copy in result["other_copies"]]
    assert sum(copy["times"] * times for copy, times in listed) == int(said[1])
    assert sum(copy["nbytes"] * copy["times"] * times for copy, times in listed) == int(said[2])
    assert cli("run", "--replay=run.json").code == 0
    assert "B per bank (whole run)" in done.out

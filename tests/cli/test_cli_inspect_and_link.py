"""`stitch-inspect` and `stitch-link`: what files hold, what stitching costs, joining for good."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.planner import Copy
from stitch.report.run_record import Recorder

Cli = Callable[..., Any]


def test_inspect_shows_slots_machine_memory_and_sizes(cli: Cli, here: Path) -> None:
    done = cli("inspect", "a.ttb")
    assert (done.code, done.err) == (0, "")
    assert "input  x: 4x8xf32 in f32:l1:row_major:interleaved" in done.out
    assert "output y: 4x8xf32 in f32:l1" in done.out
    assert "machine wormhole_n150: 8x8 cores" in done.out
    assert f"size {(here / 'a.ttb').stat().st_size} B" in done.out
    assert "constant 'w'" in done.out and "= MatMul" not in done.out


def test_a_file_whose_name_begins_as_an_option_is_named_with_its_folder(
    cli: Cli, here: Path
) -> None:
    (here / "a.ttb").rename(here / "-dash.ttb")
    done = cli("inspect", "-dash.ttb")
    assert done.code == 2 and "the file of that name is ./-dash.ttb" in done.err
    assert cli("inspect", "./-dash.ttb").code == 0


def test_sections_choose_what_is_shown(cli: Cli) -> None:
    operations = cli("inspect", "a.ttb", "--section=operations").out
    assert "MatMul x1, Relu x1" in operations and "input  x" not in operations
    assert "h: 4x8xf32 = MatMul(x, w)" in operations
    everything = cli("inspect", "a.ttb", "--section=all").out
    assert "MatMul" in everything and "input  x" in everything and "l1:" in everything


def test_operators_by_way_of_the_host_are_listed_before_a_run(cli: Cli, here: Path) -> None:
    said = "operators that --executor=cuda computes by way of the host: "
    assert said + "none\n" in cli("inspect", "a.ttb", "--executor=cuda").out
    said = said.replace("cuda", "torch:cpu-inductor")
    assert said + "none\n" in cli("inspect", "a.ttb", "--executor=torch:cpu-inductor").out
    b = stitch.ComputationGraphBuilder("sums")
    x = b.input("x", (4, 8), "float32")
    b.output("y", b.op("Relu", b.op("CumSum", x, np.array(0, np.int64), reverse=1)))
    stitch.compile(b.build(), target="cuda").save(here / "sums.ttb")
    found = json.loads(cli("inspect", "sums.ttb", "--executor=cuda", "--json").out)
    assert found["programs"][0]["by_way_of_the_host"] == ["CumSum"]
    assert cli("inspect", "a.ttb", "types.ttb", "--executor=cuda").code == 2


def test_json_is_for_programs(cli: Cli, here: Path) -> None:
    found = json.loads(cli("inspect", "types.ttb", "--json", "--section=all").out)
    assert found["format_version"] == "1.1"
    (program,) = found["programs"]
    assert [slot["type"] for slot in program["inputs"]] == ["3xi32", "3xi1", "3xbf16"]
    assert [op["op"] for op in program["operations"]] == ["Add", "Not", "Add"]
    size = found["size"]
    assert size["metadata"] + size["sealing"] + size["data"] == size["total"]
    assert size["total"] == (here / "types.ttb").stat().st_size
    spaces = program["memory"]["spaces"]
    parts = program["memory"]["parts"]
    for name, space in spaces.items():
        assert space["bytes_per_bank"] == sum(
            part["bytes_per_bank"] for part in parts if part["space"] == name
        )


def test_a_damaged_constant_is_found_only_with_verify_full(cli: Cli, here: Path) -> None:
    data = bytearray((here / "a.ttb").read_bytes())
    data[-1] ^= 1
    (here / "bad.ttb").write_bytes(data)
    assert cli("inspect", "bad.ttb").code == 0
    done = cli("inspect", "bad.ttb", "--verify=full")
    assert done.code == 3 and "CRC-32" in done.err
    assert cli("inspect", "a.ttb", "--verify=full").code == 0


def test_two_modules_in_the_same_place_cost_nothing(cli: Cli) -> None:
    done = cli("inspect", "a.ttb", "b.ttb")
    assert done.code == 0 and "can be stitched on wormhole_n150: 0 copies, 0 B" in done.out
    assert "advice" not in done.out


def test_two_modules_apart_cost_one_copy_and_the_advice_spares_it(cli: Cli) -> None:
    found = json.loads(cli("inspect", "a.ttb", "b_dram.ttb", "--json").out)
    assert (found["copy_count"], found["copy_nbytes"]) == (1, 128)
    assert found["copy_seconds"] > 0
    assert found["links"][0]["conversions"] == ["move l1 to dram"]
    advice = found["advice"][0]
    assert advice.startswith("compile b with --set input.x.space=l1: -1 copy, -128 B, -0.2 us")
    word = advice.split("--set ")[1].split(":")[0]
    assert cli("compile", "b.yaml", "-o", "advised.ttb", "--set", word).code == 0
    again = json.loads(cli("inspect", "a.ttb", "advised.ttb", "--json").out)
    assert again["copy_count"] == 0


def test_names_from_a_file_cannot_steer_the_terminal(cli: Cli, here: Path) -> None:
    builder = stitch.ComputationGraphBuilder("evil\x1b[2J")
    builder.output("y", builder.input("x", (2,), "float32") + 1.0)
    stitch.compile(builder.build()).save(here / "evil.ttb")
    for done in (
        cli("inspect", "evil.ttb"),
        cli("run", "--module=evil.ttb", "--init=ones", "--explain"),
        cli("run", "--module=evil.ttb", "--function=z"),
    ):
        assert "\x1b" not in done.out + done.err and "\\x1b[2J" in done.out + done.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "nothing to inspect"),
        (("gone.ttb",), 3, "gone.ttb"),
        (("a.yaml",), 3, "not a .ttb file"),
        (("a.ttb", "--wire=a.y=b.x"), 2, "several modules"),
        (("a.ttb", "--section=nothing"), 2, "operations"),
        (("--check-plan=gone.json",), 3, "gone.json"),
        (("--check-plan=a.yaml",), 3, "no record"),
        (("a.ttb", "--check-plan=run.json"), 2, "not both"),
        (("--check-plan", "a.ttb"), 2, "after the modules"),
        (("a.ttb", "b.ttb", "--device=nowhere"), 2, "nowhere"),
    ],
)
def test_what_cannot_be_inspected_is_said_with_its_exit_code(
    cli: Cli, words: tuple[str, ...], code: int, said: str
) -> None:
    done = cli("inspect", *words)
    assert done.code == code and said in done.err, done.err
    assert "Traceback" not in done.err


# -- plans -----------------------------------------------------------------------------------------


def test_a_forged_plan_is_not_confirmed(cli: Cli) -> None:
    run = ("run", "--module=a.ttb", "--module=b_dram.ttb", "--init=ones", "--record=run.json")
    assert cli(*run).code == 0
    body = json.loads(Path("run.json").read_text())
    steps = body["plans"]["1"]["steps"]
    between = [s for s in steps if s["is"] == Copy.__name__][-1]
    steps.remove(between)
    Path("forged.json").write_text(json.dumps(body))
    done = cli("inspect", "--check-plan=forged.json")
    assert done.code == 6 and "1 problem (1 content)" in done.out


# -- linking ---------------------------------------------------------------------------------------


def _with_branches(certificate: dict[str, Any]) -> dict[str, Any]:
    steps = {"is": "Branches", "steps": "b" * 1_000_000, "by_sums": False}
    return {**certificate, "kind": "packing", "branches": steps}


FORGERIES: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "another kind": lambda c: {**c, "kind": "cycle"},
    "doubled": lambda c: {**c, "pieces": c["pieces"] * 2, "gaps": c["gaps"] * 2},
    "truncated": lambda c: {**c, "pieces": c["pieces"][:-1]},
    "empty": lambda c: {**c, "pieces": [], "gaps": []},
    "negative": lambda c: {**c, "pieces": [-size for size in c["pieces"]]},
    "huge": lambda c: {**c, "gaps": [2**62]},
    "many pieces": lambda c: {**c, "pieces": [32] * 100_000, "gaps": [32] * 100_000},
    "a million branches": _with_branches,
    "undecided": lambda c: {**c, "kind": "undecided", "pieces": c["pieces"][1:]},
    "none": lambda c: None,
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_record_with_forged_certificates_is_not_confirmed(
    cli: Cli, here: Path, forgery: str
) -> None:
    record = json.loads(_record_of_a_crowd())
    plans = record["plans"].values()
    steps = (step for plan in plans for step in plan["steps"] if step["is"] == "Copy")
    step = next(step for step in steps if step["certificate"] is not None)
    step["certificate"] = FORGERIES[forgery](step["certificate"])
    (here / "forged.json").write_text(json.dumps(record))
    done = cli("inspect", "--check-plan=forged.json")
    kind = "uncertified" if forgery == "none" else "certificate"
    assert done.code == 6 and f" {kind})" in done.out and len(done.out) < 100_000
    assert "Traceback" not in done.err


def test_a_number_that_no_machine_type_holds_is_a_bad_file(cli: Cli, here: Path) -> None:
    record = json.loads(_record_of_a_crowd())
    step = next(s for plan in record["plans"].values() for s in plan["steps"] if "seconds" in s)
    for field, said in (("seconds", "a number"), ("nbytes", "an integer of 64 bits")):
        step |= {field: 10**400}
        (here / "large.json").write_text(json.dumps(record))
        done = cli("inspect", "--check-plan=large.json")
        assert done.code == 3 and said in done.err and "internal" not in done.err
        step |= {field: 0}


FORGED_USES: dict[str, Callable[[list[list[int]]], list[list[int]]]] = {
    "no such value": lambda uses: [*uses, [1_000, 9]],
    "a negative value": lambda uses: [[-1, 9], *uses],
    "a huge value": lambda uses: [*uses, [2**62, 9]],
    "doubled": lambda uses: [*uses, uses[-1]],
    "out of order": lambda uses: uses[::-1],
    "before the end": lambda uses: [[value, 0] for value, _ in uses],
    "a hundred thousand": lambda uses: uses[:1] * 100_000,
    "a hundred thousand in order": lambda uses: [[value, 9] for value in range(100_000)],
}


@pytest.mark.parametrize("forgery", FORGED_USES)
def test_a_record_with_uses_that_cannot_be_predicted_is_not_confirmed(
    cli: Cli, here: Path, forgery: str
) -> None:
    record = json.loads(_record_of_a_crowd())
    plan = record["plans"][max(record["plans"], key=int)]
    assert plan["request"]["later"] == []
    plan["request"]["later"] = foretold = [[value, 1] for value in plan["request"]["kept"]]
    assert len(foretold) > 1
    (here / "right.json").write_text(json.dumps(record))
    assert cli("inspect", "--check-plan=right.json").code == 0
    plan["request"]["later"] = FORGED_USES[forgery](foretold)
    (here / "forged.json").write_text(json.dumps(record))
    done = cli("inspect", "--check-plan=forged.json")
    assert done.code == 6 and done.out.count(" later)") == 1 and len(done.out) < 10_000
    assert "Traceback" not in done.err


def test_kinds_of_certificates_are_counted_and_older_records_read(cli: Cli, here: Path) -> None:
    record = json.loads(_record_of_a_crowd())
    for plan in record["plans"].values():
        for step in plan["steps"]:
            if step["is"] == "Copy" and step["certificate"] is not None:
                del step["certificate"]["branches"]
    (here / "old.json").write_text(json.dumps(record))
    done = cli("inspect", "--check-plan=old.json")
    assert done.code == 0 and "1 certificate (1 capacity): sound" in done.out
    found = json.loads(cli("inspect", "--check-plan=old.json", "--json").out)
    counts = [(plan["certificates"], plan["kinds"]) for plan in found["plans"]]
    assert (1, {"capacity": 1}) in counts and (0, {}) in counts


def _record_of_a_crowd() -> str:
    """Results fill a small L1, and some wait in DRAM."""
    builder = stitch.ComputationGraphBuilder("grow")
    x = builder.input("x", (64, 64), "float32")
    builder.output("y", x + 1.0)
    placement = ("input.x.space=l1", "output.y.space=l1")
    model = stitch.compile(builder.build(), target="tiny", placement=placement)
    with stitch.open_device("tiny", window=1) as device:
        recorder = Recorder(device)
        grow = device.load(model)
        kept = [grow(np.full((64, 64), i, np.float32)) for i in range(6)]
        device.flush()
        del kept
        return recorder.text()


def test_linked_modules_compute_the_same_bits(cli: Cli) -> None:
    done = cli("link", "a.ttb", "b_dram.ttb", "-o", "ab.ttb", "--name=whole")
    assert done.code == 0 and "linked into 'whole'" in done.out
    pair = ("--module=a.ttb", "--module=b_dram.ttb")
    assert cli("run", *pair, "--init=randn", "--output=@apart.npy").code == 0
    assert cli("run", "--module=ab.ttb", "--init=randn", "--output=@joined.npy").code == 0
    assert np.load("apart.npy").tobytes() == np.load("joined.npy").tobytes()


def test_wires_and_kept_outputs_decide_what_is_left(cli: Cli) -> None:
    words = ("a.ttb", "b.ttb", "cell.ttb", "-o", "abc.ttb")
    wires = ("--wire=a.y=b.x", "--wire=a.y=cell.x", "--wire=b.y=cell.h", "--keep=b.y")
    assert cli("link", *words, *wires).code == 0
    program = stitch.load("abc.ttb").programs[0]
    assert [slot.name for slot in program.inputs] == ["x"]
    assert len(program.outputs) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("a.ttb",), 2, "at least two"),
        (("a.ttb", "gone.ttb"), 3, "gone.ttb"),
        (("a.ttb", "types.ttb"), 6, "does not fit"),
        (("a.ttb", "b.ttb", "--keep=a.z"), 2, "has no output 'z'"),
        (("a.ttb", "b.ttb", "--wire=b.y=a.x"), 2, "backwards"),
        (("a.ttb", "small.ttb"), 4, "compile both for the same machine"),
    ],
)
def test_what_cannot_be_linked_is_said_and_nothing_is_written(
    cli: Cli, here: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    assert cli("compile", "b.yaml", "-o", "small.ttb", "--target=tiny").code == 0
    done = cli("link", *words, "-o", "o.ttb")
    assert done.code == code and said in done.err, done.err
    assert not (here / "o.ttb").exists()


def test_a_missing_file_is_named_before_a_missing_option(cli: Cli) -> None:
    for words in (("a.tb",), ("a.tb", "b.ttb")):
        done = cli("link", *words)
        assert done.code == 3 and "where: a.tb" in done.err and "try: " in done.err
    done = cli("link", "a.ttb", "b.ttb")
    assert done.code == 2 and "expected: -o FILE" in done.err


def test_a_recording_that_is_taken_for_a_module_is_sent_where_it_belongs(
    cli: Cli, here: Path
) -> None:
    assert cli("run", "a.ttb", "--init=ones", "--record=r.json").code == 0
    done = cli("inspect", "r.json")
    assert done.code == 3 and "got: JSON text" in done.err
    assert "stitch-inspect --check_plan=FILE" in done.err
    assert cli("inspect", "--check_plan=r.json").code == 0
    assert cli("run", "--replay=r.json").code == 0


def test_the_plan_for_modules_is_confirmed(cli: Cli) -> None:
    done = cli("inspect", "a.ttb", "b_dram.ttb", "--check-plan")
    assert done.code == 0 and done.out.strip().endswith("sound")


def test_of_many_plans_with_problems_the_first_are_shown_and_the_rest_counted(cli: Cli) -> None:
    body = json.loads(_record_of_a_crowd())
    plan = max(body["plans"].values(), key=lambda plan: len(plan["steps"]))
    steps = [step for step in plan["steps"] if step["is"] != Copy.__name__]
    # No two of them have as many steps.
    body["plans"] = {str(n): {**plan, "steps": steps * n} for n in range(1, 40)}
    Path("long.json").write_text(json.dumps(body))
    done = cli("inspect", "--check-plan=long.json")
    assert done.code == 6
    assert done.out.splitlines()[-1] == "and 19 more plans, 19 with problems (--json lists them)"

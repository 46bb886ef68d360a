"""The benchmark of functions over nests: every suite runs on small data, its rows and figures are
there, and its goals are missed where they should be."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from stitch.compiler import SCHEDULES
from tests.support.benches import load_bench, run_bench

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

SMALL = (
    "--depth=2", "--length=4", "--batch=2", "--hidden=8", "--attention=32", "--count=64",
    "--widths=4", "--depths=1,2", "--sentences=5", "--words=9", "--rounds=1",
    "--executors=numpy,torch", "--no-compile",
)  # fmt: skip


@pytest.fixture
def fractal() -> ModuleType:
    return load_bench("fractal")


@pytest.fixture
def results(fractal: ModuleType) -> ModuleType:
    return importlib.import_module("fractal_ways.results")


def measured(
    fractal: ModuleType, capsys: pytest.CaptureFixture[str], suite: str, *words: str
) -> list[dict[str, Any]]:
    """What a suite prints as JSON on small data."""
    assert fractal.main([*SMALL, f"--suite={suite}", *words, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


#: The peers of each network, beside its loops in PyTorch.
PEERS = {
    "lstm": {
        "torch.nn.LSTM", "onnxruntime, LSTM operators", "onnxruntime, Scan of cells",
        "onnxruntime, Scan, inputs before it",
    },
    "dilated": set(),
    "grid": set(),
    "gemm": {"torch, whole matrices"},
    "flash": {"torch scaled_dot_product_attention"},
    "bigbird": {"torch scaled_dot_product_attention of gathered blocks"},
    "ragged": {"onnxruntime, a Scan for each list", "onnxruntime, SequenceMap of a Scan"},
    "sentences": {"torch.nn.LSTM, packed in each run", "torch.nn.LSTM, packed before"},
}  # fmt: skip


#: Those of the quick suite: each compiles every schedule of a network anew.
QUICK = (("lstm", "numpy,torch"), ("grid", "numpy"))
LONG = pytest.mark.campaign("benchmarks")


@pytest.mark.parametrize(
    ("suite", "executors"),
    [
        pytest.param(suite, executors, marks=() if (suite, executors) in QUICK else LONG)
        for suite in PEERS for executors in ("numpy", "numpy,torch")
    ],
)  # fmt: skip
def test_a_network_is_measured_by_every_executor_beside_its_peers(
    fractal: ModuleType, capsys: pytest.CaptureFixture[str], suite: str, executors: str
) -> None:
    result, *_ = measured(fractal, capsys, suite, f"--executors={executors}")
    peers = {row["way"] for row in result["rows"] if row["side"] == "peer"}
    assert peers == {"torch eager loops", *PEERS[suite]}
    ours = [row for row in result["rows"] if row["side"] == "ours"]
    assert {row["way"] for row in ours} == {f"stitch {e}, chosen" for e in executors.split(",")}
    named = [row["way"] for row in result["rows"] if row["side"] == "ours, schedules by name"]
    assert {way.split(", ")[1] for way in named} <= {*SCHEDULES}
    assert [row["way"] for row in result["rows"] if row["side"] == "ours, mode parallel"] == [
        "stitch numpy, in mode parallel"
    ]
    assert result["absent"] == {}
    assert [row["way"].split(", ")[:2] for row in result["rows"] if row["side"].startswith("one")] \
        == [["mode sequential", "once"], ["compiled", "numpy"]]  # fmt: skip
    assert all(row["clock_ms"] > 0 for row in result["rows"])
    figures = {figure["name"]: figure for figure in result["figures"]}
    goal = figures["ours / torch eager loops (EAGER_GOAL)"]
    eager = next(r["processor_ms"] for r in result["rows"] if r["way"] == "torch eager loops")
    assert goal["most"] == 1.0
    assert goal["value"] == pytest.approx(min(row["processor_ms"] for row in ours) / eager)
    # Some have a goal, whose name stands behind the peer's.
    names = {name.partition(" (")[0] for name in figures}
    assert {f"ours / {peer}" for peer in PEERS[suite]} < names
    assert figures["mode sequential / compiled, small"]["value"] > 0


@LONG
def test_attention_is_measured_in_blocks_by_hand_and_of_single_queries(
    fractal: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured(fractal, capsys, "flash", "--attention=256", "--executors=numpy")
    assert [result["name"].partition("length ")[2] for result in found] == [
        "256", "256, queries one by one, blocks of 64 keys",
        "256, blocks of 128 queries, blocks of 64 keys", "64, queries one by one, keys one by one",
    ]  # fmt: skip
    for result in found[1:]:
        ways = {row["way"] for row in result["rows"]}
        assert {"torch scaled_dot_product_attention", "stitch numpy, chosen"} < ways
        # Beside what is chosen, single queries in blocks and all at once; nobody waits for rounds.
        if "queries one by one" in result["name"]:
            assert "stitch numpy, rounds" not in ways


def test_the_schedule_chosen_is_measured_against_the_best_by_name(fractal: ModuleType) -> None:
    networks = importlib.import_module("fractal_ways.networks")
    results = importlib.import_module("fractal_ways.results")
    row, ours, named = results.Row, results.OURS, results.NAMED
    rows = [
        row("stitch numpy, chosen", ours, 3.0, 1.0), row("stitch numpy, rows", named, 2.0, 1.0),
        row("stitch numpy, in mode parallel", results.TRACED, 1.0, 1.0),
        row("stitch auto, chosen", ours, 1.0, 1.0), row("stitch auto, rows", named, 2.0, 1.0),
        row("numpy, chosen", results.PEER, 0.5, 1.0),
    ]  # fmt: skip
    (figure,) = networks._choices(rows, ["numpy", "auto", "torch"])
    assert (figure.value, figure.note) == (1.5, "numpy")
    assert [*networks._choices(rows[:1], ["numpy"])] == []


def test_small_stacks_are_of_the_depth_and_twice_that(
    fractal: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured(fractal, capsys, "small", "--executors=numpy")
    assert [result["name"] for result in found] == [
        "stacked LSTM, hidden 4, depth 2", "stacked LSTM, hidden 4, depth 4"
    ]  # fmt: skip


@LONG
def test_loops_are_compiled_by_torch_too(
    fractal: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    backends: list[bool] = []

    def compiled(part: Any, *, dynamic: bool) -> Any:
        backends.append(dynamic)
        return part

    monkeypatch.setattr(torch, "compile", compiled)
    words = [word for word in SMALL if word != "--no-compile"]
    assert fractal.main([*words, "--suite=gemm", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert "torch.compile of the loops" in {row["way"] for row in result["rows"]}
    assert backends == [False]

    def without_a_compiler(part: Any, *, dynamic: bool) -> Any:
        def called(*_: Any) -> Any:
            raise RuntimeError("no C++ compiler\nwas found")

        return called

    monkeypatch.setattr(torch, "compile", without_a_compiler)
    assert fractal.main([*words, "--suite=gemm", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["absent"] == {"torch.compile of the loops": "no C++ compiler"}


def test_what_does_not_grow_with_the_length_is_measured(
    fractal: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    length, scan = measured(fractal, capsys, "length", "--count=256")
    figures = {figure["name"]: figure for figure in length["figures"]}
    assert [f"length {n}: {what}" in figures for n in (4, 256) for what in ("compile", "file")] == [
        True
    ] * 4
    assert figures["compile and first run less a later one, 256 / 4 (LENGTH_GOAL)"]["most"] == 1.5
    # One loop of any length: not a byte more.
    assert figures["size of the file, 256 / 4 (FILE_GOAL)"]["value"] == 1.0
    (figure,) = scan["figures"]
    assert figure["name"] == "compile an ONNX Scan of 64 LSTM cells (ONNX_SCAN_GOAL_S)"
    assert figure["value"] > 0 and figure["most"] == 0.2 and "operation" in figure["note"]


def test_a_round_is_measured_beside_its_kernel(
    fractal: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (result,) = measured(fractal, capsys, "rounds")
    ours, hand = (row["processor_ms"] for row in result["rows"])
    (figure,) = result["figures"]
    assert figure["name"].endswith("(ROUND_GOAL_US)") and figure["most"] == 1.0
    assert figure["value"] == pytest.approx((ours - hand) / 64 * 1e3)


def test_a_training_step_is_measured_or_says_why_not(
    fractal: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (result,) = measured(fractal, capsys, "training")
    names = {row["way"] for row in result["rows"]}
    assert "torch.nn.LSTM" in names
    assert names | {*result["absent"]} == {"torch.nn.LSTM", "stitch numpy", "stitch torch"}
    assert not names & {*result["absent"]} and all(result["absent"].values())


def test_losses_of_another_network_are_never_timed(fractal: ModuleType) -> None:
    training = importlib.import_module("fractal_ways.training_step")
    cases = importlib.import_module("fractal_ways.recurrent_cases")
    weights = cases.lstm_weights(2, 4)
    xs, wanted = cases.normal(3, 2, 4), cases.normal(3, 2, 4, seed=9)
    step = importlib.import_module("fractal_ways.torch_training").step
    run = step(xs, wanted, *weights, rate=training.RATE)
    losses = [run() for _ in range(training.COMPARED)]
    assert losses[0] > losses[-1]
    training._check("alike", losses, xs, wanted, weights)
    with pytest.raises(AssertionError, match="other"):
        training._check("other", losses[::-1], xs, wanted, weights)


def test_growth_counts_the_rounds_of_every_schedule(
    fractal: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (result,) = measured(fractal, capsys, "growth")
    rows = [row["way"] for row in result["rows"]]
    assert any(row.startswith("depth 1, chosen: 4 rounds") for row in rows)
    assert "depth 2, rounds: 8 rounds" in rows or "depth 2, chosen: 8 rounds" in rows
    assert [(f["value"], f["note"]) for f in result["figures"]] == [
        (0, "4 rounds"), (0, "5 rounds")
    ]  # fmt: skip


def test_growth_without_diagonals_misses_its_goal(fractal: ModuleType, results: ModuleType) -> None:
    growth = importlib.import_module("fractal_ways.growth")
    points = [(growth.Point(8, 2, "chosen", 8, 1.0, 1.0), "rounds")]
    result = growth.result_of(points, 8, 4, 2)
    (missed,) = results.missed_goals([result])
    assert "no schedule takes them" in missed
    points.append((growth.Point(8, 2, "wave", 6, 1.0, 1.0), "wave"))
    (missed,) = results.missed_goals([growth.result_of(points, 8, 4, 2)])
    assert missed.endswith("(WAVE_ROUNDS_GOAL) 1, not 0")


@pytest.mark.campaign("benchmarks")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells of memory")
def test_the_memory_of_attention_is_measured_in_processes_of_their_own(
    fractal: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (result,) = measured(fractal, capsys, "memory", "--attention=512")
    figures = {figure["name"]: figure for figure in result["figures"]}
    sizes = [figures[f"peak memory of stitch, length {n}"]["value"] for n in (128, 512)]
    ratio = figures["peak memory of stitch, 512 / 128 (MEMORY_GOAL)"]
    assert ratio["value"] == pytest.approx(sizes[1] / sizes[0])
    assert figures["peak memory of torch, length 512"]["value"] >= 0
    single = figures["peak memory of stitch (queries one by one), 512 / 128 (MEMORY_GOAL)"]
    assert single["most"] == ratio["most"]


def test_growth_is_drawn(
    fractal: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    page = tmp_path / "growth.html"
    (result,) = measured(fractal, capsys, "growth", f"--plot={page}")
    written = page.read_text(encoding="utf-8")
    # What plotly draws stands in the page as data.
    start = written.rindex("Plotly.newPlot(")
    traces, _ = json.JSONDecoder().raw_decode(written, written.index("[", start))
    assert [len(trace["x"]) for trace in traces if trace["name"] == "chosen"] == [2, 2]
    drawn = {
        (trace["name"], depth, rounds)
        for trace in traces if trace.get("xaxis") == "x2"
        for depth, rounds in zip(trace["x"], trace["y"], strict=True)
    }  # fmt: skip
    assert {f"depth {d}, {name}: {r} rounds" for name, d, r in drawn} == {
        row["way"] for row in result["rows"]
    }
    assert sum(trace["showlegend"] for trace in traces) == len({t["name"] for t in traces})


def test_the_table_names_goals_ratios_and_what_is_missing(results: ModuleType) -> None:
    cases = importlib.import_module("fractal_ways.cases")
    rows = (
        results.Row("mine", results.OURS, 2.0, 3.0, "hoisted"),
        results.Row("slower", results.OURS, 4.0, 2.0),
        # What nobody gets without asking for it has no part in ratios.
        results.Row("asked", results.NAMED, 0.5, 0.5),
        results.Row("theirs", results.PEER, 1.0, 1.0),
    )
    goals = (cases.RatioGoal("A_GOAL", "theirs", 1.5), cases.RatioGoal("B_GOAL", "gone", 1.0))
    absent = (cases.Absent("gone", "not installed (gone)"),)
    more = (results.Figure("bytes", 3.0, "x", 2.5), results.Figure("free", 7.0, "ms"))
    result = results.Result("net", "small", rows, absent, goals, more)
    # A peer that is absent has its reason in the table; its goal cannot be missed.
    assert results.missed_goals([result]) == [
        "net: ours / theirs (A_GOAL) 2 x, not 1.5", "net: bytes 3 x, not 2.5"
    ]  # fmt: skip
    table = result.table()
    assert table.startswith("net: small\n") and "not installed (gone)" in table
    (line,) = [line for line in table.splitlines() if "(A_GOAL)" in line]
    assert "1.5, missed" in line and "by the clock 3.00; mine" in line
    assert table.index("mine") < table.index("slower")
    met = results.Result("net", "small", rows, (), (cases.RatioGoal("A_GOAL", "theirs", 2.0),))
    assert results.missed_goals([met]) == [] and "2, met" in met.table()
    without_ours = results.Result("net", "small", rows[2:], (), goals[:1])
    (missed,) = results.missed_goals([without_ours])
    assert missed.endswith("not measured")


def test_a_missed_goal_is_the_exit_code(
    fractal: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["fractal_ways.round_cost"], "ROUND_GOAL_US", -1e9)
    assert fractal.main([*SMALL, "--suite=rounds"]) == 0
    assert fractal.main([*SMALL, "--suite=rounds", "--check"]) == 1
    printed = capsys.readouterr()
    assert "-1e+09, missed" in printed.out
    assert printed.err.count("goal missed: rounds: a round beside its kernel") == 2


def test_a_way_with_another_result_is_never_timed(fractal: ModuleType) -> None:
    networks = importlib.import_module("fractal_ways.networks")
    cases = importlib.import_module("fractal_ways.cases")
    recurrent = importlib.import_module("fractal_ways.recurrent_cases")
    case = recurrent.dilated_rnn(4, 2, 8, compiled=False, small=False)
    right = case.peers[0].make()
    wrong = cases.Peer("wrong", lambda: lambda: right() * np.float32(1.001))
    asked = cases.Case(case.name, "", case.network, case.given, (case.peers[0], wrong))
    with pytest.raises(AssertionError, match="wrong"):
        networks.measured(asked, ["numpy"], 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--suite=lstm,nosuch",), "no suite nosuch"),
        (("--executors=nosuch",), "no executor nosuch"),
        (("--hidden=64,x",), "'x'"),
        (("--depths=0",), "'0'"),
        (("--attention=31",), "from 32 on"),
        (("--suite=lstm", "--plot=a.html"), "draws the suite growth"),
        (("--plot=growth.png",), "growth.png"),
        (("--plot=nowhere/growth.html",), "nowhere"),
    ],
)
def test_wrong_arguments_are_one_line(
    fractal: ModuleType, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        fractal.main([*words])
    printed = capsys.readouterr()
    assert caught.value.code == 2 and printed.out == ""
    (line,) = [line for line in printed.err.splitlines() if "error: " in line]
    assert said in line and printed.err.endswith(f"{line}\n")


def test_without_plotly_nothing_is_measured_for_a_picture(
    fractal: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(SystemExit) as caught:
        fractal.main(["--suite=growth", "--plot=growth.html"])
    assert caught.value.code == 2
    assert "--plot needs plotly: pip install stitch-runtime[bench]" in capsys.readouterr().err


def test_it_runs_as_a_command() -> None:
    done = run_bench("fractal", *SMALL, "--suite=rounds")
    assert done.returncode == 0 and "ROUND_GOAL_US" in done.stdout, done.stderr

"""The benchmarks run, compare results before they time anything, and report as JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
from types import ModuleType

import numpy as np
import pytest

from tests.support.benches import load_bench


@pytest.fixture
def overhead() -> ModuleType:
    return load_bench("overhead")


def test_the_overhead_of_each_chain_is_reported(
    overhead: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--chains", "1,3", "--width", "8", "--batch", "2", "--machine", "tiny"]
    assert overhead.main([*words, "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["programs"] for row in rows] == [1, 3]
    for row in rows:
        assert row["pipeline_us"] > 0 and row["calls_us"] > 0 and row["hand_us"] > 0
        assert row["pipeline_us_per_program"] == pytest.approx(row["pipeline_us"] / row["programs"])


def test_every_missed_goal_is_named(overhead: ModuleType) -> None:
    def row(programs: int, ratio: float, calls: float) -> object:
        return overhead.Row("tiny", programs, 8, 1, *[1.0] * 3, ratio, *[1.0] * 4, calls)

    assert overhead.missed_goals([row(2, 1.3, 10.0), row(64, 1.3, 9.0)]) == []
    assert len(overhead.missed_goals([row(2, 1.31, 10.1), row(64, 1.0, 9.0)])) == 2
    (grows,) = overhead.missed_goals([row(2, 1.0, 1.0), row(64, 1.2, 1.0)])
    assert "its cost grows" in grows


def test_by_hand_is_the_network_that_the_programs_are(overhead: ModuleType) -> None:
    layers = overhead.make_layers(2, 8)
    x = overhead.np.ones((3, 8), overhead.np.float32)
    expected = x
    for w, b in layers:
        expected = overhead.np.maximum(expected @ w + b, 0)
    overhead.np.testing.assert_allclose(overhead.by_hand(layers, 3)(x), expected, rtol=1e-6)


@pytest.fixture
def peers() -> ModuleType:
    return load_bench("peers")


def test_ours_and_the_peers_give_the_same_results_and_are_reported(
    peers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--chains", "tiny", "--machines", "host", "--executors", "numpy", "onnxruntime"]
    words += ["--peers", "numpy", "onnxruntime", "torch", "--rounds", "1", "--json"]
    assert peers.main(words) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["absent"] == {}
    sides = [row["side"] for row in result["rows"]]
    assert {side: sides.count(side) for side in sides} == {
        "ours": 2, "calls": 2, "other form": 4, "peer": 4, "yardstick": 1,
    }  # fmt: skip
    least = {
        side: min(r["least_us"] for r in result["rows"] if r["side"] == side) for side in sides
    }
    assert result["ratio"] == pytest.approx(least["ours"] / least["peer"])
    assert result["ratio_to_hand"] == pytest.approx(least["ours"] / least["yardstick"])


def test_many_programs_are_linked_and_called_beside_the_sessions_of_their_goals(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chains = importlib.import_module("peer_ways.chains")
    (many,) = [chain for chain in chains.CHAINS if chain.name == "many"]
    few = dataclasses.replace(many, name="few", programs=many.programs[:5])
    monkeypatch.setattr(peers, "CHAINS", (few,))
    words = ["--chains", "few", "--machines", "host", "--executors", "numpy", "--rounds", "1"]
    assert peers.main([*words, "--forms", "float32", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert set(result["absent"]) == {"torch.compile", "iree"}
    least = {row["way"]: row["least_us"] for row in result["rows"]}
    assert [(goal["side"], goal["goal"]) for goal in result["more_goals"]] == [
        ("linked", 0.2), ("linked", 0.8), ("calls", 0.35)
    ]  # fmt: skip
    for goal in result["more_goals"]:
        assert goal["way"].startswith(f"stitch numpy, {goal['side']}")
        assert goal["least"] == pytest.approx(least[goal["way"]] / least[goal["peer"]])


def test_a_goal_of_linked_programs_is_missed_above_its_ratio_only(peers: ModuleType) -> None:
    cases = importlib.import_module("peer_ways.cases")
    goals = (cases.Goal("linked", "bound", 0.5), cases.Goal("calls", "bound", 0.5))
    rows = [peers.Row(*row) for row in (("mine", "ours", (1.0,)), ("one", "linked", (2.0,)),
                                        ("bound", "peer", (4.0,), "x"))]  # fmt: skip
    assert peers.missed_goals([peers.Result("m", "", 1.0, tuple(rows), (), False, goals)]) == []
    rows.append(peers.Row("calls", "calls", (2.5,)))
    (missed,) = peers.missed_goals([peers.Result("m", "", 1.0, tuple(rows), (), False, goals)])
    assert missed == "m: calls 0.62 x bound, not 0.5"


def test_a_way_with_another_result_is_never_timed(peers: ModuleType) -> None:
    chains = importlib.import_module("peer_ways.chains")
    case = chains.make_case(chains.Chain("small", ((3, 4), (4, 2)), 2, 1.0, 1))
    case.check(peers.Way("right", lambda x: case.expected, case.x))
    with pytest.raises(AssertionError, match="wrong"):
        case.check(peers.Way("wrong", lambda x: case.expected * 1.001, case.x))


def test_a_peer_that_is_missing_is_listed_with_its_reason(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peers.PEERS, "iree", ("a_package_that_is_not_installed", "peer"))
    words = ["--chains", "tiny", "--machines", "host", "--executors", "numpy"]
    words += ["--forms", "float32", "--peers", "iree", "--rounds", "1", "--check"]
    assert peers.main(words) == 1
    printed = capsys.readouterr()
    assert "not installed (a_package_that_is_not_installed)" in printed.out
    assert "every peer is missing" in printed.err


def test_a_goal_of_the_peers_is_missed_above_its_ratio_only(peers: ModuleType) -> None:
    def result(mine: float, other: float) -> object:
        # What is no dense form of ours, and what is no product, count for neither side.
        times = {"ours": mine, "peer": other, "other form": 0.1, "yardstick": 0.1}
        rows = tuple(peers.Row(side, side, (us,)) for side, us in times.items())
        return peers.Result("middle", "4-4", 1.03, rows, ())

    assert peers.missed_goals([result(1.03, 1.0)]) == []
    assert len(peers.missed_goals([result(1.04, 1.0)])) == 1


def test_a_peer_that_was_given_all_programs_as_one_counts_only_where_the_goal_says_so(
    peers: ModuleType,
) -> None:
    rows = (
        peers.Row("mine", "ours", (2.0, 4.0)),
        peers.Row("apart", "peer", (2.0, 5.0), "x"),
        peers.Row("as one", "peer", (1.0, 2.0), "x", stitched=False),
    )
    assert peers.missed_goals([peers.Result("m", "", 1.03, rows, (), stitched_only=True)]) == []
    result = peers.Result("m", "", 1.03, rows, ())
    assert result.ratio() == 2.0
    assert len(peers.missed_goals([result])) == 1
    assert result.as_data()["ratios"]["best peer, stitched"] == {"least": 1.0, "median": 0.9}


@pytest.mark.campaign("benchmarks")
def test_models_in_programs_of_their_own_give_the_same_results_everywhere(
    peers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--suite", "models", "--models", "resnet", "gpt", "--splits", "3", "--rounds", "1"]
    words += ["--image", "32", "--length", "8", "--layers", "2", "--width", "64"]
    words += ["--machines", "host", "--peers", "torch", "--json"]
    assert peers.main(words) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["name"] for result in results] == ["resnet/3", "gpt/3"]
    for result in results:
        assert result["absent"] == {}
        assert [row["side"] for row in result["rows"]] == ["ours", "ours", "peer"]


@pytest.mark.campaign("benchmarks")
def test_models_reach_every_peer(peers: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--suite", "models", "--models", "bert", "--splits", "2", "--rounds", "1", "--json"]
    words += ["--length", "8", "--layers", "2", "--width", "64", "--machines", "host"]
    words += ["--peers", "onnxruntime", "torch.compile"]
    assert peers.main(words) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["absent"] == {}
    assert {row["peer"] for row in result["rows"]} == {"", "onnxruntime", "torch.compile"}


@pytest.fixture
def steady() -> ModuleType:
    return load_bench("steady")


def test_every_row_of_what_repeats_is_measured_and_named(
    steady: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert steady.main(["--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    settled = [f"length {n}, window {w}" for w in (1, 64) for n in (2, 65)]
    assert {row["name"] for row in rows} == {
        *(f"{way} ÷ ONNX Runtime bound, {n} programs" for n in (2, 64)
          for way in ("pipe(x)", "pipe(x).numpy()", "c(b(a(x))).numpy()")),
        "pipe(tensor) ÷ pipe(array), 2 programs",
        "h = a(h) ÷ by hand, looked at after each step",
        "h = a(h) ÷ by hand, looked at after 64 steps",
        *(f"{what} with {observer} ÷ bare" for what in ("pipeline of 2", "training step")
          for observer in ("a Chrome trace", "a program hook", "an operation hook")),
        "results all kept, tasks a second",
        "queueing while another thread computes",
        "torch.compile of two layers ÷ aot_eager",
        *(f"holding, slowest ÷ fastest: {where}" for where in (*settled, "two outputs")),
        *(f"holding, all kept over fastest: {where}"
          for where in (*settled, "two outputs, both", "two outputs, the first")),
        *(f"two outputs, {which} all kept: 50 ÷ 5 held" for which in ("both", "the first")),
        *(f"planned or written when settled: {where}" for where in settled),
        *(f"a program, length 65 ÷ length 2, window {window}" for window in (1, 64)),
    }  # fmt: skip
    for row in rows:
        assert row["value"] is not None or row["note"] == "the device does not tell", row["name"]


def test_a_goal_is_missed_on_its_own_side_or_where_nothing_was_measured(steady: ModuleType) -> None:
    missed = [
        steady.Row(*words).missed
        for words in (
            ("ratio", 1.2, 1.2), ("ratio", 1.21, 1.2), ("rate", 5.0, 5.0, "/s", True),
            ("rate", 4.9, 5.0, "/s", True), ("absent", None, 1.0),
        )
    ]  # fmt: skip
    assert missed == [False, True, False, True, True]


def test_a_held_result_that_changes_is_never_timed(steady: ModuleType) -> None:
    holding = steady.holding
    place = np.zeros((1, 64), np.float32)

    def overwrites(x: np.ndarray) -> np.ndarray:
        place[:] = holding.expected(1, next(i for i, y in enumerate(holding.inputs()) if y is x))
        return place.view()

    def keeps(x: np.ndarray) -> np.ndarray:
        return overwrites(x).copy()

    holding.compare(keeps, holding.in_a_ring(3), 1, 10)
    with pytest.raises(AssertionError):
        holding.compare(overwrites, holding.in_a_ring(3), 1, 10)

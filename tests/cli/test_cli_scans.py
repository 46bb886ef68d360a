"""The commands on files with scans: shown in words, linked, run, explained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.graph import as_json
from stitch.ttb import load, save
from tests.support.bodied_graphs import bodied_graph
from tests.support.files.scanned_specimens import by_hand, scanned_binary

Cli = Callable[..., Any]


@pytest.fixture
def files(here: Path) -> Path:
    """Beside the others: a scan of scans (rounds.ttb), of two rounds (squares.ttb), of rows alone
    (grown.ttb), and what no scan carries (bodied.ttb)."""
    save(scanned_binary(), here / "rounds.ttb")
    b = stitch.ComputationGraphBuilder("squares")
    x = b.input("x", (8,), "float32")
    (last,), _ = stitch.graph.scan(b, lambda s, _: ([s[0] * s[0]], []), [x], [], count=2)
    b.output("z", last)
    stitch.compile(b.build(), target="host", schedule="rounds").save(here / "squares.ttb")
    b = stitch.ComputationGraphBuilder("grown")
    rows = b.input("x", (6, 8), "float32")
    _, (given,) = stitch.graph.scan(b, lambda _, e: ([], [b.op("Tanh", e[0])]), [], [rows])
    b.output("y", given)
    stitch.compile(b.build(), target="host", schedule="rounds").save(here / "grown.ttb")
    stitch.compile(bodied_graph(), target="host").save(here / "bodied.ttb")
    rng = np.random.default_rng(5)
    np.save(here / "first.npy", rng.standard_normal(8, np.float32))
    np.save(here / "xs.npy", rng.standard_normal((5, 3, 8), np.float32))
    return here


def expected(here: Path) -> tuple[Any, Any]:
    return by_hand(np.load(here / "first.npy"), np.load(here / "xs.npy"))


def test_inspect_shows_scans_with_their_bodies(cli: Cli, files: Path) -> None:
    done = cli("inspect", "rounds.ttb", "--section=operations")
    assert done.code == 0 and "requires bodies, scans" in done.out
    assert (
        "    last: 8xf32, all: 5x3x8xf32 = stitch.Scan(first, xs, bias, count=5, "
        "num_scan_inputs=1, num_states=1, scan_input_directions=[1]) as body 2\n"
    ) in done.out
    assert "body=1 : 8xf32, 3x8xf32\n      %after = Tanh(%last) : 8xf32\n" in done.out
    assert "%after = own.Halve(%more) body=0" in done.out
    found = cli("inspect", "rounds.ttb", "--section=operations", "--json").out
    (program,) = json.loads(found)["programs"]
    assert program["operations"][0]["body"] == 2 and len(program["bodies"]) == 3


def test_run_runs_a_scan_and_explains_what_it_copies(cli: Cli, files: Path) -> None:
    done = cli(
        "run", "--module=rounds.ttb", "--input=first=@first.npy", "--input=xs=@xs.npy",
        "--output=last=@last.npy", "--output=all=@all.npy", "--explain",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "input 'xs' of 'rounds'" in done.out and "1 program run" in done.out
    for name, theirs in zip(("last", "all"), expected(files), strict=True):
        np.testing.assert_allclose(np.load(files / f"{name}.npy"), theirs, 1e-6)


def test_a_scan_is_linked_with_an_operation_that_carries_a_body(cli: Cli, files: Path) -> None:
    done = cli("link", "grown.ttb", "bodied.ttb", "-o", "both.ttb", "--wire=grown.y=bodied.x")
    assert done.code == 0, done.err
    shown = cli("inspect", "both.ttb", "--section=operations").out
    assert "stitch.Scan(" in shown and "own.Gate(" in shown
    assert cli("run", "--module=both.ttb", "--init=randn").code == 0


def test_compile_takes_a_schedule_and_says_how_loops_run(cli: Cli, here: Path) -> None:
    b = stitch.ComputationGraphBuilder("halves")
    rows = b.input("x", (6, 8), "float32")
    _, (given,) = stitch.graph.scan(b, lambda _, e: ([], [e[0] * 0.5]), [], [rows])
    b.output("y", given)
    Path("halves.json").write_text(as_json(b.build()), encoding="utf-8")
    words = ("compile", "halves.json", "--target=host", "-o", "halves.ttb")
    done = cli(*words)
    assert done.code == 0 and "  loop of 6 rounds at test_cli_scans.py:" in done.out
    assert ": batch (" in done.out and "; not " in done.out and "rounds (" in done.out
    assert not load("halves.ttb").programs[0].bodies
    assert ": rounds (" in cli(*words, "--schedule=rounds").out
    assert load("halves.ttb").programs[0].bodies
    assert " ms by numpy)" in done.out
    assert " ms by onnxruntime)" in cli(*words, "--executor=onnxruntime").out
    refused = cli(*words, "--schedule=waves")
    assert refused.code == 2 and "'wave'" in refused.err

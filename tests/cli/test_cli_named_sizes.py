"""Files with named sizes on the command line: shown with expressions and guards, run at a size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from tests.support.files.symbolic_specimens import rich_model

Cli = Callable[..., Any]


def joined(x: Any, y: Any) -> Any:
    return x + y


@pytest.fixture(autouse=True)
def _files(here: Path) -> None:
    rich_model().save(here / "rich.ttb")
    batch = stitch.Dim("batch", 1, 9)
    zeros = np.zeros((4, 2), np.float32)
    stitch.compile(joined, (zeros, zeros), dynamic_shapes={"x": {0: batch}, "y": {0: batch}}).save(
        here / "joined.ttb"
    )


def test_inspect_shows_sizes_expressions_and_guards_with_their_lines(cli: Cli) -> None:
    done = cli("inspect", "rich.ttb", "--section=all", "--verify=full")
    assert (done.code, done.err) == (0, "")
    for line in (
        "requires numbered_values, symbolic_sizes", "  size   n: 2 to 40, compiled at 8",
        "  guard  4 < n (symbolic_specimens.py:17)", "  input  x: nxmxf32",
        "  output output_0: (n // 2)xmxf32", "  constant constant_4 = [m*n]",
        "reshape: (m*n)xf32 = Reshape(mul, constant_4)", "all checksums match",
    ):  # fmt: skip
        assert line in done.out, line
    shown = json.loads(cli("inspect", "rich.ttb", "--json").out)
    assert shown["programs"] == [] and shown["requires"] == ["numbered_values", "symbolic_sizes"]
    assert shown["symbolic"]["sizes"][1] == {"name": "m", "least": 2, "most": 9, "example": 3}
    assert shown["symbolic"]["guards"][0] == {
        "left": "4", "relation": "<", "right": "n", "line": "symbolic_specimens.py:17",
        "relied": "", "is_specialised": False,
    }  # fmt: skip


def test_run_takes_the_sizes_of_inputs_or_of_at(cli: Cli, here: Path) -> None:
    x = np.random.default_rng(1).standard_normal((6, 5)).astype(np.float32)
    np.save(here / "x.npy", x)
    np.savez(here / "x.npz", x=x)
    expected = np.asarray(rich_model()(x)[1])
    for word in ("x=@x.npy", "@x.npy", "rich.x=@x.npy", "@x.npz"):
        done = cli("run", "rich.ttb", f"--input={word}", "--output=output_1=@flat.npy")
        assert (done.code, done.err) == (0, "stitch-run: wrote flat.npy\n"), done.err
        assert np.array_equal(np.load(here / "flat.npy"), expected)
    done = cli("run", "rich.ttb", "--init=ones", "--at=n=6,m=4")
    assert done.code == 0 and "output_0: 3x4xf32" in done.out
    done = cli("run", "joined.ttb", "--input=x=3x2xf32=1", "--init=ones")
    assert done.code == 0 and "3x2xf32=[2. 2.]" in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["rich.ttb", "--init=ones"], 2, "nothing says n, m"),
        (["rich.ttb", "--init=ones", "--at=n=6"], 2, "--at=m=N"),
        (["rich.ttb", "--init=ones", "--at=n=6,m=3,k=2"], 2, "no module has a size 'k'"),
        (["rich.ttb", "--init=ones", "--at=k=2"], 2, "; --at=k=2"),
        (["rich.ttb", "--init=ones", "--at=nn=2,m=3"], 2, "--at=nn: did you mean 'n'?"),
        (["rich.ttb", "--init=ones", "--at=n"], 2, "NAME=N[,NAME=N]"),
        (["rich.ttb", "--init=ones", "--at=n=6", "--at=n=6"], 2, "gives size 'n' twice"),
        (["rich.ttb", "--init=ones", "--at=n=41,m=3"], 2, "out of bounds"),
        (["rich.ttb", "--init=ones", "--at=n=4,m=3"], 3, "where: symbolic_specimens.py:17"),
        (["rich.ttb", "--input=6x5xf32", "--at=n=7"], 2, "--at=n=7 contradicts an --input"),
        (["rich.ttb", "--input=z=6x5xf32"], 2, "there is no input 'z'"),
        (["rich.ttb", "--input=f32=1"], 2, "'x' has another number of axes"),
        (["joined.ttb", "--input=x=3x2xf32", "--input=y=4x2xf32"], 2, "two inputs disagree"),
        (["pipeline.yaml", "--init=ones"], 4, "program 'rich' has named sizes"),
        (["pipeline.yaml", "--init=ones", "--at=n=6"], 2, "a pipeline takes those without"),
    ],
)
def test_run_refuses_what_gives_no_sizes(
    cli: Cli, here: Path, arguments: list[str], code: int, message: str
) -> None:
    (here / "pipeline.yaml").write_text(
        "modules: {r: rich.ttb}\n"
        "inputs: {x: {shape: [6, 5], type: float32}}\n"
        "steps: [{run: r, inputs: {x: x}, outputs: {output_0: y}}]\noutputs: [y]\n"
    )
    done = cli("run", *arguments)
    assert done.code == code and message in done.err, done.err


@pytest.mark.parametrize("command", ["link", "inspect"])
def test_what_takes_placed_programs_says_what_to_do(cli: Cli, command: str) -> None:
    more = {"link": ["a.ttb", "-o", "o.ttb"], "inspect": ["a.ttb"]}
    done = cli(command, "rich.ttb", *more[command])
    assert done.code == 4 and "stitch.load(path).at(n=8, m=3)" in done.err, done.err
    assert "stitch-run --at=n=8,m=3" in done.err

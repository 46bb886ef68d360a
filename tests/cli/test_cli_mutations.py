"""Damaged recordings and pipeline files: an answer with an exit code, never a fault of ours."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
Place = tuple[str | int, ...]
PIPELINE = """\
modules: {a: a.ttb, cell: {file: cell.ttb}}
inputs:
  x: {shape: [4, 8], type: float32}
  xs: {shape: [3, 4, 8], type: float32}
steps:
  - {run: a, inputs: {x: x}, outputs: {y: h}}
  - repeat: 3
    carry: {h: g}
    steps:
      - {run: cell, inputs: {x: "xs[i]", h: h}, outputs: {h_next: g}}
outputs: [h]
"""


def places(data: Any, here: Place = ()) -> Iterator[Place]:
    """Where everything in some JSON stands."""
    if here:
        yield here
    if isinstance(data, dict | list):
        children: Any = data.items() if isinstance(data, dict) else enumerate(data)
        for key, value in children:
            yield from places(value, (*here, key))


def damage(data: Any, where: Place, rng: random.Random) -> None:
    """Take one value away, or put a wrong one in its place."""
    for key in where[:-1]:
        data = data[key]
    if rng.random() < 0.2:
        del data[where[-1]]
    else:
        data[where[-1]] = rng.choice(
            [None, 0, -1, 1 << 70, "x", [], {}, True, 1.5, "l1", "inf", [0], 1 << 40]
        )


def damaged_recordings(cli: Cli, count: int) -> None:
    """Mutates a recording `count` times; replays and checks each."""
    words = ("--module=a.ttb", "--module=b_dram.ttb", "--init=ones", "--record=run.json")
    assert cli("run", *words).code == 0
    text = Path("run.json").read_text()
    known = list(places(json.loads(text)))
    rng = random.Random(3)
    codes = set()
    for _ in range(count):
        body = json.loads(text)
        where = rng.choice(known)
        damage(body, where, rng)
        Path("bad.json").write_text(json.dumps(body))
        for done in (cli("run", "--replay=bad.json"), cli("inspect", "--check-plan=bad.json")):
            assert "internal error" not in done.err, (where, done.err)
            codes.add(done.code)
    assert codes <= {0, 3, 6} and {3, 6} <= codes


def damaged_pipelines(cli: Cli, count: int) -> None:
    """Mutates a pipeline file `count` times; plans each."""
    rng = random.Random(6)
    codes = set()
    for _ in range(count):
        letters = list(PIPELINE)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(letters))
            letters[at : at + rng.randint(0, 1)] = rng.choice('[]{}:,-0129ixh"\n #&*!|>')
        Path("bad.yaml").write_text("".join(letters))
        done = cli("run", "bad.yaml", "--dry_run")
        assert "internal error" not in done.err, ("".join(letters), done.err)
        codes.add(done.code)
    assert 3 in codes


def test_damaged_recordings_are_refused_or_disproved(cli: Cli) -> None:
    damaged_recordings(cli, 60)


def test_damaged_pipeline_files_are_refused(cli: Cli) -> None:
    damaged_pipelines(cli, 60)


@pytest.mark.campaign("hostile")
def test_many_damaged_recordings_are_refused_or_disproved(cli: Cli) -> None:
    damaged_recordings(cli, 3000)


@pytest.mark.campaign("hostile")
def test_many_damaged_pipeline_files_are_refused(cli: Cli) -> None:
    damaged_pipelines(cli, 3000)

"""`collect` in a repeat of a pipeline file, and elements from behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.documents import YamlPipeline, read_pipeline
from stitch.documents.pipeline_graphs import MAX_JOINED
from stitch.errors import FormatError
from tests.support.grids import in_turn
from tests.support.stitched_models import consuming, model

Cli = Callable[..., Any]
HEAD = """\
modules: {cell: cell.ttb}
inputs:
  h: {shape: [4, 8], type: float32}
  xs: {shape: [COUNT, 4, 8], type: float32}
steps:
"""
LOOP = """\
  - repeat: COUNT
    carry: {h: h_new}
    collect: {hs: h_new}
    steps:
      - {run: cell, inputs: {x: "xs[i]", h: h}, outputs: {h_next: h_new}}
outputs: {all: hs, last: h}
"""


def arrays(count: int) -> tuple[Any, Any]:
    """h and xs, whole numbers: sums are exact."""
    random = np.random.default_rng(count)
    h, xs = (random.integers(-9, 9, s).astype(np.float32) for s in ((4, 8), (count, 4, 8)))
    return h, xs


def states(h: Any, xs: Any) -> Any:
    """The state after each round."""
    return np.cumsum(np.concatenate([h[None], xs]), axis=0)[1:]


def opened(text: str, count: int, device: stitch.Device) -> YamlPipeline:
    """The pipeline of a text on a device."""
    Path("p.yaml").write_text(text.replace("COUNT", str(count)))
    return YamlPipeline(read_pipeline("p.yaml"), device)


@pytest.mark.parametrize(
    ("window", "count"),
    in_turn([1, 64], [1, 2, MAX_JOINED - 1, MAX_JOINED, MAX_JOINED + 1, 200]),
)
def test_what_rounds_made_becomes_one_tensor(here: Path, count: int, window: int) -> None:
    h, xs = arrays(count)
    with stitch.open_device("wormhole_n150", window=window) as device:
        whole, last = opened(HEAD + LOOP, count, device).run((h, xs))
        assert whole.shape == (count, 4, 8)
        np.testing.assert_array_equal(whole.numpy(), states(h, xs))
        np.testing.assert_array_equal(last.numpy(), h + xs.sum(0))


def test_repeats_within_repeats_collect_what_was_collected(here: Path) -> None:
    text = (
        HEAD
        + """\
  - repeat: 3
    index: t
    carry: {h: h}
    collect: {grid: row, lasts: h}
    steps:
      - repeat: COUNT
        carry: {h: h_new}
        collect: {row: h_new}
        steps:
          - {run: cell, inputs: {x: "xs[i]", h: h}, outputs: {h_next: h_new}}
  - {run: cell, inputs: {x: "lasts[-1]", h: "lasts[0]"}, outputs: [sum]}
outputs: [grid, lasts, sum]
"""
    )
    h, xs = arrays(5)
    wanted = states(h, np.concatenate([xs] * 3)).reshape(3, 5, 4, 8)
    with stitch.open_device("wormhole_n150") as device:
        grid, lasts, total = opened(text, 5, device).run((h, xs))
        np.testing.assert_array_equal(grid.numpy(), wanted)
        np.testing.assert_array_equal(lasts.numpy(), wanted[:, -1])
        np.testing.assert_array_equal(total.numpy(), wanted[0, -1] + wanted[2, -1])


@pytest.mark.parametrize("count", [9, 129])
def test_what_is_collected_may_be_given_away_by_the_next_round(here: Path, count: int) -> None:
    consuming("eat", 0.5, (4, 8), target="wormhole_n150").save("cell.ttb")
    text = """\
modules: {cell: cell.ttb}
inputs:
  x: {shape: [4, 8], type: float32}
steps:
  - {run: cell, inputs: [x], outputs: [y]}
  - repeat: COUNT
    carry: {y: z}
    collect: {zs: z}
    steps: [{run: cell, inputs: [y], outputs: [z]}]
outputs: [zs]
"""
    x = np.ones((4, 8), np.float32)
    wanted, y = [], x
    (eaten,) = stitch.load("cell.ttb").programs
    with stitch.open_device("wormhole_n150") as device:
        one = device.load(stitch.load("cell.ttb"))
        y = np.array(one(y))
        for _ in range(count):
            y = np.array(one(y))
            wanted.append(y)
        (found,) = opened(text, count, device).run((x,))
        np.testing.assert_array_equal(found.numpy(), np.stack(wanted))
    assert eaten.outputs[0].aliases_input == 0


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "bfp8"])
def test_what_is_collected_keeps_the_bits_that_it_was_stored_in(here: Path, stored: str) -> None:
    def build(b: Any) -> None:
        b.output("y", b.input("x", (32, 32), "float32") * 1.01)

    placement = [f"output.y.data_type={stored}"] + ["output.y.layout=tile"] * (stored == "bfp8")
    model("cell", build, target="wormhole_n150", placement=placement).save("cell.ttb")
    text = """\
modules: {cell: cell.ttb}
inputs:
  xs: {shape: [7, 32, 32], type: float32}
steps:
  - repeat: 7
    collect: {ys: y}
    steps: [{run: cell, inputs: ["xs[-1-i]"], outputs: [y]}]
outputs: [ys]
"""
    xs = np.random.default_rng(2).standard_normal((7, 32, 32), dtype=np.float32)
    with stitch.open_device("wormhole_n150") as device:
        one = device.load(stitch.load("cell.ttb"))
        wanted = np.stack([np.array(one(x)) for x in xs[::-1]])
        checked = opened(text, 7, device)
        (found,) = checked.run((xs,))
        np.testing.assert_array_equal(found.numpy(), wanted)
        (said,) = checked.checked.outputs
        assert said.desc is not None
        assert found.layout.data_type is said.desc.layout.data_type
        assert found.shape == said.type.shape


def test_a_pipeline_that_collects_is_run_planned_recorded_and_explained(
    cli: Cli, here: Path
) -> None:
    h, xs = arrays(70)
    np.savez("in.npz", h=h, xs=xs)
    np.savez("e.npz", all=states(h, xs), last=h + xs.sum(0))
    Path("p.yaml").write_text((HEAD + LOOP).replace("COUNT", "70"))
    words = ("--input=@in.npz", "--expected_output=@e.npz", "--atol=0", "--check_memory_leak")
    more = ("--loops=2", "--record=r.json", "--explain", "--check_memory", "--save_artifacts")
    done = cli("run", "p.yaml", *words, *more)
    assert done.code == 0, done.err + done.out
    # In each pass two programs beside the cells join 64 rounds, and what came of them with six.
    assert "[SUCCESS] 2 results" in done.out and f"{2 * 72} program runs" in done.out
    assert cli("run", "--replay=r.json").code == 0
    assert cli("inspect", "--check-plan=r.json").code == 0
    planned = cli("run", "p.yaml", "--dry_run", "--max_copies=0")
    assert planned.code == 0 and "72 program runs" in planned.out, planned.err
    ran = cli("run", "p.yaml", *words, "--max_copies=0")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("before", "after", "line", "said"),
    [
        ("{hs: h_new}", "{hs: h_knew}", 6, "there is no value 'h_knew'"),
        ("{hs: h_new}", "{hs: xs}", 6, "hs collects 'xs', which no step of the repeat defines"),
        ("{hs: h_new}", "{hs: h}", 6, "hs collects 'h', which no step of the repeat defines"),
        ("{hs: h_new}", "{xs: h_new}", 6, "'xs' is defined already"),
        ("{hs: h_new}", "hs", 8, "must be a mapping from names to values"),
        ("xs[i]", "xs[-2-i]", 10, "xs[-2-i] goes from 2 to -1, and xs has 4 elements"),
        ("xs[i]", "xs[4-i]", 10, "xs[4-i] goes from 4 to 1, and xs has 4 elements"),
        ("xs[i]", "xs[2-i]", 10, "xs[2-i] goes from 2 to -1, and xs has 4 elements"),
        ("xs[i]", "xs[-1-k]", 10, "there is no index 'k' here (there are: i)"),
        ("xs[i]", "xs[1-i-i]", 10, "must be a value"),
        ("xs[i]", "xs[-1234567890123-i]", 10, "must be a value"),
    ],
)
def test_a_mistake_is_named_with_its_line(
    here: Path, before: str, after: str, line: int, said: str
) -> None:
    text = (HEAD + LOOP).replace("COUNT", "4")
    assert before in text
    Path("p.yaml").write_text(text.replace(before, after, 1))
    with pytest.raises(FormatError) as caught:
        read_pipeline("p.yaml")
    assert said in str(caught.value) and f"p.yaml:{line}" in str(caught.value), str(caught.value)


@pytest.mark.parametrize("start", [-1, -2, 5, 4])
def test_elements_are_taken_from_behind(here: Path, start: int) -> None:
    rounds = 5 if start in (-2, 4) else 6
    text = (
        (HEAD + LOOP).replace("repeat: COUNT", f"repeat: {rounds}").replace("[i]", f"[{start}-i]")
    )
    h, xs = arrays(6)
    taken = [xs[start - i] for i in range(rounds)]
    with stitch.open_device("wormhole_n150") as device:
        whole, _ = opened(text, 6, device).run((h, xs))
        np.testing.assert_array_equal(whole.numpy(), states(h, np.stack(taken)))


#: Long repeats, of which rounds run as one prepared graph: with what collects in loops, without
#: what is carried, with two names for one value.
LONG = {
    "nested": """\
  - repeat: 130
    index: t
    carry: {h: last}
    collect: {rows: row, firsts: first}
    steps:
      - {run: cell, inputs: {x: "xs[t]", h: h}, outputs: {h_next: first}}
      - {run: cell, inputs: {x: "xs[0]", h: first}, outputs: {h_next: f}}
      - repeat: 3
        index: k
        carry: {f: g}
        collect: {row: g}
        steps:
          - {run: cell, inputs: {x: "xs[k]", h: f}, outputs: {h_next: g}}
      - {run: cell, inputs: {x: "xs[1]", h: f}, outputs: {h_next: last}}
outputs: [rows, firsts]
""",
    "nothing carried": """\
  - repeat: 300
    collect: {ys: y, zs: y}
    steps: [{run: cell, inputs: {x: "xs[-1-i]", h: h}, outputs: {h_next: y}}]
outputs: [ys, zs]
""",
}


def long_results(name: str, h: Any, xs: Any) -> tuple[Any, Any]:
    """What the steps above compute."""
    if name == "nothing carried":
        return h + xs[::-1], h + xs[::-1]
    rows, firsts = [], []
    for t in range(130):
        f = h + xs[t]
        g, row = f + xs[0], []
        for k in range(3):
            g = g + xs[k]
            row.append(g)
        rows.append(np.stack(row))
        firsts.append(f)
        h = g + xs[1]
    return np.stack(rows), np.stack(firsts)


@pytest.mark.parametrize(("name", "window"), in_turn(LONG, [1, 3, 64]))
def test_long_repeats_collect_from_rounds_that_run_as_one(
    here: Path, name: str, window: int
) -> None:
    h, xs = arrays(300)
    with stitch.open_device("wormhole_n150", window=window, debug=window == 3) as device:
        loaded = opened(HEAD + LONG[name], 300, device)
        for turn in range(7):
            if turn == 5:
                before = device.statistics()
            found = loaded.run((h, xs) if turn % 2 else (h, device.tensor(xs)))
            for ours, theirs in zip(found, long_results(name, h, xs), strict=True):
                np.testing.assert_array_equal(ours.numpy(), theirs)
            np.testing.assert_array_equal(h, arrays(300)[0])
        assert device.statistics().plans_made == before.plans_made

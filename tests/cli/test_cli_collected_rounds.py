"""`collect` in a repeat of a pipeline file, elements from behind, and inputs that are lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.documents import YamlPipeline, read_pipeline
from stitch.documents.pipelines.collecting import MOST_JOINED
from stitch.errors import FormatError, LinkError, UsageError
from tests.support.stitched_models import consuming, model, scaled

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


@pytest.mark.parametrize("window", [1, 64])
@pytest.mark.parametrize("count", [1, 2, MOST_JOINED - 1, MOST_JOINED, MOST_JOINED + 1, 200])
def test_what_rounds_made_becomes_one_tensor(here: Path, count: int, window: int) -> None:
    h, xs = arrays(count)
    with stitch.open_device("wormhole_n150", window=window) as device:
        whole, last = opened(HEAD + LOOP, count, device).run((h, xs))
        assert whole.shape == (count, 4, 8)
        np.testing.assert_array_equal(whole.numpy(), states(h, xs))
        np.testing.assert_array_equal(last.numpy(), h + xs.sum(0))


def test_so_many_rounds_that_what_was_joined_is_joined_again(here: Path) -> None:
    count = MOST_JOINED**2 + MOST_JOINED + 3
    loop = LOOP.replace("xs[i]", "xs[0]")
    text = (HEAD + loop).replace("[COUNT, 4, 8]", "[1, 4, 8]")
    h, xs = arrays(1)
    with stitch.open_device("wormhole_n150") as device:
        whole, _ = opened(text, count, device).run((h, xs))
        wanted = h + xs * np.arange(1, count + 1, dtype=np.float32)[:, None, None]
        np.testing.assert_array_equal(whole.numpy(), wanted)


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


def test_what_is_collected_may_be_given_away_by_the_next_round(here: Path) -> None:
    consuming("eat", 2.0, (4, 8), target="wormhole_n150").save("cell.ttb")
    text = """\
modules: {cell: cell.ttb}
inputs:
  x: {shape: [4, 8], type: float32}
steps:
  - {run: cell, inputs: [x], outputs: [y]}
  - repeat: 9
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
        for _ in range(9):
            y = np.array(one(y))
            wanted.append(y)
        (found,) = opened(text, 9, device).run((x,))
        np.testing.assert_array_equal(found.numpy(), np.stack(wanted))
    assert eaten.outputs[0].aliases_input == 0


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "bfp8"])
def test_what_is_collected_keeps_the_bits_that_it_was_stored_in(here: Path, stored: str) -> None:
    def build(b: Any) -> None:
        b.output("y", b.input("x", (32, 32), "float32") * 1.01)

    wishes = [f"output.y.data_type={stored}"] + ["output.y.layout=tile"] * (stored == "bfp8")
    model("cell", build, target="wormhole_n150", wishes=wishes).save("cell.ttb")
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
        ("{hs: h_new}", "{hs: xs}", 6, "hs collects 'xs', which is not made in a round"),
        ("{hs: h_new}", "{hs: h}", 6, "hs collects 'h', which is not made in a round"),
        ("{hs: h_new}", "{xs: h_new}", 6, "'xs' is defined already"),
        ("{hs: h_new}", "hs", 8, "must be a mapping from names to values"),
        ("xs[i]", "xs[-2-i]", 10, "xs[-2-i] goes from 2 to -1, and xs has 4 elements"),
        ("xs[i]", "xs[4-i]", 10, "xs[4-i] goes from 4 to 1, and xs has 4 elements"),
        ("xs[i]", "xs[2-i]", 10, "xs[2-i] goes from 2 to -1, and xs has 4 elements"),
        ("xs[i]", "xs[-1-k]", 10, "there is no index 'k' here (there are: i)"),
        ("xs[i]", "xs[1-i-i]", 10, "is no value"),
        ("xs[i]", "xs[-1234567890123-i]", 10, "is no value"),
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


def test_what_is_collected_and_read_by_nobody_is_warned_of(cli: Cli, here: Path) -> None:
    text = (HEAD + LOOP).replace("COUNT", "2").replace("all: hs, ", "")
    Path("p.yaml").write_text(text)
    done = cli("run", "p.yaml", "--init=ones", "--output=-")
    assert done.code == 0 and "p.yaml:6: 'hs' is read by no step" in done.err, done.err
    Path("p.yaml").write_text(text.replace("hs", "_hs"))
    assert "warning" not in cli("run", "p.yaml", "--init=ones", "--output=-").err


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


def test_a_long_repeat_takes_elements_from_behind(here: Path) -> None:
    text = (HEAD + LOOP).replace("[i]", "[-1-i]").replace("    collect: {hs: h_new}\n", "")
    text = text.replace("all: hs, ", "")
    h, xs = arrays(300)
    with stitch.open_device("wormhole_n150") as device:
        loop = opened(text, 300, device)
        (last,) = loop.run((h, xs))
        np.testing.assert_array_equal(last.numpy(), h + xs.sum(0))
        whole = device.tensor(xs)
        (last,) = loop.run((h, whole))
        np.testing.assert_array_equal(last.numpy(), h + xs.sum(0))


LISTS = """\
modules: {cell: cell.ttb, wide: wide.ttb}
inputs:
  h: {shape: [4, 8], type: float32}
  xs: {shape: [8], lengths: [4, 6, 4], type: float32}
steps:
  - repeat: 2
    carry: {h: g}
    collect: {gs: g}
    steps:
      - {run: cell, inputs: {x: "xs[2]", h: h}, outputs: {h_next: f}}
      - {run: cell, inputs: {x: "xs[0]", h: f}, outputs: {h_next: g}}
  - {run: wide, inputs: ["xs[1]"], outputs: [w]}
outputs: [gs, w]
"""


@pytest.fixture
def lists(here: Path) -> list[Any]:
    """Three arrays, of which the second is longer, and a module that takes it."""
    scaled("wide", 3.0, (6, 8), target="wormhole_n150").save("wide.ttb")
    random = np.random.default_rng(5)
    np.save("x.npy", random.integers(-9, 9, (4, 8)).astype(np.float32))
    return [random.integers(-9, 9, (n, 8)).astype(np.float32) for n in (4, 6, 4)]


def check_lists(h: Any, lists: list[Any], gs: Any, wide: Any) -> None:
    step = lists[0] + lists[2]
    np.testing.assert_array_equal(gs, np.stack([h + step, h + 2 * step]))
    np.testing.assert_array_equal(wide, lists[1] * 3 + 1)


def test_a_list_is_one_argument_and_its_arrays_are_chosen_by_number(
    here: Path, lists: list[Any]
) -> None:
    h = np.load("x.npy")
    with stitch.open_device("wormhole_n150") as device:
        loaded = opened(LISTS, 0, device)
        for given in (lists, tuple(lists), [device.tensor(x) for x in lists]):
            gs, wide = loaded(h, given)
            check_lists(h, lists, gs.numpy(), wide.numpy())
        with pytest.raises(UsageError, match=r"'xs' of .* is a list of 3 arrays\n  got: 2 arrays"):
            loaded(h, xs=lists[:2])
        with pytest.raises(UsageError, match=r"is a list of 3 arrays\n  got: ndarray"):
            loaded(h, xs=lists[0])
        with pytest.raises(LinkError, match=r"input 'xs\[1\]' has another shape"):
            loaded(h, xs=lists[:1] * 3)
        with pytest.raises(UsageError, match=r"missing: xs\n  expected: .*xs: 3 such as 4x8xf32"):
            loaded(h)


@pytest.mark.parametrize("loops", ["1", "2"])
def test_a_list_is_given_to_a_command_array_by_array(
    cli: Cli, here: Path, lists: list[Any], loops: str
) -> None:
    Path("p.yaml").write_text(LISTS)
    for number, x in enumerate(lists):
        np.save(f"x{number}.npy", x)
    words = [f"--input=xs[{number}]=@x{number}.npy" for number in range(3)]
    done = cli("run", "p.yaml", "--input=h=@x.npy", *words, "--output=@o.npz", f"--loops={loops}")
    assert done.code == 0, done.err
    with np.load("o.npz") as found:
        check_lists(np.load("x.npy"), lists, found["gs"], found["w"])
    np.savez("all.npz", h=np.load("x.npy"), **{f"xs[{n}]": x for n, x in enumerate(lists)})
    assert cli("run", "p.yaml", "--input=@all.npz", "--output=@o.npz").code == 0
    with np.load("o.npz") as found:
        check_lists(np.load("x.npy"), lists, found["gs"], found["w"])
    assert cli("run", "p.yaml", "--init=randn", "--record=r.json").code == 0
    assert cli("run", "--replay=r.json").code == 0
    assert cli("run", "p.yaml", "--dry_run").code == 0
    done = cli("run", "p.yaml", "--input=h=@x.npy", *words[:2])
    assert done.code == 2 and "inputs are missing: xs[2]" in done.err


@pytest.mark.parametrize(
    "entry",
    [
        "files: [x0.npy, x1.npy, x2.npy]", "file: l.npz, names: [a, b, c]",
        "files: [m0.npz, m1.npz, m2.npz], name: a", "file: l.npz, names: [a, b, c], type: float32",
        "files: [x0.npy, m1.npz, l.npz], names: [a, a, c]",
        "files: [x0.npy, x1.npy, x2.npy], shape: [8], lengths: [4, 6, 4]",
    ],
)  # fmt: skip
def test_a_list_comes_out_of_files(cli: Cli, here: Path, lists: list[Any], entry: str) -> None:
    for number, x in enumerate(lists):
        np.save(f"x{number}.npy", x)
        np.savez(f"m{number}.npz", a=x, b=x)
    np.savez("l.npz", a=lists[0], b=lists[1], c=lists[2])
    if "x0.npy, m1" in entry:
        np.savez("x0.npz", a=lists[0], b=lists[1])
        entry = entry.replace("x0.npy", "x0.npz")
    Path("p.yaml").write_text(LISTS.replace("shape: [8], lengths: [4, 6, 4], type: float32", entry))
    h = np.load("x.npy")
    with stitch.open_device("wormhole_n150") as device:
        loaded = YamlPipeline(read_pipeline("p.yaml"), device)
        gs, wide = loaded(h)
        check_lists(h, lists, gs.numpy(), wide.numpy())
        gs, wide = loaded(h, xs=[x * 2 for x in lists])
        check_lists(h, [x * 2 for x in lists], gs.numpy(), wide.numpy())
    done = cli("run", "p.yaml", "--input=h=@x.npy", "--output=@o.npz")
    assert done.code == 0, done.err
    with np.load("o.npz") as found:
        check_lists(h, lists, found["gs"], found["w"])


@pytest.mark.parametrize(
    ("before", "after", "line", "said"),
    [
        ('"xs[1]"', '"xs[3]"', 12, "xs[3] goes from 3 to 3, and xs has 3 arrays"),
        ('"xs[1]"', '"xs[-4]"', 12, "xs[-4] goes from -1 to -1, and xs has 3 arrays"),
        ('"xs[0]"', '"xs[i]"', 11, "xs[1] (by xs[i]) is 6x8xf32, cell.x is 4x8xf32"),
        ('"xs[0]"', '"xs[-1-i]"', 11, "xs[1] (by xs[-1-i]) is 6x8xf32, cell.x is 4x8xf32"),
        ('"xs[0]"', '"xs[i+2]"', 11, "xs[i+2] goes from 2 to 3, and xs has 3 arrays"),
        ('"xs[0]"', "xs", 11, "xs is a list of 3 arrays, and cell.x takes one: xs[i]"),
        ('["xs[1]"]', "[xs]", 12, "xs is a list of 3 arrays, and wide.x takes one: xs[0]"),
        ('"xs[1]"', '"xs[0]"', 12, "xs[0] is 4x8xf32, wide.x is 6x8xf32"),
        ("[4, 6, 4]", "[4, 6]", 10, "xs[2] goes from 2 to 2, and xs has 2 arrays"),
        ("lengths: [4, 6, 4]", "lengths: []", 4, "must be a list of lengths"),
        ("lengths: [4, 6, 4]", "lengths: [4, -6, 4]", 4, "must be a whole number"),
        ("shape: [8], ", "", 4, "left out: it belongs to `shape`"),
        ("4], type", "4], names: [a, b, c], type", 4, "left out: it belongs to `file` or `files`"),
        ("4], type", "4], files: [a.npy, b.npy], type", 4,
         "a list has one of each for every array, not 2 files and 3 lengths"),
        ("4], type", "4], files: [a.npy, b.npy, b.npy], file: a.npz, type", 4,
         "`files` for a list"),
        ("4], type", "4], file: a.npz, name: a, names: [a, b, c], type", 4, "`names` for a list"),
        ("shape: [8], lengths: [4, 6, 4], type: float32", "files: [x0.npy, x.npy, b.npy]", 4,
         "xs[2] is not like xs[0]"),
        ("shape: [8]", "files: [x0.npy, x.npy, b.npy], shape: [8]", 4, "input 'xs[1]'"),
        ("gs, w", "xs, w", 13, "output 'xs' is an input"),
    ],
)  # fmt: skip
def test_a_mistake_with_a_list_is_named_with_its_line_and_number(
    here: Path, lists: list[Any], before: str, after: str, line: int, said: str
) -> None:
    np.save("x0.npy", lists[0])
    np.save("b.npy", lists[0][:, :7])
    assert before in LISTS
    Path("p.yaml").write_text(LISTS.replace(before, after, 1))
    with pytest.raises(FormatError) as caught:
        read_pipeline("p.yaml")
    assert said in str(caught.value) and f"p.yaml:{line}" in str(caught.value), str(caught.value)

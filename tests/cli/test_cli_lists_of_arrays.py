"""Inputs of pipeline files that are lists of arrays of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.documents import YamlPipeline, read_pipeline
from stitch.errors import FormatError, LinkError, UsageError
from tests.support.stitched_models import scaled

Cli = Callable[..., Any]
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


def results(found: Any) -> Any:
    """All results of a call."""
    return found


def opened(text: str, device: stitch.Device) -> YamlPipeline:
    """The pipeline of a text on a device."""
    Path("p.yaml").write_text(text)
    return YamlPipeline(read_pipeline("p.yaml"), device)


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
        loaded = opened(LISTS, device)
        for given in (lists, tuple(lists), [device.tensor(x) for x in lists]):
            gs, wide = results(loaded(h, given))
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
        gs, wide = results(loaded(h))
        check_lists(h, lists, gs.numpy(), wide.numpy())
        gs, wide = results(loaded(h, xs=[x * 2 for x in lists]))
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


def test_a_long_repeat_takes_arrays_of_a_list(here: Path) -> None:
    text = f"""\
modules: {{cell: cell.ttb}}
inputs:
  h: {{shape: [4, 8], type: float32}}
  xs: {{shape: [8], lengths: {[4] * 140}, type: float32}}
steps:
  - repeat: 140
    carry: {{h: g}}
    collect: {{gs: g}}
    steps: [{{run: cell, inputs: {{x: "xs[-1-i]", h: h}}, outputs: {{h_next: g}}}}]
outputs: [gs]
"""
    random = np.random.default_rng(1)
    xs = random.integers(-9, 9, (140, 4, 8)).astype(np.float32)
    h = np.ones((4, 8), np.float32)
    wanted = h + np.cumsum(xs[::-1], axis=0)
    with stitch.open_device("wormhole_n150") as device:
        loaded = opened(text, device)
        for given in ([*xs], [device.tensor(x) for x in xs]):
            np.testing.assert_array_equal(results(loaded(h, given)).numpy(), wanted)

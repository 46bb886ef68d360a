"""`stitch-run pipeline.yaml`: its form, what it computes, and every way to get it wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import stitch
from stitch.documents import YamlPipeline, read_pipeline
from stitch.errors import UsageError
from tests.support.stitched_models import scaled

Cli = Callable[..., Any]
PIPELINE = """\
name: rollout
modules:
  encoder: b.ttb
  cell: {file: cell.ttb, program: cell}
inputs:
  x: {shape: [4, 8], type: float32}
  xs: {shape: [3, 4, 8], type: float32}
steps:
  - {run: encoder, inputs: {x: x}, outputs: {y: h}}
  - repeat: 3
    carry: {h: h_new}
    steps:
      - {run: cell, inputs: {x: "xs[i]", h: h}, outputs: {h_next: h_new}}
  - {run: cell, inputs: ["xs[-1]", h], outputs: [last]}
outputs: {result: last, state: h}
"""


@pytest.fixture
def xs() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Three inputs of the cell."""
    return np.arange(96, dtype=np.float32).reshape(3, 4, 8)


def expected(x: Any, xs: Any) -> tuple[Any, Any]:
    """What the pipeline above computes: (result, state)."""
    h = x + np.float32(1)
    for one in xs:
        h = one + h
    return xs[-1] + h, h


def test_a_pipeline_file_runs_steps_repeats_and_slices(cli: Cli, here: Path, xs: Any) -> None:
    (here / "p.yaml").write_text(PIPELINE)
    np.save("xs.npy", xs)
    result, state = expected(np.load("x.npy"), xs)
    np.savez("e.npz", result=result, state=state)
    words = ("--input=x=@x.npy", "--input=xs=@xs.npy", "--expected_output=@e.npz", "--loops=2")
    done = cli("run", "p.yaml", *words, "--max_copies=0", "--check_memory_leak", "--atol=0")
    assert done.code == 0, done.err + done.out
    assert "[SUCCESS] 2 results" in done.out


def test_inputs_from_files_can_be_replaced(cli: Cli, here: Path, xs: Any) -> None:
    np.savez("arrays.npz", xs=xs, other=xs)
    text = PIPELINE.replace(
        "xs: {shape: [3, 4, 8], type: float32}", "xs: {file: arrays.npz, name: xs}"
    )
    (here / "p.yaml").write_text(text)
    assert cli("run", "p.yaml", "--input=@x.npy", "--output=@o.npz").code == 0
    with np.load("o.npz") as found:
        np.testing.assert_array_equal(found["state"], expected(np.load("x.npy"), xs)[1])
    done = cli("run", "p.yaml", "--input=@x.npy", "--input=xs=3x4x8xf32=0", "--output=@o.npz")
    assert done.code == 0
    with np.load("o.npz") as found:
        np.testing.assert_array_equal(found["state"], np.load("x.npy") + np.float32(1))


def test_indices_nest_and_may_be_shifted(here: Path) -> None:
    text = PIPELINE.replace("repeat: 3", "repeat: 2\n    index: t").replace("xs[i]", "xs[t+1]")
    inner = '      - {run: cell, inputs: {x: "xs[t+1]", h: h}, outputs: {h_next: h_new}}\n'
    assert inner in text
    nested = (
        "      - repeat: 2\n        index: k\n        carry: {h: g}\n        steps:\n"
        '          - {run: cell, inputs: ["xs[t]", h], outputs: [f]}\n'
        '          - {run: cell, inputs: ["xs[k]", f], outputs: [g]}\n'
    )
    (here / "p.yaml").write_text(text.replace(inner, nested + inner))
    xs = np.arange(96, dtype=np.float32).reshape(3, 4, 8)
    x = np.ones((4, 8), np.float32)
    h = x + 1
    for t in range(2):
        for k in range(2):
            h = h + xs[t] + xs[k]
        h = h + xs[t + 1]
    with stitch.open_device("wormhole_n150") as device:
        pipeline = YamlPipeline(read_pipeline("p.yaml"), device)
        result, state = pipeline.run((x, xs))
        np.testing.assert_array_equal(state.numpy(), h)
        np.testing.assert_array_equal(result.numpy(), h + xs[2])


def test_a_writable_array_is_captured_at_the_call(here: Path) -> None:
    (here / "p.yaml").write_text(PIPELINE)
    x, xs = np.ones((4, 8), np.float32), np.ones((3, 4, 8), np.float32)
    with stitch.open_device("wormhole_n150") as device:
        pipeline = YamlPipeline(read_pipeline("p.yaml"), device)
        outputs = pipeline(x=x, xs=xs)
        assert isinstance(outputs, tuple)
        x[...] = 99
        xs[...] = 99
        state = outputs[1].numpy()
        np.testing.assert_array_equal(state, np.full((4, 8), 5, np.float32))
        assert x.flags.writeable and xs.flags.writeable


def test_wrong_inputs_are_named_when_it_is_called(here: Path) -> None:
    (here / "p.yaml").write_text(PIPELINE)
    with stitch.open_device("wormhole_n150") as device:
        pipeline = YamlPipeline(read_pipeline("p.yaml"), device)
        with pytest.raises(UsageError, match=r"missing: xs; surplus: ys \(did you mean 'xs'"):
            pipeline(x=np.ones((4, 8), np.float32), ys=1)


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("modules:", "modles:", 2, "did you mean 'modules'"),
        ("carry:", "cary:", 11, "did you mean 'carry'"),
        ("run: encoder", "run: encodr", 9, "did you mean 'encoder'"),
        ("inputs: {x: x}", "inputs: {z: x}", 9, "has no input 'z'"),
        ("inputs: {x: x}", "inputs: {}", 9, "also needs x"),
        ("inputs: {x: x}", "inputs: {x: xx}", 9, "there is no value 'xx'"),
        ("inputs: {x: x}", "inputs: {x: xs}", 9, "xs is 3x4x8xf32, encoder.x is 4x8xf32"),
        ("inputs: {x: x}", 'inputs: {x: "x y"}', 9, "must be a value"),
        ("outputs: {y: h}", "outputs: {yy: h}", 9, "did you mean 'y'"),
        ("outputs: {y: h}", "outputs: {y: x}", 9, "'x' is defined already"),
        ("outputs: {y: h}", "outputs: {y: 1h}", 9, "is no name"),
        ("xs[i]", "xs[i+1]", 13, "xs[i+1] goes from 1 to 3, and xs has 3 elements"),
        ("xs[i]", "xs[i-1]", 13, "goes from -1 to 1"),
        ("xs[i]", "xs[j]", 13, "there is no index 'j'"),
        ("xs[-1]", "xs[-4]", 14, "xs[-4] goes from -1"),
        ("xs[-1]", "xs[i]", 14, "there is no index 'i'"),
        ("h: h_new", "h: xs", 10, "h is 4x8xf32, and cannot become xs"),
        ("h: h_new", "hh: h_new", 10, "there is no value 'hh'"),
        ("repeat: 3", "repeat: 0", 10, "whole number from 1"),
        ("repeat: 3", "repeat: many", 10, "must be a whole number from 1"),
        ("state: h}", "state: h_new}", 15, "there is no value 'h_new'"),
        ("state: h}", "state: x}", 15, "not a result of a step"),
        ("{shape: [4, 8], type: float32}", "{shape: [4, 8], type: float33}", 6, "float32"),
        ("{shape: [4, 8], type: float32}", "{type: float32}", 6, "shape: must be"),
        ("program: cell}", "program: sell}", 4, "no program 'sell'"),
    ],
)
def test_a_mistake_is_named_with_its_line(
    cli: Cli, here: Path, old: str, new: str, line: int, said: str
) -> None:
    assert old in PIPELINE
    (here / "p.yaml").write_text(PIPELINE.replace(old, new, 1))
    done = cli("run", "p.yaml", "--init=ones")
    assert done.code == 3 and said in done.err, done.err
    assert f"p.yaml:{line}" in done.err
    assert "Traceback" not in done.err


def test_a_module_that_is_not_there_and_a_pipeline_that_is_not_there(cli: Cli, here: Path) -> None:
    (here / "p.yaml").write_text(PIPELINE.replace("b.ttb", "gone.ttb"))
    missing = cli("run", "p.yaml", "--init=ones")
    assert missing.code == 3 and "gone.ttb" in missing.err
    absent = cli("run", "q.yaml")
    assert absent.code == 3 and "q.yaml" in absent.err


def test_paths_are_relative_to_the_file(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "p.yaml").write_text(PIPELINE)
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert cli("run", "../p.yaml", "--init=ones", "--output=").code == 0


def test_from_yaml_opens_a_device_or_takes_one(here: Path, xs: Any) -> None:
    (here / "p.yaml").write_text(PIPELINE)
    x = np.load("x.npy")
    wanted = expected(x, xs)[0]
    own = stitch.Pipeline.from_yaml("p.yaml", window=1)
    assert isinstance(own.device, stitch.Device)
    assert own.device.machine.name == "wormhole_n150"
    np.testing.assert_array_equal(own(x=x, xs=xs)[0].numpy(), wanted)
    own.device.close()
    with stitch.open_device("wormhole_n150") as device:
        shared = stitch.Pipeline.from_yaml("p.yaml", device=device)
        np.testing.assert_array_equal(shared(x, xs)[0].numpy(), wanted)
        with pytest.raises(UsageError, match="with an open device"):
            stitch.Pipeline.from_yaml("p.yaml", device=device, window=1)


def test_the_file_may_name_its_device(cli: Cli, here: Path) -> None:
    for name in ("b", "cell"):
        assert cli("compile", f"{name}.yaml", "-o", f"{name}.ttb", "--target=tiny").code == 0
    (here / "p.yaml").write_text("device: tiny\n" + PIPELINE)
    done = cli("run", "p.yaml", "--init=ones", "--explain", "--output=")
    assert done.code == 0 and done.out.startswith("tiny: ")
    other = cli("run", "p.yaml", "--init=ones", "--device=wormhole_n150")
    assert other.code == 4 and "banks" in other.err


FROM_FILE = """\
modules: {types: types.ttb}
inputs:
  i: {shape: [3], type: int32}
  p: {shape: [3], type: bool}
  f: {file: f.npy, type: bfloat16}
steps:
  - {run: types, inputs: {i: i, p: p, f: f}, outputs: {g: g}}
outputs: [g]
"""


def test_a_file_of_another_floating_type_is_warned_of_and_refused_by_strict_types(
    cli: Cli, here: Path
) -> None:
    (here / "p.yaml").write_text(FROM_FILE)
    np.save("f.npy", np.array([1.5, -2, 3], np.float64))
    done = cli("run", "p.yaml", "--init=ones")
    assert done.code == 0
    assert "p.yaml:5: input 'f' is converted from float64 to bfloat16" in done.err
    strict = cli("run", "p.yaml", "--init=ones", "--strict_types")
    assert strict.code == 3 and "input 'f' is converted" in strict.err


def test_strict_types_refuse_a_pipeline_input_of_another_floating_type_than_its_slot(
    cli: Cli, here: Path
) -> None:
    (here / "p.yaml").write_text(PIPELINE.replace("float32", "float64", 1))
    done = cli("run", "p.yaml", "--init=ones")
    assert done.code == 0 and done.err == (
        "stitch-run: warning: p.yaml:9: x is 4x8xf64, encoder.x is 4x8xf32: it is converted "
        "[converted]\n"
    )
    strict = cli("run", "p.yaml", "--init=ones", "--strict_types")
    assert strict.code == 3 and "p.yaml:9" in strict.err and "x is 4x8xf64" in strict.err


def test_nameless_bytes_of_a_file_are_bfloat16_where_the_pipeline_says_so(
    cli: Cli, here: Path
) -> None:
    (here / "p.yaml").write_text(FROM_FILE)
    np.save("f.npy", np.array([1.5, -2, 3], ml_dtypes.bfloat16))
    done = cli("run", "p.yaml", "--init=ones", "--output=@g.npy")
    assert done.code == 0 and np.load("g.npy").tolist() == [3, -4, 6], done.err
    (here / "p.yaml").write_text(FROM_FILE.replace(", type: bfloat16", ""))
    refused = cli("run", "p.yaml", "--init=ones")
    assert refused.code == 3 and "declare it with type: bfloat16" in refused.err


def test_what_a_round_makes_may_be_carried_in_a_circle(here: Path) -> None:
    text = (
        "modules: {cell: cell.ttb}\ninputs:\n  a: {shape: [4, 8], type: float32}\n"
        "  b: {shape: [4, 8], type: float32}\nsteps:\n"
        "  - repeat: 3\n    carry: {a: b, b: c}\n    steps:\n"
        "      - {run: cell, inputs: {x: a, h: b}, outputs: {h_next: c}}\noutputs: [b]\n"
    )
    (here / "p.yaml").write_text(text)
    with stitch.open_device("wormhole_n150") as device:
        pipeline = YamlPipeline(read_pipeline("p.yaml"), device)
        one = np.ones((4, 8), np.float32)
        (found,) = pipeline.run((one, one))
        np.testing.assert_array_equal(found.numpy(), one * 5)


def nested(*times: int) -> str:
    """A pipeline of nested repeats around one run."""
    step = "{run: encoder, inputs: {x: x}, outputs: {y: h}}"
    after = "h"
    for level, count in enumerate(times):
        step = f"{{repeat: {count}, index: i{level}, carry: {{x: {after}}}, steps: [{step}]}}"
        after = "x"
    inputs = "inputs:\n  x: {shape: [4, 8], type: float32}\n"
    return f"modules: {{encoder: b.ttb}}\n{inputs}steps: [{step}]\noutputs: [x]\n"


def test_repeats_that_multiply_beyond_reason_are_refused_unless_asked_for(
    cli: Cli, here: Path
) -> None:
    (here / "p.yaml").write_text(nested(10**6, 10**6))
    done = cli("run", "p.yaml", "--dry_run")
    assert done.code == 3
    assert "runs 1,000,000,000,000 programs" in done.err and "max_runs" in done.err
    (here / "p.yaml").write_text(nested(10**6, 10**6) + "max_runs: 1000000000000\n")
    assert read_pipeline("p.yaml").file.runs == 10**12
    (here / "p.yaml").write_text(nested(3, 2) + "max_runs: 5\n")
    done = cli("run", "p.yaml", "--dry_run")
    assert done.code == 3 and "runs 6 programs (nested repeats multiply), at most 5" in done.err


@pytest.mark.parametrize("words", [("--explain", "--init=ones"), ("--dry_run",)])
def test_how_many_programs_will_run_is_said_before_they_do(
    cli: Cli, here: Path, words: tuple[str, ...]
) -> None:
    (here / "p.yaml").write_text(nested(3, 4))
    done = cli("run", "p.yaml", "--num_runs=5", *words)
    assert done.code == 0 and "60 program runs ahead: 5 passes of 12" in done.err
    done = cli("run", "--module=a.ttb", "--module=b.ttb", *words)
    assert done.code == 0 and "2 program runs ahead" in done.err


@pytest.mark.parametrize("window", [1, 8, 64])
def test_copies_for_fixed_addresses_are_counted_alike_everywhere(
    cli: Cli, here: Path, window: int
) -> None:
    at = (
        "input.x.space=l1", "input.x.address=0x40000",
        "output.y.space=l1", "output.y.address=0x48000",
    )  # fmt: skip
    scaled("f", 0.5, target="wormhole_n150", placement=at).save("f.ttb")
    (here / "p.yaml").write_text(
        "modules: {f: f.ttb}\ninputs: {x: {shape: [4, 64], type: float32}}\nsteps:\n"
        "  - {run: f, inputs: {x: x}, outputs: {y: a}}\n"
        "  - repeat: 20\n    carry: {a: b}\n    steps:\n"
        "      - {run: f, inputs: {x: a}, outputs: {y: b}}\n"
        "  - {run: f, inputs: {x: x}, outputs: {y: c}}\noutputs: [a, c]\n"
    )
    sums = []
    made = ("--init=randn", "--explain")
    for words in (made, ("--dry_run",), (*made, "--record=r.json")):
        done = cli("run", "p.yaml", f"--window={window}", *words)
        assert done.code == 0, done.err
        sums.append(done.out[done.out.index("wormhole_n150:") :].splitlines()[0])
    # What is fed back goes where it is read, and makes way for what is held: a move each.
    assert sums[0].startswith("wormhole_n150: 22 program runs, 24 copies, 24576 B")
    assert len(set(sums)) == 1
    totals = json.loads((here / "r.json").read_text())["totals"]
    assert (totals["copies"], totals["nbytes"]) == (24, 24576)

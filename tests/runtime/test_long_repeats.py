"""Long repeats of pipeline files: rounds are recorded, and give what runs one by one give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.documents import YamlPipeline, read_pipeline
from stitch.graph import ComputationGraphBuilder
from stitch.program import Array
from stitch.runtime import HookContext, PlanRun
from tests.support.grids import in_turn
from tests.support.stitched_models import consuming, integers, model, used

SHAPE = (4, 64)
HEAD = """\
modules: {half: half.ttb, mix: mix.ttb, eat: eat.ttb, fixed: fixed.ttb}
inputs:
  x: {shape: [4, 64], type: float32}
  w: {shape: [4, 64], type: float32}
  xs: {shape: [400, 4, 64], type: float32}
steps:
"""
#: What takes elements of one array twice, and names its inputs in another order than the slots.
FROM_OUTSIDE = {
    "in the order of names": """\
  - repeat: 399
    carry: {x: y}
    steps:
      - {run: mix, inputs: {y: "xs[i]", x: "xs[i+1]"}, outputs: [u]}
      - {run: mix, inputs: {y: w, x: u}, outputs: [t]}
      - {run: mix, inputs: {y: t, x: x}, outputs: [y]}
outputs: {a: x}
""",
    "used up and read": """\
  - repeat: 399
    carry: {x: y}
    steps:
      - {run: eat, inputs: ["xs[i]"], outputs: [s]}
      - {run: mix, inputs: [s, "xs[i]"], outputs: [u]}
      - {run: eat, inputs: ["xs[i]"], outputs: [t]}
      - {run: mix, inputs: [u, t], outputs: [v]}
      - {run: mix, inputs: [x, v], outputs: [y]}
outputs: {a: x}
""",
}
#: One carried value, three with one that goes round, elements of an array, loops in loops.
LOOPS = {
    "one": """\
  - repeat: 400
    carry: {x: y}
    steps: [{run: half, inputs: [x], outputs: [y]}]
outputs: {a: x}
""",
    "several": """\
  - {run: half, inputs: [x], outputs: [z]}
  - repeat: 401
    carry: {x: y, z: t}
    steps:
      - {run: mix, inputs: [x, z], outputs: [s]}
      - {run: mix, inputs: [s, w], outputs: [y]}
      - {run: mix, inputs: [x, y], outputs: [t]}
outputs: {a: x, b: z, c: w}
""",
    "elements": """\
  - repeat: 399
    carry: {x: y}
    steps: [{run: mix, inputs: [x, "xs[i+1]"], outputs: [y]}]
outputs: {a: x}
""",
    "loops": """\
  - repeat: 150
    index: t
    carry: {x: v}
    steps:
      - {run: mix, inputs: [x, "xs[t]"], outputs: [u]}
      - repeat: 3
        index: k
        carry: {u: v}
        steps: [{run: mix, inputs: [u, "xs[k]"], outputs: [v]}]
      - {run: half, inputs: [u], outputs: [v2]}
outputs: {a: x}
""".replace("{x: v}", "{x: v2}"),
    "donated": """\
  - {run: half, inputs: [x], outputs: [y]}
  - repeat: 400
    carry: {y: z}
    steps: [{run: eat, inputs: [y], outputs: [z]}]
outputs: {a: y}
""",
    "at an address": """\
  - repeat: 300
    carry: {x: y}
    steps: [{run: fixed, inputs: [x], outputs: [y]}]
outputs: {a: x}
""",
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the modules."""

    def mix(b: ComputationGraphBuilder) -> None:
        x, y = b.input("x", SHAPE, "float32"), b.input("y", SHAPE, "float32")
        b.output("z", x * 0.5 + y * 0.25)

    def half(b: ComputationGraphBuilder) -> None:
        b.output("y", b.input("x", SHAPE, "float32") * 0.5 + 1.0)

    monkeypatch.chdir(tmp_path)
    model("half", half).save("half.ttb")
    model("mix", mix).save("mix.ttb")
    consuming("eat", 0.5, SHAPE).save("eat.ttb")
    at = ("input.x.space=l1", "input.x.address=0x600")
    model("fixed", half, placement=at).save("fixed.ttb")
    yield tmp_path


def computed(loop: str, x: Array, w: Array, xs: Array) -> tuple[Array, ...]:
    """What the file computes, by hand."""
    half, quarter = np.float32(0.5), np.float32(0.25)

    def mix(a: Array, b: Array) -> Array:
        return a * half + b * quarter

    if loop == "several":
        z = x * half + 1
        for _ in range(401):
            y = mix(mix(x, z), w)
            x, z = y, mix(x, y)
        return x, z
    if loop == "elements":
        for i in range(399):
            x = mix(x, xs[i + 1])
    elif loop == "loops":
        for t in range(150):
            x = mix(x, xs[t])
            for k in range(3):
                x = mix(x, xs[k])
            x = x * half + 1
    elif loop == "donated":
        x = (x * half + 1) * half ** np.float32(400)
    else:
        for _ in range(300 if loop == "at an address" else 400):
            x = x * half + 1
    return (x,)


@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("loop", FROM_OUTSIDE)
def test_rounds_are_given_what_each_run_asks_for(files: Path, loop: str, window: int) -> None:
    x, w, xs = given()
    half, quarter = np.float32(0.5), np.float32(0.25)
    expected = x
    for i in range(399):
        if loop == "used up and read":
            s = xs[i] * half
            u = s * half + xs[i] * quarter
            v = u * half + s * quarter
        else:
            u = xs[i + 1] * half + xs[i] * quarter
            v = u * half + w * quarter
        expected = expected * half + v * quarter
    Path("p.yaml").write_text(HEAD + FROM_OUTSIDE[loop], encoding="utf-8")
    with stitch.open_device("tiny", window=window) as device:
        pipeline = YamlPipeline(read_pipeline("p.yaml"), device)
        for _ in range(2):
            (result,) = pipeline.run((x, w, xs))
            np.testing.assert_array_equal(result.numpy(), expected)


def given() -> tuple[Array, Array, Array]:
    random = np.random.default_rng(3)
    return (integers(SHAPE), integers(SHAPE, 7),
            random.standard_normal((400, *SHAPE), np.float32))  # fmt: skip


def loaded(device: stitch.Device, loop: str) -> YamlPipeline:
    Path("p.yaml").write_text(HEAD + LOOPS[loop].replace(", c: w", ""), encoding="utf-8")
    return YamlPipeline(read_pipeline("p.yaml"), device)


@pytest.mark.parametrize(("window", "loop"), in_turn([1, 3, 64], LOOPS))
def test_a_long_repeat_is_planned_once_and_computes_the_same(
    files: Path, loop: str, window: int
) -> None:
    arrays = given()
    expected = computed(loop, *arrays)
    with stitch.open_device("tiny", window=window, debug=window == 3) as device:
        pipeline = loaded(device, loop)
        tensors = tuple(map(device.tensor, arrays[:2]))
        runs: list[int] = []

        def count(event: object) -> None:
            if isinstance(event, PlanRun):
                runs.append(len(event.plan.request.tasks))

        device.events.subscribe(count)
        for turn in range(8):
            if turn == 6:
                before = device.statistics()
            values = arrays if turn % 2 else (*tensors, arrays[2])
            runs.clear()
            results = pipeline.run(values)
            for result, wanted in zip(results, expected, strict=True):
                np.testing.assert_array_equal(result.numpy(), wanted)
            # As many programs as the file says, whoever counts them.
            assert sum(runs) == pipeline.checked.file.runs
        after = device.statistics()
        assert after.plans_made == before.plans_made
        # What it was given is the caller's, still.
        np.testing.assert_array_equal(tensors[0].numpy(), arrays[0])
        np.testing.assert_array_equal(tensors[1].numpy(), arrays[1])


@pytest.mark.parametrize(
    ("at", "error", "loop"),
    in_turn([1, 64, 65, 200, 390], [RuntimeError, KeyboardInterrupt], ["one", "donated"]),
)
def test_a_long_repeat_that_is_stopped_leaves_the_device_as_it_was(
    files: Path, loop: str, error: type[BaseException], at: int
) -> None:
    arrays = given()
    with stitch.open_device("tiny", debug=True) as device:
        pipeline = loaded(device, loop)
        for _ in range(2):
            stitch.wait(pipeline.run(arrays))
        at_rest, left = used(device), at

        def stop(context: HookContext) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise error

        undo = device.hooks.register(before_program=stop)
        with pytest.raises(error):
            stitch.wait(pipeline.run(arrays))
        undo()
        assert used(device) == at_rest
        (result,) = pipeline.run(arrays)
        np.testing.assert_array_equal(result.numpy(), computed(loop, *arrays)[0])

"""The JSON of a model: written to paths, read back with what the search found, refused by name."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import FormatError, StitchError, UsageError
from stitch.program import Space
from tests.support.json_damage import at, damaged_json
from tests.support.training.models import batches, compiled, mlp, train


def searched() -> stitch.CompiledModel:
    return compiled(
        stitch.Adam(lr=0.01), target="wormhole_n150", graph=mlp(hidden=64), algorithm="search"
    )


def test_what_the_search_found_comes_back_from_a_path(tmp_path: Path) -> None:
    model = searched()
    train(model, batches(2), 3)
    model.dump(tmp_path / "model.json")
    again = stitch.CompiledModel.load(str(tmp_path / "model.json"))
    before, after = model.search_result, again.search_result
    assert before is not None
    assert after is not None
    assert after.tensor_mapping == before.tensor_mapping
    assert after.solution == before.solution
    assert after.cost_values == before.cost_values
    assert [g.name for _, g in after.graph.in_order] == [g.name for _, g in before.graph.in_order]
    assert after.graph.saved == before.graph.saved
    assert again.training is not None
    assert again.training.search_result is after
    assert train(again, batches(2), 4) == train(model, batches(2), 4)


def test_a_model_for_inference_has_its_places_chosen_and_keeps_them() -> None:
    model = stitch.compile(mlp(hidden=64), target="wormhole_n150", algorithm="search")
    found = model.search_result
    assert found is not None
    assert set(found.tensor_mapping.values()) == {Space.L1}
    assert found.solution.algorithm == "search"
    again = stitch.CompiledModel.load(io.StringIO(model.as_json()))
    assert again.encode() == model.encode()
    assert again.search_result is not None
    assert again.search_result.as_data() == found.as_data()
    assert again.search_result.graph is again.graph


def test_a_training_that_an_older_version_wrote_goes_on() -> None:
    file = Path(__file__).parents[1] / "formats/training_v1.json"
    model = stitch.CompiledModel.load(file)
    assert model.training is not None and model.search_result is not None
    assert model.training.options.clip_grad_norm == 0.5
    assert model.training.options.accumulation_steps == 2
    assert model.search_result.tensor_mapping["y"] is Space.L1
    # The losses of the four steps that followed in the version that wrote the file.
    wanted = [0.193043, 0.524414, 0.149074, 0.610941]
    assert train(model, batches(2, 4), 4) == pytest.approx(wanted, rel=1e-4)
    assert (
        json.loads(file.read_text())["training"].keys()
        == json.loads(model.as_json())["training"].keys()
    )


def refusal(text: str) -> str:
    with pytest.raises(FormatError) as caught:
        stitch.CompiledModel.load(io.StringIO(text))
    return str(caught.value)


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_another_version_is_named(version: Any) -> None:
    body = json.loads(searched().as_json()) | {"version": version}
    told = refusal(json.dumps(body))
    assert "no compiled model, or of another version" in told
    assert f"version {version!r}" in told


_STEPS = {"type": "int64", "shape": [1], "base64": "AAAAAAAAAAA="}


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("values fc1.bias type", "int32", ".values.fc1.bias\n  expected: 64xf32"),
        ("values fc1.bias type", "float23", ".values.fc1.bias.type\n"),
        ("values fc1.bias base64", "AAAA", ".values.fc1.bias"),
        ("values fc1.bias shape", [-64], ".values.fc1.bias"),
        ("values training.steps", _STEPS, ".values.training.steps\n"),
        ("loss", 7, ".loss\n"),
        ("loss loss", "mes", ".loss\n"),
        ("optimizer betas", 3, ".optimizer\n"),
        ("optimizer groups", [1], ".optimizer\n"),
        ("optimizer schedule schedule", [], ".optimizer\n"),
        ("precision", "float23", ".precision\n"),
        ("spaces", {"x": "l2"}, ".spaces.x\n"),
        ("clip_grad_norm", -1, "\n  got: -1"),
        ("extra", 1, ""),
    ],
)
def test_what_is_wrong_in_a_training_is_said_with_its_place(
    place: str, value: Any, said: str
) -> None:
    body = json.loads(searched().as_json())
    *outer, last = place.split()
    at(body["training"], tuple(outer))[last] = value
    assert f"  where: model.training{said}" in refusal(json.dumps(body))


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("inference", 700), ("training", 300),
        pytest.param("inference", 10_000, marks=pytest.mark.campaign("hostile")),
        pytest.param("training", 2_000, marks=pytest.mark.campaign("hostile")),
    ],
)  # fmt: skip
def test_damaged_json_is_a_model_or_an_error_of_ours(kind: str, count: int) -> None:
    graph = mlp(hidden=8)
    text = (
        stitch.compile(graph, target="host")
        if kind == "inference"
        else compiled(stitch.Adam(lr=0.01, weight_decay=0.1), graph=graph, algorithm="search")
    ).as_json()
    rng, refused = random.Random(11), 0
    for _ in range(count):
        try:
            stitch.CompiledModel.load(io.StringIO(damaged_json(text, rng)))
        except StitchError as error:
            assert len(str(error)) < 20_000
            refused += 1
    assert count // 2 < refused < count


# -- tensors of a model, whole and in parts --------------------------------------------------------


def test_a_part_of_a_tensor_is_read_and_written() -> None:
    model = searched()
    for moment in ("before", "after"):
        if moment == "after":
            train(model, batches(2), 1)
        whole = model.get_tensor("fc1.weight")
        np.testing.assert_array_equal(model.get_tensor("fc1.weight", (0, slice(2))), whole[0, :2])
        model.set_tensor("fc1.weight", [7.0, 8.0], (0, slice(2)))
        assert model.get_tensor("fc1.weight", (0, slice(2))).tolist() == [7.0, 8.0]
        np.testing.assert_array_equal(model.get_tensor("fc1.weight")[1:], whole[1:])
        model.set_tensor("fc1.weight", whole)
    assert model.get_tensor("fc1.weight.exp_avg", 0).shape == whole[0].shape


def test_the_master_is_written_with_its_parameter() -> None:
    model = compiled(stitch.SGD(lr=0.0), target="host", precision="bfloat16")
    train(model, batches(1), 1)
    model.set_tensor("fc1.weight", 0.3, (0, 0))
    assert model.get_tensor("fc1.weight.master", (0, 0)) == np.float32(0.3)
    assert (
        model.get_tensor("fc1.weight.master", (0, 1))
        == model.instance.parameters()["fc1.weight"][0, 1]
    )


@pytest.mark.parametrize(
    ("index", "part", "told"),
    [((99, 0), 1.0, "invalid index"), (0, [1.0], "another shape"), ("w", 1.0, "invalid index")],
)
def test_a_part_that_does_not_fit_is_refused(index: Any, part: Any, told: str) -> None:
    model = searched()
    before = model.get_tensor("fc1.weight")
    for _ in range(2):
        with pytest.raises(UsageError, match=told):
            model.set_tensor("fc1.weight", part, index)
        np.testing.assert_array_equal(model.get_tensor("fc1.weight"), before)
        model.start()


def test_a_model_for_inference_shows_its_constants() -> None:
    b = stitch.ComputationGraphBuilder("line")
    x, weights = b.input("x", (2, 3), "float32"), np.arange(12, dtype=np.float32).reshape(4, 3)
    b.output("y", b.linear(x, b.parameter("w", weights)))
    model = stitch.compile(b.build(), target="host")
    np.testing.assert_array_equal(model.get_tensor("w", 1), weights[1])
    with pytest.raises(UsageError, match="cannot be changed"):
        model.set_tensor("w", weights)


def test_a_file_of_programs_is_told_to_be_no_text(tmp_path: Path) -> None:
    path = tmp_path / "line.ttb"
    stitch.compile(mlp()).save(path)
    with pytest.raises(FormatError, match=r"the file is no text"):
        stitch.CompiledModel.load(path)

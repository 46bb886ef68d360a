"""Pipeline files on several devices compute what they compute on one."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import numpy as np
import pytest

import stitch
from stitch.documents import YamlPipeline, read_pipeline
from stitch.documents.pipeline_form import pipeline_from_text
from stitch.errors import UsageError
from stitch.mesh import MachineSpecification, Mesh, open_mesh
from stitch.mesh.local_carrier import LocalCarrier
from stitch.mesh.server import DeviceServer
from tests.documents.test_pipeline_graphs import (
    HEAD,
    LENGTH,
    SHAPE,
    Written,
    few,
    interpreted,
    modules,
    written,
)
from tests.support.grids import every

__all__ = ["few", "modules"]
DEVICES = ("device0", "device1", "device2")


def placed(text: str, random: Random) -> str:
    """Place most modules of a file on devices."""
    for module in re.findall(r"(\w+): \w+\.ttb", text):
        device = random.choice([*DEVICES, ""])
        if device:
            entry = f"{module}: {{file: {module}.ttb, device: {device}}}"
            text = text.replace(f"{module}: {module}.ttb", entry)
    return text


@pytest.mark.parametrize("seed", every(3, range(12)))
@pytest.mark.usefixtures("few")
def test_a_random_pipeline_on_a_mesh_computes_what_its_steps_compute(
    modules: Path, seed: int
) -> None:
    random = Random(seed)
    text = Written(seed, (1, 2, 3, 5, 9, 13), 40).text
    file = written(modules, text[len(HEAD) :])
    file.write_text("devices: 3\n" + placed(text, random))
    draw = np.random.default_rng(seed)
    arrays = [draw.standard_normal(s, np.float32) for s in (SHAPE, SHAPE, (LENGTH, *SHAPE))]
    parsed = pipeline_from_text(text, modules)
    expected = interpreted(parsed, dict(zip(("x", "w", "xs"), arrays, strict=True)))

    def open_server(name: str) -> DeviceServer:
        return DeviceServer(name, stitch.open_device("tiny"))

    # Servers work in an order drawn from the seed, and one is killed.
    carrier = LocalCarrier(open_server, seed, {random.randrange(40): "kill during"})
    with Mesh(MachineSpecification.of(3, "tiny"), carrier) as mesh:
        pipeline = YamlPipeline(read_pipeline(file), mesh)
        for results in [pipeline.run(arrays), pipeline.run(arrays)]:
            for result, wanted in zip(results, expected, strict=True):
                np.testing.assert_array_equal(result.numpy(), wanted, err_msg=text)


def test_from_yaml_opens_a_mesh_or_takes_one(modules: Path) -> None:
    steps = "  - {run: mix, inputs: [x, w], outputs: [a]}\noutputs: [a]\n"
    text = written(modules, steps).read_text()
    file = modules / "p.yaml"
    file.write_text("devices: 2\n" + text.replace(
        "mix: mix.ttb", "mix: {file: mix.ttb, device: device1}"
    ))  # fmt: skip
    arrays = [np.ones(shape, np.float32) for shape in (SHAPE, SHAPE, (LENGTH, *SHAPE))]
    wanted = arrays[0] * np.float32(0.75)
    own = stitch.Pipeline.from_yaml(file, in_flight=2)
    result = own(*arrays)
    assert isinstance(own.device, Mesh)
    assert (result.device, own.device.in_flight) == ("device1", 2)
    np.testing.assert_array_equal(result.numpy(), wanted)
    own.device.close()
    with open_mesh(1, machine="tiny") as mesh, pytest.raises(UsageError) as caught:
        stitch.Pipeline.from_yaml(file, device=mesh)
    assert "no device 'device1'" in str(caught.value) and "p.yaml:2" in str(caught.value)


def test_a_value_of_another_type_is_converted_between_graphs(tmp_path: Path) -> None:
    x = np.linspace(-3, 3, 32, dtype=np.float32).reshape(4, 8)
    for name, kind in (("narrow", "bfloat16"), ("wide", "float32")):
        builder = stitch.ComputationGraphBuilder(name)
        builder.output("y", builder.input("x", SHAPE, kind) * 0.3)
        stitch.compile(builder.build(), target="tiny").save(tmp_path / f"{name}.ttb")
    file = tmp_path / "p.yaml"
    file.write_text(
        "modules: {narrow: narrow.ttb, wide: wide.ttb}\n"
        "inputs: {x: {shape: [4, 8], type: float32}}\n"
        "steps:\n"
        "  - {run: narrow, inputs: [x], outputs: [n]}\n"
        "  - repeat: 200\n    carry: {n: m}\n"
        "    steps: [{run: narrow, inputs: [n], outputs: [m]}]\n"
        "  - {run: wide, inputs: [n], outputs: [y]}\n"
        "outputs: [y]\n"
    )
    with stitch.open_device("tiny") as device:
        wanted = YamlPipeline(read_pipeline(file), device)(x).numpy()
    with open_mesh(2, machine="tiny") as mesh:
        found = YamlPipeline(read_pipeline(file), mesh)(x).numpy()
    assert found.tobytes() == wanted.tobytes()

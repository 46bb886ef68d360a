"""Four programs, four files: what is in them, and that other processes run them alike."""

from __future__ import annotations

import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.cli import run_main
from stitch.program import Array, Role
from tests.support.training.models import batches, compiled, train, values_of


def stitch_run(file: Path, inputs: dict[str, Array], outputs: list[str]) -> dict[str, Array]:
    """The outputs of one file, run by the command."""
    folder = file.parent / file.stem
    folder.mkdir(exist_ok=True)
    command = [f"--module={file}"]
    for i, (name, array) in enumerate(inputs.items()):
        np.save(folder / f"in{i}.npy", array)
        command.append(f"--input={name}=@{folder / f'in{i}.npy'}")
    for i, name in enumerate(outputs):
        command.append(f"--output={name}=@{folder / f'out{i}.npy'}")
    with redirect_stdout(StringIO()):
        assert run_main(command) == 0
    return {name: np.load(folder / f"out{i}.npy") for i, name in enumerate(outputs)}


def test_a_step_of_four_files_run_by_the_command_equals_that_of_the_instance(
    tmp_path: Path,
) -> None:
    model = compiled(stitch.SGD(lr=0.05, momentum=0.9))
    assert model.training is not None
    files = model.save_programs(tmp_path)
    names = ["forward.ttb", "loss.ttb", "backward.ttb", "update.ttb", "evaluation.ttb"]
    assert [f.name for f in files] == names
    ((x, y),) = batches(1)
    tensors: dict[str, Array] = {"x": x, "label": y, "learning_rate": np.asarray(0.05, np.float32)}
    tensors.update(model.training.values)
    for slot in model.training.programs.update.inputs:
        if slot.name.endswith("momentum_buffer"):
            name = slot.name.removesuffix(".momentum_buffer")
            tensors[slot.name] = np.zeros_like(model.training.values[name])
    for file, program in zip(files[:4], model.binary.programs[:4], strict=True):
        wanted = {slot.name: tensors[slot.name] for slot in program.inputs}
        tensors |= stitch_run(file, wanted, [slot.name for slot in program.outputs])
    (expected,) = train(model, [(x, y)])
    assert tensors["loss"] == np.float32(expected)
    for name, value in model.instance.parameters().items():
        np.testing.assert_array_equal(tensors[name], value)


def operators(model: stitch.CompiledModel, role: Role) -> list[str]:
    """The operators of one of the programs."""
    program = next(p for p in model.binary.programs if p.role is role)
    return [operation.op for operation in program.operations]


def test_backward_holds_no_operation_of_forward_unless_it_recomputes() -> None:
    assert operators(compiled(), Role.FORWARD) == ["Gemm", "Relu", "Gemm"]
    assert "Relu" not in operators(compiled(), Role.BACKWARD)
    assert "Relu" in operators(compiled(recompute="all"), Role.BACKWARD)
    counts = [
        operators(compiled(recompute=r), Role.BACKWARD).count("Gemm") for r in ("none", "all")
    ]
    assert counts[1] > counts[0]


def test_json_goes_round_and_predicts_the_same_in_a_new_process(tmp_path: Path) -> None:
    model = compiled(stitch.Adam(lr=0.01))
    data = batches(4)
    train(model, data)
    with (tmp_path / "model.json").open("w") as file:
        model.dump(file)
    np.save(tmp_path / "x.npy", data[0][0])
    code = (
        "import sys, numpy, stitch\n"
        "model = stitch.CompiledModel.load(open('model.json'))\n"
        "numpy.save('y.npy', model(numpy.load('x.npy')).numpy())\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), values_of(model(data[0][0])))


def test_without_weights_a_dumped_model_asks_for_them(tmp_path: Path) -> None:
    model = compiled()
    with (tmp_path / "model.json").open("w+") as file:
        model.dump(file, weights=False)
        file.seek(0)
        bare = stitch.CompiledModel.load(file)
    ((x, _),) = batches(1)
    with pytest.raises(stitch.StitchError, match=r"no initial values for fc1\.weight"):
        bare(x)
    assert model.training is not None
    bare.start(weights=model.training.values)
    np.testing.assert_array_equal(values_of(bare(x)), values_of(model(x)))

"""Archives of `torch.export.save` (`.pt2`) by `stitch.compile` and `stitch-compile`."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import stitch
from stitch.cli import compile_main as main
from stitch.errors import FormatError


class Net(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.second(self.first(x).relu())}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def test_an_archive_compiles_without_examples(tmp_path: Path, x: torch.Tensor) -> None:
    net, path = Net(), tmp_path / "net.pt2"
    torch.export.save(torch.export.export(net, (x,)), path)
    model = stitch.compile(path)
    np.testing.assert_allclose(model(x)["y"].numpy(), net(x)["y"].detach().numpy(), rtol=1e-5)


def test_the_command_splits_an_archive(tmp_path: Path, x: torch.Tensor) -> None:
    net = Net()
    torch.export.save(torch.export.export(net, (x,)), tmp_path / "net.pt2")
    assert main([str(tmp_path / "net.pt2"), "--split=2", "-o", str(tmp_path / "m.ttb")]) == 0
    with stitch.open_device() as device:
        pipeline = stitch.Pipeline([device.load(tmp_path / f"m.{k}.ttb") for k in range(2)])
        result = pipeline(x.numpy()).numpy()
    np.testing.assert_allclose(result, net(x)["y"].detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("damage", ["text", "another archive", "missing", "cut"])
def test_a_file_that_is_no_archive_is_refused(tmp_path: Path, x: torch.Tensor, damage: str) -> None:
    path = tmp_path / "net.pt2"
    if damage == "text":
        path.write_text("no archive")
    elif damage == "another archive":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a", "b")
    elif damage == "cut":
        torch.export.save(torch.export.export(Net(), (x,)), path)
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(FormatError) as raised:
        stitch.compile(path)
    assert raised.value.where == str(path)

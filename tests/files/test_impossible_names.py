"""Names that no file can have: one clear error wherever a path is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.errors import StitchError
from stitch.report import ChromeTrace, VisualizerFolder

NAMES = ("a\0.ttb", "a\0/b.ttb", "\0", "a\ud800.ttb", "n" * 5000)


@pytest.fixture
def model() -> stitch.CompiledModel:
    return stitch.compile(lambda x: x + 1, (np.ones((2, 2), np.float32),), target="host")


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_every_function_that_takes_a_path_refuses_a_name_that_no_file_can_have(
    model: stitch.CompiledModel, name: str, tmp_path: Path
) -> None:
    with stitch.open_device("host") as device:
        takers: dict[str, Callable[[str], object]] = {
            "load": stitch.load,
            "compile": lambda p: stitch.compile(p, target="host"),
            "target": lambda p: stitch.compile(np.abs, (np.ones(2, np.float32),), target=p),
            "open_device": stitch.open_device,
            "device.load": device.load,
            "save": model.save,
            "dump": model.dump,
            "CompiledModel.load": stitch.CompiledModel.load,
            "link": lambda p: stitch.link([p, p]),
            "from_yaml": stitch.Pipeline.from_yaml,
            "get_layout": lambda p: stitch.get_layout(p, 0, 0),
            "ChromeTrace": lambda p: ChromeTrace(device, p).close(),
            "VisualizerFolder": lambda p: VisualizerFolder(device, p).close(),
        }
        for taker, take in takers.items():
            with pytest.raises(StitchError) as refused:
                take(str(tmp_path / name))
            assert refused.value.what, taker

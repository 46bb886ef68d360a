"""What listens to a device says which argument is of another kind, and listens to nothing then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stitch
from stitch.errors import UsageError
from stitch.report import (
    ChromeTrace,
    OperationComparison,
    OperationStore,
    Recorder,
    VisualizerFolder,
)

Listener = Callable[..., Any]


@pytest.mark.parametrize(
    ("listener", "parameter"),
    [
        (ChromeTrace, "path"), (OperationComparison, "expected"), (OperationStore, "path"),
        (VisualizerFolder, "folder"),
    ],
)  # fmt: skip
def test_a_path_of_another_kind_is_named(listener: Listener, parameter: str) -> None:
    with stitch.open_device("tiny") as device:
        with pytest.raises(UsageError, match=f"{listener.__name__} takes .* as {parameter}") as at:
            listener(device, 3)
        assert at.value.got == "int: 3"


@pytest.mark.parametrize(
    "listener", [ChromeTrace, OperationComparison, OperationStore, Recorder, VisualizerFolder]
)
def test_what_is_no_device_is_named(listener: Listener, tmp_path: Path) -> None:
    rest = (tmp_path / "a.npz",) if listener in (OperationStore, VisualizerFolder) else ()
    with pytest.raises(UsageError, match=f"{listener.__name__} takes a device as device"):
        listener("tiny", *rest)

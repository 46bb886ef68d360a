"""How many Python functions of the runtime stand between a call and its kernels."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import stitch
from stitch import runtime
from tests.support.stitched_models import integers, one, scaled

FOLDER = str(Path(runtime.__file__).parent)
#: Frames and files of a warm call; functions and files of the first one.
WARM, COLD = (25, 10), (200, 17)


def frames(work: Callable[[], object]) -> list[tuple[str, str]]:
    """Return file and name of each Python function of the runtime, without executors, as called."""
    seen: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDER):
            inside = code.co_filename[len(FOLDER) + 1 :]
            if not inside.startswith("executors"):
                seen.append((inside, code.co_qualname))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


def test_a_call_passes_few_functions_of_the_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    with stitch.open_device("tiny") as device:
        program, x = device.load(scaled("a", 2.0)), integers()
        first = set(frames(lambda: one(program(x)).numpy()))
        for _ in range(8):
            one(program(x)).numpy()
        warm = frames(lambda: one(program(x)).numpy())
    counts = len(warm), len({file for file, _ in warm})
    cold = len(first), len({file for file, _ in first})
    with capsys.disabled():
        print(f"\nwarm {counts} frames, files; first call {cold} functions, files")
    page = Path(__file__).parents[2] / "docs" / "architecture.md"
    rows = re.findall(
        r"^ {4,5}\d+  +(\S+\.py) +([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) == 9, "ten boxes, of which one is generated code"
    assert [frame for frame in warm if frame in rows] == rows
    assert counts[0] <= WARM[0] and counts[1] <= WARM[1], warm
    assert cold[0] <= COLD[0] and cold[1] <= COLD[1]

"""A process without file descriptors: what loads a module late says so, and works afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stitch.errors import StitchError

SCRIPT = """
import os, resource, sys, traceback
import numpy as np
import stitch
from stitch.errors import StitchError

model = stitch.compile(lambda x: x + 1, (np.ones((2, 2), np.float32),), target="tiny")

def tried(name):
    device = stitch.open_device("tiny")
    program = device.load(model)
    graph = stitch.TaskGraph()
    calls = {
        "explain": lambda: device.explain(),
        "memory_report": lambda: device.memory_report(),
        "memory_views": lambda: device.memory_views(),
        "as_json": lambda: graph.as_json(),
        "optimize": lambda: stitch.training.optimize,
        "fractal": lambda: stitch.fractal.map,
        "executor": lambda: stitch.open_device("tiny", executor="auto").close(),
    }
    call = calls[name]
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    try:
        call()
        print("late import expected")
    except StitchError as error:
        assert "Too many open files" in str(error), error
        assert "ulimit -n" in str(error), error
    assert float(program(np.ones((2, 2), np.float32)).numpy().sum()) == 8
    for handle in held:
        os.close(handle)
    call()
    device.close()
    print(name, "done", flush=True)

for name in sys.argv[1:]:
    if os.fork() == 0:
        try:
            tried(name)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.wait()
"""
CALLS = ["explain", "memory_report", "memory_views", "as_json", "optimize", "fractal", "executor"]


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    """Each call in a child of its own of one process, which has loaded what all of them need."""
    command = [sys.executable, "-c", SCRIPT, *CALLS]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("call", CALLS)
def test_without_descriptors_a_late_import_is_one_error_and_the_device_goes_on(
    call: str, done: subprocess.CompletedProcess[str]
) -> None:
    said = [line for line in done.stdout.splitlines() if not line.endswith(" done")]
    assert f"{call} done" in done.stdout.splitlines() and not said, done.stdout + done.stderr


def test_a_package_of_another_version_is_named_with_the_line_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "needs_another"
    folder.mkdir()
    face = "__getattr__, _ = names_on_demand(__name__, {'module': 'name'})"
    (folder / "__init__.py").write_text(f"from stitch.on_demand import names_on_demand\n{face}\n")
    (folder / "module.py").write_text("import sys\nname = sys.removed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StitchError, match=r"(?s)module\.py:2.*no attribute 'removed'.*pip install"):
        exec("from needs_another import name")

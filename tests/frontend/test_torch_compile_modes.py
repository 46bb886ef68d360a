"""Modes, options, stances and logs of torch.compile, as its users know them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from tests.support.grids import every
from tests.support.torch.compiled import assert_same, compiled, storage_of

X = torch.linspace(-1, 1, 24).view(6, 4)


def run_in_mode(mode: str | None) -> Any:
    """A small network, compiled in a mode; and the same without."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    return torch.compile(module, backend="stitch", mode=mode), module


def refusal(run: Any) -> str:
    """What is said of a compilation that is refused."""
    with pytest.raises(BackendCompilerFailed) as caught:
        run(X)
    return str(caught.value)


# Modes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", every(2, [None, "default", "reduce-overhead", "max-autotune"]))
def test_a_mode_of_torch_gives_the_numbers_of_eager_torch(mode: str | None) -> None:
    run, module = run_in_mode(mode)
    assert_same(run(X), module(X))


def test_an_unknown_mode_is_answered_with_the_nearest() -> None:
    run, _ = run_in_mode("max_autotune")
    said = refusal(run)
    assert "no mode 'max_autotune'" in said and "did you mean 'max-autotune'?" in said
    assert "reduce-overhead" in said


# Options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("inter_op_threads", 2), ("strict_types", True), ("window", 3)]
)
def test_an_option_of_a_device_reaches_it(name: str, value: Any) -> None:
    run = compiled(lambda x: x * 2, **{name: value})
    assert_same(run(X), X * 2)
    assert storage_of(**{name: value}) is not storage_of()
    assert getattr(storage_of(**{name: value}).device, name) == value


def test_threads_are_refused_where_an_executor_takes_none() -> None:
    said = refusal(compiled(lambda x: x + 1, executor="numpy", threads=2))
    assert "takes no number of threads" in said


def test_a_misspelt_option_of_a_device_is_answered_with_the_nearest() -> None:
    assert "did you mean 'inter_op_threads'?" in refusal(
        compiled(lambda x: x + 1, inter_op_thread=2)
    )


# Stances ----------------------------------------------------------------------------------------


def test_force_eager_runs_nothing_here() -> None:
    run = compiled(lambda x: x * 3)
    counts = storage_of().counts
    with torch.compiler.set_stance("force_eager"):
        before = counts.graphs
        assert_same(run(X), X * 3)
        assert counts.graphs == before
    assert_same(run(X), X * 3)
    assert counts.graphs == before + 1


def test_fail_on_recompile_fails_on_new_shapes_alone() -> None:
    run = compiled(lambda x: x * 3, dynamic=False)
    run(X)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_same(run(X), X * 3)
        with pytest.raises(RuntimeError, match="recompile"):
            run(X[:2])


# Logs -------------------------------------------------------------------------------------------

PROGRAM = """
import torch
run = torch.compile(lambda x: torch.linalg.inv(x).relu() + x * 2 - 1, backend="stitch",
                    options={"min_operations": 1})
run(torch.eye(3))
"""


def logged(setting: str) -> str:
    """What a process writes to standard error with this `TORCH_LOGS`."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, "TORCH_LOGS": setting, "OMP_NUM_THREADS": "1",
             "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stderr


@pytest.mark.campaign("torch_compile")
def test_torch_logs_tells_of_graphs_programs_and_fallbacks() -> None:
    said = logged("+stitch")
    assert "graph inference_0:" in said and "run by torch" in said
    assert "torch runs linalg_inv_ex" in said or "torch runs aten.linalg_inv_ex" in said
    assert "program @" in said


@pytest.mark.campaign("torch_compile")
def test_torch_logs_without_a_plus_tells_of_graphs_alone() -> None:
    said = logged("stitch")
    assert "graph inference_0:" in said
    assert "program @" not in said

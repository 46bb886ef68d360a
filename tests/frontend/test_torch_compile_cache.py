"""The option `cache` of torch.compile: what was compiled once is read, and no folder stops it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch.compiler._cache import CacheArtifactManager

from tests.support.torch.compiled import assert_same, compiled, storage_of

X = torch.linspace(-1, 1, 24).view(6, 4)


def network() -> Any:
    """The same network each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def step(**options: Any) -> list[Any]:
    """Result and gradients of a training step of the network, compiled anew."""
    module = network()
    result = compiled(module, **options)(X)
    result.sum().backward()
    return [result.detach(), *(p.grad for p in module.parameters())]


def graphs_of(**options: Any) -> tuple[int, int]:
    """How many graphs were compiled so far with these options, and how many were read."""
    counts = storage_of(**options).counts
    return counts.graphs, counts.from_cache


def assert_bits(found: list[Any], wanted: list[Any]) -> None:
    """The same, to the bit."""
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


def test_what_was_compiled_once_is_read_with_its_backward_pass(tmp_path: Path) -> None:
    options = {"cache": str(tmp_path)}
    graphs, read = graphs_of(**options)
    first = step(**options)
    assert graphs_of(**options) == (graphs + 2, read)
    assert_bits(step(**options), first)
    assert graphs_of(**options) == (graphs + 2, read + 2)
    assert_same(first, step())


def test_another_option_reads_nothing(tmp_path: Path) -> None:
    step(cache=str(tmp_path))
    graphs, read = graphs_of()
    step(cache=str(tmp_path), passes=False)
    assert graphs_of() == (graphs + 2, read)


def test_another_text_of_stitch_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(cache=str(tmp_path))
    graphs, read = graphs_of()
    monkeypatch.setattr("stitch.compile_cache._text_digest", lambda rooms: f"other {rooms}")
    step(cache=str(tmp_path))
    assert graphs_of() == (graphs + 2, read)


def test_artifacts_carry_what_was_compiled_to_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CacheArtifactManager.with_fresh_cache():
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
        first = step(cache=True)
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "there"))
    assert torch.compiler.load_cache_artifacts(saved[0]) is not None
    graphs, read = graphs_of()
    assert_bits(step(cache=True), first)
    assert graphs_of() == (graphs, read + 2)


def test_a_folder_that_is_none_stops_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert_same(step(cache=str(file)), step())
    assert file.read_text() == ""


def test_a_full_disk_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(AOTAutogradCache, "_write_to_local_cache", staticmethod(full))
    assert_same(step(cache=str(tmp_path)), step())


def test_a_damaged_entry_is_compiled_anew(tmp_path: Path) -> None:
    first = step(cache=str(tmp_path))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-20] + b"x" * 20)
    graphs, read = graphs_of()
    assert_bits(step(cache=str(tmp_path)), first)
    assert graphs_of() == (graphs + 2, read)


@pytest.mark.parametrize("value", [3, ["a"]])
def test_what_is_no_folder_is_refused(value: Any) -> None:
    with pytest.raises(BackendCompilerFailed, match="takes a folder"):
        compiled(lambda x: x + 1, cache=value)(X)


PROGRAM = """
import sys, torch
from stitch.frontend.torch.compile import CompileSettings, shared_storage_of
options = {"cache": sys.argv[1]}
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
result = torch.compile(module, backend="stitch", options=options)(torch.ones(3, 4))
result.sum().backward()
counts = shared_storage_of(CompileSettings.of(options)).counts
print(counts.graphs, counts.from_cache, float(module[0].weight.grad.sum()))
"""


def printed(folder: Path) -> list[str]:
    """What a process prints that compiles, or reads, what `PROGRAM` asks for."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.campaign("torch_compile")
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first, second = printed(tmp_path), printed(tmp_path)
    assert first[:2] == ["2", "0"]
    assert second == ["0", "2", first[2]]

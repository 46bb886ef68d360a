"""A named pipe in the place of any file is refused by every command, and never waited for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
ARRAYS = ("run", "--module=a.ttb")


@pytest.fixture(autouse=True)
def _patience() -> Iterator[None]:
    """What waits for a pipe is woken after a while, and fails."""

    def woken(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, woken)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("pipe", "words"),
    [
        ("p.yaml", ("compile", "p.yaml", "-o", "o.ttb")),
        ("p.onnx", ("compile", "p.onnx", "-o", "o.ttb")),
        ("p.json", ("compile", "p.json", "-o", "o.ttb")),
        ("p.py", ("compile", "p.py", "--entry=make", "-o", "o.ttb")),
        ("m.yaml", ("compile", "a.yaml", "--target=m.yaml", "-o", "o.ttb")),
        ("p.npy", ("compile", "p.onnx", "--input=x=@p.npy", "-o", "o.ttb")),
        ("p.ttb", ("link", "a.ttb", "p.ttb", "-o", "o.ttb")),
        ("p.ttb", ("inspect", "p.ttb")),
        ("p.ttb", ("inspect", "a.ttb", "p.ttb")),
        ("p.json", ("inspect", "--check_plan=p.json")),
        ("p.ttb", ("run", "--module=p.ttb")),
        ("p.yaml", ("run", "p.yaml")),
        ("p.json", ("run", "--replay=p.json")),
        ("m.yaml", ("run", "--module=a.ttb", "--device=m.yaml")),
        ("p.npy", (*ARRAYS, "--input=x=@p.npy")),
        ("p.npz", (*ARRAYS, "--input=@p.npz")),
        ("p.raw", (*ARRAYS, "--input=4x8xf32=@p.raw")),
        ("p.npy", (*ARRAYS, "--init=ones", "--expected_output=@p.npy")),
        ("o.ttb", ("compile", "a.yaml", "-o", "o.ttb")),
        ("o.npy", (*ARRAYS, "--init=ones", "--output=@o.npy")),
    ],
)  # fmt: skip
def test_a_named_pipe_is_refused_and_not_waited_for(
    cli: Cli, here: Path, pipe: str, words: tuple[str, ...]
) -> None:
    Path(pipe).unlink(missing_ok=True)
    os.mkfifo(pipe)
    done = cli(*words)
    assert done.code in (2, 3, 6) and "pipe" in done.err, done.err
    assert "Traceback" not in done.err and "internal error" not in done.err

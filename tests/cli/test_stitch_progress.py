"""Long phases on a terminal, `--timings`, `-q`, `-v` and STITCH_LOG: all on standard error."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import pty
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich.status  # noqa: F401  # Importing it takes longer than these phases.

from stitch.cli.stitch_command import main

Captured = pytest.CaptureFixture[str]
COMPILE = ["compile", "b.yaml", "-o", "c.ttb"]


def slowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, after 0.15 seconds."""

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.15)
        return function(*arguments, **named)

    return slow


def on_a_terminal(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal at standard error receives from a command."""
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # The end of a terminal.
            while part := os.read(ours, 4096):
                seen.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setenv("TERM", "xterm")
        patched.setattr(sys, "stderr", terminal)
        assert main(words) == 0
    reader.join()
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(seen).decode())


@pytest.mark.parametrize(
    ("words", "slow", "shown"),
    [
        (COMPILE, "stitch.api.compile", "compiling ..."),
        (["inspect", "a.ttb", "b.ttb"], "stitch.api.open_device", "planning, and"),
        (["run", "b.ttb", "--init=ones", "--num_runs=3"], "stitch.api.Device.flush",
         "planning and running ... 2 of 3"),
        (["simulate", "b.ttb", "--sweep", "l1.bank_nbytes=1MiB,2MiB"],
         "stitch.api.open_device", "simulating ... 1 of 2"),
    ],
)  # fmt: skip
def test_a_terminal_shows_what_takes_long_and_nothing_that_is_short(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, words: list[str], slow: str,
    shown: str,
) -> None:  # fmt: skip
    assert shown not in on_a_terminal(words, monkeypatch)
    owner, _, name = slow.rpartition(".")
    target = pkgutil.resolve_name(owner)
    monkeypatch.setattr(target, name, slowed(getattr(target, name)))
    monkeypatch.setattr("stitch.cli.phases.SHOWN_AFTER", 0.05)
    assert shown in on_a_terminal(words, monkeypatch)
    assert shown not in on_a_terminal([*words, "--quiet"], monkeypatch)
    capsys.readouterr()
    assert main(words) == 0
    assert shown not in capsys.readouterr().err, "it is no terminal"


def test_timings_names_the_phases_in_order(here: Path, capsys: Captured) -> None:
    assert main(["run", "b.ttb", "--init=ones", "--timings"]) == 0
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"stitch run: timings: reading modules [0-9.]+ s, loading [0-9.]+ s, "
        r"planning and running [0-9.]+ s, writing [0-9.]+ s", said,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "variable", "logged"),
    [([], "", ""), ([], "info", "INFO"), (["-v"], "", "INFO"), (["-vv"], "info", "INFO"),
     (["-v"], "error", "INFO")],
)  # fmt: skip
def test_the_log_is_that_of_the_option_or_of_the_variable(
    here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, options: list[str],
    variable: str, logged: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("STITCH_LOG", variable)
    assert main([*COMPILE, *options]) == 0
    seen = capsys.readouterr()
    assert "INFO" not in seen.out
    assert (f"{logged} stitch.cli: compiling: " in seen.err) == bool(logged)


def test_a_quiet_command_names_no_file_and_an_unknown_level_is_one_error(
    here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*COMPILE, "-q"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("STITCH_LOG", "inof")
    assert main(COMPILE) == 2
    assert "did you mean 'info'?" in capsys.readouterr().err

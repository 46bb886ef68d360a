"""Kills commands after each of their system calls of writing; prints what was found as JSON.

A process of its own, since it forks: `python -m tests.support.files.killed_commands FOLDER`, in a
folder with `a.ttb`, `a.yaml` and `x.npy`. Of each command a child is killed
(SIGKILL) after its n-th call; then every file that was there, or is there, is looked at, and the
command is run again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from stitch.api import load
from stitch.cli import compile as compile_command
from stitch.cli import run as run_command
from stitch.forms import read_array_file
from tests.support.files.killed_saves import killed

Main = Callable[[list[str]], int]
COMMANDS: dict[str, tuple[Main, list[str], int]] = {
    "split": (compile_command.main, ["a.yaml", "--split=2", "-o", "m.ttb"], 1),
    "run": (
        run_command.main,
        ["--module=a.ttb", "--input=x=@x.npy", "--output=@y.npy", "--trace=t.json",
         "--record=r.json", "--result_file=s.json", "--save_artifacts"],
        3,
    ),
}  # fmt: skip
READERS: dict[str, Callable[[Path], object]] = {
    ".ttb": lambda path: load(path, verify="full"),
    ".npy": read_array_file,
    ".json": lambda path: json.loads(path.read_text()),
}


def with_fp_errors_ignored(main: Main, words: list[str]) -> int:
    """Run a command; its exit code."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return main(words)


def check(folder: Path) -> int:
    """Read every file; gives how many parts there are."""
    parts = 0
    for path in folder.rglob("*"):
        if path.name.endswith(".part"):
            parts += 1
        elif path.suffix in READERS and path.is_file():
            READERS[path.suffix](path)
    return parts


def campaign(name: str) -> dict[str, int]:
    """Kill one command everywhere."""
    main, words, stride = COMMANDS[name]
    kills = parts = at = 0
    while killed(lambda: with_fp_errors_ignored(main, words), at):
        kills, parts = kills + 1, parts + check(Path())
        assert with_fp_errors_ignored(main, words) == 0, (name, at)
        check(Path())
        for part in Path().rglob(".*.part"):
            part.unlink()
        at += stride
    return {"kills": kills, "parts": parts}


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    print(json.dumps({name: campaign(name) for name in COMMANDS}))

"""Kills processes that save, after each of their system calls; prints what was found as JSON.

A process of its own, since it forks: `python -m tests.support.files.killed_saves FOLDER`. For each
way to save and each system call, a child is killed (SIGKILL) right after the
call; then it is looked at what is there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.files.saves import SAVES
from tests.support.files.system_calls import SystemCalls, use


def killing(at: int) -> SystemCalls:
    """Calls of which the `at`-th kills the process once it is done."""
    left = count(at, -1)

    def then_killed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            result = call(*arguments)
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    return SystemCalls(then_killed)


def killed(act: Callable[[], object], at: int) -> bool:
    """Whether a child that acts was killed at its `at`-th call; False where it came to its end."""
    child = os.fork()
    if not child:
        use(pytest.MonkeyPatch(), killing(at))
        try:
            act()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main() -> None:
    """Kill after each call of each save."""
    found = []
    for name, one in SAVES.items():
        for at in count():
            folder = Path(sys.argv[1]) / f"{name}-{at}"
            folder.mkdir()
            one.save(folder, 1)
            names = {path.name for path in folder.iterdir()}
            dead = killed(lambda one=one, folder=folder: one.save(folder, 2), at)  # type: ignore[misc]
            ages = one.ages(folder)
            new = {path.name for path in folder.iterdir()} - names
            one.save(folder, 2)
            found.append({"save": name, "at": at, "killed": dead, "ages": ages, "parts": len(new),
                          "only_parts": all(name.endswith(".part") for name in new),
                          "then": one.ages(folder)})  # fmt: skip
            if not dead:
                break
    print(json.dumps(found))


if __name__ == "__main__":
    main()

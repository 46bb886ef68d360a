"""An error of a command as plain data, and the command to type instead of a wrong one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from stitch.errors import StitchError, UsageError


def error_json(error: BaseException, what: str, code: int) -> dict[str, Any]:
    """Return an error as plain data: its class, text, exit code, and the parts of the text."""
    parts = {name: getattr(error, name, None) for name in ("where", "expected", "got", "remedy")}
    problems = [asdict(problem) for problem in getattr(error, "problems", ())]
    message = getattr(error, "what", what)
    return {
        "kind": type(error).__name__, "exit_code": code, "message": message, **parts,
        "problems": problems, "text": what,
    }  # fmt: skip


_NEAR = re.compile(r"did you mean '(.+?)'\?")
_WRONG = re.compile(r"'([^']+)'|(?<!\S)(-[-\w]+)|--\w+=(\S+)")


def corrected(error: StitchError, prog: str, arguments: Sequence[str]) -> str | None:
    """Return the command to type instead of a wrong one, quoted for a shell, or None.

    An error that names a near word stands for the command with that word in place of the wrong
    one; other wrong options stand for the command's help.
    """
    words, near = prog.split(), _NEAR.search(str(error))
    if near is not None:
        # The wrong word is the last one before the near one that an argument has.
        before = str(error)[: near.start()]
        wrongs = [group for found in _WRONG.findall(before) for group in found if group]
        for wrong in reversed(wrongs):
            at = [k for k, argument in enumerate(arguments) if _has(argument, wrong)]
            is_option = wrong.startswith("-")
            if wrong != near[1] and len(at) == 1 and is_option == near[1].startswith("-"):
                fixed = list(arguments)
                fixed[at[0]] = near[1].join(fixed[at[0]].rsplit(wrong, 1))
                return shlex.join([*words, *fixed])
    if error.exit_code == UsageError.exit_code and not (error.remedy or "").startswith("stitch"):
        return shlex.join([*words, "--help"])
    return None


def _has(argument: str, word: str) -> bool:
    """Return whether an argument is a word, has it as its value, or is an option of that name.

    >>> _has("--executor=nump", "nump"), _has("--exec=x", "--exec"), _has("a.ttb", "a")
    (True, True, False)
    """
    return argument == word or argument.endswith(("=" + word, "@" + word)) or (
        word.startswith("-") and argument.partition("=")[0] == word
    )  # fmt: skip

"""`stitch completion`: what bash and zsh complete with the scripts; both must be installed."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from stitch.cli.completion_command import completion_script
from stitch.cli.stitch_command import NAMES, main

BASH = """\
source ./stitch.sh
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
function=$(complete -p stitch | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function" stitch "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts, and files to complete."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "stitch.sh").write_text(completion_script("bash"))
    (folder / "_stitch").write_text(completion_script("zsh"))
    (folder / "ask.sh").write_text(BASH)
    (folder / "weights.ttb").touch()
    return folder


def in_bash(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    asked = ["bash", "ask.sh", *words]
    done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split()


def in_zsh(folder: Path, line: str) -> list[str]:
    """What an interactive zsh prints for `echo LINE`, with a tab after the line."""
    keys = 'autoload -Uz compinit; compinit -u -D; eval "$(<_stitch)"\n'
    keys += f"{line}\t\x01echo \x05\nexit\n"  # Ctrl-A, Ctrl-E: to both ends of the line.
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder,
        start_new_session=True,
    ) as shell:  # fmt: skip
        os.close(theirs)
        os.write(ours, keys.encode())
        seen = b""
        with contextlib.suppress(OSError):  # The end of a terminal.
            while part := os.read(ours, 4096):
                seen += part
        shell.wait()
    os.close(ours)
    return [line.strip() for line in seen.decode(errors="replace").splitlines()]


def test_bash_completes_subcommands_options_values_and_files(scripts: Path) -> None:
    assert in_bash(scripts, "stitch", "") == list(NAMES)
    assert in_bash(scripts, "stitch", "run", "--exec") == ["--executor"]
    assert in_bash(scripts, "stitch", "run", "--executor", "nu") == ["numpy", "null"]
    assert in_bash(scripts, "stitch", "inspect", "wei") == ["weights.ttb"]
    assert in_bash(scripts, "stitch", "pack", "--capac") == ["--capacity"]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_is_sound_in_its_shell(scripts: Path, shell: str) -> None:
    assert shutil.which(shell), f"install {shell}: apt-get install {shell}"
    script = {"bash": "stitch.sh", "zsh": "_stitch"}[shell]
    subprocess.run([shell, "-n", script], cwd=scripts, check=True)
    if shell == "zsh":
        assert "stitch run --executor" in in_zsh(scripts, "stitch run --exec")
        assert "stitch doctor" in in_zsh(scripts, "stitch doc")


def test_an_unknown_shell_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "  try: stitch completion bash"

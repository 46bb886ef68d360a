"""Many processes write the same files, and are killed at random: nothing is ever damaged."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.run_seed import SEED

WRITE = """
import sys
from pathlib import Path
from stitch.errors import StitchError
from stitch.files import write_files
folder, mark = Path(sys.argv[1]), sys.argv[2].encode()
print("ready", flush=True)
while True:
    write_files({folder / name: mark * 200_000 for name in ("a", "b", "c")})
"""


def written(path: Path) -> set[int]:
    """The marks in a file of full length."""
    data = path.read_bytes()
    assert len(data) == 200_000, len(data)
    return set(data)


def writer(folder: Path, mark: str) -> subprocess.Popen[str]:
    """A process that writes without end."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(folder), mark],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.campaign("files")
def test_files_that_many_write_and_some_die_writing_are_whole_at_every_look(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"0" * 200_000)
    writers = [writer(tmp_path, mark) for mark in "123"]
    kills = 0
    while kills < 12:
        end = time.monotonic() + chance.uniform(0.05, 0.5)
        while time.monotonic() < end:
            for name in ("a", "b", "c"):
                assert len(written(tmp_path / name)) == 1
        at = chance.randrange(len(writers))
        # A living writer never fails because of the others.
        assert writers[at].poll() is None, writers[at].communicate()
        writers[at].send_signal(signal.SIGKILL)
        writers[at].communicate()
        kills += 1
        writers[at] = writer(tmp_path, "123"[at])
    for one in writers:
        assert one.poll() is None, one.communicate()
        one.kill()
        one.communicate()
    names = {path.name for path in tmp_path.iterdir()}
    assert {name for name in names if not name.endswith(".part")} == {"a", "b", "c"}

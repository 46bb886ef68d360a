"""A lock on a folder: one owner, named to others, and gone when the owner is."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stitch.errors import StitchError, UsageError
from stitch.files import FolderLock
from stitch.files.folder_lock import NAME
from tests.support.files.system_calls import replacing, use

HOLD = """
import sys, time
from pathlib import Path
from stitch.files import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_the_second_is_refused_and_told_who_has_it_until_the_first_lets_go(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    with pytest.raises(UsageError) as caught:
        FolderLock(tmp_path)
    assert f"process {os.getpid()} on {os.uname().nodename}" in str(caught.value)
    first.release()
    first.release()
    assert list(tmp_path.iterdir()) == []
    FolderLock(tmp_path).release()


def test_a_lock_that_nobody_holds_any_more_is_free(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    del lock
    FolderLock(tmp_path).release()


def test_the_lock_dies_with_a_killed_owner(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="another process") as caught:
            FolderLock(tmp_path)
        assert f"process {owner.pid}" in str(caught.value)
        owner.send_signal(signal.SIGKILL)
    assert (tmp_path / NAME).exists()
    FolderLock(tmp_path).release()
    assert not (tmp_path / NAME).exists()


def test_a_child_of_the_owner_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from stitch.files import FolderLock
lock = FolderLock(Path(sys.argv[1]))
reading, writing = os.pipe()
if not os.fork():
    os.close(writing)
    os.read(reading, 1)                       # Outlives its parent until told.
    os._exit(0)
lock.release()
FolderLock(Path(sys.argv[1])).release()
print("free again")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "free again\n", done.stderr


def test_a_file_system_without_locks_gives_none_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    use(monkeypatch, replacing(flock=no_locks))
    assert FolderLock(tmp_path).missing == os.strerror(errno.ENOLCK)


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    with pytest.raises(StitchError, match="cannot be locked"):
        FolderLock(tmp_path / "none")


def test_the_lock_of_a_folder_that_was_made_anew_belongs_to_its_new_owner(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    first = FolderLock(folder)
    shutil.rmtree(folder)
    assert not first.is_held
    folder.mkdir()
    second = FolderLock(folder)
    first.release()
    assert second.is_held and not first.is_held
    with pytest.raises(UsageError, match="another process has this folder"):
        FolderLock(folder)
    second.release()


def test_a_child_of_the_owner_knows_that_it_has_no_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    child = os.fork()
    if not child:
        os._exit(10 + lock.is_held)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    assert lock.is_held
    lock.release()


@pytest.mark.parametrize("name", ["flock", "write", "unlink"])
def test_an_interrupt_while_the_folder_is_locked_leaves_it_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = getattr(replacing(), name)

    def interrupted(*arguments: Any) -> Any:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        use(patch, replacing(**{name: interrupted}))
        with contextlib.suppress(KeyboardInterrupt):
            lock = FolderLock(tmp_path)
            lock.release()
    FolderLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []

"""Saving: whatever fails, and wherever the process dies, a file is the old one or the new one."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stitch.errors import StitchError
from stitch.files import Sink, atomic_write, write_files
from tests.support.files.saves import SAVES
from tests.support.files.system_calls import SystemCalls, replacing, use

ROOT = Path(__file__).resolve().parents[2]
ERRORS = (errno.EIO, errno.ENOSPC, errno.EMFILE)


def counting(made: list[str]) -> SystemCalls:
    """The real calls, noted by name."""
    return failing(made, -1, 0)


def failing(made: list[str], at: int, error: int) -> SystemCalls:
    """The real calls, noted by name, but the `at`-th fails."""

    def guarded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            made.append(name)
            if len(made) - 1 == at:
                raise OSError(error, os.strerror(error))
            return call(*arguments)

        return wrapped

    return SystemCalls(guarded)


@pytest.mark.parametrize("name", SAVES)
def test_a_failing_system_call_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    one, made = SAVES[name], list[str]()
    one.save(tmp_path, 1)
    names = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        use(patch, counting(made))
        one.save(tmp_path, 1)
    assert {"open", "write", "fsync", "replace", "close"} <= set(made)
    for at, call in enumerate(made):
        error, told = ERRORS[at % len(ERRORS)], ""
        with monkeypatch.context() as patch:
            use(patch, failing([], at, error))
            try:
                one.save(tmp_path, 2)
            except (StitchError, OSError) as caught:
                told = str(caught)
                assert os.strerror(error) in told, (call, at)
        ages = one.ages(tmp_path)
        assert told or set(ages) == {2}, (call, at)
        # A command's outputs are written one after the other.
        apart = name == "a command's outputs"
        assert set(ages) in ({1}, {2}) or (apart and set(ages) == {1, 2}), (call, at, ages)
        one.save(tmp_path, 1)
        assert sorted(tmp_path.iterdir()) == names, (call, at)


def test_a_kill_after_any_system_call_leaves_old_or_new_and_at_most_parts(
    tmp_path: Path,
) -> None:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.files.killed_saves", str(tmp_path)],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {one["save"] for one in found} == set(SAVES)
    assert sum(one["killed"] for one in found) > 40 and any(one["parts"] for one in found)
    for one in found:
        assert set(one["ages"]) <= {1, 2} and set(one["then"]) == {2}, one
        assert one["only_parts"], one
        if one["save"] != "a command's outputs" or not one["killed"]:
            assert len(set(one["ages"])) == 1, one


def test_content_and_name_are_on_the_disk_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    use(monkeypatch, counting(made))
    atomic_write(tmp_path / "f", b"x")
    order = [call for call in made if call in ("write", "fsync", "replace")]
    assert order == ["write", "fsync", "replace", "fsync"]


def test_a_file_that_is_written_but_not_known_to_be_on_the_disk_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    use(monkeypatch, replacing(fsync=sync))
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(StitchError, match="is written, but not known to be on the disk") as told:
        atomic_write(path, "new")
    assert told.value.where == str(tmp_path) and "Input/output error" in str(told.value)
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_parts_of_the_living_are_left_alone(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def meanwhile(sink: Sink) -> None:
        sink.write(b"slow")
        atomic_write(tmp_path / "other", b"fast")
        seen.append(sorted(path.name for path in tmp_path.iterdir()))

    write_files({tmp_path / "first": b"1", tmp_path / "second": meanwhile})
    assert [len(names) for names in seen] == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "other", "second"]


def test_two_writers_of_one_name_do_not_meet(tmp_path: Path) -> None:
    def rival(sink: Sink) -> None:
        sink.write(b"a" * 1000)
        atomic_write(tmp_path / "f", b"b" * 500)
        assert (tmp_path / "f").read_bytes() == b"b" * 500
        sink.write(b"a" * 1000)

    atomic_write(tmp_path / "f", rival)
    assert (tmp_path / "f").read_bytes() == b"a" * 2000
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_links_are_followed_and_permissions_kept(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to("real")
    atomic_write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o600


def test_a_pipe_that_nobody_reads_is_refused_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StitchError, match="no process reads from this pipe"):
        atomic_write(tmp_path / "pipe", b"x")
    with pytest.raises(StitchError, match="a folder"):
        atomic_write(tmp_path, b"x")


def test_devices_are_written_to_as_they_are() -> None:
    atomic_write("/dev/null", b"x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)  # noqa: PTH116

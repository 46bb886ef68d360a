"""Saving: whatever fails, and wherever the process dies, a file is the old one or the new one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from stitch.errors import StitchError
from stitch.files import FileBatch, LineFile, parts, sweep_folder, system_calls, write_file
from stitch.files.sweeping import manifest_path, manifest_text
from stitch.files.system_calls import SystemCalls
from tests.support.files.saves import SAVES

ROOT = Path(__file__).resolve().parents[2]
CALLS = tuple(field.name for field in fields(SystemCalls))
ERRORS = (errno.EIO, errno.ENOSPC, errno.EMFILE)


def counting(made: list[str]) -> SystemCalls:
    """The real calls, noted by name."""

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            made.append(name)
            return call(*arguments)

        return wrapped

    real = SystemCalls()
    return SystemCalls(**{name: noted(name, getattr(real, name)) for name in CALLS})


def failing(at: int, error: int) -> SystemCalls:
    """The real calls, but the `at`-th fails."""
    made: list[str] = []
    counted = counting(made)

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            if len(made) == at:
                made.append("failed")
                raise OSError(error, os.strerror(error))
            return call(*arguments)

        return wrapped

    return SystemCalls(**{name: guarded(getattr(counted, name)) for name in CALLS})


def check_each_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, errors: Sequence[int]
) -> None:
    """Let each system call of a save fail, with one error after the other."""
    one, made = SAVES[name], list[str]()
    one.save(folder, 1)
    names = sorted(folder.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(system_calls, "table", counting(made))
        one.save(folder, 1)
    assert {"open", "write", "fsync", "replace", "close"} <= set(made)
    for at, call in enumerate(made):
        error, told = errors[at % len(errors)], ""
        with monkeypatch.context() as patch:
            patch.setattr(system_calls, "table", failing(at, error))
            try:
                one.save(folder, 2)
            except (StitchError, OSError) as caught:
                told = str(caught)
                assert os.strerror(error) in told, (call, at)
        ages = one.ages(folder)
        assert told or set(ages) == {2}, (call, at)
        # A command's outputs are renamed one after the other.
        apart = call == "replace" and name == "a command's outputs"
        assert set(ages) in ({1}, {2}) or apart, (call, at, ages)
        one.save(folder, 1)
        assert sorted(folder.iterdir()) == names, (call, at)


@pytest.mark.parametrize("name", SAVES)
def test_a_failing_system_call_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    check_each_call(tmp_path, monkeypatch, name, ERRORS)


@pytest.mark.campaign("files")
@pytest.mark.parametrize("name", SAVES)
@pytest.mark.parametrize("error", (*ERRORS, errno.EDQUOT, errno.EROFS), ids=errno.errorcode.get)
def test_each_error_of_each_system_call_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: int
) -> None:
    check_each_call(tmp_path, monkeypatch, name, (error,))


@pytest.mark.parametrize("name", SAVES)
def test_short_writes_are_written_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def short(handle: int, data: memoryview) -> int:
        return os.write(handle, memoryview(data)[: max(1, memoryview(data).nbytes // 3)])

    monkeypatch.setattr(system_calls, "table", replace(system_calls.table, write=short))
    SAVES[name].save(tmp_path, 2)
    assert set(SAVES[name].ages(tmp_path)) == {2}


def test_a_write_that_takes_nothing_is_an_error_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = replace(system_calls.table, write=lambda *_: 0)
    monkeypatch.setattr(system_calls, "table", stuck)
    with pytest.raises(StitchError, match="Input/output error"):
        write_file(tmp_path / "f", b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_after_any_system_call_leaves_old_or_new_and_parts_that_the_next_save_sweeps(
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
        assert set(one["ages"]) <= {1, 2} and one["swept"] and set(one["then"]) == {2}, one
        if one["save"] != "a command's outputs" or not one["killed"]:
            assert len(set(one["ages"])) == 1, one
    together = [one for one in found if one["save"] == "programs that belong together"]
    assert {age for one in together if one["killed"] for age in one["ages"]} == {1, 2}


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(errno.EIO, "stopped")], ids=repr)
@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("at", range(4))
def test_files_that_belong_together_are_never_mixed_by_what_stops_between_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, stays: bool, stop: BaseException
) -> None:
    made: list[str] = []

    def stopping(part: Any, path: Any) -> None:
        made.append(path)
        if len(made) == at + 1 or (stays and len(made) > at):
            raise OSError(errno.EIO, "stopped") if len(made) > at + 1 else stop
        Path(part).replace(path)

    batch = FileBatch(as_one=True)
    for name in "abc":
        (tmp_path / name).write_text("old")
        batch.add(tmp_path / name, "new")
    with monkeypatch.context() as patch:
        patch.setattr(system_calls, "table", replace(system_calls.table, replace=stopping))
        with pytest.raises((KeyboardInterrupt, StitchError)):
            batch.commit()
    sweep_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    # The manifest is renamed first, and decides.
    assert {path.read_text() for path in tmp_path.iterdir()} == {"new" if at else "old"}


def test_content_and_name_are_on_the_disk_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(system_calls, "table", counting(made))
    write_file(tmp_path / "f", b"x")
    order = [call for call in made if call in ("write", "fsync", "replace")]
    assert order == ["write", "fsync", "replace", "fsync"]


def test_a_file_that_is_written_but_not_known_to_be_on_the_disk_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(system_calls, "table", replace(system_calls.table, fsync=sync))
    saves: list[Callable[[Path], object]] = [
        lambda path: write_file(path, "new"), lambda path: LineFile(path, ["new"]),
    ]  # fmt: skip
    for number, save in enumerate(saves):
        path = tmp_path / str(number)
        path.write_text("old")
        with pytest.raises(
            StitchError, match="is written, but not known to be on the disk"
        ) as told:
            save(path)
        assert told.value.where == str(tmp_path) and "Input/output error" in str(told.value)
        assert path.read_text().strip() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]


def test_parts_of_the_living_are_left_alone(tmp_path: Path) -> None:
    batch = FileBatch()
    seen: list[list[str]] = []

    def meanwhile(sink: parts.Sink) -> None:
        sink.write(b"slow")
        write_file(tmp_path / "other", b"fast")
        seen.append(sorted(path.name for path in tmp_path.iterdir()))

    batch.add(tmp_path / "first", b"1")
    batch.add(tmp_path / "second", meanwhile)
    batch.commit()
    assert [len(names) for names in seen] == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "other", "second"]


def test_two_writers_of_one_name_do_not_meet(tmp_path: Path) -> None:
    def rival(sink: parts.Sink) -> None:
        sink.write(b"a" * 1000)
        write_file(tmp_path / "f", b"b" * 500)
        assert (tmp_path / "f").read_bytes() == b"b" * 500
        sink.write(b"a" * 1000)

    write_file(tmp_path / "f", rival)
    assert (tmp_path / "f").read_bytes() == b"a" * 2000
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_what_a_dead_writer_decided_is_not_done_to_files_that_have_changed_since(
    tmp_path: Path,
) -> None:
    token = "12.0123456789ab"
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"old")
        (tmp_path / f".{name}.{token}-0.part").write_bytes(b"decided")
    names = {tmp_path / f".{name}.{token}-0.part": tmp_path / name for name in ("a", "b")}
    manifest_path(tmp_path, token).write_text(manifest_text(names))
    write_file(tmp_path / "later", b"")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == b"decided"

    for name in ("a", "b"):
        (tmp_path / f".{name}.{token}-0.part").write_bytes(b"decided again")
    manifest_path(tmp_path, token).write_text(manifest_text(names))
    (tmp_path / "b").write_bytes(b"mine, and newer")
    write_file(tmp_path / "later", b"")
    assert (tmp_path / "a").read_bytes() == b"decided again"
    assert (tmp_path / "b").read_bytes() == b"mine, and newer"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "later"]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"x": 1}', '{"%s": ["../up", null]}'])
def test_a_manifest_that_is_none_decides_nothing(tmp_path: Path, text: str) -> None:
    token, folder = "12.0123456789ab", tmp_path / "in"
    folder.mkdir()
    part = folder / f".a.{token}-0.part"
    part.write_bytes(b"x")
    manifest_path(folder, token).write_text(text.replace("%s", part.name))
    write_file(folder / "later", b"")
    assert [path.name for path in folder.iterdir()] == ["later"]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_only_looks_like_a_part_is_not_swept(tmp_path: Path) -> None:
    names = {".notes.part", ".f.12.part", "f.12.0123456789ab-0.part", ".f.12.0123456789ab.part"}
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / ".f.12.0123456789ab-0.part").write_bytes(b"litter")
    write_file(tmp_path / "g", b"")
    assert {path.name for path in tmp_path.iterdir()} == names | {"g"}


def test_a_file_system_without_locks_is_written_to_and_nothing_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(handle: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    (tmp_path / ".f.12.0123456789ab-0.part").write_bytes(b"whose?")
    monkeypatch.setattr(system_calls, "table", replace(system_calls.table, flock=no_locks))
    write_file(tmp_path / "g", b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".f.12.0123456789ab-0.part", "g"]


def test_links_are_followed_and_permissions_kept(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to("real")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o600


def test_long_names_are_written(tmp_path: Path) -> None:
    for name in ("n" * 255, "ü" * 127):
        write_file(tmp_path / name, b"x")
        assert (tmp_path / name).read_bytes() == b"x"


def test_a_pipe_that_nobody_reads_is_refused_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for write in (lambda path: write_file(path, b"x"), LineFile):
        with pytest.raises(StitchError, match="nobody reads from this pipe"):
            write(tmp_path / "pipe")
    with pytest.raises(StitchError, match="a folder"):
        write_file(tmp_path, b"x")


def test_devices_are_written_to_as_they_are() -> None:
    write_file("/dev/null", b"x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)  # noqa: PTH116


def test_the_file_that_standard_output_is_keeps_what_is_in_it(tmp_path: Path) -> None:
    code = (
        "from stitch.files import write_file; print('before', flush=True); "
        "write_file('/dev/stdout', b'x\\n'); print('after')"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\nx\nafter\n"


def test_lines_are_there_as_soon_as_they_are_added(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "r", ["a"])
    lines.add("b")
    assert (tmp_path / "r").read_text() == "a\nb\n"
    lines.close()
    again = LineFile(tmp_path / "r")
    again.close()
    assert (tmp_path / "r").read_bytes() == b""


def test_a_part_that_was_swept_before_it_was_locked_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    left = [errno.EWOULDBLOCK]

    def taken(handle: int, how: int) -> None:
        if left and "two" in str(Path(f"/proc/self/fd/{handle}").readlink()):
            raise OSError(left.pop(), "another looks whether its owner lives")
        fcntl.flock(handle, how)

    owners: list[list[str]] = []

    def look(sink: parts.Sink) -> None:
        sink.write(b"x")
        # `.NAME.PID.TOKEN-N.part`: parts of one folder stand under the lock of the first.
        owners.append([path.name.split(".")[3].partition("-")[0] for path in folders[0].iterdir()])

    monkeypatch.setattr(system_calls, "table", replace(system_calls.table, flock=taken))
    batch = FileBatch()
    batch.add(folders[0] / "f1", b"1")
    batch.add(folders[1] / "f2", b"2")
    batch.add(folders[0] / "f3", look)
    batch.commit()
    assert not left and len(owners[0]) == 2 and len(set(owners[0])) == 1
    assert [p.name for folder in folders for p in sorted(folder.iterdir())] == ["f1", "f3", "f2"]

"""Checkpoints: whole or not at all, bit for bit, and only for the training that made them."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

import stitch
from stitch.errors import FormatError, IncompatibleError, StitchError, UsageError
from stitch.forms import read_tensors, tensors_from_bytes, write_tensors
from stitch.program import Array
from stitch.training.checkpoints import (
    Checkpoint,
    CheckpointFolder,
    differences,
    read_checkpoint,
    refuse_other,
    save_checkpoint,
)
from tests.support.files.system_calls import replacing, use
from tests.support.grids import every
from tests.support.training.models import batches, compiled, train

TYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8",
         "uint64", "uint32", "uint16", "uint8", "bool")  # fmt: skip


def some_state(step: int = 3) -> dict[str, Array]:
    """A parameter, a scalar, nothing."""
    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal((3, 5)).astype(np.float32),
        "w.exp_avg": np.full((3, 5), step, np.float32),
        "training.steps": np.asarray(step, np.int64),
        "empty": np.zeros((0, 4), np.float16),
    }


def same(found: Any, expected: dict[str, Array]) -> bool:
    """Whether names, types, shapes and bytes are the same."""
    return set(found) == set(expected) and all(
        (found[n].dtype, found[n].shape, found[n].tobytes()) == (a.dtype, a.shape, a.tobytes())
        for n, a in expected.items()
    )


# -- the format ------------------------------------------------------------------------------------


def test_the_package_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {name: rng.integers(0, 2, (2, 3)).astype(name) for name in TYPES}
    tensors["scalar"] = np.asarray(7, np.int64)
    tensors["turned"] = rng.standard_normal((3, 4)).T
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        write_tensors(file, tensors, {"note": "ü"})
    with safe_open(str(path), framework="numpy") as found:
        assert found.metadata() == {"note": "ü"}
        assert same({name: found.get_tensor(name) for name in found.keys()}, tensors)  # noqa: SIM118


def test_what_the_package_safetensors_wrote_is_read() -> None:
    tensors = {name: np.ones((2, 3), name) for name in TYPES} | some_state()
    found = tensors_from_bytes(save(tensors, {"a": "b"}), "memory")
    assert same(found.tensors, tensors) and dict(found.metadata) == {"a": "b"}


def test_bfloat16_goes_round(tmp_path: Path) -> None:
    tensors = {"w": np.arange(6).astype(ml_dtypes.bfloat16)}
    with (tmp_path / "a").open("wb") as file:
        write_tensors(file, tensors)
    assert same(read_tensors(tmp_path / "a").tensors, tensors)


def _file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a safetensors file"),
        (b"\x01\x02", "not a safetensors file"),
        (b"\xff" * 8, "not a safetensors file"),
        (_file(b"{"), "no safetensors file"),
        (_file(b"\xff\xfe"), "no safetensors file"),
        (_file(b'{"a":1,"a":2}'), "duplicate key"),
        (_file(b"[" * 100_000), "nested too deeply"),
        (_file([1]), "expected: an object"),
        (_file({"w": 3}), "Entry"),
        (_file({"w": {**_entry(), "more": 1}}, bytes(8)), "Entry"),
        (_file({"w": _entry("F31")}, bytes(8)), "does not fit"),
        (_file({"w": _entry(["F32"])}, bytes(8)), "expected: a string"),
        (_file({"w": _entry(shape=[-2])}, bytes(8)), "does not fit"),
        (_file({"w": _entry(shape=[True, 2])}, bytes(8)), "an integer of 64 bits"),
        (_file({"w": _entry(shape=[2**62, 2**62])}, bytes(8)), "does not fit"),
        (_file({"w": _entry(offsets=[0, 9])}, bytes(8)), "does not fit"),
        (_file({"w": _entry(offsets=[8, 0])}, bytes(8)), "does not fit"),
        (_file({"w": _entry(offsets=[0, 4])}, bytes(4)), "does not fit"),
        (_file({"w": _entry(), "v": _entry()}, bytes(8)), "back to back"),
        (_file({"w": _entry(offsets=[8, 16])}, bytes(16)), "back to back"),
        (_file({"w": _entry()}, bytes(9)), "belong to no tensor"),
        (_file({"__metadata__": {"a": 1}}), "__metadata__"),
    ],
)
def test_a_defective_file_is_refused_by_name(data: bytes, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        tensors_from_bytes(data, "memory")


def test_damaged_bytes_give_tensors_or_a_format_error(tmp_path: Path) -> None:
    whole = save(some_state(), {"a": "b"})
    chance = random.Random(5)
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(min(len(data), 300))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        try:
            tensors_from_bytes(bytes(data), "memory")
        except FormatError as error:
            assert str(error)


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_checkpoint_goes_round_and_holds_one_file_only(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "deep" / "er")
    folder.prepare()
    made = Checkpoint(3, some_state(), {"seed": 1}, {"lr": 0.1}, {"loss_sum": 0.1 + 0.2})
    path = folder.save(made)
    folder.close()
    assert [path] == list(folder.files) == list(path.parent.iterdir())
    found = read_checkpoint(path)
    assert same(found.state, dict(made.state)) and found.step == 3
    assert (found.identity, found.settings, found.progress) == (
        made.identity, made.settings, made.progress,
    )  # fmt: skip


def test_only_the_newest_stay_in_the_order_of_their_steps(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (2, 10, 9_999_999_999, 99):
        folder.save(Checkpoint(step, some_state(step)))
    assert [int(p.stem[5:]) for p in folder.files] == [99, 9_999_999_999]
    found = folder.newest(print)
    assert found is not None and found[1].step == 9_999_999_999


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_older_checkpoint_and_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(Checkpoint(1, some_state(1)))

    def full(*_: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        use(patch, replacing(**{call: full}))
        with pytest.raises(StitchError, match="No space left") as caught:
            folder.save(Checkpoint(2, some_state(2)))
    assert "free space" in str(caught.value) and "-00000002" in str(caught.value)
    folder.close()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.safetensors"]
    assert same(read_checkpoint(folder.files[0]).state, some_state(1))


def test_what_a_killed_run_left_half_written_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".step-00000007.safetensors.part").write_bytes(b"half")
    for name in ("notes.txt", ".step-1.safetensors.part", "step-1.safetensors"):
        (tmp_path / name).write_bytes(b"mine")
    folder = CheckpointFolder(tmp_path)
    folder.prepare()
    folder.close()
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"notes.txt", ".step-1.safetensors.part", "step-1.safetensors"}
    assert folder.files == ()


def test_a_damaged_checkpoint_is_passed_over_and_told_of(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(Checkpoint(1, some_state(1)))
    path = folder.save(Checkpoint(2, some_state(2)))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    told: list[str] = []
    found = folder.newest(told.append)
    assert found is not None and found[1].step == 1
    assert told == ["step-00000002.safetensors is skipped: the checkpoint is damaged: its "
                    "CRC-32 differs"]  # fmt: skip
    folder.files[0].write_bytes(b"")
    gc.disable()
    try:
        folder.newest(told.append)
    except FormatError as error:
        left = weakref.ref(error)
    finally:
        gc.enable()
    assert left() is None, "with its frames it would stay until garbage is collected"


def test_a_folder_belongs_to_one_writer_who_is_named_to_the_second(tmp_path: Path) -> None:
    first, second = CheckpointFolder(tmp_path), CheckpointFolder(tmp_path)
    first.save(Checkpoint(1, some_state(1)))
    with pytest.raises(UsageError, match="another process has this folder") as caught:
        second.save(Checkpoint(2, some_state(2)))
    assert f"process {os.getpid()} on " in str(caught.value)
    first.close()
    second.save(Checkpoint(2, some_state(2)))
    assert [int(path.stem[5:]) for path in second.files] == [1, 2]


def test_handles_that_run_out_are_no_reason_to_take_an_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(Checkpoint(step, some_state(step)))

    def none_left(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    told: list[str] = []
    for name in ("open", "listdir"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, none_left)
            if name == "listdir":
                patch.setattr(os, "scandir", none_left)
            with pytest.raises(StitchError, match="Too many open files"):
                folder.newest(told.append)
    assert told == []


def test_weights_alone_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(save(some_state()))
    with pytest.raises(FormatError, match="no checkpoint of a training"):
        read_checkpoint(tmp_path / "w.safetensors")


WRONG_STEP = '{"version":1,"step":"3","crc32":0,"identity":{},"settings":{},"progress":{}}'


@pytest.mark.parametrize("facts", ["{", "[]", "3", '{"version": 1}', WRONG_STEP])
def test_facts_of_another_form_are_refused(tmp_path: Path, facts: str) -> None:
    (tmp_path / "c").write_bytes(save(some_state(), {"stitch_checkpoint": facts}))
    with pytest.raises(FormatError):
        read_checkpoint(tmp_path / "c")


def test_a_checkpoint_of_a_later_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(save(some_state(), {"stitch_checkpoint": '{"version": 2}'}))
    with pytest.raises(IncompatibleError, match="another version"):
        read_checkpoint(tmp_path / "c")


def test_another_trainings_checkpoint_is_refused_with_what_differs() -> None:
    saved = Checkpoint(1, {}, {"seed": 0, "tensor w": "float32[3, 4]", "tensor v": "float32[1]"})
    own = {"seed": 0, "tensor w": "float32[3, 5]", "tensor u": "float32[1]"}
    refuse_other(saved, dict(saved.identity), Path("c"))
    with pytest.raises(IncompatibleError) as caught:
        refuse_other(saved, own, Path("c"))
    for told in ("tensor w: float32[3, 4] in the checkpoint, float32[3, 5] here",
                 "tensor v: only in the checkpoint", "tensor u: only here"):  # fmt: skip
        assert told in str(caught.value)
    assert differences({"a": 1}, {"a": 1}) == ()


@pytest.mark.parametrize("optimizer", every(2, [
    partial(stitch.SGD, lr=0.05, momentum=0.9), partial(stitch.Adam, lr=0.01),
    partial(stitch.AdamW, lr=0.01),
]))  # fmt: skip
def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path, optimizer: Any) -> None:
    data = batches(6)
    whole = compiled(optimizer())
    losses = train(whole, data)
    expected = whole.instance.state_dict()
    first = compiled(optimizer())
    train(first, data[:2])
    save_checkpoint(tmp_path / "c", Checkpoint(2, first.instance.state_dict()))
    second = compiled(optimizer())
    second.start().load_state_dict(read_checkpoint(tmp_path / "c").state)
    assert train(second, data[2:]) == losses[2:]
    assert same(second.instance.state_dict(), expected)


def test_who_saves_from_a_child_is_told_that_the_folder_is_the_parents(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(Checkpoint(1, some_state(1)))
    child = os.fork()
    if not child:
        try:
            folder.save(Checkpoint(2, some_state(2)))
        except UsageError as error:
            os._exit(10 if f"process {os.getppid()}" in str(error) else 11)
        os._exit(12)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    assert [path.name for path in folder.files] == ["step-00000001.safetensors"]
    folder.close()


def test_a_folder_that_was_removed_is_made_anew_unless_another_training_did(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    folder, other = CheckpointFolder(place), CheckpointFolder(place)
    folder.save(Checkpoint(1, some_state(1)))
    shutil.rmtree(place)
    assert folder.save(Checkpoint(2, some_state(2))).exists()
    shutil.rmtree(place)
    other.save(Checkpoint(3, some_state(3)))
    with pytest.raises(UsageError, match="another process has this folder"):
        folder.save(Checkpoint(4, some_state(4)))
    assert len(other.files) == 1
    other.close()
    assert folder.save(Checkpoint(4, some_state(4))).exists()
    folder.close()


def test_no_folder_and_no_checkpoint_are_no_error(tmp_path: Path) -> None:
    assert CheckpointFolder(tmp_path / "none").newest(print) is None
    assert CheckpointFolder(tmp_path).newest(print) is None

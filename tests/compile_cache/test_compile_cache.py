"""A compile cache: equal meaning is read, anything else compiled, and nothing of the folder stops
a module from being compiled."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch import compile_cache
from stitch.compile_cache import CompileCache, entry_key
from stitch.compiler import CompileOptions
from stitch.errors import UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.graph import scan as graph_scan
from stitch.machine import load_machine
from stitch.program import Role
from stitch.ttb import load
from tests.support.files.system_calls import replacing, use

X = np.arange(8, dtype=np.float32).reshape(2, 4)
WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3)


def layer(
    weights: Any = WEIGHTS, *, name: str = "layer", slot: str = "x", factor: float = 2.0
) -> ComputationGraph:
    """y = factor * x @ weights."""
    builder = ComputationGraphBuilder(name)
    x = builder.input(slot, (2, 4), "float32")
    builder.output("y", (x @ builder.parameter("w", weights)) * factor)
    return builder.build()


def looped() -> ComputationGraph:
    """A running sum over 64 rows, as a loop."""
    builder = ComputationGraphBuilder("looped")
    rows = builder.input("rows", (64, 4), "float32")
    _, (sums,) = graph_scan(
        builder,
        lambda s, e: ([builder.tanh(s[0]) + e[0]], [s[0]]),
        [np.zeros(4, np.float32)],
        [rows],
    )
    builder.output("sums", sums)
    return builder.build()


def entries(folder: Path, ending: str = ".ttb") -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ending)


def test_what_was_compiled_once_is_read_and_is_the_same_to_the_bit(tmp_path: Path) -> None:
    first = stitch.compile(layer(), cache=tmp_path)
    second = stitch.compile(layer(), cache=tmp_path)
    plain = stitch.compile(layer())
    assert (first.is_from_cache, second.is_from_cache, plain.is_from_cache) == (False, True, False)
    assert first.encode() == second.encode() == plain.encode()
    assert second.as_json() == plain.as_json() and second.text() == plain.text()
    assert entries(tmp_path)[0].read_bytes() == plain.encode()
    result = second(X)
    assert isinstance(result, stitch.Tensor)
    np.testing.assert_array_equal(result.numpy(), X @ WEIGHTS * 2)


def test_a_hit_says_the_same_of_loops_and_warns_of_the_same(tmp_path: Path) -> None:
    placement = ["input.rows.layout=tile", "output.sums.space=l1"]
    made, read = (stitch.compile(looped(), cache=tmp_path, placement=placement) for _ in range(2))
    assert read.is_from_cache and made.loops == read.loops != ()
    assert [loop.text() for loop in made.loops] == [loop.text() for loop in read.loops]
    assert made.warnings == read.warnings and made.encode() == read.encode()


def _changed_machine() -> Any:
    machine = load_machine("wormhole_n150")
    assert machine.compute is not None
    slower = dataclasses.replace(machine.compute, launch_seconds=1.0)
    return dataclasses.replace(machine, compute=slower)


CHANGES: dict[str, tuple[Callable[[], ComputationGraph], dict[str, Any]]] = {
    "a constant's bytes": (lambda: layer(WEIGHTS + 1), {}),
    "a constant's sign of zero": (lambda: layer(np.where(WEIGHTS == 0, -0.0, WEIGHTS)
                                                .astype(np.float32)), {}),
    "a number in an operation": (lambda: layer(factor=3.0), {}),
    "the graph's name": (lambda: layer(name="other"), {}),
    "a slot's name": (lambda: layer(slot="z"), {}),
    "a placement option": (layer, {"placement": ["input.x.space=dram"]}),
    "the program's name": (layer, {"name": "renamed"}),
    "the role": (layer, {"role": Role.UPDATE}),
    "the schedule": (layer, {"schedule": "rounds"}),
    "the machine": (layer, {"target": "blackhole_p150"}),
    "a rate of the machine": (layer, {"target": _changed_machine()}),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_what_differs_in_meaning_is_compiled(what: str, tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    stitch.compile(layer(), cache=cache)
    graph, options = CHANGES[what]
    other = stitch.compile(graph(), cache=cache, **options)
    assert not other.is_from_cache and len(entries(tmp_path)) == 2
    assert other.encode() == stitch.compile(graph(), **options).encode()
    again = stitch.compile(layer(), cache=cache), stitch.compile(graph(), cache=cache, **options)
    assert all(model.is_from_cache for model in again)


@pytest.mark.parametrize(
    ("field", "value"), [("optimize", False), ("reassociate", True), ("schedule", "rounds")]
)
def test_every_option_of_the_compiler_is_part_of_the_key(field: str, value: Any) -> None:
    machine = load_machine("tiny")
    plain = entry_key(layer(), machine, CompileOptions())
    other = entry_key(layer(), machine, CompileOptions(**{field: value}))
    assert plain != other


def test_what_computes_and_writes_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, seen = load_machine("tiny"), set[str]()
    seen.add(entry_key(layer(), machine, CompileOptions()))
    known = compile_cache.versions()
    assert [name for name, _ in known] == [
        "stitch", "modules", "format", "opset", "numpy", "ml_dtypes", "processor",
    ]  # fmt: skip
    for at, (name, _) in enumerate(known):
        changed = (*known[:at], (name, "another"), *known[at + 1 :])
        monkeypatch.setattr(compile_cache, "versions", lambda changed=changed: changed)
        seen.add(entry_key(layer(), machine, CompileOptions()))
    assert len(seen) == 1 + len(known)


def test_all_that_compiling_can_load_is_part_of_the_key() -> None:
    code = """
import sys
import stitch.compiler, stitch.ttb
import numpy as np
from stitch.graph import ComputationGraphBuilder, scan
from stitch.machine import load_machine
b = ComputationGraphBuilder("looped")
rows = b.input("rows", (64, 4), "float32")
_, (sums,) = scan(b, lambda s, e: ([b.tanh(s[0]) + e[0]], [s[0]]), [np.zeros(4, np.float32)],
                  [rows])
b.output("sums", sums)
program = stitch.compiler.compile_graph(b.build(), load_machine("tiny")).program
stitch.ttb.encode(stitch.ttb.Binary((program,), load_machine("tiny").shape, "test"))
print("\\n".join(m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "stitch"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    loaded = {str(Path(line)) for line in done.stdout.split()}
    assert len(loaded) > 100 and loaded <= set(compile_cache.modules())


def test_a_bound_of_memory_is_part_of_the_key() -> None:
    from stitch.budget import allowing

    machine, options = load_machine("tiny"), CompileOptions()
    plain = entry_key(layer(), machine, options)
    with allowing("1GiB"):
        assert entry_key(layer(), machine, options) != plain


def test_the_spelling_of_the_target_is_no_part_of_the_key(tmp_path: Path) -> None:
    stitch.compile(layer(), cache=tmp_path, target="tiny")
    model = stitch.compile(layer(), cache=tmp_path, target=load_machine("tiny"))
    assert model.is_from_cache and model.target == "tiny"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _flip_metadata(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(bytes(data))


def _of_another(path: Path) -> None:
    path.write_bytes(stitch.compile(layer(WEIGHTS + 5)).encode())


def _no_ttb(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


DAMAGES = [_cut, _empty, _flip_last, _flip_metadata, _of_another, _no_ttb]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_binary_that_is_not_what_was_kept_is_compiled_anew_and_replaced(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    cache = CompileCache(tmp_path)
    expected = stitch.compile(layer(), cache=cache).encode()
    damage(entries(tmp_path)[0])
    model = stitch.compile(layer(), cache=cache)
    assert not model.is_from_cache and model.encode() == expected
    assert [warning.kind for warning in model.warnings] == ["cache_entry"]
    assert str(tmp_path) in str(model.warnings[0])
    healed = stitch.compile(layer(), cache=cache)
    assert healed.is_from_cache and healed.warnings == () and healed.encode() == expected


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"7", b'"text"', b"null", b"\xff\xfe", b"{}", b"[" * 100_000]
)
def test_notes_that_are_none_are_compiled_anew_and_replaced(text: bytes, tmp_path: Path) -> None:
    stitch.compile(layer(), cache=tmp_path)
    entries(tmp_path, ".json")[0].write_bytes(text)
    model = stitch.compile(layer(), cache=tmp_path)
    assert [warning.kind for warning in model.warnings] == ["cache_entry"]
    assert stitch.compile(layer(), cache=tmp_path).is_from_cache


@pytest.mark.parametrize(
    ("key", "value"),
    [("key", "0" * 64), ("version", 2), ("stitch", "model"), ("loops", [3]), ("nbytes", "many")],
)
def test_notes_with_a_field_of_another_kind_are_compiled_anew(
    key: str, value: Any, tmp_path: Path
) -> None:
    stitch.compile(layer(), cache=tmp_path)
    notes = entries(tmp_path, ".json")[0]
    body = json.loads(notes.read_text()) | {key: value}
    del body["crc32"]
    sealed = body | {"crc32": zlib.crc32((json.dumps(body, indent=1) + "\n").encode())}
    notes.write_text(json.dumps(sealed, indent=1))
    model = stitch.compile(layer(), cache=tmp_path)
    assert not model.is_from_cache
    assert [warning.kind for warning in model.warnings] == ["cache_entry"]


@pytest.mark.parametrize(("said", "other"), [("rounds", "roundt"), ('"count": 64', '"count": 65')])
def test_notes_that_say_something_else_are_compiled_anew(
    said: str, other: str, tmp_path: Path
) -> None:
    expected = stitch.compile(looped(), cache=tmp_path).loops
    notes = entries(tmp_path, ".json")[0]
    text = notes.read_text()
    assert said in text
    notes.write_text(text.replace(said, other))
    model = stitch.compile(looped(), cache=tmp_path)
    assert not model.is_from_cache and model.loops == expected
    assert stitch.compile(looped(), cache=tmp_path).is_from_cache


def test_an_entry_under_another_key_is_not_taken_for_it(tmp_path: Path) -> None:
    """Somebody renames both files of an entry: each fits the other, neither the key."""
    stitch.compile(layer(), cache=tmp_path)
    stitch.compile(layer(factor=3.0), cache=tmp_path)
    for ending in (".ttb", ".json"):
        one, other = entries(tmp_path, ending)
        one.write_bytes(other.read_bytes())
    models = [stitch.compile(layer(factor=f), cache=tmp_path) for f in (2.0, 3.0)]
    assert [model.is_from_cache for model in models].count(True) == 1
    plain = [stitch.compile(layer(factor=f)).encode() for f in (2.0, 3.0)]
    assert [model.encode() for model in models] == plain


@pytest.mark.parametrize("ending", [".ttb", ".json"])
def test_half_an_entry_is_none(ending: str, tmp_path: Path) -> None:
    stitch.compile(layer(), cache=tmp_path)
    entries(tmp_path, ending)[0].unlink()
    model = stitch.compile(layer(), cache=tmp_path)
    assert not model.is_from_cache and model.warnings == ()
    assert stitch.compile(layer(), cache=tmp_path).is_from_cache


def _refusing(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """No file can be made or written any more, as in a folder that is read-only, or full."""

    def refuse(*_: Any) -> Any:
        raise error

    use(monkeypatch, replacing(open=refuse, unlink=refuse))


def test_a_folder_that_takes_nothing_is_said_once_and_modules_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = stitch.compile(layer(), cache=tmp_path)
    before = sorted(tmp_path.iterdir())
    cache = CompileCache(tmp_path)
    _refusing(monkeypatch, PermissionError(13, "Permission denied"))
    models = [stitch.compile(layer(factor=f), cache=cache) for f in (3.0, 4.0)]
    assert [[w.kind for w in model.warnings] for model in models] == [["cache_folder"], []]
    assert "Permission denied" in str(models[0].warnings[0])
    assert models[0].encode() == stitch.compile(layer(factor=3.0)).encode()
    hit = stitch.compile(layer(), cache=cache)
    assert hit.is_from_cache and hit.encode() == kept.encode()
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_leaves_no_half_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        use(patched, replacing(write=full))
        model = stitch.compile(layer(), cache=tmp_path)
    assert [warning.kind for warning in model.warnings] == ["cache_folder"]
    assert "No space left" in str(model.warnings[0]) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", [".ttb", ".json"])
@pytest.mark.parametrize("there", ["a link to a file", "a link to nothing", "a pipe"])
def test_an_entry_takes_its_name_from_what_has_it_and_follows_no_link(
    tmp_path: Path, ending: str, there: str
) -> None:
    folder, other = tmp_path / "cache", tmp_path / "other"
    stitch.compile(layer(), cache=folder)
    (entry,) = folder.glob(f"*{ending}")
    entry.unlink()
    if there == "a link to a file":
        other.write_text("mine")
    if there == "a pipe":
        os.mkfifo(entry)
    else:
        entry.symlink_to(other)
    assert not stitch.compile(layer(), cache=folder).is_from_cache
    assert stitch.compile(layer(), cache=folder).is_from_cache
    assert entry.is_file() and not entry.is_symlink()
    assert not other.exists() or other.read_text() == "mine"


@pytest.mark.parametrize(("name", "said"), [("a\0b", "null byte"), ("y/" * 1900, "recursion")])
def test_a_name_that_no_folder_can_have_is_said(tmp_path: Path, name: str, said: str) -> None:
    model = stitch.compile(layer(), cache=tmp_path / name)
    assert model.warnings[-1].kind == "cache_folder" and said in str(model.warnings[-1])


def test_an_empty_name_is_not_the_folder_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="as cache"):
        stitch.compile(layer(), cache="")
    with pytest.raises(UsageError, match="CompileCache takes a path as folder"):
        CompileCache("")
    assert list(tmp_path.iterdir()) == []


COMPILE = """
import sys
import numpy as np
import stitch
from tests.compile_cache.test_compile_cache import layer
print("ready", flush=True)
sys.stdin.readline()
models = [stitch.compile(layer(factor=float(f)), cache=sys.argv[1]) for f in range(6)]
assert not any(model.warnings for model in models), [m.warnings for m in models]
print(hash(tuple(model.encode() for model in models)), sum(m.is_from_cache for m in models))
"""


def test_processes_that_write_at_once_are_all_right(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILE, str(folder)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    found = [process.communicate("go\n", timeout=200)[0].split()[0] for process in processes]
    assert len(set(found)) == 1 and all(process.returncode == 0 for process in processes)
    assert len(entries(folder)) == len(entries(folder, ".json")) == 6
    assert len(list(folder.iterdir())) == 12, "no parts are left"
    assert all(stitch.compile(layer(factor=float(f)), cache=folder).is_from_cache
               for f in range(6))  # fmt: skip


def test_what_was_used_least_recently_goes_where_the_folder_is_full(tmp_path: Path) -> None:
    sizes = CompileCache(tmp_path)
    for factor in (1.0, 2.0, 3.0):
        stitch.compile(layer(factor=factor), cache=sizes)
    nbytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    for at, factor in enumerate((1.0, 3.0, 2.0)):
        stitch.compile(layer(factor=factor), cache=sizes)
        used = max(tmp_path.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for path in tmp_path.glob(f"{used.stem}.*"):
            os.utime(path, ns=(at, at))
    assert stitch.compile(layer(factor=1.0), cache=sizes).is_from_cache  # the oldest no more
    bounded = CompileCache(tmp_path, max_nbytes=nbytes + 100)
    stitch.compile(layer(factor=4.0), cache=bounded)
    left = [f for f in (1.0, 2.0, 4.0) if stitch.compile(layer(factor=f), cache=tmp_path)
            .is_from_cache]  # fmt: skip
    assert left == [1.0, 2.0, 4.0] and len(entries(tmp_path)) == 3


def test_a_binary_larger_than_the_folder_may_be_is_not_kept(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, max_nbytes=300)
    model = stitch.compile(layer(), cache=cache)
    assert [warning.kind for warning in model.warnings] == ["cache_size"]
    assert list(tmp_path.iterdir()) == []


def test_a_hit_stays_usable_when_its_entry_is_gone(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    stitch.compile(layer(), cache=cache)
    hit = stitch.compile(layer(), cache=cache)
    cache.clear()
    assert list(tmp_path.iterdir()) == [] and hit.is_from_cache
    hit.save(tmp_path / "kept.ttb")
    assert load(tmp_path / "kept.ttb", verify="full") == stitch.compile(layer()).binary


def test_clearing_leaves_what_is_none_of_the_caches(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    stitch.compile(layer(), cache=cache)
    others = [tmp_path / "mine.ttb", tmp_path / f"{'a' * 63}.json", tmp_path / "notes.json"]
    for path in others:
        path.write_text("mine")
    cache.clear()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_trainings_are_refused_in_one_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)trainings are not cached.*model\.dump"):
        stitch.compile(
            layer(), optimizer=stitch.SGD(lr=0.1), loss=stitch.losses.MSELoss(), cache=tmp_path
        )
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_answered_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="as cache"):
        stitch.compile(layer(), cache=3)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="not an amount of memory"):
        CompileCache(tmp_path, max_nbytes="lots")

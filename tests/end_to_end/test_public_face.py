"""The public face: compile, save, load, open, call, wait, as the documentation promises."""

from __future__ import annotations

import gc
import io
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError, IncompatibleError, UsageError
from stitch.program import DataType, Space
from stitch.ttb import Binary
from tests.support.explained import without_the_computers_bytes
from tests.support.stitched_models import integers, one, scaled


def test_explain_prints_of_the_fifteen_lines_what_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    code, said = (
        page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "text")
    )
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    printed = capsys.readouterr().out
    assert without_the_computers_bytes(printed) == without_the_computers_bytes(said)


def test_two_files_that_never_met_are_stitched(tmp_path: Path) -> None:
    for name, factor in (("a", 2.0), ("b", 3.0)):
        scaled(name, factor).save(tmp_path / f"{name}.ttb")
    with stitch.open_device("tiny", window=64) as device:
        a, b = device.load(tmp_path / "a.ttb"), device.load(str(tmp_path / "b.ttb"))
        hidden = one(a(integers()))
        logits = one(b(hidden))
        np.testing.assert_array_equal(logits.numpy(), (integers() * 2 + 1) * 3 + 1)
        assert hidden.space is Space.L1
        assert hidden.layout.address == hidden.address
        assert "1 copy" in device.explain()
        assert "output 'y' of 'a'" in device.memory_report()


def test_a_compiled_model_is_callable() -> None:
    compiled = scaled("a", 2.0)
    np.testing.assert_array_equal(one(compiled(integers())).numpy(), integers() * 2 + 1)
    np.testing.assert_array_equal(one(compiled(x=integers())).numpy(), integers() * 2 + 1)
    own = weakref.ref(compiled.session.programs[0])
    del compiled
    gc.collect()
    assert own() is None  # the program that it loaded for itself goes with it


def test_json_of_a_model_compiles_to_the_same_bytes() -> None:
    plain = scaled("a", 2.0, placement=("input.x.space=dram", "output.y.layout=tile"))
    compiled = stitch.compile(
        plain.graph, target="tiny", placement=plain.placement, name="b", role="backward"
    )
    text = io.StringIO()
    compiled.dump(text)
    again = stitch.CompiledModel.load(io.StringIO(text.getvalue()))
    assert again.encode() == compiled.encode()
    assert again.placement == compiled.placement
    assert "program @b role=backward" in again.text()
    for broken in ("", "[]", "{}", text.getvalue()[:-5], '{"placement": [[1]]}'):
        with pytest.raises(stitch.FormatError):
            stitch.CompiledModel.load(io.StringIO(broken))


def test_errors_speak_python_where_python_is_spoken() -> None:
    x = np.zeros((2, 2), np.float32)
    for options in ({"device": "tiny"}, {"device": "tiny", "loss": "mse", "optimizer": "sgd"}):
        given: dict[str, Any] = dict(options)
        with pytest.raises(UsageError, match=r"takes no device(.|\n)*target= names the machine"):
            stitch.compile(lambda x: x + 1, [x], **given)
    model = stitch.compile(lambda x: x + 1, [x])
    with pytest.raises(UsageError, match=r"Pipeline\(\[device\.load\(one\)"):
        stitch.Pipeline([model])  # type: ignore[list-item]
    with (
        stitch.open_device("tiny") as device,
        pytest.raises(IncompatibleError, match=r"compile\(\.\.\., target='tiny'\)"),
    ):
        device.load(model)


def test_load_reads_paths_bytes_and_models_without_a_device(tmp_path: Path) -> None:
    compiled = scaled("a", 2.0)
    compiled.save(tmp_path / "a.ttb")
    for source in (tmp_path / "a.ttb", str(tmp_path / "a.ttb"), compiled.encode(), compiled):
        for verify in ("metadata", "full"):
            found = stitch.load(source, verify=verify)
            assert isinstance(found, Binary)
            assert found.program(0).name == "a"
    with pytest.raises(UsageError, match="'metadata' or 'full'"):
        stitch.load(compiled.encode(), verify="some")
    with pytest.raises(stitch.StitchError, match=r"none\.ttb"):
        stitch.load(tmp_path / "none.ttb")
    with pytest.raises(stitch.FormatError):
        stitch.load(b"nothing of the kind")


def test_what_cannot_be_compiled_says_why(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="no front end reads"):
        stitch.compile(tmp_path / "model.bin")
    with pytest.raises(CompileError, match=r"it is compiled: device\.load"):
        stitch.compile(tmp_path / "model.ttb")
    with pytest.raises(UsageError, match="there is no executor 'ort'"):
        stitch.compile(lambda x: x, [integers()], executor="ort")
    with pytest.raises(UsageError, match="a torch module or a function"):
        stitch.compile(42)
    with pytest.raises(UsageError, match="the function's parameters"):
        stitch.compile(lambda x: x, {"y": integers()}, target="tiny")
    with pytest.raises(UsageError, match="not a placement option"):
        scaled("a", 2.0, placement=("nonsense",))


def test_a_loaded_program_tells_what_it_takes_and_gives() -> None:
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0, placement=("input.x.space=dram",)))
        assert repr(a) == ("<LoadedProgram a(x: 4x64xf32) -> 4x64xf32:l1:row_major:interleaved>")
        assert (
            a.input_layout("x") == a.input_layout(0) == stitch.Layout(DataType.FLOAT32, Space.DRAM)
        )
        for wrong in ("z", 1, -1):
            with pytest.raises(UsageError, match="input"):
                a.input_layout(wrong)
        tensor = one(a(integers()))
        assert repr(tensor) == "<Tensor 4x64xf32:l1:row_major:interleaved pending>"
        assert tensor.is_pending
        tensor.deallocate()


def test_repr_of_a_ready_tensor_shows_its_elements_as_numpy_does() -> None:
    with stitch.open_device("tiny") as device:
        small = device.tensor(np.array([[1.5, 2.0], [3.0, -4.0]], np.float32))
        assert repr(small) == (
            "Tensor([[ 1.5,  2. ],\n        [ 3. , -4. ]], 2x2xf32:host:row_major:interleaved)"
        )
        assert "..." not in repr(device.tensor(np.arange(1000)))
        large = repr(device.tensor(np.arange(1001)))
        assert large.startswith("Tensor([   0,    1,    2, ...,  998,  999, 1000], 1001xi64")
        assert "small" in f"small {small}"
    assert repr(small) == "<Tensor 2x2xf32:host:row_major:interleaved ready>"


def test_repr_of_a_tensor_inside_a_host_function_does_not_wait_for_the_function() -> None:
    seen: list[str] = []
    with stitch.open_device("tiny") as device:
        held = device.tensor(np.zeros(2, np.float32))

        @stitch.task
        def look(x: Any) -> Any:
            seen.append(repr(held))
            return x

        result = device.call(look, held)
        device.wait()
        del result
    assert seen == ["<Tensor 2xf32:host:row_major:interleaved ready>"]


def test_dir_of_a_device_lists_the_documented_names() -> None:
    with stitch.open_device("tiny") as device:
        names = dir(device)
        assert names == sorted(names) and len(names) <= 40
        documented = stitch.Device.__doc__ or ""
        for name in names:
            assert hasattr(device, name)
            member = getattr(stitch.Device, name, None)
            assert member.__doc__ if member else f"        {name}: " in documented, name


def test_a_split_module_chains_to_the_results_of_the_whole() -> None:
    def net(x: Any) -> Any:
        return (np.maximum(x * 2.0, 0.0) + 1.0) * 3.0

    x = integers()
    whole = stitch.compile(net, [x], target="tiny")
    for parts in (
        stitch.split(net, [x], parts=3, target="tiny", name="net"),
        stitch.split(net, [x], at=[whole.graph.values[2].name], target="tiny", name="net"),
    ):
        assert [part.program.name for part in parts] == [f"net_{k}" for k in range(len(parts))]
        with stitch.open_device("tiny") as device:
            pipeline = stitch.Pipeline([device.load(part) for part in parts])
            assert pipeline(x).numpy().tobytes() == whole(x).numpy().tobytes()
    with pytest.raises(UsageError, match="split takes no optimizer"):
        stitch.split(net, [x], optimizer="adam")
    with pytest.raises(CompileError, match=r"no node 'nope'(.*\n)*.*model\.text\(\)"):
        stitch.split(net, [x], at="nope")
    with pytest.raises(UsageError, match="parts= or at="):
        stitch.split(net, [x], parts=3, at="nope")
    with pytest.raises(CompileError, match="into 0 parts"):
        stitch.split(net, [x], parts=0)
    calls: tuple[Any, ...] = (stitch.compile, stitch.split)
    for call in calls:
        with pytest.raises(UsageError, match=r"got: ndarray: \[.*\]\n  try: .* tuple: \(x,\)"):
            call(net, x)
        with pytest.raises(UsageError, match=r"compiled already\n.*\n  got: CompiledModel"):
            call(whole, [x])

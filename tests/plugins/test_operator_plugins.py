"""Operators of a plugin's domain: from YAML and ONNX to files, gradients and the compile cache."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import stitch
from stitch import plugins
from stitch.errors import CompileError
from stitch.graph import ComputationGraphBuilder
from stitch.testing import OperatorCase, OperatorSuite, one

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugins" / "operator"
X = np.arange(-16, 16, dtype=np.float32).reshape(4, 8)
SQUARES = np.maximum(X, 0) ** 2


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's operator, registered in this process."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    with plugins.files([]):
        names = runpy.run_path(str(EXAMPLE / "lab_operator" / "__init__.py"))
        stitch.register("operators", "lab", names["OPERATORS"])
        yield


def squares(path: Path) -> Path:
    """An ONNX model of one operation of the domain."""
    node = helper.make_node("SquaredRelu", ["x"], ["y"], domain="lab")
    slots = [helper.make_tensor_value_info(name, TensorProto.FLOAT, X.shape) for name in "xy"]
    graph = helper.make_graph([node], "squares", slots[:1], slots[1:])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("lab", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets), path)
    return path


@pytest.mark.usefixtures("lab")
class TestSquaredRelu(OperatorSuite):
    """The example's operator passes the suite that its own test inherits."""

    domain = "lab"
    cases = (OperatorCase("SquaredRelu", (X,)), OperatorCase("SquaredRelu", (X[:0],)))


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("executor", ["numpy", "onnxruntime", "auto"])
def test_yaml_and_onnx_modules_use_the_operator(executor: str, tmp_path: Path) -> None:
    for module in (EXAMPLE / "squares.yaml", squares(tmp_path / "squares.onnx")):
        model = stitch.compile(module, target="tiny")
        assert [o.title for o in model.binary.programs[0].operations] == ["lab.SquaredRelu"]
        with stitch.open_device("tiny", executor=executor) as device:
            np.testing.assert_array_equal(one(device.load(model)(X)).numpy(), SQUARES)


def test_without_the_plugin_the_operator_is_unknown(tmp_path: Path) -> None:
    with pytest.raises((CompileError, stitch.FormatError), match=r"SquaredRelu|'lab'"):
        stitch.compile(EXAMPLE / "squares.yaml", target="tiny")
    with pytest.raises(CompileError, match="SquaredRelu"):
        stitch.compile(squares(tmp_path / "squares.onnx"), target="tiny")


def test_a_file_needs_the_plugin_where_it_is_loaded(tmp_path: Path, lab: None) -> None:
    path = tmp_path / "squares.ttb"
    stitch.compile(EXAMPLE / "squares.yaml", target="tiny").save(path)
    names = plugins._registered
    taken = names.pop(("operators", "lab"))
    with stitch.open_device("tiny") as device:
        with pytest.raises(stitch.StitchError, match=r"lab\.SquaredRelu"):
            device.load(path)
        names["operators", "lab"] = taken
        np.testing.assert_array_equal(one(device.load(path)(X)).numpy(), SQUARES)


def test_the_compile_cache_follows_the_plugins_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (EXAMPLE / "lab_operator" / "__init__.py").read_text(encoding="utf-8")
    module = tmp_path / "cached_operator.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = []
    with plugins.files([]):
        for text in (source, source, source + "\n# Another version.\n"):
            module.write_text(text, encoding="utf-8")
            sys.modules.pop("cached_operator", None)
            plugins._registered.clear()
            stitch.register("operators", "lab", import_module("cached_operator").OPERATORS)
            builder = ComputationGraphBuilder("squares")
            (y,) = builder.apply("SquaredRelu", [builder.input("x", (4, 8), "float32")], ["y"],
                                 {}, "lab")  # fmt: skip
            builder.output("y", y)
            cache = stitch.CompileCache(tmp_path / "cache")
            stitch.compile(builder.build(), target="tiny", cache=cache)
            keys.append(len(list((tmp_path / "cache").glob("*.ttb"))))
    assert keys == [1, 1, 2]

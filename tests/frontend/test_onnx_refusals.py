"""ONNX models that cannot be compiled, or are no sound models: one clear error for each."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import stitch
from stitch.errors import CompileError, FormatError, IncompatibleError
from stitch.frontend.onnx import from_onnx
from stitch.frontend.onnx import protos as onnx_file
from tests.support.onnx.models import BOOL, INT64, drawn, info, model
from tests.support.run_seed import SEED

node = helper.make_node


def test_all_unsupported_operators_are_reported_at_once_with_their_nodes() -> None:
    nodes = [
        node("NonZero", ["x"], ["i"], name="first"),
        node("Relu", ["x"], ["r"]),
        node("ImageDecoder", ["r"], ["d"], name="second"),
        node("Unknown", ["r"], ["u"], name="third", domain="acme"),
        node("ImageDecoder", ["r"], ["e"], name="fourth"),
        node("Gather", ["x", "i"], ["y"], name="downstream"),
    ]
    proto = model(nodes, [info("x", [3, 3])], ["y", "d", "u", "e"], domains={"acme": 1})
    with pytest.raises(CompileError) as caught:
        from_onnx(proto)
    text = str(caught.value)
    assert "NonZero is not supported (the shape of its result depends on data): case:first" in text
    assert (
        "ImageDecoder is not supported (the shape of its result depends on what a file holds)"
        in text
    )
    assert ": case:second, case:fourth" in text
    assert "acme.Unknown is not supported: case:third" in text
    assert "downstream" not in text


def _branch(name: str, op: str = "Neg") -> Any:
    return helper.make_graph([node(op, ["x"], [name])], name, [], [info(name, None)])


def _rounds(ends: str = "") -> Any:
    """The body of a loop that negates its state; with `ends` it asks each round's number."""
    inputs = [info("i", [], INT64), info("c_in", [], BOOL), info("v", None)]
    asks = node(ends, ["i", "t"], ["c_out"]) if ends else node("Identity", ["c_in"], ["c_out"])
    nodes = [asks, node("Neg", ["v"], ["w"]), node("Identity", ["v"], ["seen"])]
    outputs = [info("c_out", [], BOOL), info("w", None), info("seen", None)]
    return helper.make_graph(nodes, "rounds", inputs, outputs)


REFUSED = {
    "If": (
        [
            node("ReduceMax", ["x"], ["m"], keepdims=0),
            node("Cast", ["m"], ["d"], to=BOOL),
            node("If", ["d"], ["y"], then_branch=_branch("a"), else_branch=_branch("b", "Shape")),
        ],
        "If is not supported .control flow",
    ),
    "Loop": (
        [
            node("ReduceMax", ["x"], ["m"], keepdims=0),
            node("Cast", ["m"], ["t"], to=INT64),
            node("Loop", ["t", "", "x"], ["z", "y"], body=_rounds()),
        ],
        "Loop is not supported where data decide how many values it collects",
    ),
    "long Loop": (
        [
            node("Constant", [], ["t"], value_int=5000),
            node("Loop", ["t", "", "x"], ["z", "y"], body=_rounds("Less")),
        ],
        "Loop is not supported for more than 4096 rounds",
    ),
    "NonZero": ([node("NonZero", ["x"], ["y"])], "NonZero is not supported .the shape"),
    "Unique": ([node("Unique", ["x"], ["y"])], "Unique is not supported .the shape"),
    "operator on a sequence": (
        [node("SequenceConstruct", ["x"], ["s"]), node("Neg", ["s"], ["y"])],
        "operator Neg is not supported on a sequence of 1 tensors",
    ),
    "empty output": ([node("SequenceEmpty", [], ["y"])], "outputs .* are empty sequences"),
    "empty optional value": (
        [node("Optional", [], ["y"], type=helper.make_tensor_type_proto(1, [2]))],
        "empty optional value",
    ),
    "position from data": (
        [
            node("SequenceConstruct", ["x", "x"], ["s"]),
            node("ReduceMax", ["x"], ["m"], keepdims=0),
            node("Cast", ["m"], ["i"], to=INT64),
            node("SequenceAt", ["s", "i"], ["y"]),
        ],
        "position. of SequenceAt must be known",
    ),
    "StringNormalizer": ([node("StringNormalizer", ["x"], ["y"])], "not strings"),
    "RandomNormalLike": ([node("RandomNormalLike", ["x"], ["y"])], "explicit key"),
    "float6": ([node("Cast", ["x"], ["y"], to=TensorProto.FLOAT6E2M3)], "not supported"),
    "string constant": ([node("Constant", [], ["y"], value_string="a")], "value_string"),
    "shape from data": (
        [node("Cast", ["x"], ["s"], to=INT64), node("Reshape", ["x", "s"], ["y"])],
        "must be known at compile time",
    ),
}


@pytest.mark.parametrize(("nodes", "words"), REFUSED.values(), ids=REFUSED)
def test_what_depends_on_data_or_is_no_plain_tensor_is_refused_by_name(
    nodes: list[Any], words: str
) -> None:
    inputs = [info("x", [4, 8]), info("c", [], BOOL), info("n", [], INT64)]
    proto = model(nodes, inputs, ["y"])
    with pytest.raises(CompileError, match=words):
        from_onnx(proto, (drawn(4, 8), np.array(True), np.array(2)))


@pytest.mark.parametrize(
    ("code", "name"),
    [(TensorProto.FLOAT6E2M3, "float6e2m3"), (TensorProto.STRING, "string"),
     (TensorProto.COMPLEX64, "complex64")],
)  # fmt: skip
def test_types_that_stitch_lacks_are_refused_by_name(code: int, name: str) -> None:
    as_input = model([node("Identity", ["x"], ["y"])], [info("x", [2], code)], ["y"])
    with pytest.raises(CompileError, match=f"input 'x': tensors of type {name} are not supported"):
        from_onnx(as_input)
    as_weight = model([node("Identity", ["w"], ["y"])], [], ["y"])
    as_weight.graph.initializer.append(TensorProto(name="w", data_type=code, dims=[0]))
    with pytest.raises(CompileError, match=f"tensors of type {name} are not supported"):
        from_onnx(as_weight)


def test_two_inputs_of_one_name_are_refused() -> None:
    proto = model([node("Neg", ["x"], ["y"])], [info("x", [2]), info("x", [2, 3])], ["y"])
    with pytest.raises(FormatError, match="two inputs are called 'x'"):
        from_onnx(proto)


def test_sequences_without_an_example_are_refused() -> None:
    sequence = helper.make_tensor_sequence_value_info("x", 1, [2])
    proto = model([node("Identity", ["x"], ["y"])], [sequence], ["y"])
    for examples in ((), (drawn(2),), {"x": None}):
        with pytest.raises(CompileError, match="input 'x': sequence values take the form"):
            from_onnx(proto, examples)


@pytest.mark.parametrize(
    ("examples", "shapes", "words"),
    [
        ((), {}, "dynamic dimension left unbound: b"),
        ((), {"x": (2,)}, r"expected \[b, 3\], got \[2\]"),
        ((), {"x": (2, 4)}, r"expected \[b, 3\], got \[2, 4\]"),
        ((), {"z": (2, 3)}, "no input 'z'"),
        ({"x": drawn(2, 3), "z": 1}, {}, "no input 'z'"),
        ((drawn(2, 3),), {}, "1 example inputs for a model of 2"),
        ((drawn(2, 3).astype(np.float64), drawn(2)), {}, "expected float32, got float64"),
        ((["a"], drawn(2)), {}, "the example is no array"),
        ({"x": drawn(2, 3)}, {"x": (5, 3)}, "the example has another shape"),
    ],
)
def test_inputs_that_cannot_be_bound(examples: Any, shapes: Any, words: str) -> None:
    proto = model([node("Neg", ["x"], ["y"])], [info("x", ["b", 3]), info("v", ["b"])], ["y"])
    with pytest.raises(CompileError, match=words):
        from_onnx(proto, examples, shapes)


def test_an_input_without_an_example_cannot_take_two_sizes() -> None:
    inputs = [info("x", ["b", 3]), info("v", ["b"]), info("w", ["b"])]
    proto = model([node("Neg", ["x"], ["y"])], inputs, ["y"])
    with pytest.raises(CompileError, match=r"'w' .* unbound: b \(in other inputs .* 2 and 4\)"):
        from_onnx(proto, {"x": drawn(2, 3), "v": drawn(4)})


def test_a_value_that_decides_a_shape_has_to_be_given() -> None:
    proto = model(
        [node("Reshape", ["x", "s"], ["y"])], [info("x", [6]), info("s", [2], INT64)], ["y"]
    )
    with pytest.raises(CompileError, match="the values of 's' decide shapes"):
        from_onnx(proto)


def test_versions_out_of_reach_are_refused_by_name() -> None:
    nodes, inputs = [node("Neg", ["x"], ["y"])], [info("x", [2])]
    with pytest.raises(IncompatibleError, match="opset 29 is newer"):
        from_onnx(model(nodes, inputs, ["y"], opset=29))
    newer = model(nodes, inputs, ["y"])
    newer.ir_version = 99
    with pytest.raises(IncompatibleError, match="IR version 99"):
        from_onnx(newer)
    newer = model(nodes, inputs, ["y"], opset=29)
    newer.ir_version = 99
    with pytest.raises(IncompatibleError, match=r"opset 29 is newer .*, and IR version 99") as both:
        from_onnx(newer)
    followed = str(both.value.remedy)
    assert f"convert_version(model, {onnx_file.NEWEST_OPSET})" in followed
    assert f"model.ir_version = {onnx_file.NEWEST_IR}" in followed
    old = model([node("NoSuchOperator", ["x"], ["y"])], inputs, ["y"], opset=7)
    with pytest.raises(CompileError, match="operator NoSuchOperator is not supported"):
        from_onnx(old)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (node("Mod", ["x", "x"], ["y"]), 1, "requires fmod=1"),
        (node("BitShift", ["x", "x"], ["y"], direction="LEFT"), 6, "not support the data type"),
        (node("Celu", ["x"], ["y"]), 11, "not support the data type"),
    ],
)
def test_what_the_newest_opset_added_is_refused_by_its_name(
    call: Any, kind: int, message: str
) -> None:
    proto = model([call], [info("x", [1, 2, 2, 2], kind)], ["y"], opset=onnx_file.READABLE_OPSET)
    with pytest.raises(CompileError, match=message):
        from_onnx(proto)


def test_a_file_that_was_cut_off_is_said_to_be(tmp_path: Path) -> None:
    proto = model([node("Neg", ["x"], ["y"])], [info("x", [2])], ["y"])
    (tmp_path / "cut.onnx").write_bytes(proto.SerializeToString()[:-3])
    with pytest.raises(
        FormatError, match=r"cut off or damaged(.|\n)*bytes that begin like an ONNX"
    ):
        from_onnx(tmp_path / "cut.onnx")


def test_a_function_that_calls_itself_is_refused() -> None:
    imports = [helper.make_opsetid("mine", 1)]
    calls = [node("F", ["a"], ["b"], domain="mine")]
    loop = helper.make_function("mine", "F", ["a"], ["b"], calls, imports)
    proto = model([node("F", ["x"], ["y"], domain="mine")], [info("x", [2])], ["y"],
                  functions=[loop], domains={"mine": 1})  # fmt: skip
    with pytest.raises(FormatError, match="calls itself"):
        from_onnx(proto)


def test_functions_that_multiply_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch.frontend.onnx.node_walk.MAX_NODES", 2000)
    imports = [helper.make_opsetid("mine", 1), helper.make_opsetid("", 26)]
    bombs = [helper.make_function("mine", "F0", ["a"], ["b"], [node("Neg", ["a"], ["b"])], imports)]
    for k in range(1, 30):
        twice = [node(f"F{k - 1}", ["a"], ["m"], domain="mine"),
                 node(f"F{k - 1}", ["m"], ["b"], domain="mine")]  # fmt: skip
        bombs.append(helper.make_function("mine", f"F{k}", ["a"], ["b"], twice, imports))
    proto = model([node("F29", ["x"], ["y"], domain="mine")], [info("x", [2])], ["y"],
                  functions=bombs, domains={"mine": 1})  # fmt: skip
    with pytest.raises(CompileError, match="more than 2000 nodes"):
        from_onnx(proto)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("Neg", ["nothing"], ["y"])], "no value 'nothing'"),
        ([node("Neg", ["h"], ["y"]), node("Neg", ["x"], ["h"])], "made later"),
        ([node("Neg", ["x"], ["y"]), node("Abs", ["x"], ["y"])], "'y' is made twice"),
        ([node("Neg", ["x"], ["y", "z"])], "Neg has the wrong number of outputs"),
        ([node("Foo", ["x"], ["y"], domain="acme")], "does not import"),
        ([node("Neg", ["x"], ["h"])], "no value 'y'"),
        ([node("Elu", ["x"], ["y"], alpha="one")], "attribute 'alpha' has the wrong type"),
        ([node("Constant", [], ["y"])], "exactly one attribute"),
    ],
)
def test_graphs_that_do_not_hold_together(nodes: list[Any], words: str) -> None:
    with pytest.raises((FormatError, CompileError), match=words):
        from_onnx(model(nodes, [info("x", [2])], ["y"]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.ClearField("graph"), "no graph"),
        (lambda p: p.graph.node[0].attribute.extend([*p.graph.node[0].attribute]), "given twice"),
        (lambda p: setattr(p.graph.node[0].attribute[0], "ref_attr_name", "a"), "in no function"),
        (lambda p: p.graph.node[0].attribute.add(name="s", type=3, s=b"\xff"), "no UTF-8"),
        (lambda p: setattr(p.graph.initializer[0].segment, "begin", 1), "a tensor in segments"),
        (lambda p: p.functions.extend([onnx.FunctionProto(name="F", domain="m")] * 2), "F.*twice"),
    ],
)
def test_a_model_that_lacks_or_doubles_a_part_is_refused(change: Any, words: str) -> None:
    nodes = [node("Elu", ["x"], ["h"], alpha=0.5), node("Add", ["h", "w"], ["y"])]
    proto = model(nodes, [info("x", [2])], ["y"], {"w": drawn(2)})
    change(proto)
    with pytest.raises(FormatError, match=words):
        from_onnx(proto)


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.FLOAT])
def test_external_data_may_begin_anywhere_and_needs_no_length(tmp_path: Path, kind: int) -> None:
    """As in one file for all tensors: 4-bit elements, and an offset that no element fits."""
    nodes = [node("Cast", ["w"], ["y"], to=1), node("Cast", ["e"], ["z"], to=1)]
    proto, path = model(nodes, [], ["y", "z"]), tmp_path / "m.onnx"
    values = np.array([1, -2, 3, -4], np.float32)
    packed = b"\xe1\xc3" if kind == TensorProto.INT4 else values.tobytes()
    (tmp_path / "w.bin").write_bytes(b"abc" + packed)
    for name, size in (("w", 4), ("e", 0)):
        tensor = proto.graph.initializer.add(name=name, data_type=kind, dims=[size])
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="w.bin")
        tensor.external_data.add(key="offset", value="3")
    onnx.save(proto, path)
    with stitch.open_device("host") as device:
        y, z = device.load(stitch.compile(path, target="host"))()
        np.testing.assert_array_equal(y.numpy(), values)
        assert z.shape == (0,)
    proto.graph.initializer[0].external_data[1].value = "-3"
    onnx.save(proto, path)
    with pytest.raises(FormatError, match="offset is no number of bytes"):
        from_onnx(path)


def _saved_with_external_data(folder: Path) -> Path:
    proto = model([node("Add", ["x", "w"], ["y"])], [info("x", [8])], ["y"], {"w": drawn(8)})
    path = folder / "m.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    return path


def test_external_data_that_is_missing_short_or_elsewhere(tmp_path: Path) -> None:
    path = _saved_with_external_data(tmp_path)
    data = (tmp_path / "w.bin").read_bytes()
    (tmp_path / "w.bin").write_bytes(data[:20])
    with pytest.raises(FormatError, match=r"w\.bin is too short"):
        from_onnx(path)
    (tmp_path / "w.bin").unlink()
    (tmp_path / "w.bim").write_bytes(data)
    with pytest.raises(FormatError, match=r"w\.bin cannot be read") as caught:
        from_onnx(path)
    assert "w.bim" in str(caught.value)
    with pytest.raises(FormatError, match="has no folder"):
        from_onnx(onnx.load(path, load_external_data=False))


@pytest.mark.parametrize("location", ["../w.bin", "/etc/hostname", "", "a/../../w.bin", "."])
def test_external_data_outside_the_folder_is_not_read(tmp_path: Path, location: str) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(64))
    folder = tmp_path / "model"
    folder.mkdir()
    proto = onnx.load(_saved_with_external_data(folder), load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(FormatError, match="external data"):
        from_onnx(folder / "m.onnx")


def test_a_link_that_leads_outside_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = _saved_with_external_data(folder)
    (folder / "w.bin").rename(tmp_path / "w.bin")
    (folder / "w.bin").symlink_to(tmp_path / "w.bin")
    with pytest.raises(FormatError, match="must lie in the model's folder"):
        from_onnx(path)
    (folder / "w.bin").unlink()
    (folder / "w.bin").symlink_to("w.bin")
    with pytest.raises(FormatError, match=r"no usable location|w\.bin cannot be read"):
        from_onnx(path)


def test_tensors_whose_data_does_not_fit_their_shape() -> None:
    for dims in ([3], [1], [-1], [2**40, 2**30]):
        proto = model([node("Neg", ["w"], ["y"])], [], ["y"])
        proto.graph.initializer.append(
            TensorProto(name="w", data_type=1, dims=dims, raw_data=bytes(8))
        )
        with pytest.raises(FormatError, match=r"does not fit its shape|negative dimension"):
            from_onnx(proto)


def test_a_file_of_two_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.onnx"
    with path.open("wb") as file:
        file.truncate(onnx_file.MESSAGE_LIMIT)
    with pytest.raises(FormatError, match="2 GB or more") as caught:
        from_onnx(path)
    assert "save_as_external_data" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"name: a\ninputs: {}\n", "text"),
        (b"\x93NUMPY" + bytes(80), "NumPy"),
        (b"\x08\x0a", "no ONNX graph"),
    ],
)
def test_files_that_are_no_models_are_recognised(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=words):
        stitch.compile(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot read the model") as caught:
        stitch.compile(tmp_path / "none.onnx")
    assert "none.onnx" in str(caught.value)


def _specimen() -> bytes:
    """A model with a function, a branch, old words and several ways of storing."""
    function = helper.make_function(
        "mine", "F", ["a"], ["b"], [node("Elu", ["a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    branches = {
        key: helper.make_graph([node(op, ["r"], [op])], op, [], [info(op, None)])
        for key, op in (("then_branch", "Neg"), ("else_branch", "Abs"))
    }
    nodes = [
        node("MatMul", ["x", "w"], ["m"], name="mm"),
        node("F", ["m"], ["r"], domain="mine"),
        node("Constant", [], ["c"], value=helper.make_tensor("c", BOOL, [], [1])),
        node("If", ["c"], ["i"], **branches),
        node("ReduceMax", ["i"], ["rm"], axes=[1], keepdims=1),
        node("Reshape", ["rm", "s"], ["y"]),
        node("Shrink", ["i"], ["sh"], lambd=0.5),
        node("Split", ["sh"], ["p", "q"], axis=1),
        node("Pad", ["p", "pads"], ["pd"]),
        node("Unsqueeze", ["pd", "axes"], ["u"]),
        node("Conv", ["u", "k"], ["cv"], pads=[1, 1, 1, 1]),
    ]
    weights = {
        "w": drawn(4, 4), "s": np.array([2, -1]), "k": drawn(2, 1, 2, 2),
        "pads": np.array([0, 0, 1, 1]), "axes": np.array([0, 1]),
    }  # fmt: skip
    proto = model(nodes, [info("x", ["b", 4])], ["y", "cv"], weights, opset=14,
                  functions=[function], domains={"mine": 1})  # fmt: skip
    from_onnx(proto, (drawn(2, 4),))
    return bytes(proto.SerializeToString())


def _damaged(data: bytes, draw: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, how = draw.randrange(len(damaged) or 1), draw.random()
        if how < 0.7 and damaged:
            damaged[at] = draw.randrange(256)
        elif how < 0.8:
            del damaged[at : at + draw.randrange(1, 8)]
        elif how < 0.95:
            damaged[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 5)))
        else:
            del damaged[at:]
    return bytes(damaged)


def _survive(tmp_path: Path, seed: int, rounds: int) -> int:
    """Damages a model so often; gives how often it was refused. Any other exception escapes."""
    data, draw, refused = _specimen(), random.Random(seed), 0
    path = tmp_path / "damaged.onnx"
    for _ in range(rounds):
        path.write_bytes(_damaged(data, draw))
        try:
            from_onnx(path, (drawn(2, 4),))
        except (FormatError, CompileError):
            refused += 1
    return refused


def test_damaged_models_are_refused_or_read_and_nothing_else(tmp_path: Path) -> None:
    assert _survive(tmp_path, 1, 800) > 400


@pytest.mark.campaign("hostile")
@pytest.mark.parametrize("part", range(6))
def test_damaged_models_in_a_long_campaign(tmp_path: Path, part: int) -> None:
    seed = 2 + SEED + part
    assert _survive(tmp_path, seed, 5000) > 2500, seed

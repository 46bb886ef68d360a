"""Modules in YAML: what they say, where weights come from, and every kind of bad input."""

from __future__ import annotations

import io
import json
import pickle
import textwrap
import zipfile
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from stitch import ops
from stitch.errors import FormatError
from stitch.frontend import load_module, module_from_text
from stitch.frontend.yaml import parse_statement
from stitch.graph import ComputationGraph, check_types
from stitch.program import ABSENT, Array, DataType, InputKind, Ownership

HERE = Path()


def results(graph: ComputationGraph, *arrays: Array) -> list[Array]:
    """The outputs, computed one operation at a time."""
    assert check_types(graph) == ()
    found: dict[int, Array] = dict(graph.constant_data())
    found |= {slot.value: a for slot, a in zip(graph.inputs, arrays, strict=True)}
    for o in graph.operations:
        operands: Sequence[Array | None] = [None if i == ABSENT else found[i] for i in o.inputs]
        made = ops.evaluate(o.op, operands, attributes=o.attributes, outputs=len(o.outputs))
        found.update(zip(o.outputs, made, strict=True))
    return [found[slot.value] for slot in graph.outputs]


def module(text: str, folder: Path = HERE) -> ComputationGraph:
    return module_from_text(textwrap.dedent(text), folder, "m.yaml")


def one(operations: str, parameters: str = "", outputs: str = "[y]") -> str:
    """A module over x: 2x3 float32."""
    return (
        "inputs:\n"
        "  x: {shape: [2, 3], type: float32}\n"
        f"parameters: {{{parameters}}}\n"
        f"operations: {operations}\n"
        f"outputs: {outputs}\n"
    )


X = np.array([[1, -2, 3], [4, 5, -6]], np.float32)


def test_a_module_computes_what_it_says() -> None:
    graph = module(
        """
        name: dense
        inputs: {x: {shape: [2, 3], type: f32}}
        parameters:
          w: {values: [[1, 2, 3], [0, 1, 0]], type: float32}
        operations:
          - h = MatMul(x, w_t)
          - y = Relu(h)
        outputs: [y]
        """.replace("- h", "- w_t = Transpose(w, perm=[1, 0])\n          - h")
    )
    assert graph.name == "dense"
    expected = np.maximum(X @ np.array([[1, 2, 3], [0, 1, 0]], np.float32).T, 0)
    assert results(graph, X)[0].tolist() == expected.tolist()


def test_numbers_take_the_first_tensors_type_and_lists_of_ints_are_int64() -> None:
    graph = module(
        """
        inputs: {x: {shape: [2, 3], type: float16}}
        operations:
          - a = Add(1, x)
          - y = Reshape(a, [0x3, -1])
          - z = Mul(y, [0.5, 2])
        outputs: [z]
        """
    )
    kinds = [graph.values[c.value].type.data_type for c in graph.constants]
    assert kinds == [DataType.FLOAT16, DataType.INT64, DataType.FLOAT16]


def test_slots_carry_kinds_ownership_and_placement() -> None:
    graph = module(
        """
        inputs:
          s: {shape: [64, 64], type: float32, kind: state, ownership: donate,
              space: l1, layout: tile, data_type: bfp8, address: 0x20000,
              memory_layout: height_sharded, shard_spec: "2x1,32x64"}
        operations: [y = Relu(s)]
        outputs:
          out: {value: y, space: dram, alias: s}
        """
    )
    (slot,) = graph.inputs
    assert (slot.kind, slot.ownership) == (InputKind.STATE, Ownership.DONATE)
    assert sorted(option.text() for option in graph.placement) == [
        "input.s.address=0x20000",
        "input.s.data_type=bfp8",
        "input.s.layout=tile",
        "input.s.memory_layout=height_sharded",
        "input.s.shard_spec=2x1,32x64",
        "input.s.space=l1",
        "output.out.alias=s",
        "output.out.space=dram",
    ]


def test_operations_are_located_in_the_file_without_its_folder(tmp_path: Path) -> None:
    (tmp_path / "net.yaml").write_text(one("\n  - a = Relu(x)\n  - y = Neg(a)"))
    graph = load_module(tmp_path / "net.yaml")
    assert graph.name == "net"
    assert [o.location for o in graph.operations] == ["net.yaml:5", "net.yaml:6"]


W = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    np.savez(tmp_path / "two.npz", w=W, other=W.T)
    np.savez_compressed(tmp_path / "one.npz", only=W)
    np.save(tmp_path / "w.npy", np.asfortranarray(W))
    np.save(tmp_path / "big_endian.npy", W.astype(">f4"))
    save_file({"w": W, "half": W.astype(ml_dtypes.bfloat16)}, tmp_path / "w.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        "file: two.npz, name: w",
        "file: one.npz",
        "file: w.npy",
        "file: big_endian.npy",
        "file: w.safetensors, name: w",
        "file: two.npz, name: w, shape: [2, 3], type: float32",
        "values: [[0, 1, 2], [3, 4, 5.0]]",
        "shape: [2, 3], init: arange",
    ],
)
def test_a_parameter_comes_from_a_file_from_values_or_from_a_rule(
    source: str, weights: Path
) -> None:
    graph = module(one("['y = Add(x, w)']", f"w: {{{source}}}"), weights)
    assert results(graph, X)[0].tolist() == (X + W).tolist()


def test_bfloat16_weights_come_out_of_npy_where_the_module_says_so(weights: Path) -> None:
    np.save(weights / "bf.npy", W.astype(DataType.BFLOAT16.dtype))
    text = one("['y = Add(x, w)']", "w: {file: bf.npy, type: bfloat16}")
    graph = module(text.replace("float32", "bfloat16"), weights)
    assert graph.constants[0].data.dtype == DataType.BFLOAT16.dtype
    assert graph.constants[0].data.astype(np.float32).tolist() == W.tolist()
    with pytest.raises(FormatError, match="declare it with type: bfloat16"):
        module(one("['y = Add(x, w)']", "w: {file: bf.npy}"), weights)


def test_bfloat16_weights_come_out_of_safetensors(weights: Path) -> None:
    text = one("['y = Cast(w, to=float32)']", "w: {file: w.safetensors, name: half}")
    assert results(module(text, weights), X)[0].tolist() == W.tolist()


def test_made_up_numbers_depend_on_the_seed_alone() -> None:
    def made(**options: str) -> Array:
        init = ", ".join(f"{k}: {v}" for k, v in options.items())
        text = one("[y = Identity(x)]", f"w: {{shape: [400], init: {{{init}}}}}")
        return module(text).constants[0].data

    normal = made(kind="randn", seed="3", mean="5", scale="2.0")
    assert normal.tolist() == made(kind="randn", seed="3", mean="5", scale="2.0").tolist()
    assert normal.tolist() != made(kind="randn", seed="4", mean="5", scale="2.0").tolist()
    assert abs(float(normal.mean()) - 5) < 0.5
    assert abs(float(normal.std()) - 2) < 0.5
    uniform = made(kind="uniform", low="-1", high="1e-1")
    assert -1 <= uniform.min() < uniform.max() < 0.1
    assert set(made(kind="constant", value="2.5").tolist()) == {2.5}
    assert made(kind="arange", start="1", step="0.5")[:3].tolist() == [1, 1.5, 2]
    assert set(made(kind="zeros").tolist()) == {0}
    assert set(made(kind="ones").tolist()) == {1}


def test_parameters_without_a_seed_differ_from_each_other() -> None:
    graph = module(
        one("['y = Add(x, w)']", "w: {shape: [3], init: randn}, v: {shape: [3], init: randn}")
    )
    assert graph.constants[0].data.tolist() != graph.constants[1].data.tolist()


BAD_MODULES = {
    "": "the file is empty",
    "- 3": "m.yaml:1: must be a mapping",
    "name: [": "not YAML",
    "name: x\nname: y": "is defined twice",
    "a: !!python/object/apply:os.system [ls]": "a: there is no such key",
    "? [1]\n: 2": "a key is a word",
    "<<: {a: 1}": "<<: there is no such key",
    "opertaions: []": "did you mean 'operations'",
    "inputs: 3": "inputs: must be a mapping, not '3'",
    "inputs: {x: {shape: [2]}}": "inputs.x.type: must be a data type",
    "inputs: {x: {type: f32}}": "inputs.x.shape: must be a list of dimensions",
    "inputs: {x: {shape: [2.5], type: f32}}": "whole numbers",
    "inputs: {x: {shape: [2, -2], type: f32}}": "and its element 1 is '-2'",
    "inputs: {x: {shape: [1, [2]], type: f32}}": "and its element 1 is a list of 1",
    "inputs: {x: {shape: [1099511627776], type: f32}}": "beyond 2^40",
    "inputs: {x: {shape: {a: 1}, type: f32}}": "not a mapping",
    "inputs: {x: {shape: [2], type: flaot32}}": "did you mean 'float32'",
    "inputs: {x: {shape: [2], type: bfp8}}": "not a block format",
    "inputs: {x: {shape: [2], type: f32, kind: wieght}}": "activation, parameter",
    "inputs: {x: {shape: [2], type: f32, ownership: lend}}": "borrow, donate",
    "inputs: {x: {shape: [2], type: f32, space: l7}}": "host, dram, l1",
    "inputs: {x: {shape: [2], type: f32, adress: 3}}": "did you mean 'address'",
    "inputs: {x: {shape: [2], type: f32, address: -3}}": "not an address",
    "inputs: {a b: {shape: [2], type: f32}}": "cannot be the name",
    "inputs: {_: {shape: [2], type: f32}}": "cannot be the name",
    "outputs: []": "at least one",
    "outputs: [[1]]": "names only",
    one("3"): "a list of operations",
    one("[3]"): "an operation is written",
    one("[y = Relu(x]"): "m.yaml:4",
    one("[y = Rleu(x)]"): "did you mean Relu",
    one("[y = foo.Relu(x)]"): "a known domain",
    one("[y = Relu(z)]"): "'z' is not defined above",
    one("['y = Relu(x, x)']"): "wrong number of operands",
    one("['a, b = Relu(x)']"): "wrong number of outputs",
    one("['y = Relu(x, alhpa=3)']"): "no attribute 'alhpa'",
    one("['y = Elu(x, alpha=abc)']"): "alpha",
    one("['y = Softmax(x, axis=abc)']"): "is a whole number",
    one("['y = Cast(x, to=flaot32)']"): "is a whole number",
    one("['y = Add(x, [1.0, [2.0]])']"): "no list of numbers",
    one("['y = Reshape(x, [5])']"): "Reshape",
    one("['y = Reshape(x, [99999999999999999999])']"): "no list of numbers",
    one("['y = Reshape(x, [9223372036854775808])']"): "64 bits",
    one("['y = Add(x, 1e39)']"): "does not fit a tensor of float32",
    one("['y = Transpose(x, perm=[[1], [0]])']"): "a list of either",
    one("['y = Transpose(x, perm=[a, 0])']"): "a list of either",
    one("[y = Relu(x), y = Neg(x)]"): "defined on line 4 already",
    one("[x = Relu(x)]", outputs="[x]"): "'x' is defined on line 2",
    one("\n  - y = Gemm(x, x) {transB: 1}"): "an operation is written",
    one("[y = Relu(x)]", outputs="{y: {sapce: l1}}"): "did you mean 'space'",
    one("[y = Relu(x)]", outputs="{y: {shape: [3]}}"): "not the declared shape",
    one("[y = Relu(x)]", outputs="{y: {type: int8}}"): "not the declared shape or type",
    one("[y = Relu(x)]", outputs="{y: {alias: z}}"): "there is no input 'z'",
    one("[y = Relu(x)]", outputs="{z: {}}"): "'z' is not defined above",
    one("[y = Relu(x)]", outputs="[y, y]"): "two outputs",
    one("[]", "w: {}"): "one of file, init, values; not none",
    one("[]", "w: {file: a.npy, init: ones}"): "not file and init",
    one("[]", "w: {file: nowhere.npz}"): "no file nowhere.npz",
    one("[]", "w: {file: nowhere.txt}"): ".npy, .npz, .safetensors",
    one("[]", "w: {values: [[1], 2]}"): "a rectangular list",
    one("[]", "w: {values: [[1, 2], [3]]}"): "a rectangular list",
    one("[]", "w: {values: [1.0e+39], type: f32}"): "do not fit float32",
    one("[]", "w: {values: [7.0e+4], type: f16}"): "do not fit float16",
    one("[]", "w: {values: [a]}"): "not numbers",
    one("[]", "w: {values: [0.5], type: int8}"): "not whole numbers",
    one("[]", "w: {values: [300], type: int8}"): "do not fit int8",
    one("[]", "w: {values: [1], shape: [2]}"): "has the shape [1], declared is [2]",
    one("[]", "w: {init: ones}"): "init needs one",
    one("[]", "w: {shape: [2], init: {kind: onse}}"): "did you mean 'ones'",
    one("[]", "w: {shape: [2], init: {kind: ones, seed: 3}}"): "init.seed: there is no such key",
    one("[]", "w: {shape: [2], init: {kind: constant}}"): "init.value: must be a number",
    one("[]", "w: {shape: [2], init: {kind: randn, seed: -1}}"): "not negative",
    one("[]", "w: {shape: [2], init: {kind: randn, scale: big}}"): "init.scale: must be a number",
    one("[]", "w: {shape: [2], type: int8, init: randn}"): "for int8",
    one("[]", "w: {shape: [999], type: int8, init: arange}"): "can hold",
    one("[]", "w: {shape: [99999, 99999], init: ones}"): "put more into a file",
    one("[]", "w: {shape: [2], type: bfp8, init: ones}"): "not a block format",
}


@pytest.mark.parametrize("text", BAD_MODULES, ids=range(len(BAD_MODULES)))
def test_a_bad_module_is_a_format_error_that_says_what_is_allowed(text: str) -> None:
    with pytest.raises(FormatError) as caught:
        module(text)
    assert BAD_MODULES[text] in str(caught.value)
    assert "m.yaml" in str(caught.value)


def test_all_defects_come_in_one_error_in_the_order_of_the_file() -> None:
    with pytest.raises(FormatError) as caught:
        module(
            """
            inputs:
              x: {shape: [2], type: float33}
            operations:
              - a = Rleu(x)
              - b = Relu(a)
              - c = Relu(q)
            outputs: [z]
            """
        )
    lines = [p.where for p in caught.value.problems]
    assert lines == ["m.yaml:3", "m.yaml:5", "m.yaml:7", "m.yaml:8"]


HOSTILE = {
    "alias bomb": "a: &a [1,1,1,1,1,1,1,1,1]\n"
    + "".join(
        f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)
    ),
    "endless alias": "a: &a [*a]",
    "deep flow": "a: " + "[" * 50_000,
    "deep blocks": "\n".join(" " * i + "a:" for i in range(200)),
    "many events": "a: [" + "1," * 150_000 + "]",
    "long": "a: " + "x" * (1 << 20),
    "control characters": "a: \x00",
    "long number": "name: " + "9" * 5000,
    "tab": "a:\n\t- b",
    "tag": "name: !!python/name:os.system x",
    "long operation": one("['y = Relu(" + "x" * 30_000 + ")']"),
    "deep lists": one("['y = Add(x, " + "[" * 5000 + ")']"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_module_is_refused_without_effort(name: str) -> None:
    with pytest.raises(FormatError):
        module(HOSTILE[name])


def write_pickled(path: Path) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": "|O", "fortran_order": False, "shape": (1,)}
    )
    path.write_bytes(buffer.getvalue() + pickle.dumps([print]))


def test_object_arrays_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    write_pickled(tmp_path / "w.npy")
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.write(tmp_path / "w.npy", "w.npy")
    (tmp_path / "raw.npy").write_bytes(pickle.dumps({"w": 1}))
    for source in ("w.npy", "w.npz", "raw.npy"):
        with pytest.raises(FormatError, match=r"no sound \.np[yz] file: .*(objects|magic)"):
            module(one("['y = Add(x, w)']", f"w: {{file: {source}}}"), tmp_path)


@pytest.mark.parametrize("file", ["two.npz", "one.npz", "w.npy", "w.safetensors"])
def test_a_truncated_or_damaged_weights_file_is_a_format_error(file: str, weights: Path) -> None:
    whole = (weights / file).read_bytes()
    name = "" if file in ("w.npy", "one.npz") else ", name: w"
    text = one("['y = Add(x, w)']", f"w: {{file: {file}{name}}}")
    random = np.random.default_rng(1)
    for length in sorted({0, 1, 7, *range(9, len(whole) - 1, 41)}):
        (weights / file).write_bytes(whole[:length])
        with pytest.raises(FormatError, match=file):
            module(text, weights)
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[int(random.integers(len(whole)))] ^= int(random.integers(1, 256))
        (weights / file).write_bytes(bytes(damaged))
        try:
            assert isinstance(module(text, weights), ComputationGraph)
        except FormatError as error:
            assert "m.yaml" in str(error)


def test_a_wrong_array_name_shape_or_type_names_file_and_array(weights: Path) -> None:
    with pytest.raises(FormatError) as caught:
        module(
            """
            inputs: {x: {shape: [2, 3], type: float32}}
            parameters:
              a: {file: two.npz, name: ohter}
              b: {file: two.npz}
              c: {file: w.npy, name: w}
              d: {file: two.npz, name: w, shape: [3, 2]}
              e: {file: two.npz, name: w, type: float16}
              f: {file: w.safetensors, name: v}
            outputs: [x]
            """,
            weights,
        )
    said = str(caught.value)
    for words in (
        "two.npz: there is no array 'ohter'",
        "did you mean 'other'",
        "two.npz: one array must be named",
        "w.npy holds one array",
        "(two.npz w) has the shape [2, 3], declared is [3, 2]",
        "(two.npz w) holds float32, declared is float16",
        "w.safetensors: there is no array 'v'",
    ):
        assert words in said


def test_arrays_of_types_that_are_not_stored_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "c.npy", np.zeros(3, np.complex64))
    with pytest.raises(FormatError, match="complex64"):
        module(one("['y = Add(x, w)']", "w: {file: c.npy}"), tmp_path)


def test_a_module_that_cannot_be_read_is_a_format_error(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\xfe")
    for name in ("nowhere.yaml", "latin.yaml", "."):
        with pytest.raises(FormatError):
            load_module(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "y", "y = Relu(x", "y = Relu(x) z", "1 = Relu(x)", "y = Relu(x y)", "y = Relu(a=1, x)",
        "y = Relu(a=1, a=2)", "y = Relu({x: 1}, x)", "y = Relu(x, [1)", "y = Relu(x)(x)",
    ],
)  # fmt: skip
def test_what_is_no_statement_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match=r"m\.yaml:4"):
        module(one(json.dumps([text])))


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="xy=(),[]_ .1-'aRelu", max_size=30))
def test_any_text_is_a_statement_or_is_refused(text: str) -> None:
    try:
        made = parse_statement(text)
    except FormatError:
        return
    assert made.op


SOUND = one("\n  - h = Clip(x, _, 2.0)\n  - y = Reshape(h, [3, -1])", "w: {shape: [2], init: ones}")


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_damaged_module_is_a_graph_or_a_format_error(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(SOUND) - 1))
    end = data.draw(st.integers(at, min(len(SOUND), at + 8)))
    put = data.draw(
        st.sampled_from(["", "-1", "[", "}", ": ", "\n", "&a ", "*a", "null", "1e9", "9" * 30])
    )
    try:
        graph = module_from_text(SOUND[:at] + put + SOUND[end:], HERE)
    except FormatError:
        return
    assert check_types(graph) == ()

"""`stitch schema` and `stitch export`: JSON Schemas against the readers, programs for viewers."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import onnxruntime
import pytest
import yaml

import stitch
from stitch.cli import main
from stitch.documents import load_pipeline
from stitch.errors import StitchError
from stitch.frontend import load_module
from stitch.machine import parse_machine
from stitch.mesh import specification_of
from tests.support.grids import every
from tests.support.scanned_graphs import scanned_graph

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("module", "pipeline", "machine", "mesh")
SHIPPED = {
    f.relative_to(ROOT).as_posix(): f
    for folder in ("stitch/machine", "examples")
    for f in sorted((ROOT / folder).rglob("*.yaml"))
}
MESH = """\
devices: {left: {machine: tiny}, right: {machine: tiny, node: a}}
links:
  - {from: left, to: right, latency_seconds: 1.0e-6, bytes_per_second: 1.0e+9, source: measured}
  - {from: right, to: left, latency_seconds: 0, curve: [[1, 1.0e-6], [1024, 2.0e-6]]}
"""


def text_of(name: str) -> str:
    return (ROOT / "stitch" / "schemas" / f"{name}.json").read_text(encoding="utf-8")


@functools.cache
def validator(name: str) -> Any:
    return jsonschema.Draft202012Validator(json.loads(text_of(name)))


def refuses(name: str, document: Any) -> bool:
    return not validator(name).is_valid(document)


@pytest.mark.parametrize("name", FORMS)
def test_the_committed_schema_is_what_the_reader_s_fields_say(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schema", name]) == 0
    printed = capsys.readouterr().out
    jsonschema.Draft202012Validator.check_schema(json.loads(printed))
    assert printed == text_of(name), f"stitch schema {name} -o stitch/schemas/{name}.json"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_documents_name_their_schema_in_the_first_line_and_fit_it(name: str) -> None:
    text = SHIPPED[name].read_text(encoding="utf-8")
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert named is not None
    schema = (SHIPPED[name].parent / named[1]).resolve()
    assert schema.parent == ROOT / "stitch" / "schemas"
    validator(schema.stem).validate(yaml.safe_load(text))


def test_an_example_that_is_written_names_the_schemas_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--example=recurrent"]) == 0
    for document in (tmp_path / "recurrent").glob("*.yaml"):
        named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", document.read_text())
        assert named is not None
        assert Path(named[1]).is_file()


def test_a_mesh_fits_its_schema() -> None:
    assert not refuses("mesh", yaml.safe_load(MESH))


def reads(name: str, text: str, folder: Path) -> bool:
    """Whether the reader of a form takes a text."""
    file = folder / "document.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        if name == "module":
            load_module(file)
        elif name == "pipeline":
            load_pipeline(file)
        elif name == "machine":
            parse_machine(text.encode(), "document.yaml")
        else:
            specification_of(file)
    except StitchError:
        return False
    return True


def places(data: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a document."""
    children = data.items() if isinstance(data, dict) else enumerate(data)
    inner = [
        place
        for key, value in children
        for place in (places(value, (*here, key)) if isinstance(value, dict | list) else [])
    ]
    keys = data if isinstance(data, dict) else range(len(data))
    return [*((*here, key) for key in keys), *inner]


DOCUMENTS = {
    "module": SHIPPED["examples/digits/network.yaml"].read_text(encoding="utf-8"),
    "pipeline": SHIPPED["examples/recurrent/pipeline.yaml"].read_text(encoding="utf-8"),
    "machine": SHIPPED["stitch/machine/tiny.yaml"].read_text(encoding="utf-8"),
    "mesh": MESH,
}
#: What replaces a value; None removes its key.
WRONG: tuple[Any, ...] = (None, "x y", -1, [], {"unknown_key": 1}, 1e40, True)
#: Of the pairs of a place and a value, the quick run takes each twentieth.
STEP = 20


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("start", every(STEP, range(STEP)))
def test_what_a_schema_refuses_the_reader_refuses(name: str, start: int, tmp_path: Path) -> None:
    """Of a document with one value replaced, and some of each are refused by both.

    Not the reverse: types of tensors, names that are defined elsewhere and figures that depend on
    others are no matter of a schema.
    """
    original = yaml.safe_load(DOCUMENTS[name])
    both = 0
    for place, wrong in list(itertools.product(places(original), WRONG))[start::STEP]:
        document = copy.deepcopy(original)
        holder = document
        for key in place[:-1]:
            holder = holder[key]
        if wrong is None:
            del holder[place[-1]]
        else:
            holder[place[-1]] = wrong
        if refuses(name, document):
            text = yaml.safe_dump(document, sort_keys=False)
            assert not reads(name, text, tmp_path), (place, wrong)
            both += 1
    assert both


def test_the_schema_of_files_is_in_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "ttb"]) == 0
    assert capsys.readouterr().out == (ROOT / "schema/program.fbs").read_text(encoding="utf-8")


def test_wrong_words_name_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["schema"], "expected: ttb, module, pipeline, machine, mesh"),
        (["schema", "modul"], "did you mean 'module'?"),
        (["export", "a.ttb"], "--format=onnx, model_explorer, dot"),
        (["export", "a.ttb", "--format=pdf"], "--format takes onnx, model_explorer or dot"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with constants, several results, an absent operand and a dropped result."""
    monkeypatch.chdir(tmp_path)
    builder = stitch.ComputationGraphBuilder("shown")
    x = builder.input("x", (4, 8), "float32")
    weight = builder.parameter("w", np.arange(64, dtype=np.float32).reshape(8, 8))
    h = builder.op("Clip", builder.matmul(x, weight), None, 6.0)
    values, _ = builder.apply("TopK", [h, [3]], ["values", "indices"], {"axis": -1})
    builder.output("best", values)
    builder.output('"quoted\\', builder.op("Relu", h))
    stitch.compile(builder.build(), target="tiny").save("a.ttb")
    return tmp_path / "a.ttb"


def test_onnx_has_the_operations_types_locations_and_layouts(exported: Path) -> None:
    assert main(["export", "a.ttb", "--format=onnx", "-o", "a.onnx", "-q"]) == 0
    model = onnx.load("a.onnx")
    onnx.checker.check_model(model, full_check=True)
    program = stitch.load(exported).programs[0]
    assert [n.op_type for n in model.graph.node] == [o.op for o in program.operations]
    assert all("test_cli_schema_and_export.py:" in n.doc_string for n in model.graph.node)
    assert [t.name for t in model.graph.output] == [slot.name for slot in program.outputs]
    properties = {entry.key: entry.value for entry in model.metadata_props}
    assert properties["layout of x"] == "f32:l1:row_major:interleaved"
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    np.testing.assert_array_equal(weights["w"], np.arange(64).reshape(8, 8))


@pytest.mark.usefixtures("exported")
def test_onnx_runtime_computes_the_numbers_of_the_program() -> None:
    """Of a program whose operators are ONNX's own."""
    assert main(["export", "a.ttb", "--format=onnx", "-o", "a.onnx", "-q"]) == 0
    x = np.linspace(-3, 3, 32, dtype=np.float32).reshape(4, 8)
    session = onnxruntime.InferenceSession("a.onnx", providers=["CPUExecutionProvider"])
    theirs = session.run(None, {"x": x})
    with stitch.open_device("tiny") as device:
        ours = [result.numpy() for result in device.load("a.ttb")(x)]
    assert len(ours) == len(theirs) == 2
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6)


def test_a_scan_is_written_with_its_body() -> None:
    from stitch.cli.onnx_graph import onnx_bytes

    program = stitch.compile(scanned_graph("nested"), target="host").binary.programs[0]
    model = onnx.load_from_string(onnx_bytes(program))
    bodies = [a.g for node in model.graph.node for a in node.attribute if a.name == "body"]
    assert len(bodies) == sum(operation.body >= 0 for operation in program.operations)
    assert bodies
    assert all(graph.node for graph in bodies)


def objects(required: dict[str, Any]) -> dict[str, Any]:
    """The schema of an array of objects with these properties and no others."""
    item = {"type": "object", "properties": required, "required": [*required]}
    return {"type": "array", "items": item | {"additionalProperties": False}}


TEXT = {"type": "string"}
FACTS = objects({"key": TEXT, "value": TEXT})
#: A `GraphCollection` as Model Explorer's classes (`model_explorer.graph_builder`) have it, as far
#: as Stitch writes it.
COLLECTION = objects({
    "label": TEXT,
    "graphs": objects({
        "id": TEXT,
        "nodes": objects({
            "id": TEXT, "label": TEXT, "namespace": TEXT, "attrs": FACTS,
            "incomingEdges": objects({
                "sourceNodeId": TEXT, "sourceNodeOutputId": TEXT, "targetNodeInputId": TEXT,
            }),
            "outputsMetadata": objects({"id": TEXT, "attrs": FACTS}),
        }),
    }),
})["items"]  # fmt: skip


@pytest.mark.usefixtures("exported")
def test_drawings_have_a_node_for_each_operation_and_an_edge_for_each_operand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = stitch.load("a.ttb").programs[0]
    reads = sum(v >= 0 for o in program.operations for v in o.inputs) + len(program.outputs)
    nodes = (len(program.inputs) + len(program.constants) + len(program.operations)
             + len(program.outputs))  # fmt: skip
    assert main(["export", "a.ttb", "--format=dot"]) == 0
    drawn = capsys.readouterr().out
    assert drawn.count(" -> ") == reads
    assert drawn.count("shape=") - 1 == nodes
    assert main(["export", "a.ttb", "--format=model_explorer"]) == 0
    collection = json.loads(capsys.readouterr().out)
    jsonschema.validate(collection, COLLECTION)
    (graph,) = collection["graphs"]
    assert len({node["id"] for node in graph["nodes"]}) == nodes
    edges = [(node["id"], edge) for node in graph["nodes"] for edge in node["incomingEdges"]]
    assert len(edges) == reads
    results = {node["id"]: len(node["outputsMetadata"]) for node in graph["nodes"]}
    assert all(int(e["sourceNodeOutputId"]) < results[e["sourceNodeId"]] for _, e in edges)


@pytest.mark.campaign("extensions")
@pytest.mark.usefixtures("exported")
def test_graphviz_reads_the_drawing_with_names_as_they_are() -> None:
    program = stitch.load("a.ttb").programs[0]
    assert main(["export", "a.ttb", "--format=dot", "-o", "a.dot", "-q"]) == 0
    laid_out = subprocess.run(["dot", "-Tjson0", "a.dot"], capture_output=True, check=True)
    graph = json.loads(laid_out.stdout)
    assert not laid_out.stderr
    reads = sum(v >= 0 for o in program.operations for v in o.inputs) + len(program.outputs)
    assert len(graph["edges"]) == reads
    labels = [node["label"].replace("\\\\", "\\") for node in graph["objects"]]
    assert {slot.name for slot in program.inputs} <= set(labels)
    assert {slot.name for slot in program.outputs} <= set(labels)
    assert {operation.title for operation in program.operations} <= set(labels)


def test_an_exported_model_has_the_names_of_the_slots(here: Path) -> None:
    """Also of a constant and of a value that two slots have."""
    builder = stitch.ComputationGraphBuilder("names")
    x = builder.input("x", (4, 8), "float32")
    weight = builder.parameter("w", np.ones((8, 8), np.float32))
    result = builder.op("Relu", builder.matmul(x, weight))
    for name, value in (("first", result), ("w", weight), ("second", result)):
        builder.output(name, value)
    stitch.compile(builder.build(), target="tiny").save("n.ttb")
    assert main(["export", "n.ttb", "--format=onnx", "-o", "n.onnx", "-q"]) == 0
    onnx.checker.check_model(onnx.load("n.onnx"), full_check=True)
    session = onnxruntime.InferenceSession("n.onnx", providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["first", "w", "second"]
    found = session.run(None, {"x": np.ones((4, 8), np.float32)})
    for array, number in zip(found, (8, 1, 8), strict=True):
        np.testing.assert_array_equal(array, number)


@pytest.mark.parametrize(
    ("words", "name", "text"),
    [
        (["schema", "ttb"], "Makefile", "all:\n"),
        (["schema", "module"], "mine.json", '{"api": "mine"}'),
        (["export", "a.ttb", "--format=dot"], "notes.txt", "mine\n"),
        (["export", "a.ttb", "--format=model_explorer"], "mine.json", '{"label": "mine"}'),
        (["simulate", "a.ttb"], "mine.csv", "name,salary\nme,1\n"),
        (["pack", "b.csv"], "mine.csv", "name,salary\nme,1\n"),
    ],
)
def test_files_of_others_are_not_overwritten(
    here: Path, words: list[str], name: str, text: str
) -> None:
    Path("b.csv").write_text("id,lower,upper,size\n1,0,2,4\n2,1,3,4\n")
    Path(name).write_text(text)
    assert main([*words, "-o", name]) == 2
    assert Path(name).read_text() == text
    for _ in "twice":
        assert main([*words, "-o", f"own_{name}"]) == 0

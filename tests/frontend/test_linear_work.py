"""Every front door is linear in what comes through it: four times the file is four times the work.

Work is counted, not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import helper

import stitch
from stitch.compiler import compile_graph
from stitch.documents import read_pipeline
from stitch.errors import FormatError
from stitch.frontend import module_from_text, read_graph
from stitch.graph import ComputationGraph, as_json, from_json
from stitch.machine import load_machine
from stitch.ttb import Binary, encode, load
from tests.support.grids import in_turn
from tests.support.lines_run import lines_run

#: Elements of the shorter file; the longer one has four times as many.
FEW = 24
#: Quadratic work would be sixteen times as much.
MOST = 5.0
MACHINE = load_machine("wormhole_n150")
Work = Callable[[], object]


def assert_linear(work_on: Callable[[int], Work]) -> None:
    """What is made for a number of elements does four times as much for four times as many."""
    work_on(2)()  # What is looked up once in a process is not counted.
    few, many = (lines_run(work_on(count)) for count in (FEW, 4 * FEW))
    assert many <= MOST * few, f"{many} lines for {4 * FEW} elements, {few} for {FEW}"


def listed(form: str, count: int) -> str:
    return "\n".join(form.replace("#", str(i)).replace("@", str(i + 1)) for i in range(count))


def chain(count: int) -> str:
    """Operations one after the other, each with a parameter."""
    weights = listed("  w#: {shape: [4], init: {kind: randn, seed: #}}", count)
    operations = listed("  - t@ = Add(t#, w#)", count)
    return (f"inputs:\n  t0: {{shape: [4], type: float32}}\nparameters:\n{weights}\n"
            f"operations:\n{operations}\noutputs: [t{count}]\n")  # fmt: skip


def side_by_side(count: int) -> str:
    """As many inputs and outputs as operations, with placement options; every input may be
    overwritten.
    """
    slot = "{shape: [4], type: float32, space: l1, kind: state, ownership: donate}"
    inputs = listed(f"  x#: {slot}", count)
    operations, outputs = listed("  - y# = Relu(x#)", count), listed("  y#: {space: l1}", count)
    return f"inputs:\n{inputs}\noperations:\n{operations}\noutputs:\n{outputs}\n"


def fixed(count: int) -> str:
    """Inputs at fixed addresses between inputs without one."""
    inputs = listed("  x#: {shape: [4], type: float32, space: dram, address: 3#00000}", count)
    inputs += "\n" + listed("  z#: {shape: [4], type: float32}", count)
    operations = listed("  - y# = Add(x#, z#)", count)
    return f"inputs:\n{inputs}\noperations:\n{operations}\noutputs:\n{listed('  y#:', count)}\n"


def wide(count: int) -> str:
    """One operation of many operands."""
    inputs = listed("  x#: {shape: [4], type: float32}", count)
    names = ", ".join(f"x{i}" for i in range(count))
    return f"inputs:\n{inputs}\noperations:\n  - y = Concat({names}, axis=0)\noutputs: [y]\n"


MODULES = {"chain": chain, "side by side": side_by_side, "fixed": fixed, "wide": wide}


def graph(form: str, count: int) -> ComputationGraph:
    return module_from_text(MODULES[form](count), Path())


def reading_yaml(form: str, count: int) -> Work:
    return lambda: graph(form, count)


def compiling(form: str, count: int) -> Work:
    made = graph(form, count)
    return lambda: compile_graph(made, MACHINE)


def reading_json(form: str, count: int) -> Work:
    text = as_json(graph(form, count))
    return lambda: from_json(text)


def decoding(form: str, count: int) -> Work:
    made = compile_graph(graph(form, count), MACHINE).program
    file = encode(Binary((made,), MACHINE.shape, "test"))
    return lambda: load(file, verify="full")


@pytest.mark.parametrize(
    ("work_on", "form"), in_turn([reading_yaml, compiling, reading_json, decoding], MODULES)
)
def test_work_on_a_module_is_linear(work_on: Callable[[str, int], Work], form: str) -> None:
    assert_linear(lambda count: work_on(form, count))


def test_linking_is_linear_in_programs_also_of_one_name() -> None:
    program = compile_graph(graph("side by side", 1), MACHINE).program

    def work_on(count: int) -> Work:
        words = [f"{i}.0={i + 1}.0" for i in range(count - 1)]
        return lambda: stitch.link([program] * count, words, target=MACHINE)

    assert_linear(work_on)


def onnx_model(form: str, count: int) -> Any:
    slots = {"chain": ["t0"], "side by side": [f"x{i}" for i in range(count)]}[form]
    ends = {"chain": [f"t{count}"], "side by side": [f"y{i}" for i in range(count)]}[form]
    at = {"chain": ("t{}", "t{}", 1), "side by side": ("x{}", "y{}", 0)}[form]
    nodes = [
        helper.make_node("Relu", [at[0].format(i)], [at[1].format(i + at[2])]) for i in range(count)
    ]
    infos = [[helper.make_tensor_value_info(n, 1, [4]) for n in names] for names in (slots, ends)]
    made = helper.make_graph(nodes, "g", *infos)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 26)], ir_version=10)


@pytest.mark.parametrize("form", ["chain", "side by side"])
def test_reading_an_onnx_model_is_linear(form: str) -> None:
    def work_on(count: int) -> Work:
        model = onnx_model(form, count)
        return lambda: read_graph(model, (), None)

    assert_linear(work_on)


PIPELINE_STEPS = {
    "chain": "  - {run: b, inputs: {x: t#}, outputs: {y: t@}}",
    "side by side": "  - {run: b, inputs: {x: x#}, outputs: {y: y#}}",
    "repeats": "  - {repeat: 2, carry: {x#: z#}, steps: "
    "[{run: b, inputs: {x: x#}, outputs: {y: z#}}]}",
    "unknown values": "  - {run: b, inputs: {x: q#}, outputs: {y: y#}}",
}


def pipeline_text(form: str, count: int) -> str:
    slots = 1 if form == "chain" else count
    word = {"chain": "t", "side by side": "x", "repeats": "x", "unknown values": "x"}[form]
    inputs = listed(f"  {word}#: {{shape: [4], type: float32}}", slots)
    ends = {"chain": [f"t{count}"], "repeats": [f"x{i}" for i in range(count)]}
    outputs = ", ".join(ends.get(form, [f"y{i}" for i in range(count)]))
    steps = listed(PIPELINE_STEPS[form], count)
    return f"modules: {{b: b.ttb}}\ninputs:\n{inputs}\nsteps:\n{steps}\noutputs: [{outputs}]\n"


@pytest.fixture
def pipelines(tmp_path: Path) -> Callable[[str, int], Path]:
    """Writes pipelines of so many steps over a module that takes x and gives y."""
    text = "inputs:\n  x: {shape: [4], type: float32}\noperations: [y = Relu(x)]\noutputs: [y]\n"
    stitch.compile(module_from_text(text, tmp_path)).save(tmp_path / "b.ttb")

    def write(form: str, count: int) -> Path:
        path = tmp_path / f"{count}.yaml"
        path.write_text(pipeline_text(form, count))
        return path

    return write


@pytest.mark.parametrize("form", PIPELINE_STEPS)
def test_reading_a_pipeline_is_linear(form: str, pipelines: Callable[[str, int], Path]) -> None:
    def work_on(count: int) -> Work:
        path = pipelines(form, count)

        def work() -> None:
            if form != "unknown values":
                read_pipeline(path)
                return
            with pytest.raises(FormatError):
                read_pipeline(path)

        return work

    assert_linear(work_on)

"""Every front door is linear in what comes through it: four times the file is four times the work.

Work is counted, not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import stitch
from stitch.cli.chain import RunInput
from stitch.cli.module_files import ModuleFile
from stitch.cli.run_inputs import SlotNames, assign
from stitch.cli.wiring import wires_of
from stitch.compiler import compile_graph
from stitch.documents import YamlPipeline, read_pipeline
from stitch.errors import FormatError
from stitch.frontend import module_from_text, read_graph
from stitch.graph import ComputationGraph, as_json, from_json
from stitch.machine import load_machine
from stitch.machine.description import parse_machine
from stitch.program import DataType, ValueType
from stitch.ttb import Binary, encode, load
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


@pytest.mark.parametrize("form", MODULES)
def test_reading_a_module_in_yaml_is_linear(form: str) -> None:
    assert_linear(lambda count: lambda: graph(form, count))


def test_naming_the_defects_of_a_module_is_linear() -> None:
    def work_on(count: int) -> Work:
        text = chain(count).replace("= Add(t", "= Add(q")

        def work() -> None:
            with pytest.raises(FormatError):
                module_from_text(text, Path())

        return work

    assert_linear(work_on)


@pytest.mark.parametrize("form", MODULES)
def test_compiling_is_linear(form: str) -> None:
    def work_on(count: int) -> Work:
        made = graph(form, count)
        return lambda: compile_graph(made, MACHINE)

    assert_linear(work_on)


@pytest.mark.parametrize("form", MODULES)
def test_reading_a_graph_in_json_is_linear(form: str) -> None:
    def work_on(count: int) -> Work:
        text = as_json(graph(form, count))
        return lambda: from_json(text)

    assert_linear(work_on)


@pytest.mark.parametrize("form", MODULES)
def test_verifying_and_decoding_a_binary_is_linear(form: str) -> None:
    def work_on(count: int) -> Work:
        made = compile_graph(graph(form, count), MACHINE).program
        file = encode(Binary((made,), MACHINE.shape, "test"))
        return lambda: load(file, verify="full")

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


@pytest.mark.parametrize("form", ["chain", "side by side", "repeats"])
def test_preparing_and_running_a_pipeline_is_linear(
    form: str, pipelines: Callable[[str, int], Path]
) -> None:
    def work_on(count: int) -> Work:
        checked = read_pipeline(pipelines(form, count))

        def work() -> None:
            # Several windows in either case: what one holds is planned as a whole.
            with stitch.open_device("wormhole_n150", window=8) as device:
                pipeline = YamlPipeline(checked, device)
                pipeline.run([np.zeros(4, np.float32)] * len(pipeline.inputs))

        return work

    assert_linear(work_on)


def test_nested_repeats_are_walked_once_more_for_each_level_only(
    pipelines: Callable[[str, int], Path],
) -> None:
    def nested(levels: int) -> Work:
        step = "{run: b, inputs: {x: x0}, outputs: {y: y}}"
        after = "y"
        for level in range(levels):
            index = f"i{level}"
            step = f"{{repeat: 2, index: {index}, carry: {{x0: {after}}}, steps: [{step}]}}"
            after = "x0"
        path = pipelines("chain", 1)
        path.write_text(
            "modules: {b: b.ttb}\ninputs:\n  x0: {shape: [4], type: float32}\n"
            f"steps: [{step}]\noutputs: [x0]\n"
        )
        return lambda: read_pipeline(path)

    nested(1)()
    shallow, deep = lines_run(nested(2)), lines_run(nested(6))
    assert deep <= 4 * shallow


def test_naming_the_defects_of_a_machine_is_linear() -> None:
    def work_on(count: int) -> Work:
        text = "name: m\n" + listed("core_gird_#: 1", count)

        def work() -> None:
            with pytest.raises(FormatError):
                parse_machine(text.encode(), "m.yaml")

        return work

    assert_linear(work_on)


def loaded_modules(slots: int, count: int) -> list[ModuleFile]:
    program = compile_graph(graph("side by side", slots), MACHINE).program
    binary = Binary((program,), MACHINE.shape, "test")
    return [ModuleFile(f"{i}.ttb", f"m{i}", binary, program) for i in range(count)]


def test_wires_between_many_slots_are_linear() -> None:
    def work_on(count: int) -> Work:
        modules = loaded_modules(count, 2)
        words = [f"m0.y{i}=m1.x{i}" for i in range(count)]
        return lambda: wires_of(modules, words)

    assert_linear(work_on)


def test_wires_between_many_modules_are_linear() -> None:
    def work_on(count: int) -> Work:
        modules = loaded_modules(1, count)
        words = [f"m{i}.y0=m{i + 1}.x0" for i in range(count - 1)]
        return lambda: wires_of(modules, words)

    assert_linear(work_on)


def test_linking_is_linear_in_programs_also_of_one_name() -> None:
    def work_on(count: int) -> Work:
        program = loaded_modules(1, 1)[0].program
        words = [f"{i}.0={i + 1}.0" for i in range(count - 1)]
        return lambda: stitch.link([program] * count, words, target=MACHINE)

    assert_linear(work_on)


def test_assigning_option_values_to_slots_is_linear() -> None:
    def work_on(count: int) -> Work:
        names = [f"x{i}" for i in range(count)]
        words = [(name if i % 2 else None, "@x.npy") for i, name in enumerate(names)]
        slots = [RunInput(name, ValueType((2,), DataType.FLOAT32)) for name in names]
        return lambda: assign(words, SlotNames(slots, "input"), "input")

    assert_linear(work_on)

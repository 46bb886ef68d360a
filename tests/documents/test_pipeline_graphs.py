"""Task graphs of pipeline files: which there are, and that they compute what the steps say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.documents import PipelineFile, YamlPipeline, pipeline_graphs, read_pipeline
from stitch.documents.pipeline_form import PipelineStep, RunStep, pipeline_from_text
from stitch.documents.pipeline_graphs import Assign, GraphRun, Loop, graph_runs, graphs_of
from stitch.errors import FormatError
from stitch.graph import ComputationGraphBuilder
from stitch.machine import load_machine
from stitch.program import Array
from tests.support.grids import every
from tests.support.stitched_models import consuming, model

SHAPE = (4, 8)
#: The elements of the input `xs`.
LENGTH = 40
HEAD = """\
modules: {mix: mix.ttb, both: both.ttb, spread: spread.ttb, eat: eat.ttb}
inputs:
  x: {shape: [4, 8], type: float32}
  w: {shape: [4, 8], type: float32}
  xs: {shape: [40, 4, 8], type: float32}
steps:
"""
HALF, QUARTER = np.float32(0.5), np.float32(0.25)
#: What the modules compute.
MODULES: Mapping[str, Callable[..., tuple[Array, ...]]] = {
    "mix": lambda x, y: (x * HALF + y * QUARTER,),
    "both": lambda x: (x * HALF + np.float32(1), x * QUARTER),
    "spread": lambda x: (np.stack([x, x * HALF, x * QUARTER]),),
    "eat": lambda x: (x * HALF,),
}


def saved(folder: Path, target: str) -> Path:
    """A folder with the modules, compiled for a machine."""

    def mix(b: ComputationGraphBuilder) -> None:
        x, y = b.input("x", SHAPE, "float32"), b.input("y", SHAPE, "float32")
        b.output("z", x * 0.5 + y * 0.25)

    def both(b: ComputationGraphBuilder) -> None:
        x = b.input("x", SHAPE, "float32")
        b.output("y", x * 0.5 + 1.0)
        b.output("z", x * 0.25)

    def spread(b: ComputationGraphBuilder) -> None:
        x = b.input("x", SHAPE, "float32")
        b.output("y", b.concat([b.unsqueeze(one, 0) for one in (x, x * 0.5, x * 0.25)], 0))

    for build in (mix, both, spread):
        model(build.__name__, build, target=target).save(folder / f"{build.__name__}.ttb")
    consuming("eat", 0.5, SHAPE, target=target).save(folder / "eat.ttb")
    return folder


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the modules for the machine `tiny`."""
    return saved(tmp_path_factory.mktemp("modules"), "tiny")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and joins so small that few rounds already take loops of loops."""
    monkeypatch.setattr(pipeline_graphs, "MAX_TASKS", 4)
    monkeypatch.setattr(pipeline_graphs, "MAX_JOINED", 3)


def written(folder: Path, steps: str) -> Path:
    """The file of some steps and outputs."""
    file = folder / "p.yaml"
    file.write_text(HEAD + steps, encoding="utf-8")
    return file


def runs_of(folder: Path, steps: str) -> Sequence[pipeline_graphs.PipelineRun]:
    """The runs of a file, without a device; results are joined on a machine with room for all."""
    checked = read_pipeline(written(folder, steps))
    return graphs_of(checked.file, checked.programs, load_machine("wormhole_n150"))[0]


# By hand.


def interpreted(file: PipelineFile, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    """The outputs of a pipeline, step by step in NumPy."""
    values = dict(arrays)
    _interpret(file.steps, values, {})
    return tuple(values[word] for _, word, _ in file.outputs)


def _interpret(
    steps: Sequence[PipelineStep], values: dict[str, Array], indices: Mapping[str, int]
) -> None:
    for step in steps:
        if isinstance(step, RunStep):
            given = [
                values[r.name][r.at(indices)] if r.is_element else values[r.name]
                for _, r in step.inputs
            ]
            results = MODULES[step.module](*given)
            for (_, name), result in zip(step.outputs, results, strict=False):
                values[name] = result
            continue
        collected: dict[str, list[Array]] = {name: [] for name, _ in step.collect}
        for number in range(step.times):
            _interpret(step.steps, values, {**indices, step.index: number})
            for name, source in step.collect:
                collected[name].append(values[source])
            values.update({name: values[after] for name, after in step.carry})
        values.update({name: np.stack(each) for name, each in collected.items()})


class Written:
    """A random pipeline file: what its steps may read at a place."""

    def __init__(self, seed: int, times: Sequence[int], most: int) -> None:
        self.random, self.times, self.most = Random(seed), times, most
        self.lines: list[str] = []
        self.count = 0
        #: Values by name: those of `SHAPE`, and the lengths of stacks of them.
        self.single, self.stacks = ["x", "w"], {"xs": LENGTH}
        #: What steps have made, and stacks of stacks.
        self.results: list[str] = []
        self.others: list[str] = []
        self.loops: dict[str, int] = {}
        self.steps("  ", 1, 3)
        outputs = [*self.others[-2:], *(n for n in self.stacks if n != "xs"), *self.results]
        taken = self.random.sample(outputs, min(4, len(outputs)))
        self.text = HEAD + "\n".join([*self.lines, f"outputs: [{', '.join(taken)}]"]) + "\n"

    def name(self) -> str:
        """A new name."""
        self.count += 1
        return f"v{self.count}"

    def read(self) -> str:
        """A value that a step may read, perhaps an element."""
        if self.random.random() < 0.5:
            return self.random.choice(self.single)
        return self.element(self.random.choice([*self.stacks]))

    def element(self, stack: str) -> str:
        """An element of a stack."""
        random, length = self.random, self.stacks[stack]
        index, times = random.choice([*self.loops.items(), ("", length + 1)])
        if times > length:
            return f'"{stack}[{random.randrange(-length, length)}]"'
        late = random.randrange(length - times + 1)
        if random.random() < 0.5:
            return f'"{stack}[{index}+{late}]"'
        return f'"{stack}[{random.choice([-1 - late, times - 1 + late])}-{index}]"'

    def run(self, indent: str, module: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Write a run of a module."""
        self.lines.append(
            f"{indent}- {{run: {module}, inputs: [{', '.join(inputs)}], "
            f"outputs: [{', '.join(outputs)}]}}"
        )

    def made(self, *names: str) -> None:
        """These may be read from now on."""
        self.single += names
        self.results += names

    def steps(self, indent: str, runs: int, depth: int) -> list[str]:
        """Write some steps; the values that they define."""
        defined: list[str] = []
        for _ in range(self.random.randint(2, 4)):
            kind = self.random.choice(["mix", "both", "spread", "eat", "eaten", "loop", "loop"])
            first, second = self.name(), self.name()
            if kind == "loop" and depth:
                defined += self.repeat(indent, runs, depth)
            elif kind == "both":
                self.run(indent, "both", [self.read()], [first, second])
                self.made(first, second)
                defined += [first, second]
            elif kind == "spread":
                self.run(indent, "spread", [self.read()], [first])
                self.stacks[first] = 3
            elif kind == "eat" and len(self.stacks) > 1:
                stack = self.random.choice([name for name in self.stacks if name != "xs"])
                self.run(indent, "eat", [self.element(stack)], [first])
                self.made(first)
                defined.append(first)
            elif kind == "eaten":
                self.run(indent, "mix", [self.read(), self.read()], [first])
                rounds = self.random.choice(self.times)
                if rounds * runs <= self.most:
                    self.lines.append(f"{indent}- repeat: {rounds}")
                    self.lines.append(f"{indent}  index: u{self.count}")
                    self.lines.append(f"{indent}  carry: {{{first}: {second}}}")
                    stack = self.name()
                    self.lines.append(f"{indent}  collect: {{{stack}: {second}}}")
                    self.lines.append(f"{indent}  steps:")
                    self.run(f"{indent}  ", "eat", [first], [second])
                    self.stacks[stack] = rounds
                self.made(first)
                defined.append(first)
            else:
                self.run(indent, "mix", [self.read(), self.read()], [first])
                self.made(first)
                defined.append(first)
        return defined

    def repeat(self, indent: str, runs: int, depth: int) -> list[str]:
        """Write a repeat; the values of `SHAPE` that it defines."""
        random, index = self.random, f"i{self.name()}"
        times = random.choice([t for t in self.times if t * runs <= self.most] or [1])
        single, stacks, results = [*self.single], {**self.stacks}, [*self.results]
        others = [*self.others]
        self.loops[index] = times
        carried = random.sample(self.single, random.randint(0, min(2, len(self.single))))
        at = len(self.lines)
        defined = self.steps(f"{indent}  ", runs * times, depth - 1)
        inner = [name for name in self.stacks if name not in stacks]
        # A file's input may become a result, and no result becomes one.
        usable = [name for name in self.results if name not in carried or name in results]
        carry = {name: random.choice(usable) for name in carried if usable}
        collect = {self.name(): source for source in random.sample(defined, min(2, len(defined)))}
        nested = {self.name(): source for source in inner[:1]}
        del self.loops[index]
        self.single, self.stacks, self.results, self.others = single, stacks, results, others
        pairs = ", ".join(f"{name}: {after}" for name, after in carry.items())
        stacked = ", ".join(f"{name}: {value}" for name, value in {**collect, **nested}.items())
        self.lines[at:at] = [
            f"{indent}- repeat: {times}", f"{indent}  index: {index}",
            f"{indent}  carry: {{{pairs}}}", f"{indent}  collect: {{{stacked}}}",
            f"{indent}  steps:",
        ]  # fmt: skip
        self.results += [name for name in carry if name not in self.results]
        self.stacks |= dict.fromkeys(collect, times)
        self.others += nested
        return [name for name in carry if name in single]


def compared(
    folder: Path, seed: int, times: Sequence[int], most: int, machine: str = "tiny"
) -> None:
    """Compare a random pipeline with its steps in NumPy, for arrays and for tensors."""
    text = Written(seed, times, most).text
    file = written(folder, text[len(HEAD) :])
    random = np.random.default_rng(seed)
    arrays = [random.standard_normal(s, np.float32) for s in (SHAPE, SHAPE, (LENGTH, *SHAPE))]
    parsed = pipeline_from_text(text, folder)
    expected = interpreted(parsed, dict(zip(("x", "w", "xs"), arrays, strict=True)))
    window = (1, 64)[seed % 2]
    with stitch.open_device(machine, window=window, debug=seed % 7 == 0) as device:
        pipeline = YamlPipeline(read_pipeline(file), device)
        tensors = [device.tensor(array) for array in arrays]
        for given in (arrays, tensors, arrays, tensors):
            results = pipeline.run(given)
            for result, wanted in zip(results, expected, strict=True):
                np.testing.assert_array_equal(result.numpy(), wanted, err_msg=text)
        for tensor, array in zip(tensors, arrays, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("seed", every(6, range(60)))
@pytest.mark.usefixtures("few")
def test_a_random_pipeline_computes_what_its_steps_compute(modules: Path, seed: int) -> None:
    compared(modules, seed, (1, 2, 3, 5, 9, 13), 20)


@pytest.mark.campaign("random_work")
@pytest.mark.parametrize("seed", range(100, 160))
def test_a_random_pipeline_of_large_graphs_computes_what_its_steps_compute(
    tmp_path: Path, seed: int
) -> None:
    folder = saved(tmp_path, "wormhole_n150")
    compared(folder, seed, (1, 3, 40, 130, 200), 300, "wormhole_n150")


# Which graphs there are.


def test_a_file_without_repeats_is_one_graph(modules: Path) -> None:
    (run,) = runs_of(
        modules,
        '  - {run: both, inputs: ["xs[-1]"], outputs: [a, b]}\n'
        "  - {run: mix, inputs: [a, x], outputs: [c]}\n"
        "  - {run: mix, inputs: [c, x], outputs: [d]}\n"
        "outputs: {last: d, first: b}\n",
    )
    assert isinstance(run, GraphRun)
    assert [reference.text() for reference in run.inputs] == ["xs[-1]", "x"]
    assert [task.agent.name for task in run.graph.tasks] == ["both", "mix", "mix"]
    assert run.outputs == ["d", "b"]
    assert run.graph.validate() == ()


def test_a_short_repeat_runs_in_the_graph_around_it(modules: Path) -> None:
    (run,) = runs_of(
        modules,
        "  - {run: mix, inputs: [x, w], outputs: [h]}\n"
        "  - repeat: 3\n    carry: {h: g}\n    collect: {hs: g}\n"
        '    steps: [{run: mix, inputs: [h, "xs[i+1]"], outputs: [g]}]\n'
        "outputs: [h, hs]\n",
    )
    assert isinstance(run, GraphRun)
    assert [r.text() for r in run.inputs] == ["x", "w", "xs[1]", "xs[2]", "xs[3]"]
    # The module `eat` may overwrite a value, so that a copy of it is collected.
    assert [task.agent.name for task in run.graph.tasks] == [
        "mix",
        *("mix", "collect") * 3,
        "collect",
    ]


@pytest.mark.usefixtures("few")
def test_a_longer_repeat_is_a_graph_of_some_rounds_that_runs_in_a_loop(modules: Path) -> None:
    start, loop, rest = runs_of(
        modules,
        "  - repeat: 11\n    carry: {x: y}\n"
        '    steps: [{run: mix, inputs: [x, "xs[-1-i]"], outputs: [y]}]\n'
        "  - {run: mix, inputs: [x, w], outputs: [z]}\noutputs: [z]\n",
    )
    assert isinstance(start, Assign) and isinstance(loop, Loop) and isinstance(rest, GraphRun)
    assert (loop.times, loop.step) == (2, 4)
    round_of_four, after = loop.body
    assert isinstance(round_of_four, GraphRun) and isinstance(after, Assign)
    elements = ["xs[-1-i]", "xs[-2-i]", "xs[-3-i]", "xs[-4-i]"]
    assert [r.text() for r in round_of_four.inputs] == ["x.2", *elements]
    # Three rounds are left, and run in the graph of what follows.
    assert [r.text() for r in rest.inputs] == ["x.2", "xs[-9]", "xs[-10]", "xs[-11]", "w"]
    assert len(rest.graph.tasks) == 4
    # What the last round left is read for the last time, and may be overwritten.
    assert round_of_four.consumed == {"x.2"} and rest.consumed == {"x.2"}


@pytest.mark.usefixtures("few")
def test_elements_of_a_result_are_read_between_two_graphs(modules: Path) -> None:
    first, second = runs_of(
        modules,
        "  - {run: spread, inputs: [x], outputs: [s]}\n"
        "  - repeat: 3\n    carry: {w: y}\n"
        '    steps: [{run: mix, inputs: [w, "s[i]"], outputs: [y]}]\n'
        "outputs: [w]\n",
    )
    assert isinstance(first, GraphRun) and isinstance(second, GraphRun)
    assert [r.text() for r in second.inputs] == ["w", "s[0]", "s[1]", "s[2]"]
    assert second.drops >= {"s"}


def test_many_rounds_take_few_graphs_and_no_program_has_many_inputs(modules: Path) -> None:
    runs = runs_of(
        modules,
        "  - repeat: 1000000\n    carry: {x: y}\n    collect: {ys: y}\n"
        "    steps: [{run: both, inputs: [x], outputs: [y]}]\noutputs: [ys]\n",
    )
    graphs = {id(run.graph): run.graph for run, _ in graph_runs(runs)}.values()
    assert len(graphs) == 4
    assert max(len(task.inputs) for graph in graphs for task in graph.tasks) == 64
    cells = sum(
        times * sum(task.agent.name == "both" for task in run.graph.tasks)
        for run, times in graph_runs(runs)
    )
    assert cells == 10**6


def test_tasks_are_placed_where_their_modules_are(modules: Path) -> None:
    checked = read_pipeline(written(
        modules,
        "  - {run: mix, inputs: [x, w], outputs: [a]}\n"
        "  - {run: both, inputs: [a], outputs: [b]}\noutputs: [b]\n",
    ))  # fmt: skip
    machine = load_machine("tiny")
    ((run,), _) = graphs_of(checked.file, checked.programs, machine, {"mix": "left"})
    assert isinstance(run, GraphRun)
    assert run.graph.table().devices == ("left", None)


def test_what_is_used_for_the_last_time_is_freed(modules: Path) -> None:
    """Of 40 stacked results one element is wanted: then nothing but the result is there."""
    file = written(
        modules,
        "  - repeat: 40\n    collect: {ys: y}\n"
        '    steps: [{run: mix, inputs: [x, "xs[i]"], outputs: [y]}]\n'
        '  - {run: mix, inputs: ["ys[-1]", w], outputs: [z]}\noutputs: [z]\n',
    )
    with stitch.open_device("tiny") as device:
        pipeline = YamlPipeline(read_pipeline(file), device)
        x, w = np.ones(SHAPE, np.float32), np.ones(SHAPE, np.float32)
        pipeline(x, w, np.ones((LENGTH, *SHAPE), np.float32)).numpy()
        device.drain()
        used = sum(use.used_nbytes for use in device.memory_use().values())
        again = pipeline(x, w, np.ones((LENGTH, *SHAPE), np.float32))
        assert again.numpy()[0, 0] == np.float32(0.75 * 0.5 + 0.25)
        device.drain()
        held = sum(use.used_nbytes for use in device.memory_use().values())
        assert held <= used + again.volume * 4


# Devices in the file.


def test_a_file_may_name_devices_and_where_modules_are(tmp_path: Path) -> None:
    modules = "modules: {a: {file: a.ttb, device: left}, b: b.ttb}\n"
    steps = "steps: [{run: a, outputs: [y]}]\noutputs: [y]\n"
    file = pipeline_from_text("devices: two.yaml\n" + modules + steps, tmp_path)
    assert file.devices == str(tmp_path / "two.yaml")
    assert [module.device for module in file.modules] == ["left", None]
    assert pipeline_from_text("devices: 2\n" + modules + steps, tmp_path).devices == 2


@pytest.mark.parametrize(
    ("head", "line", "said"),
    [
        ("", 2, "module 'a' names its device 'left', and the file has no `devices`"),
        ("device: tiny\ndevices: 2\n", 2, "there is `device` as well"),
        ("devices: 0\n", 1, "must be a machine specification, such as two.yaml, or a number"),
        ("devices: two\n", 1, "must be a machine specification"),
        ("devices: [left]\n", 1, "must be a machine specification"),
    ],
)
def test_devices_that_contradict_are_named_with_their_line(
    tmp_path: Path, head: str, line: int, said: str
) -> None:
    text = head + "modules:\n  a: {file: a.ttb, device: left}\n"
    text += "steps: [{run: a, outputs: [y]}]\noutputs: [y]\n"
    with pytest.raises(FormatError) as caught:
        pipeline_from_text(text, tmp_path)
    assert said in str(caught.value) and f"pipeline.yaml:{line}" in str(caught.value)


def test_a_pipeline_for_several_devices_runs_on_one(modules: Path) -> None:
    file = written(modules, "  - {run: mix, inputs: [x, w], outputs: [a]}\noutputs: [a]\n")
    text = file.read_text().replace("mix: mix.ttb", "mix: {file: mix.ttb, device: left}")
    file.write_text("devices: 2\n" + text)
    one: Any = np.ones(SHAPE, np.float32)
    with stitch.open_device("tiny") as device:
        result = stitch.Pipeline.from_yaml(file, device=device)(one, one, np.ones((40, 4, 8)))
        np.testing.assert_array_equal(result.numpy(), one * HALF + one * QUARTER)

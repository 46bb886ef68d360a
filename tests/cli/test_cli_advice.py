"""Advice: what it promises is what a run reports once it is followed; `--for` and `--diff`."""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.cli.chain import Chain
from stitch.cli.module_files import ModuleFile, with_program
from stitch.cli.rehearsal import advise, rehearse
from stitch.compiler import split_graph, with_layouts
from stitch.errors import StitchError
from stitch.frontend import read_graph
from stitch.linker import Wire
from stitch.machine import load_machine
from stitch.planner import Cost
from stitch.program import Layout
from stitch.report import read_copies
from tests.support.grids import every

Cli = Callable[..., Any]


def transformer() -> tuple[Any, tuple[Any, ...]]:
    """Three layers, and an example."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
    net = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return net.eval(), (torch.randn(1, 16, 32),)


def ran(cli: Cli, *words: str) -> tuple[list[str], Cost]:
    """The advice of a run with data, and what its record counted."""
    made = ("--init=randn", "--explain", "--record=run.json", "--output=@out.npz")
    done = cli("run", *words, *made)
    assert done.code == 0, done.err
    advice = [line[10:] for line in done.out.splitlines() if line.startswith("  advice: ")]
    return advice, read_copies(Path("run.json").read_text()).cost


def words_of(line: str) -> tuple[str, list[str]]:
    """The program that a line of advice names, and what it is to be compiled with."""
    match = re.fullmatch(r"(?:compile|and) (\S+) with ((?:--set \S+ ?)+?)(?:: .*)?", line)
    assert match is not None, line
    return match[1], shlex.split(match[2])


def promised(lines: Sequence[str]) -> tuple[int, int, str]:
    match = re.search(r"([-+]\d+) cop\S+ ([-+]\d+) B, (\S+) us", lines[-1])
    assert match is not None, lines
    return int(match[1]), int(match[2]), match[3]


def assert_kept(lines: Sequence[str], now: Cost, then: Cost) -> None:
    """What was promised is what came, copies and bytes exactly, time as it is printed."""
    more = then - now
    assert promised(lines) == (more.copies, more.nbytes, f"{more.seconds * 1e6:+.1f}")
    assert more.seconds < 0


# -- following it ----------------------------------------------------------------------------------


def test_advice_on_a_transformer_in_six_saves_what_it_says(cli: Cli) -> None:
    module, examples = transformer()
    parts = split_graph(read_graph(module, examples, None), 6)
    apart = {1: ["input.0.space=dram"], 2: ["output.0.layout=tile"], 4: ["input.0.space=dram"]}
    files = [f"part{at}.ttb" for at in range(6)]
    for at, part in enumerate(parts):
        stitch.compile(part, placement=apart.get(at, ())).save(files[at])
    lines, now = ran(cli, *files)
    found = json.loads(cli("inspect", *files, "--json").out)
    numbers = {part.name: at for at, part in enumerate(parts)}
    assert lines
    for line in lines:
        name, words = words_of(line)
        at = numbers[name]
        placement = [*apart.get(at, ()), *(word for word in words if word != "--set")]
        stitch.compile(parts[at], placement=placement).save(files[at])
    again, then = ran(cli, *files)
    assert again == []
    assert_kept(lines, now, then)
    assert found["advice"] == lines
    more, promise = then - now, Cost(**found["advice_adds"])
    assert more.order == promise.order and more.program_seconds < 0


# -- brute force -----------------------------------------------------------------------------------

LAYOUTS = ("space=l1", "space=dram", "layout=tile", "address=0x40000")


def random_chain(draw: random.Random) -> tuple[list[ModuleFile], list[Wire]]:
    """Programs of one operation, each slot placed at random."""
    modules = []
    for at in range(draw.randint(2, 4)):
        builder = stitch.ComputationGraphBuilder(f"p{at}")
        builder.output("y", builder.input("x", (32, 64), "float32") + 1.0)
        placement = []
        for slot in ("input.x", "output.y"):
            chosen = draw.sample(LAYOUTS, draw.randint(0, 2))
            if "address=0x40000" in chosen and slot == "output.y":
                chosen.remove("address=0x40000")
            if "address=0x40000" in chosen and "space=dram" in chosen:
                chosen.remove("space=dram")
            placement += [f"{slot}.{word}" for word in chosen]
        binary = stitch.compile(builder.build(), placement=placement).binary
        modules.append(ModuleFile(f"p{at}.ttb", f"p{at}", binary, binary.programs[0]))
    return modules, [Wire(at, 0, at + 1, 0) for at in range(len(modules) - 1)]


@pytest.mark.parametrize("seed", every(3, range(12)))
def test_the_best_single_change_is_the_best_of_all_single_changes(seed: int) -> None:
    modules, wires = random_chain(random.Random(seed))
    machine = load_machine("wormhole_n150")

    def load(device: stitch.Device, programs: Any) -> Chain:
        placed = [with_program(m, programs.get(at)) for at, m in enumerate(modules)]
        return Chain(device, placed, wires)

    now = rehearse(machine, load, {}, None)
    costs = [now.cost]
    for wire in wires:
        given = modules[wire.producer].program.output_desc(0).layout
        taken = modules[wire.consumer].program.input_desc(0).layout
        tries: list[tuple[int, str, Layout]] = [
            (at, side, one)
            for at, side in ((wire.producer, "output"), (wire.consumer, "input"))
            for layout in (given, taken)
            for one in (layout, layout.without_address())
        ]
        for at, side, layout in tries:
            slots: Any = {(side, 0): layout}
            try:
                changed = with_layouts(modules[at].program, slots, machine.shape)
                costs.append(rehearse(machine, load, {at: changed}, None).cost)
            except StitchError:
                continue
    best = min(costs, key=lambda cost: cost.order)
    advice = advise(machine, load, None, now, most=1)
    assert (now.cost if advice is None else advice.then).order == best.order


@pytest.mark.parametrize("seed", every(3, range(12)))
def test_a_changed_program_is_what_compiling_it_anew_gives(seed: int) -> None:
    draw = random.Random(seed)
    machine = load_machine("wormhole_n150")
    rows = draw.choice((32, 8_000, 16_000, 40_000))
    builder = stitch.ComputationGraphBuilder("p")
    h = builder.input("x", (rows, 256), "float32") + builder.input("z", (rows, 256), "float32")
    builder.output("y", (h @ np.ones((256, 256), np.float32)) + 1.0)
    graph = builder.build()
    program = stitch.compile(graph).binary.programs[0]
    for side, slot in (("input", "x"), ("input", "z"), ("output", "y")):
        for word in ("space=l1", "space=dram", "layout=tile", "address=0x50000"):
            option = f"{side}.{slot}.{word}"
            index = 1 if slot == "z" else 0
            of = program.input_desc if side == "input" else program.output_desc
            try:
                anew = stitch.compile(graph, placement=option).binary.programs[0]
            except StitchError:
                continue
            after = anew.input_desc if side == "input" else anew.output_desc
            if after(index) == of(index):
                continue
            slots: Any = {(side, index): after(index).layout}
            try:
                changed = with_layouts(program, slots, machine.shape)
            except StitchError:
                continue  # It says so where it cannot know.
            assert changed.text() == anew.text(), option


# -- types -----------------------------------------------------------------------------------------


def test_no_advice_changes_a_result(cli: Cli) -> None:
    narrow = ("--set", "input.x.data_type=bfloat16")
    assert cli("compile", "b.yaml", "-o", "n.ttb", *narrow).code == 0
    # Another reader wants all bits of what `a` makes: it is not stored narrower.
    wires = ("--wire=a.y=n.x", "--wire=a.y=b_dram.x")
    found = json.loads(cli("inspect", "a.ttb", "n.ttb", "b_dram.ttb", *wires, "--json").out)
    assert found["copy_count"] == 2
    assert not [line for line in found["advice"] if "data_type" in line]
    # Alone it is rounded in any case, now or later.
    found = json.loads(cli("inspect", "a.ttb", "n.ttb", "--json").out)
    assert "output.y.data_type=bfloat16" in found["advice"][0]


# -- --for -----------------------------------------------------------------------------------------

PIPELINE = """\
device: wormhole_n150
modules: {a: mine.ttb, b: b_dram.ttb}
inputs: {x: {shape: [4, 8], type: float32}}
steps:
  - {run: a, inputs: {x: x}, outputs: [h]}
  - {run: b, inputs: [h], outputs: [y]}
outputs: [y]
"""


def test_a_module_is_placed_for_its_pipeline(cli: Cli) -> None:
    Path("p.yaml").write_text(PIPELINE)
    done = cli("compile", "a.yaml", "-o", "mine.ttb", "--for=p.yaml")  # It was not there before.
    assert done.code == 0, done.err
    line = "for p.yaml: placed a with --set output.y.space=dram: -1 copy, -128 B, -0.2 us a pass"
    assert done.out.splitlines()[-1].startswith(line[:-7])
    lines, then = ran(cli, "p.yaml")
    assert lines == []
    assert cli("compile", "a.yaml", "-o", "mine.ttb").code == 0
    lines, now = ran(cli, "p.yaml")
    assert promised(done.out.splitlines())[:2] == (
        then.copies - now.copies,
        then.nbytes - now.nbytes,
    )
    assert then.copies - now.copies == -1


def test_other_modules_of_the_pipeline_come_first(cli: Cli) -> None:
    Path("p.yaml").write_text(PIPELINE)
    Path("b_dram.ttb").unlink()
    done = cli("compile", "a.yaml", "-o", "mine.ttb", "--for=p.yaml")
    assert done.code == 3 and not Path("mine.ttb").exists()
    assert "b_dram.ttb of the pipeline does not exist" in done.err and "p.yaml" in done.err
    assert "compile the other modules of a pipeline first, without --for" in done.err


SHARDED = """\
name: shards
inputs: {x: {shape: [8, 64], type: float32, space: dram}}
operations: [y = Neg(x)]
outputs: {y: {space: l1, memory_layout: height_sharded, shard_spec: "2x1,4x64"}}
"""


def test_advice_on_a_source_with_shards_can_be_followed_as_it_stands(cli: Cli) -> None:
    Path("s.yaml").write_text(SHARDED)
    plain = SHARDED.replace("shards", "fixed").replace("space: dram", "space: l1, address: 0x20000")
    Path("t.yaml").write_text(plain.partition("outputs:")[0] + "outputs: [y]\n")
    assert cli("compile", "s.yaml", "-o", "s.ttb").code == 0
    assert cli("compile", "t.yaml", "-o", "t.ttb").code == 0
    lines, now = ran(cli, "s.ttb", "t.ttb")
    name, words = words_of(lines[0])
    assert name == "shards" and "output.y.memory_layout=interleaved" in words
    done = cli("compile", "s.yaml", "-o", "s.ttb", *words)
    assert done.code == 0, done.err
    assert_kept(lines, now, ran(cli, "s.ttb", "t.ttb")[1])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("-o", "other.ttb", "--for=p.yaml"), 2, "p.yaml has no module in the file other.ttb"),
        (("-o", "mine.ttb", "--for=gone.yaml"), 3, "gone.yaml"),
        (("-o", "-", "--for=p.yaml"), 2, "one module of a pipeline"),
        (("--text", "--for=p.yaml"), 2, "one module of a pipeline"),
        (("-o", "mine.ttb", "--for=p.yaml", "--split=2"), 2, "without --split"),
    ],
)
def test_what_is_no_module_of_a_pipeline_is_refused(
    cli: Cli, words: tuple[str, ...], code: int, said: str
) -> None:
    Path("p.yaml").write_text(PIPELINE)
    done = cli("compile", "a.yaml", *words)
    assert done.code == code and said in done.err, done.err
    assert not Path("mine.ttb").exists() and "Traceback" not in done.err


# -- --diff ----------------------------------------------------------------------------------------


def recorded(cli: Cli, name: str, *files: str) -> None:
    done = cli("run", *files, "--init=ones", f"--record={name}", "--save_artifacts",
               f"--artifact_dir={name}.folder", "--output=@out.npz")  # fmt: skip
    assert done.code == 0, done.err


def test_the_difference_of_two_runs_is_said_and_bounded(cli: Cli) -> None:
    recorded(cli, "old.json", "a.ttb", "b.ttb")
    recorded(cli, "new.json", "a.ttb", "b_dram.ttb")
    done = cli("inspect", "--diff", "old.json", "new.json", "--max-added-bytes=128")
    assert done.code == 0, done.err
    head, *lines = done.out.splitlines()
    assert head.startswith("this change: +1 copy, +128 B, +0.2 us")
    assert [line for line in lines if "  + copy x1 128 B" in line] and "'x' of 'b'" in done.out
    done = cli("inspect", "--diff", "old.json", "new.json", "--max-added-bytes=127")
    assert done.code == 7 and "128 B added, at most 127 allowed" in done.err
    back = cli("inspect", "--diff", "new.json", "old.json", "--max-added-bytes=0")
    assert back.code == 0 and back.out.startswith("this change: -1 copy, -128 B, -0.2 us")
    same = cli("inspect", "--diff", "old.json", "old.json")
    assert same.out == "this change: +0 copies, +0 B, +0.0 us\n"


def test_runs_of_different_lengths_are_said_to_be_and_have_no_bound(cli: Cli) -> None:
    recorded(cli, "old.json", "a.ttb", "b_dram.ttb")
    recorded(cli, "new.json", "a.ttb", "b_dram.ttb", "--num_runs=3")
    for one, other in (("old.json", "new.json"),
                       ("old.json.folder/plans.json", "new.json.folder/plans.json")):  # fmt: skip
        done = cli("inspect", "--diff", one, other)
        said = "different lengths: 'a' ran 1 time, then 3; 'b' ran 1 time, then 3"
        assert done.code == 0 and f"note: these runs are of {said}" in done.err
        for words in ((one, other), (other, one)):
            judged = cli("inspect", "--diff", *words, "--max-added-bytes=1000000")
            assert judged.code == 6 and "added bytes cannot be compared" in judged.err
        found = json.loads(cli("inspect", "--diff", one, other, "--json").out)
        assert found["unequal"] == [["a", 1, 3], ["b", 1, 3]]
    # Another program is another way to the same end: what both run, they run as often.
    recorded(cli, "less.json", "a.ttb")
    done = cli("inspect", "--diff", "less.json", "old.json", "--max-added-bytes=1000000")
    assert done.code == 0 and not done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no copies of a run"),
        ("[1]", "a plan lacks `copies`"),
        ('[{"copies": [], "runs": -1, "program_seconds": 0}]', "invalid count"),
        ('[{"copies": [], "runs": "x", "program_seconds": 0}]', "wrong type"),
        ('[{"copies": [{}], "runs": 1, "program_seconds": 0}]', "CopyLine has no"),
        ('[{"copies": [], "runs": 1, "program_seconds": NaN}]', "invalid count"),
        ("{}", "no record"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_file_that_cannot_be_compared_gets_one_error(cli: Cli, text: str, said: str) -> None:
    recorded(cli, "old.json", "a.ttb", "b.ttb")
    Path("bad.json").write_text(text)
    done = cli("inspect", "--diff", "old.json", "bad.json")
    assert done.code == 3 and said in done.err and "bad.json" in done.err, done.err
    assert done.err.count("error:") == 1 and "Traceback" not in done.err


def test_forged_totals_are_no_record(cli: Cli) -> None:
    recorded(cli, "old.json", "a.ttb", "b.ttb")
    for key, value in (("copies", "x"), ("nbytes", -1), ("seconds", None), ("copies", 1.5)):
        body = json.loads(Path("old.json").read_text())
        body["totals"][key] = value
        Path("bad.json").write_text(json.dumps(body))
        done = cli("inspect", "--diff", "old.json", "bad.json")
        assert done.code == 3 and "totals" in done.err, done.err


def test_words_that_do_not_go_with_a_comparison_are_refused(cli: Cli) -> None:
    assert cli("inspect", "a.ttb", "--max-added-bytes=1").code == 2
    assert cli("inspect", "a.ttb", "--diff", "old.json", "new.json").code == 2

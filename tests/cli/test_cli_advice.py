"""Advice: what it promises is what a run reports once it is followed; `--diff`."""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stitch
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


def advice_on(cli: Cli, *files: str) -> tuple[str | None, Any]:
    """What `stitch-inspect` advises, and what it says that the change adds."""
    done = cli("inspect", *files, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    (line,) = found["advice"] or [None]
    return line, found["advice_adds"]


def cost_of(cli: Cli, *files: str) -> Cost:
    """What the record of a run with data counted."""
    done = cli("run", *files, "--init=randn", "--record=run.json", "--output=@out.npz")
    assert done.code == 0, done.err
    return read_copies(Path("run.json").read_text()).cost


def words_of(line: str) -> tuple[str, list[str]]:
    """The program that a line of advice names, and what it is to be compiled with."""
    match = re.fullmatch(r"compile (\S+) with ((?:--set \S+ ?)+?): .*", line)
    assert match is not None, line
    return match[1], shlex.split(match[2])


def assert_kept(line: str, promise: Any, more: Cost) -> None:
    """What was promised is what came, copies and bytes exactly, time as it is printed."""
    match = re.search(r"([-+]\d+) cop\S+ ([-+]\d+) B, (\S+) us", line)
    assert match is not None, line
    said = int(match[1]), int(match[2]), match[3]
    assert said == (more.copies, more.nbytes, f"{more.seconds * 1e6:+.1f}")
    assert more.order == Cost(**promise).order and more.order < (0, 0, 0)


# -- following it ----------------------------------------------------------------------------------


def test_advice_on_a_transformer_in_six_saves_what_it_says(cli: Cli) -> None:
    module, examples = transformer()
    parts = split_graph(read_graph(module, examples, None), 6)
    placement = {1: ["input.0.space=dram"], 2: ["output.0.layout=tile"], 4: ["input.0.space=dram"]}
    files = [f"part{at}.ttb" for at in range(6)]
    for at, part in enumerate(parts):
        stitch.compile(part, placement=placement.get(at, ())).save(files[at])
    numbers = {part.name: at for at, part in enumerate(parts)}
    followed, now = 0, cost_of(cli, *files)
    while True:
        line, promise = advice_on(cli, *files)
        if line is None:
            break
        name, words = words_of(line)
        at = numbers[name]
        placement.setdefault(at, []).extend(word for word in words if word != "--set")
        stitch.compile(parts[at], placement=placement[at]).save(files[at])
        then = cost_of(cli, *files)
        assert_kept(line, promise, then - now)
        followed, now = followed + 1, then
    assert followed >= 2


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
    line, promise = advice_on(cli, "s.ttb", "t.ttb")
    assert line is not None
    now, (name, words) = cost_of(cli, "s.ttb", "t.ttb"), words_of(line)
    assert name == "shards" and "output.y.memory_layout=interleaved" in words
    done = cli("compile", "s.yaml", "-o", "s.ttb", *words)
    assert done.code == 0, done.err
    assert_kept(line, promise, cost_of(cli, "s.ttb", "t.ttb") - now)


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

    now = rehearse(modules, wires, machine)
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
                placed = [with_program(m, changed) if k == at else m for k, m in enumerate(modules)]
                costs.append(rehearse(placed, wires, machine).cost)
            except StitchError:
                continue
    best = min(costs, key=lambda cost: cost.order)
    advice = advise(modules, wires, machine, now)
    added = (best - now.cost).order
    assert (Cost(0, 0, 0.0) if advice is None else advice.adds).order == added


def test_a_change_that_does_not_compile_is_passed_over_for_one_that_drops_an_address(
    cli: Cli,
) -> None:
    l1 = load_machine("wormhole_n150").shape.l1
    assert l1 is not None
    fixed = ("input.x.space=l1", f"input.x.address={l1.base:#x}")
    for name, placement in (("a", ("output.y.space=dram",)), ("b", fixed)):
        builder = stitch.ComputationGraphBuilder(name)
        y = builder.input("x", (4, 8), "float32") + 1.0
        builder.output("y", builder.softmax(y) if name == "a" else y)
        stitch.compile(builder.build(), placement=placement).save(f"{name}.ttb")
    # `a` cannot leave its result at that address, which its scratch has.
    line, promise = advice_on(cli, "a.ttb", "b.ttb")
    assert line is not None and line.startswith(
        "compile b with --set input.x.space=dram and without its placement option for "
        "input.x.address: -1 copy, "
    )
    now = cost_of(cli, "a.ttb", "b.ttb")
    stitch.compile(builder.build(), placement="input.x.space=dram").save("b.ttb")
    assert_kept(line, promise, cost_of(cli, "a.ttb", "b.ttb") - now)


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


# -- --diff ----------------------------------------------------------------------------------------


def recorded(cli: Cli, name: str, *files: str) -> None:
    done = cli("run", *files, "--init=ones", f"--record={name}", "--output=@out.npz")
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
    assert done.code == 7 and "bytes: 256 B, at most 255 B allowed" in done.err
    back = cli("inspect", "--diff", "new.json", "old.json", "--max-added-bytes=0")
    assert back.code == 0 and back.out.startswith("this change: -1 copy, -128 B, -0.2 us")
    same = cli("inspect", "--diff", "old.json", "old.json")
    assert same.out == "this change: +0 copies, +0 B, +0.0 us\n"


def test_runs_of_different_lengths_are_said_to_be_and_have_no_bound(cli: Cli) -> None:
    recorded(cli, "old.json", "a.ttb", "b_dram.ttb")
    recorded(cli, "new.json", "a.ttb", "b_dram.ttb", "--num_runs=3")
    words = ("inspect", "--diff", "old.json", "new.json")
    done = cli(*words)
    said = "different lengths: 'a' ran 1 time, then 3; 'b' ran 1 time, then 3"
    assert done.code == 0 and f"note: these runs are of {said}" in done.err
    judged = cli(*words, "--max-added-bytes=1000000")
    assert judged.code == 6 and "their bytes cannot be compared" in judged.err
    found = json.loads(cli(*words, "--json").out)
    assert found["unequal"] == [["a", 1, 3], ["b", 1, 3]]
    # Another program is another way to the same end: what both run, they run as often.
    recorded(cli, "less.json", "a.ttb")
    done = cli("inspect", "--diff", "less.json", "old.json", "--max-added-bytes=1000000")
    assert done.code == 0 and not done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an empty text"),
        ("stitch", "no JSON"),
        ("[]", "this is no record"),
        ("{}", "this is no record"),
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

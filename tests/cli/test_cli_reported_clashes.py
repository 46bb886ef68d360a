"""Clashes, spills and failed allocations that users of other runtimes reported, as chains here.

Each is named by its thread. `--dry_run` predicts what happens before anything runs: a plan that
does not clash, with its price, or a certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stitch
from stitch.errors import OutOfMemoryError
from stitch.graph import ComputationGraphBuilder
from stitch.planner import Allocate, Certificate, Copy, Execute, Plan, Relocate, check_plan
from stitch.program import Ownership
from stitch.report.run_record import read_record
from tests.support.reported_clashes import HOST, N150, REPORTS, TOO_LARGE, Report, pipeline

Cli = Callable[..., Any]


@pytest.fixture
def predicted(cli: Cli) -> Callable[..., list[Plan]]:
    """The plans of a dry run, all of them sound; nothing has been executed."""

    def run(*words: str) -> list[Plan]:
        done = cli("run", "p.yaml", "--dry_run", "--record=run.json", *words)
        assert done.code == 0, done.err
        assert "nothing was executed" in done.out and "the spaces saw 0 writes" in done.out
        plans = list(read_record(Path("run.json").read_text(encoding="utf-8")).plans.values())
        assert [check_plan(plan) for plan in plans] == [()] * len(plans)
        return plans

    return run


def ways(plans: list[Plan]) -> Iterator[Copy | Relocate]:
    """What the plans do that nobody asked for: moves, and copies that make room."""
    for plan in plans:
        yield from (c for c in plan.copies if isinstance(c, Relocate) or c.kind == "evict")


@pytest.mark.parametrize("report", [r for r in REPORTS if not r.over], ids=lambda r: r.name)
def test_where_enough_is_free_a_move_makes_room_and_nothing_leaves(
    report: Report, predicted: Callable[..., list[Plan]]
) -> None:
    pipeline(report)
    (move,) = ways(predicted())
    assert isinstance(move, Relocate) and move.space is report.space
    assert move.stage is None and move.bounced_nbytes == 0
    assert 0 < move.nbytes <= report.moved * report.chip.banks(report.space)


@pytest.mark.parametrize("report", [r for r in REPORTS if r.over], ids=lambda r: r.name)
def test_where_too_little_is_free_the_certificate_says_by_how_much(
    report: Report, predicted: Callable[..., list[Plan]]
) -> None:
    pipeline(report)
    outs = list(ways(predicted()))
    (out,) = outs
    assert isinstance(out, Copy) and out.source.desc.layout.space is report.space
    certificate = out.certificate
    assert isinstance(certificate, Certificate) and certificate.kind == "capacity"
    assert sum(certificate.pieces) - sum(certificate.gaps) == report.over


@pytest.mark.parametrize("thread", TOO_LARGE)
def test_what_never_fits_is_refused_by_the_compiler_with_the_numbers_of_the_report(
    thread: str, here: Path
) -> None:
    nbytes, chip, space = TOO_LARGE[thread]
    base, limit = chip.region(space)
    with pytest.raises(OutOfMemoryError) as error:
        pipeline(Report(thread, chip, (), nbytes, space=space))
    assert f"at most {limit - base} B per bank" in str(error.value)
    assert f"{nbytes - limit + base} B per bank too much" in str(error.value)


# -- what costs too much ------------------------------------------------------------------------


def program(name: str, build: Callable[[ComputationGraphBuilder], None], *placement: str) -> None:
    """A file of a program for the chip."""
    builder = ComputationGraphBuilder(name)
    build(builder)
    stitch.compile(builder.build(), target="chip.yaml", placement=placement).save(f"{name}.ttb")


def chain(modules: str, inputs: str, steps: str, outputs: str) -> None:
    names = ", ".join(f"{name}: {name}.ttb" for name in modules.split())
    Path("p.yaml").write_text(
        f"device: chip.yaml\nmodules: {{{names}}}\ninputs: {{{inputs}}}\n"
        f"steps:\n{steps}\noutputs: [{outputs}]\n"
    )


def copied(plans: list[Plan], kind: str) -> list[Copy]:
    return [s for plan in plans for s in plan.steps if isinstance(s, Copy) and s.kind == kind]


IN_L1 = ("input.x.space=l1", "output.y.space=l1")


def test_a_tensor_leaves_l1_right_before_the_program_that_has_no_room_tt_mlir_7221(
    predicted: Callable[..., list[Plan]], here: Path
) -> None:
    """Two programs read it in L1 before, one after; it is written once and comes back once."""
    Path("chip.yaml").write_text(N150.text())
    rows, more = (64, 600_000), (64, 1_000_000)
    program("a", lambda b: b.output("y", b.neg(b.input("x", rows, "int8"))),
            "input.x.space=host", "output.y.space=l1")  # fmt: skip
    program("reads", lambda b: b.output("y", b.abs(b.input("x", rows, "int8"))),
            "input.x.space=l1", "output.y.space=dram")  # fmt: skip
    program("d", lambda b: b.output("y", b.neg(b.input("x", more, "int8"))),
            "input.x.space=host", "output.y.space=l1")  # fmt: skip
    program("last", lambda b: b.output("y", b.abs(b.input("x", more, "int8"))),
            "input.x.space=l1", "output.y.space=dram")  # fmt: skip
    run = "  - {{run: {}, inputs: {{x: {}}}, outputs: {{y: {}}}}}"
    chain(
        "a reads d last",
        "x: {shape: [64, 600000], type: int8}, z: {shape: [64, 1000000], type: int8}",
        "\n".join(run.format(*row) for row in (("a", "x", "t"), ("reads", "t", "b"),
                   ("reads", "t", "c"), ("d", "z", "d"), ("last", "d", "f"),
                   ("reads", "t", "e"))), "b, c, e, f",
    )  # fmt: skip
    plans = predicted()
    (plan,) = plans
    (out,) = copied(plans, "evict")
    ran = [s for s in plan.steps[: plan.steps.index(out)] if isinstance(s, Execute)]
    assert [plan.request.tasks[s.task].transformation.name for s in ran] == ["a", "reads", "reads"]
    assert out.nbytes == 600_000 * 64 and out.source.desc.shape == rows
    back = [s for s in copied(plans, "copy") if s.value == out.value]
    assert [s.nbytes for s in back] == [600_000 * 64]


def test_a_result_takes_the_place_of_its_input_however_little_is_free_tt_mlir_8625(
    predicted: Callable[..., list[Plan]], here: Path
) -> None:
    """1 MiB a bank in a budget of 1.3 MiB: two of it would not fit. There the program is a
    reshape; here one that writes over an input that it is given."""
    Path("chip.yaml").write_text(replace(N150, l1=(103_712, 103_712 + 1_363_136)).text())
    program("a", lambda b: b.output("y", b.neg(b.input("x", (64, 1024, 256), "float32"))),
            "input.x.space=host", "output.y.space=l1")  # fmt: skip

    def over(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (64, 1024, 256), "float32", ownership=Ownership.DONATE)
        b.output("y", b.neg(x))

    program("over", over, "input.x.space=l1")
    chain(
        "a over", "x: {shape: [64, 1024, 256], type: float32}",
        "  - {run: a, inputs: {x: x}, outputs: {y: t}}\n"
        "  - {run: over, inputs: {x: t}, outputs: {y: y}}", "y",
    )  # fmt: skip
    plans = predicted()
    assert list(ways(plans)) == []
    assert [s.target.desc.layout.space for s in copied(plans, "copy")] == [HOST]
    _, run = (s for plan in plans for s in plan.steps if isinstance(s, Execute))
    assert run.inputs[0].buffer == run.outputs[0].buffer


def test_weights_are_laid_out_once_for_each_layout_that_is_asked_for_tt_xla_953(
    predicted: Callable[..., list[Plan]], here: Path
) -> None:
    """Two programs want the same weights in two layouts, ten times in turn."""
    Path("chip.yaml").write_text(N150.text())
    for name, layout in (("a", "tile"), ("b", "row_major")):

        def build(b: ComputationGraphBuilder) -> None:
            b.output("y", b.matmul(b.input("x", (64, 64), "float32"),
                                   b.input("w", (64, 64), "float32")))  # fmt: skip

        program(name, build, *IN_L1, "input.w.space=dram", f"input.w.layout={layout}")
    chain(
        "a b", "x: {shape: [64, 64], type: float32}, w: {shape: [64, 64], type: float32}",
        "  - repeat: 10\n    carry: {x: h}\n    steps:\n"
        "      - {run: a, inputs: {x: x, w: w}, outputs: {y: g}}\n"
        "      - {run: b, inputs: {x: g, w: w}, outputs: {y: h}}", "x",
    )  # fmt: skip
    plans = predicted()
    ran = sum(isinstance(s, Execute) for p in plans for s in p.steps)
    weights = [s for s in copied(plans, "copy") if "input 'w'" in s.reason]
    assert ran == 20 and len(weights) == 2


def test_an_input_is_at_its_address_at_every_run_whatever_lies_there_tt_metal_26598_and_45085(
    predicted: Callable[..., list[Plan]], here: Path
) -> None:
    """Each round keeps a result where the next round's input must lie."""
    Path("chip.yaml").write_text(N150.text())
    at = 0x80000
    program("model", lambda b: b.output("y", b.neg(b.input("x", (64, 65_536), "int8"))),
            *IN_L1, f"input.x.address={at:#x}", f"output.y.address={at + 65_536:#x}")  # fmt: skip
    steps = "\n".join(f"  - {{run: model, inputs: {{x: x{i}}}, outputs: {{y: y{i}}}}}"
                      for i in range(4))  # fmt: skip
    inputs = ", ".join(f"x{i}: {{shape: [64, 65536], type: int8}}" for i in range(4))
    chain("model", inputs, steps, "y0, y1, y2, y3")
    plans = predicted()
    (plan,) = plans
    ran = [s for s in plan.steps if isinstance(s, Execute)]
    places = {s.buffer.number: s.buffer.address for s in plan.steps if isinstance(s, Allocate)}
    assert [places[s.inputs[0].buffer] for s in ran] == [at] * 4
    assert [places[s.outputs[0].buffer] for s in ran] == [at + 65_536] * 4
    # Each kept result moves once, out of the way of the next; nothing goes through DRAM.
    moves = list(ways(plans))
    assert len(moves) == 3 and all(isinstance(m, Relocate) and m.stage is None for m in moves)

"""The schedules that are chosen for nests, on a card and on the host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

import stitch
from stitch import fractal as ops
from stitch.compiler import CompileOptions
from stitch.compiler.loops.loop_costs import rates_of
from stitch.machine import load_machine
from tests.support.benches import BENCHES

CARD = load_machine("cuda")
#: By nest: the schedules of its loops on a card, where kernels are many small ones or few large
#: ones, and on the host.
CHOSEN = {
    "stacked LSTM, hidden 64": ("wave", "wave"),
    "stacked LSTM, hidden 256": ("wave", "rows hoisted"),
    "dilated RNN": (
        "batch batch batch batch batch batch hoisted hoisted hoisted hoisted hoisted hoisted",
        "batch batch batch batch batch batch hoisted hoisted hoisted hoisted rounds rounds",
    ),
    "grid RNN": ("rows rows hoisted", "rows rows rounds"),
    "two products": ("batch rows hoisted", "batch rows rounds"),
    "flash attention": ("batch batch hoisted", "rounds blocks rounds"),
    "BigBird": ("batch batch", "blocks batch"),
}


@pytest.fixture(autouse=True, scope="module")
def benches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHES)
        yield
        for name in [name for name in sys.modules if name.split(".")[0] == "fractal_ways"]:
            del sys.modules[name]


@cache
def nest(name: str) -> Any:
    from fractal_ways import blockwise_cases as blockwise
    from fractal_ways import recurrent_cases as recurrent

    wide = (32, 64, 256, 256)
    return {
        "stacked LSTM, hidden 64": lambda: recurrent.stacked_lstm(8, 64, 16, 64, False, False),
        "stacked LSTM, hidden 256": lambda: recurrent.stacked_lstm(*wide, False, False),
        "dilated RNN": lambda: recurrent.dilated_rnn(64, 16, 64, False, False),
        "grid RNN": lambda: recurrent.grid_rnn(16, 16, 64, False, False),
        "two products": lambda: blockwise.two_products(64, False, False),
        "flash attention": lambda: blockwise.flash_attention(4096, 64, False, False),
        "BigBird": lambda: blockwise.bigbird(64, 16, 64, False, False),
    }[name]()


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("target", ["cuda", "host"])
def test_the_schedules_of_nests(name: str, target: str) -> None:
    case = nest(name)
    notes = ops.compile(case.network, *case.given, target=target).loops
    assert " ".join(note.schedule for note in notes) == CHOSEN[name][target == "host"]
    assert {note.executor for note in notes} == {"cuda" if target == "cuda" else "numpy"}


@pytest.mark.parametrize("executor", ["cuda", "torch:cpu", "cuda:1", "torch:cpu-inductor"])
def test_names_of_cards_have_the_rates_of_cards_on_every_machine(executor: str) -> None:
    CompileOptions(executor=executor)
    for machine in ("host", "cuda", "wormhole_n150"):
        assert rates_of(load_machine(machine), executor) == CARD.loops
    (rates,) = rates_of(CARD, "numpy")
    assert rates == rates_of(load_machine("host"))[0]


def test_a_call_in_parallel_on_a_device_of_pytorch_has_the_rates_of_cards() -> None:
    xs = ops.FractalTensor(np.ones((4, 2), np.float32))
    with (
        stitch.open_device("torch:cpu") as device,
        ops.mode("parallel", device=device) as report,
    ):
        assert ops.scan(lambda s, x: s + x, xs).leaves()[-1].tolist() == [4, 4]
    assert " by cuda)" in report.explain()

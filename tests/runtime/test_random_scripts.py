"""Random scripts of device use beside plain NumPy; `tools/random_scripts` runs more of them."""

from __future__ import annotations

import contextlib
import gc
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import stitch
from stitch import planner
from stitch.errors import OutOfMemoryError
from stitch.planner import Plan, PlanRequest
from stitch.report import ChromeTrace, Recorder
from tests.support import plans_that_ran
from tests.support.grids import every
from tests.support.planner.leaving_brute_force import TooManyWaysError, needless, task_finds_room
from tests.support.random_scripts import THREADS, Script, run, script, shrunk
from tests.support.run_seed import SEED

TOOL = Path(__file__).parents[2] / "tools" / "random_scripts"
#: Scripts of a campaign, which draws others each time, of each of its parts, and of these such
#: whose plans brute force checks.
SEEDS, PART, CHECKED_BY_BRUTE_FORCE = 2000, 200, 20


def tried(seed: int) -> None:
    """Run the script of a seed; an error says how to repeat it."""
    try:
        run(script(seed))
    except BaseException as error:
        error.add_note(f"tools/random_scripts --seeds={seed}:{seed + 1} --shrink")
        raise


@pytest.mark.parametrize("part", every(4, range(8)))
def test_a_script_has_the_results_of_numpy_and_leaves_nothing(part: int) -> None:
    for seed in range(part * 8, part * 8 + 8):
        tried(seed)


def test_a_run_that_a_hook_stopped_counts_the_copies_that_it_made() -> None:
    # It overwrites an array of the call, after two complete runs of the same plan.
    steps = (
        ("feed_back", (3112, 1720, 2039, 647)),
        ("plant", (2254,)),
        ("graph", (3202, 3494, 1781, 1494)),
    )
    run(Script(1507, 11, 64, "numpy", False, True, False, (steps,)))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[PlanRequest]:
    """The requests for which the planner finds no room."""
    requests: list[PlanRequest] = []
    plan = planner.plan

    def remembering(request: PlanRequest, **options: Any) -> Plan:
        try:
            return plan(request, **options)
        except OutOfMemoryError:
            requests.append(request)
            raise

    for name, module in [*sys.modules.items()]:
        if name.startswith("stitch.runtime") and vars(module).get("plan") is plan:
            monkeypatch.setattr(module, "plan", remembering)
    return requests


@pytest.mark.campaign("random_scripts")
@pytest.mark.parametrize("part", range(SEEDS // PART))
def test_many_scripts_have_the_results_of_numpy_and_leave_nothing(
    part: int, refused: list[PlanRequest]
) -> None:
    """Of some, brute force confirms each eviction and each request that found no room."""
    for number in range(part * PART, part * PART + PART):
        refused.clear()
        tried(1_000_000 * SEED + number)
        plans = plans_that_ran.taken()
        assert plans_that_ran.defects(plans) == [], number
        if number % PART < CHECKED_BY_BRUTE_FORCE:
            assert [said for plan in plans for said in needless(plan)[0]] == [], number
            for request in refused:
                with contextlib.suppress(TooManyWaysError):
                    found = [task_finds_room(request, i) for i in range(len(request.tasks))]
                    assert not all(found), number


@pytest.fixture
def nothing_is_collected() -> Iterator[None]:
    """When garbage is collected, and with it tensors, depends on all that a process has done."""
    gc.disable()
    yield
    gc.enable()


def watched(how: str, *machine: Any, **options: Any) -> stitch.Device:
    """A device that is observed from the start."""
    device = stitch.open_device(*machine, **options)
    if how == "listener":
        device.events.subscribe(lambda event: None)
    elif how == "hooks":
        device.hooks.register(before_program=lambda context: None)
    elif how == "operation hooks":
        device.hooks.register(after_operation=lambda context: None)
    elif how == "trace and record":
        trace, recorder = ChromeTrace(device), Recorder(device)
        device.events.subscribe(lambda event: (trace, recorder))
    return device


@pytest.mark.parametrize(
    "how", ["listener", "hooks", "operation hooks", "trace and record", "no counts"]
)
@pytest.mark.parametrize("first", every(3, (8, 10, 12)))
def test_observers_change_neither_results_nor_copies(
    how: str, first: int, monkeypatch: pytest.MonkeyPatch, nothing_is_collected: None
) -> None:
    for seed in (first, first + 1):
        alone = run(script(seed))
        with monkeypatch.context() as patch:
            if how == "no counts":
                # Who holds what is never read from the interpreter's counts.
                patch.setattr(sys, "getrefcount", lambda thing: 2)
            assert run(script(seed), opens=partial(watched, how)) == alone


def test_plans_that_are_dropped_all_the_time_change_nothing() -> None:
    for seed in range(200, 206):
        whole = script(seed)
        steps = [step for each in whole.threads[0] for step in (each, ("forget", ()))]
        run(replace(whole, threads=(tuple(steps),)))


def test_a_script_shrinks_to_the_steps_that_break() -> None:
    long = script(7)
    assert len(long.threads) == THREADS and long.steps > 20
    last = long.threads[1][-1]

    def breaks(each: Script) -> bool:
        return last in each.threads[1]

    assert shrunk(long, breaks).threads == ((), (last,), ())


def test_the_tool_compares_copies_with_another_run(tmp_path: Path) -> None:
    words = [str(TOOL), "--seeds=8:11", "--json", "--check"]

    def here(*more: str) -> tuple[Any, str, str]:
        with (
            mock.patch.object(sys, "argv", [*words, *more]),
            mock.patch.object(sys, "path", [*sys.path]),
            contextlib.redirect_stdout(StringIO()) as out,
            contextlib.redirect_stderr(StringIO()) as err,
            pytest.raises(SystemExit) as ended,
        ):
            runpy.run_path(str(TOOL), run_name="__main__")
        return ended.value.code, out.getvalue(), err.getvalue()

    first = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    base = tmp_path / "base.json"
    base.write_text(first.stdout, encoding="utf-8")
    code, out, err = here(f"--against={base}")
    assert code == 0, err
    assert out == first.stdout
    rows = [json.loads(line) for line in first.stdout.splitlines()]
    assert [row["seed"] for row in rows] == [8, 9, 10]
    fewer = [json.dumps({**row, "copies": row["copies"] - 1}) for row in rows]
    base.write_text("\n".join(fewer), encoding="utf-8")
    code, _, err = here(f"--against={base}")
    assert code == 1 and "equal or fewer in 0.00%" in err

"""`tools/inject` finds what is broken, names the line, and finds nothing where nothing is."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.grids import every

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r"^(\w+) +(interrupt|timer|memory|visit|closing) +(\d+) broken / (\d+) places", re.MULTILINE
)


def inject(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "inject"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.campaign("injection")
def test_a_lock_that_is_taken_before_the_try_is_found_by_its_line() -> None:
    done = inject("--scenario=bare_specimen", "--fault=interrupt", "--seconds=5", "--check")
    assert done.returncode == 1, done.stderr
    found = re.search(r"(tools/\S+):(\d+) .*: another thread hangs", done.stdout)
    assert found is not None, done.stdout
    lines = (ROOT / found[1]).read_text(encoding="utf-8").splitlines()
    assert "self.lock.acquire()" in lines[int(found[2]) - 1]


def test_nothing_is_found_between_a_lock_and_its_with() -> None:
    done = inject("--scenario=sound_specimen", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {
        kind: (int(broken), int(places)) for _, kind, broken, places in LINE.findall(done.stdout)
    }
    assert {broken for broken, _ in counts.values()} == {0}
    assert counts["interrupt"][1] >= 2 and counts["memory"][1] >= 1


STOPPED, COME_IN = ("interrupt", "timer", "memory"), ("visit", "closing")
#: Every how many places are tried in a long campaign; those of the others are few.
EVERY = {"first_call": 2, "load": 2, "moving_call": 10, "fetching_call": 20,
         "second_training_step": 20}  # fmt: skip
SAMPLED = {"first_call": 800, "load": 1000, "steady_call": 80, "forked_calls": 80,
           "pipeline_call": 40, "donating_call": 40,
           "moving_call": 2000, "fetching_call": 2000,
           "training_step": 120}  # fmt: skip
SCENARIOS = ["first_call", "steady_call", "queued_calls", "forked_calls", "pipeline_call",
             "donating_call",
             "observed_call", "moving_call", "fetching_call", "load", "training_step",
             "training_step_on_host", "second_training_step"]  # fmt: skip
if importlib.util.find_spec("torch") is not None:
    SCENARIOS.append("torch_compile_call")


#: Every how many places a handler comes in, or closes the device: it does a lot at each.
COMING_EVERY = {"first_call": 100, "load": 120, "queued_calls": 4, "forked_calls": 20,
                "donating_call": 5,
                "observed_call": 3, "training_step": 12, "training_step_on_host": 12,
                "second_training_step": 100, "torch_compile_call": 40,
                "moving_call": 1500, "fetching_call": 1500}  # fmt: skip


def nothing_is_broken(scenario: str, every: int, faults: tuple[str, ...]) -> None:
    chosen = [f"--fault={fault}" for fault in faults]
    done = inject(f"--scenario={scenario}", f"--every={every}", "--check", *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    tried = {kind: int(places) for _, kind, _, places in LINE.findall(done.stdout)}
    assert tried.keys() == {*faults} and min(tried.values()) >= 1


@pytest.mark.parametrize("scenario", every(3, SAMPLED))
def test_a_sample_of_places_leaves_nothing_broken(scenario: str) -> None:
    nothing_is_broken(scenario, SAMPLED[scenario], STOPPED)


@pytest.mark.campaign("injection")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_wherever_a_run_is_stopped_nothing_is_broken(scenario: str) -> None:
    nothing_is_broken(scenario, EVERY.get(scenario, 1), STOPPED)


def no_weight_is_lost(scenario: str, every: int) -> None:
    done = inject(f"--scenario={scenario}", f"--every={every}", "--check",
                  "--fault=interrupt", "--fault=timer", "--fault=memory")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "that say what was lost" not in done.stdout, done.stdout


@pytest.mark.parametrize("scenario", ["training_step", "training_step_on_host"])
def test_a_training_step_stopped_anywhere_leaves_the_weights_before_or_after_it(
    scenario: str,
) -> None:
    no_weight_is_lost(scenario, 24)


@pytest.mark.campaign("injection")
@pytest.mark.parametrize(
    ("scenario", "every"),
    [("training_step", 1), ("training_step_on_host", 1), ("second_training_step", 5)],
)
def test_wherever_a_training_is_stopped_its_weights_are_those_before_or_after_a_step(
    scenario: str, every: int
) -> None:
    no_weight_is_lost(scenario, every)


def test_a_handler_that_comes_into_a_steady_call_leaves_nothing_broken() -> None:
    nothing_is_broken("pipeline_call", 4, COME_IN)


@pytest.mark.campaign("injection")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_wherever_a_handler_comes_in_nothing_is_broken(scenario: str) -> None:
    nothing_is_broken(scenario, COMING_EVERY.get(scenario, 2), COME_IN)

"""The budget of the process: what is claimed counts until it is let go, and no more is given."""

from __future__ import annotations

import gc
import linecache
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from stitch import budget as budget_module
from stitch.budget import (
    BUDGET,
    Budget,
    allowed_nbytes,
    allowing,
    claim_for,
    group_limit,
    machine_nbytes,
    parse_nbytes,
)
from stitch.errors import OutOfMemoryError, UsageError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2GiB", 2 << 30), ("512 mib", 512 << 20), ("3kB", 3000), ("77", 77), (4096, 4096)],
)
def test_amounts_are_numbers_or_texts(text: int | str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "lots", "-3", "0", 0, -1, True, "1 GiBs", None, 2.5,
                                  "9" * 400, "9" * 400 + " GiB", "1" * 10_000])  # fmt: skip
def test_what_is_no_amount_is_refused(text: object) -> None:
    with pytest.raises(UsageError, match="not an amount of memory"):
        parse_nbytes(text)  # type: ignore[arg-type]  # what is wrong on purpose


def test_eighty_percent_of_the_machine_are_allowed_unless_said_otherwise() -> None:
    assert allowed_nbytes() == int(0.8 * machine_nbytes())
    with allowing("1MiB"):
        assert allowed_nbytes() == 1 << 20
        with allowing(None):
            assert allowed_nbytes() == 1 << 20
    assert allowed_nbytes() == int(0.8 * machine_nbytes())


def test_limits_of_control_groups_are_found_in_both_versions(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    for folder, name, text in (
        ("", "memory.max", "max"), ("a", "memory.max", "5000"), ("a/b", "memory.max", "max"),
        ("memory/a", "memory.limit_in_bytes", "9223372036854771712"),
        ("memory/a/b", "memory.limit_in_bytes", "7000"),
    ):  # fmt: skip
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(text + "\n", encoding="ascii")
    membership.write_text("0::/a/b\n", encoding="ascii")
    assert group_limit(membership, tmp_path) == 5000
    membership.write_text("9:cpu,memory:/a/b\n0::/nowhere\n", encoding="ascii")
    assert group_limit(membership, tmp_path) == 7000
    membership.write_text("1:name=systemd:/\n", encoding="ascii")
    assert group_limit(membership, tmp_path) is None
    assert group_limit(tmp_path / "absent", tmp_path) is None


def test_no_more_is_given_than_is_allowed_and_the_error_says_what_else_is_there() -> None:
    budget = Budget()
    first = budget.claim(600, "the first", allowed=1000)
    with pytest.raises(OutOfMemoryError) as caught:
        budget.claim(500, "reading 'x.npy'", allowed=1000)
    text = str(caught.value)
    for wanted in ("reading 'x.npy' needs 500", "400 of 1000", "600 B the first", "max_memory"):
        assert wanted in text
    assert budget.taken_nbytes == 600
    first.dispose()
    first.dispose()
    assert budget.taken_nbytes == 0
    second = budget.claim(1000, "all of it", allowed=1000)
    assert budget.live() == ((1000, "all of it"),)
    del second
    assert budget.taken_nbytes == 0


def test_what_is_garbage_is_collected_before_anything_is_refused() -> None:
    budget = Budget()
    circle: list[object] = [budget.claim(900, "garbage", allowed=1000)]
    circle.append(circle)
    del circle
    assert budget.claim(900, "another", allowed=1000).nbytes == 900


def test_several_amounts_are_taken_all_or_none() -> None:
    budget = Budget()
    with pytest.raises(OutOfMemoryError):
        budget.claim_parts(
            lambda: ((400, "a"), (700, "b")), "both", allowed=1000, make_room=gc.collect
        )
    assert budget.taken_nbytes == 0
    made = budget.claim_parts(
        lambda: ((400, "a"), (600, "b")), "both", allowed=1000, make_room=gc.collect
    )
    del made[0]
    assert budget.live() == ((600, "b"),)


def test_bytes_of_an_array_count_while_it_or_a_view_of_it_lives() -> None:
    before = BUDGET.taken_nbytes
    array = np.zeros(1000)
    claim_for(array, array.nbytes, "an array")
    view = array[10:].reshape(-1, 10)
    del array
    assert BUDGET.taken_nbytes == before + 8000
    del view
    assert BUDGET.taken_nbytes == before


def test_threads_are_never_given_more_than_is_allowed() -> None:
    budget, most, held = Budget(), [0], threading.Barrier(4)

    def take() -> None:
        held.wait()
        for _ in range(200):
            try:
                claimed = budget.claim(300, "mine", allowed=1000, make_room=lambda: None)
            except OutOfMemoryError:
                continue
            most[0] = max(most[0], budget.taken_nbytes)
            claimed.dispose()

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 300 <= most[0] <= 900
    assert budget.taken_nbytes == 0


def test_a_forked_child_claims_though_the_lock_was_held() -> None:
    with BUDGET._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if BUDGET.claim(1, "in the child").nbytes == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0


def lines_of(function: Any) -> int:
    """How many lines a budget runs while it does something."""
    return interrupted(function, 1 << 30)


def interrupted(function: Any, at: int) -> int:
    """Interrupt it at the `at`-th line that the budget runs; gives how many lines there were."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        code = frame.f_code
        if code.co_filename != budget_module.__file__ or code.co_name == "__del__":
            return None
        # A `with` line is seen once more where the block ends: no signal comes there.
        source = linecache.getline(code.co_filename, frame.f_lineno).strip()
        if event == "line" and not source.startswith("with "):
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count


def test_after_an_interrupt_at_any_line_what_is_taken_is_the_sum_of_what_is_claimed() -> None:
    own, held = Budget(), list[Any]()

    def change() -> None:
        first = own.claim(1000, "first", allowed=1 << 20)
        parts = ((10, "a"), (20, "b"))
        held.extend(own.claim_parts(lambda: parts, "c", allowed=1 << 20, make_room=gc.collect))
        first.dispose()
        own.claim(300, "last", allowed=1 << 20).dispose()
        assert own.taken_nbytes == 30

    lines = lines_of(change)
    assert lines > 40
    for at in range(1, lines + 1):
        held.clear()
        interrupted(change, at)
        own.claim(0, "nothing", allowed=1 << 20)
        assert own.taken_nbytes == sum(n for n, _ in own.live()) in (0, 30), at
        held.clear()
        assert own.taken_nbytes == 0, at


def test_a_finalizer_that_claims_while_the_budget_counts_does_not_wait_for_itself() -> None:
    code = """
import faulthandler, gc
from stitch.budget import BUDGET

faulthandler.dump_traceback_later(200, exit=True)

class Service:
    def __init__(self):
        self.me = self
    def __del__(self):
        BUDGET.claim(1, "by a finalizer").dispose()

gc.freeze()  # What is imported is no garbage: a collection takes no time.
for later in range(1, 60):
    gc.disable()
    gc.collect()
    Service()
    gc.set_threshold(gc.get_count()[0] + later)
    gc.enable()
    parts = tuple((1, "x") for _ in range(9))
    BUDGET.claim_parts(lambda: parts, "x", allowed=1 << 40, make_room=gc.collect)
gc.collect()
print(BUDGET.taken_nbytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "0\n", done.stderr

"""Schedules of pipelines: sound for all numbers, checked, printed, with bounded saved sets."""

from __future__ import annotations

import pytest

from stitch.errors import UsageError
from stitch.mesh.schedules import (
    SCHEDULES,
    Action,
    check_schedule,
    saved_sets,
    schedule,
    schedule_text,
)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_every_schedule_is_sound_for_any_number_of_micro_batches(
    kind: str, devices: int, chunks: int
) -> None:
    if kind != "interleaved" and chunks > 1:
        return
    for micro_batches in range(1, 25):
        orders = schedule(kind, devices * chunks, micro_batches, chunks)
        check_schedule(orders)
        assert len(orders) == devices
        assert all(len(order) == 2 * chunks * micro_batches for order in orders)


def test_1f1b_saves_the_values_of_at_most_p_minus_k_micro_batches() -> None:
    for stages in range(1, 9):
        for micro_batches in (1, 2, 3, 5, 8, 32):
            found = saved_sets(schedule("1f1b", stages, micro_batches))
            assert found == tuple(min(stages - k, micro_batches) for k in range(stages))
            assert saved_sets(schedule("gpipe", stages, micro_batches)) == (micro_batches,) * stages


def test_interleaved_with_one_stage_per_device_is_1f1b() -> None:
    assert schedule("interleaved", 4, 6, 1) == schedule("1f1b", 4, 6)


def test_backwards_of_a_stage_run_in_the_order_of_micro_batches() -> None:
    """Gradients of a stage are summed in this order, whatever the schedule."""
    for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        for order in schedule(kind, 4, 7, chunks):
            for stage in {action.stage for action in order}:
                back = [a.micro_batch for a in order if a.is_backward and a.stage == stage]
                assert back == list(range(7))


def test_a_schedule_prints_as_one_line_for_each_device() -> None:
    assert schedule_text(schedule("interleaved", 4, 2, 2)) == (
        "device 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\ndevice 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f1b", 2, 0), "a schedule of 0 micro-batches"),
        (("1f1b", 0, 2), "a schedule of 0 stages"),
        (("interleaved", 4, 2, 0), "a schedule of 0 chunks"),
        (("interleaved", 5, 2, 2), "5 stages cannot be 2 on each device"),
        (("gpipe", 4, 2, 2), "one stage per device"),
        (("1f1p", 4, 2), "no schedule '1f1p'; did you mean '1f1b'"),
        (("gpipe", 4, 2.0), "schedule takes a whole number as micro_batches"),
    ],
)
def test_numbers_that_no_schedule_has_are_refused(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        schedule(*arguments)  # type: ignore[arg-type]


def test_a_schedule_whose_devices_wait_for_each_other_is_refused() -> None:
    first, second = schedule("1f1b", 2, 2)
    swapped = (second[1], second[0], *second[2:])  # Backward before its forward.
    with pytest.raises(UsageError, match=r"wait for each other: device 0 at 0B0, device 1 at 1B0"):
        check_schedule((first, swapped))


def test_a_schedule_that_misses_or_doubles_an_action_is_refused() -> None:
    first, second = schedule("gpipe", 2, 2)
    with pytest.raises(UsageError, match="misses or has too many actions: 1B1"):
        check_schedule((first, second[:-1]))
    with pytest.raises(UsageError, match="runs 1B1 twice"):
        check_schedule((first, (*second, second[-1])))
    with pytest.raises(UsageError, match="stage 1 is on two devices: 0 and 1"):
        check_schedule(((*first, Action(1, 7)), second))

"""A plugin of pytest: the devices of all tests have their memory on PyTorch's device `torch:cpu`.

`pytest -p tests.support.torch.device_memory FILE...` runs the tests of the executor `numpy` there.
"""

from __future__ import annotations

from typing import Any

import pytest

from stitch.runtime import device as device_module
from stitch.runtime.execution import running
from stitch.runtime.executors import Executor, make_executor

_PLACES = "reads and writes the bytes of a space in place, which the processor does not reach there"
_AGAIN = "copies on the device are not compared with what was lent: lent bytes are copied again"
_NUMPY = "is about the executor numpy: its classes, its name, its threads or its views"
#: Tests that hold on the processor's own memory only, and why.
NOT_HERE = {
    "test_a_borrowed_array_is_copied_again_only_when_it_has_changed": _AGAIN,
    "test_a_call_passes_few_functions_of_the_runtime": _NUMPY,
    "test_a_device_copies_lent_bytes_again_only_when_they_have_changed": _AGAIN,
    "test_a_failure_at_any_step_while_constants_are_loaded_changes_nothing": _NUMPY,
    "test_a_value_in_the_bytes_of_another_that_is_still_read_is_refused": _NUMPY,
    "test_an_interrupt_around_any_move_loses_nothing_that_is_held": _NUMPY,
    "test_devices_and_pipelines_have_a_repr_and_cannot_be_copied": _NUMPY,
    "test_dlpack_shows_the_very_bytes_and_pins_them_until_let_go": _PLACES,
    "test_negative_zero_and_other_not_a_numbers_are_other_bytes": _AGAIN,
    "test_nothing_is_made_or_written_anew_while_observers_come_and_go": _NUMPY,
    "test_plans_copies_and_bits_are_those_of_the_bare_runs": _NUMPY,
    "test_views_of_pending_blocks_keep_their_bits": _PLACES,
    "test_what_fails_anywhere_leaves_what_the_records_say": _NUMPY,
    "test_writes_to_an_exported_result_void_its_copies_and_nothing_else_does": _AGAIN,
}


def _made(name: str | Executor, *arguments: Any, **options: Any) -> Executor:
    return make_executor("torch:cpu" if name == "numpy" else name, *arguments, **options)


def pytest_configure(config: pytest.Config) -> None:
    setattr(device_module, "make_executor", _made)  # noqa: B010 (its own import)
    # Graphs are captured at the first run: few tests run anything thrice at the same addresses.
    running.RUNS_TO_STRAIGHTEN = 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if item.name.split("[")[0] not in NOT_HERE]

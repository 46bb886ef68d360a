"""Programs of parameters only are evaluated once (tt-mlir's constant evaluation cache)."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import stitch
from tests.support.stitched_models import integers, one, parameters_only, scaled, used


def runs(device: stitch.Device) -> int:
    """The program runs so far: a remembered result takes none."""
    return device.account().total.programs


def test_the_first_call_misses_and_the_others_hit() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        k = device.load(parameters_only("k", 3.0))
        w = device.tensor(integers())
        results = [one(k(w)) for _ in range(4)]
        for result in results:
            np.testing.assert_array_equal(result.numpy(), integers() * 3)
        assert runs(device) == 1
        assert len({result.address for result in results}) == 1


def test_a_result_goes_with_an_input_that_was_dropped_before_it_was_made() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        a, k = device.load(scaled("a", 2.0)), device.load(parameters_only("k", 3.0))
        base = used(device)
        for i in range(40):
            result = one(k(one(a(integers(start=i)))))
            expected = (integers(start=i) * 2 + 1) * 3
            np.testing.assert_array_equal(result.numpy(), expected)
        del result
        device.flush()
        assert used(device) == base


def test_binaries_with_the_same_program_share_results_and_others_do_not() -> None:
    first, second = parameters_only("k", 3.0), parameters_only("k", 3.0)
    other = parameters_only("k", 4.0)
    with stitch.open_device("tiny", debug=True) as device:
        w = device.tensor(integers())
        for compiled, factor in ((first, 3), (second, 3), (other, 4)):
            loaded = device.load(compiled.encode())
            np.testing.assert_array_equal(one(loaded(w)).numpy(), integers() * factor)
        assert runs(device) == 2


def test_a_program_that_takes_the_place_of_a_dropped_one_has_results_of_its_own() -> None:
    with stitch.open_device("tiny") as device:
        w = device.tensor(integers())
        for factor in range(1, 40):
            loaded = device.load(parameters_only("k", float(factor)).encode())
            np.testing.assert_array_equal(one(loaded(w)).numpy(), integers() * factor)
            # Only the program is in the way; all that other tests have left behind may stay.
            del loaded
            gc.collect(1)
        assert runs(device) == 39


def test_an_input_that_dies_takes_its_results_along() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        k = device.load(parameters_only("k", 3.0))
        constants = used(device)
        dropped, freed = device.tensor(integers()), device.tensor(integers())
        for tensor in (dropped, freed):
            stitch.wait(one(k(tensor)))
        both = used(device)
        freed.deallocate()
        assert used(device) != both
        del dropped, tensor
        device.flush()
        assert used(device) == constants


def test_a_result_that_was_freed_is_made_again() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        k = device.load(parameters_only("k", 3.0))
        w = device.tensor(integers())
        one(k(w)).deallocate()
        np.testing.assert_array_equal(one(k(w)).numpy(), integers() * 3)
        assert runs(device) == 2


def test_arrays_and_borrowed_arrays_are_never_remembered() -> None:
    array = integers()
    with stitch.open_device("tiny", debug=True) as device:
        k = device.load(parameters_only("k", 3.0))
        borrowed = device.tensor(array, borrow=True)
        for _ in range(2):
            np.testing.assert_array_equal(one(k(array)).numpy(), array * 3)
            np.testing.assert_array_equal(one(k(borrowed)).numpy(), array * 3)
            array += 1
        assert runs(device) == 4


def test_a_pipelines_reused_output_is_a_new_version_each_time() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        pipeline = stitch.Pipeline([device.load(scaled("a", 2.0))])
        k = device.load(parameters_only("k", 3.0))
        for start in range(6):
            result = one(k(one(pipeline(integers(start=start)))))
            np.testing.assert_array_equal(result.numpy(), (integers(start=start) * 2 + 1) * 3)
            del result


@pytest.mark.parametrize("how", ["written", "written through a view", "exported"])
def test_a_result_that_others_have_changed_is_made_again(how: str) -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(parameters_only("twice", 2.0))
        w = device.tensor(integers())
        y = one(program(w))
        y.settle()
        if how == "exported":
            np.from_dlpack(y)[...] = -1
        elif how == "written":
            device.write(y, -integers())
        else:
            device.write(y[0:2], -integers((2, 64)))
        np.testing.assert_array_equal(one(program(w)).numpy(), integers() * 2)
        assert runs(device) == 2
        np.testing.assert_array_equal(one(program(w)).numpy(), integers() * 2)
        assert runs(device) == 2

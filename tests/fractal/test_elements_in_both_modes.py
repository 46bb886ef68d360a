"""An element of a result is the same in both modes: NumPy's array, which says what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stitch
from stitch import fractal as ops

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda r: r[0] + 1, "add two": lambda r: r[0] + r[1], "compare": lambda r: r[0] > 1,
    "equal": lambda r: r[0] == r[1], "sum": lambda r: r[0].sum(), "list": lambda r: r[0].tolist(),
    "format": lambda r: f"{r[0][0]:.2f}", "text": lambda r: str(r[1]),
    "shown": lambda r: repr(r[1]),
    "numpy": lambda r: r[2].numpy() * 2, "any function": lambda r: np.linalg.svd(r[:2].numpy())[1],
    "numpy of a leaf": lambda r: np.percentile(r[3], 30), "mean": lambda r: r[1].mean(),
    "iteration": lambda r: [float(x.max()) for x in r], "type": lambda r: type(r[0]).__name__,
    "head": lambda r: ops.head(r) - ops.last(r), "unbind": lambda r: sum(ops.unbind(r)),
    "matmul": lambda r: r[0] @ r[1], "slice": lambda r: r[1:][0][::-1],
    "dtype": lambda r: r[0].dtype,
    "copy": lambda r: r[0].copy() * 3, "shape": lambda r: r[0].shape,
    "writeable": lambda r: r[0].flags.writeable,
}  # fmt: skip


def in_both(call: Callable[[], Any]) -> list[Any]:
    found = []
    for mode in ("sequential", "parallel"):
        with ops.mode(mode):
            found.append(call())
    return found


@pytest.mark.parametrize("use", USES)
def test_what_is_done_with_an_element_gives_the_same_in_both_modes(use: str) -> None:
    one, other = in_both(lambda: USES[use](ops.map(lambda x: x * 2, ops.FractalTensor(ROWS))))
    assert type(one) is type(other)
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("shape", [(4,), (4, 2)], ids=str)
def test_fold_is_the_tail_of_a_scan_in_value_and_type(shape: tuple[int, ...]) -> None:
    xs = ops.FractalTensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))

    def both() -> Any:
        return ops.fold(np.add, xs), ops.tail(ops.scan(np.add, xs)), ops.reduce(np.add, xs)

    for results in in_both(both):
        for result in results:
            assert type(result) is ops.Leaf and result.shape == shape[1:]
            assert result.tolist() == xs.numpy().sum(0).tolist()
            assert f"{result.sum():.1f}" == f"{xs.numpy().sum():.1f}"


def test_a_number_is_an_element_that_counts_chooses_and_decides() -> None:
    for r in in_both(lambda: ops.map(lambda x: x + 1, ops.FractalTensor([0, 1, 2]))):
        assert [*"abcd"][r[1]] == "c" and int(r[2]) == 3 and bool(r[0] > 0)
        assert f"{r[0]:>3d}|{r[0] / 2:.2f}" == "  1|0.50"
        assert ops.FractalTensor([5, 6, 7])[r[0]].tolist() == 6
        assert sorted(r) == [1, 2, 3] and max(r) == 3


def test_leaves_of_tensors_in_tiles_are_read_as_well() -> None:
    with stitch.open_device("tiny") as device:
        tiles = stitch.Layout(stitch.DataType.FLOAT32, stitch.Space.DRAM, (32, 32))
        xs = ops.FractalTensor(device.tensor(ROWS).to_layout(tiles))
        assert xs[1].tolist() == [3, 4, 5] and [x.tolist() for x in xs] == ROWS.tolist()


def test_results_of_inner_folds_are_data_of_one_program_per_operation() -> None:
    """Were they constants, each call of the outer function would compile its operations anew."""
    values = np.arange(24, dtype=np.float32).reshape(6, 2, 2, 1)
    xs = ops.FractalTensor([list(row) for row in values])
    weight = np.full((1, 1), 0.5, np.float32)

    def outer(state: Any, row: Any) -> Any:
        return state + ops.fold(lambda s, x: s + x, row, np.zeros((2, 1), np.float32)) @ weight

    with stitch.open_device("host") as device, ops.mode("sequential", device=device):
        found = ops.fold(outer, xs, np.zeros((2, 1), np.float32))
        assert device.statistics().plans_made <= 3
    np.testing.assert_allclose(found, values.sum((0, 1)) * 0.5)


def test_a_debugged_function_formats_its_numbers() -> None:
    seen: list[str] = []

    def noted(x: Any) -> Any:
        seen.append(f"{x:.2f}")
        return x

    with ops.mode("sequential"):
        ops.map(noted, ops.FractalTensor([0.5, 2.0]))
    assert seen == ["0.50", "2.00"]

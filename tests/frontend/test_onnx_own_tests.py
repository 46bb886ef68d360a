"""Models that the onnx package has of PyTorch (opsets 6 to 9), and its simple models, are right."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

import stitch
from stitch.errors import StitchError
from stitch.frontend.onnx import from_onnx
from stitch.program import Array
from tests.support.onnx.node_tests import flat

Verdict = tuple[str, str]


def cases(kind: str) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(load_model_tests(kind=kind))


def model_of(case: Any) -> onnx.ModelProto:
    return case.model or onnx.load(Path(case.model_dir) / "model.onnx")


def data_of(case: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """Inputs and expected outputs of each data set."""
    if case.data_sets is not None:
        for inputs, outputs in case.data_sets:
            yield [_array(x) for x in inputs], [_array(y) for y in outputs]
        return
    for folder in sorted(Path(case.model_dir).glob("test_data_set_*")):
        yield _stored(folder, "input"), _stored(folder, "output")


def _stored(folder: Path, side: str) -> list[Array]:
    count = len(list(folder.glob(f"{side}_*.pb")))
    tensors = [onnx.load_tensor(folder / f"{side}_{i}.pb") for i in range(count)]
    return [numpy_helper.to_array(tensor) for tensor in tensors]


def _array(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.ndarray | np.generic) else value


def verdict(device: stitch.Device, case: Any) -> str:
    """`right`, `refused`, or what is wrong."""
    proto = model_of(case)
    for inputs, expected in data_of(case):
        try:
            program = device.load(stitch.compile(from_onnx(proto, inputs)))
            made = program(*flat(inputs))
            found = [t.numpy() for t in (made if isinstance(made, tuple) else (made,))]
        except StitchError:
            return "refused"
        wanted = flat(expected)
        if len(found) != len(wanted):
            return f"{len(found)} outputs of {len(wanted)}"
        for mine, other in zip(found, wanted, strict=True):
            problem = difference(mine, np.asarray(other), case.rtol, case.atol)
            if problem:
                return problem
    return "right"


def difference(mine: Array, other: Array, rtol: float, atol: float) -> str:
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return f"{mine.dtype}{mine.shape} for {other.dtype}{other.shape}"
    if mine.dtype.kind not in "fV":
        return "" if np.array_equal(mine, other) else "other numbers"
    narrow = mine.dtype.itemsize == 2
    a, b = mine.astype(np.float64), other.astype(np.float64)
    rtol, atol = max(rtol, 1e-2 * narrow), max(atol, 1e-3 * narrow)
    return "" if np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True) else "other numbers"


def verdicts(chosen: Sequence[Any]) -> list[Verdict]:
    with stitch.open_device("wormhole_n150") as device:
        return [(case.name, verdict(device, case)) for case in chosen]


@pytest.mark.parametrize("kind", ["pytorch-operator", "pytorch-converted"])
def test_models_that_pytorch_exported_are_right(kind: str) -> None:
    chosen = cases(kind)
    assert len(chosen) >= 35
    assert [one for one in verdicts(chosen) if one[1] != "right"] == []


def test_simple_models_are_right_but_for_those_of_texts_and_gradients() -> None:
    found = verdicts(cases("simple"))
    assert len(found) == 23
    assert [one for one in found if one[1] not in ("right", "refused")] == []
    refused = [name for name, how in found if how == "refused"]
    # The preview operator Gradient is one that ONNX Runtime does not run either.
    assert all("strnorm" in name or "gradient_of" in name for name in refused)
    assert len(refused) == 8

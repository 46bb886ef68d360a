"""The torch executor passes the suite of all executors; PyTorch's kernels agree with NumPy's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import stitch
from stitch import ComputationGraphBuilder
from stitch.errors import UsageError
from stitch.ops import KernelArguments, Thunk, infer_types, lookup, resolve_attributes
from stitch.program import NO_ATTRIBUTES, Array, DataType, Operation, ValueType
from stitch.runtime.executors import make_executor, torch_executor
from stitch.runtime.executors.host.numpy_executor import PreparedKernels
from stitch.runtime.executors.prices.operation_prices import OperationPrices
from stitch.runtime.executors.torch_executor import (
    CONVOLUTIONS,
    KERNELS,
    TorchExecutor,
    aten_kernels,
)
from stitch.testing import ExecutorSuite, PlacementSuite
from tests.support.executors.named_prices import ATEN, ATEN_PRICES, TABLE
from tests.support.grids import CAMPAIGN, in_turn, named
from tests.support.operators.one_operation import Row as OneRow
from tests.support.operators.one_operation import one_operation
from tests.support.stitched_models import model, one


class TestTorchExecutor(ExecutorSuite):
    executor: ClassVar[str] = "torch"
    left_out: ClassVar[int] = 8


@CAMPAIGN
class TestTorchExecutorWithAllPlacements(PlacementSuite):
    executor: ClassVar[str] = "torch"
    left_out: ClassVar[int] = 0


def drawn(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).normal(0, 1, shape)


def positive(*shape: int) -> Array:
    return np.abs(drawn(*shape)) + 0.5


def shares(*shape: int) -> Array:
    e = np.exp(drawn(*shape))
    return np.asarray(e / e.sum(-1, keepdims=True))


@dataclass(frozen=True)
class Row:
    """One operation on drawn operands; `outputs` of it are asked for."""

    op: str
    operands: tuple[Array, ...]
    domain: str = ""
    outputs: int = 1
    attributes: Mapping[str, Any] = field(default_factory=dict)


LAYER = (drawn(6, 5, 8), drawn(6, 5, 1), positive(6, 5, 1), drawn(8))
ROWS = (
    *(Row(op, (drawn(3, 50) * 4,)) for op in ("Erf", "Sigmoid", "Softplus", "Tanh")),
    *(
        Row(op, operands, domain, attributes={"approximate": how})
        for how in ("none", "tanh")
        for op, operands, domain in (
            ("Gelu", (drawn(7, 9) * 3,), ""),
            ("GeluGradient", (drawn(7, 9), drawn(7, 9) * 3), "stitch"),
        )
    ),
    Row("Conv", (drawn(2, 5, 9, 8), drawn(6, 5, 3, 3), drawn(6)), attributes={"pads": (1,) * 4}),
    Row("Conv", (drawn(2, 4, 9), drawn(6, 2, 3)), attributes={"group": 2, "strides": (2,)}),
    Row("Conv", (drawn(2, 3, 7, 8, 9), drawn(4, 3, 2, 3, 2)), attributes={"dilations": (2, 1, 3)}),
    Row("Conv", (drawn(1, 3, 8, 8), drawn(4, 3, 3, 3)), attributes={"auto_pad": "SAME_UPPER"}),
    Row("ConvTranspose", (drawn(2, 5, 6, 7), drawn(5, 4, 3, 3), drawn(4)),
        attributes={"pads": (1, 1, 1, 0), "strides": (2, 2), "dilations": (2, 1)}),
    Row("ConvTranspose", (drawn(2, 4, 6), drawn(4, 3, 3)),
        attributes={"group": 2, "strides": (3,), "output_padding": (2,)}),
    Row("ConvWeightGradient", (drawn(2, 5, 9, 8), drawn(2, 6, 5, 4)), "stitch",
        attributes={"kernel_shape": (3, 3), "pads": (1,) * 4, "strides": (2, 2)}),
    Row("ConvWeightGradient", (drawn(2, 4, 9), drawn(2, 6, 7)), "stitch",
        attributes={"kernel_shape": (3,), "group": 2}),
    Row("Gemm", (drawn(4, 6), drawn(6, 5))),
    Row("Gemm", (drawn(4, 6), drawn(6, 5), drawn(5))),
    Row("Gemm", (drawn(6, 4), drawn(5, 6)), attributes={"transA": 1, "transB": 1, "alpha": 0.5}),
    Row("Gemm", (drawn(4, 6), drawn(6, 5), drawn(4, 1)), attributes={"alpha": 2.0, "beta": 0.5}),
    Row("Gemm", (drawn(4, 6), drawn(6, 5), drawn(4, 5) * np.nan), attributes={"beta": 0.0}),
    Row("MatMul", (drawn(4, 6), drawn(6, 5))),
    Row("MatMul", (drawn(2, 3, 6), drawn(6, 5))),
    Row("MatMul", (drawn(2, 3, 4, 6), drawn(2, 3, 6, 5))),
    Row("LayerNormalization", (drawn(6, 5, 8), drawn(8)), outputs=1),
    Row("LayerNormalization", (drawn(6, 5, 8), drawn(8), drawn(8)), outputs=3),
    Row("LayerNormalization", (drawn(6, 5, 8), drawn(5, 8)), attributes={"axis": 1}),
    *(
        Row("LayerNormalizationGradient", (drawn(6, 5, 8) * 2, *LAYER), "stitch", outputs)
        for outputs in (1, 2, 3)
    ),
    *(
        Row("BatchNormalizationGradient", (drawn(4, 3, 5, 6), drawn(4, 3, 5, 6) + far, *figures),
            "stitch", outputs)
        for far, figures, outputs in (
            (0.5, (drawn(3), drawn(3) * 0.2, positive(3)), 3), (0.5, (drawn(3),), 2),
            (100.0, (drawn(3), drawn(3) + 100, positive(3)), 1),
        )
    ),
    *(Row(op, (drawn(4, 5, 6),), attributes={"axis": a}) for op in ("Softmax", "LogSoftmax")
      for a in (-1, 1)),
    *(Row("SoftmaxGradient", (drawn(4, 5, 6), shares(4, 5, 6)), "stitch", attributes={"axis": a})
      for a in (-1, 1)),
)  # fmt: skip


def bound(
    row: Row, operands: Sequence[Array]
) -> tuple[list[Array], Callable[[KernelArguments], Sequence[Thunk] | None], KernelArguments]:
    """Places for the results, the library's binding, and what to bind it to."""
    kinds = [ValueType(a.shape, DataType.from_dtype(a.dtype)) for a in operands]
    made = infer_types(
        row.op, kinds, domain=row.domain, attributes=row.attributes, outputs=row.outputs
    )
    results = [np.full(k.shape, np.nan, operands[0].dtype) for k in made]
    attributes = resolve_attributes(lookup(row.op, row.domain), row.attributes)
    inputs = tuple(range(len(operands)))
    outputs = tuple(range(len(inputs), len(inputs) + row.outputs))
    operation = Operation(row.op, inputs, outputs, row.attributes or NO_ATTRIBUTES, row.domain)
    arguments = KernelArguments(
        tuple(operands), tuple(results), attributes, (False,) * len(operands)
    )
    return results, lambda found: ATEN.bind(operation, found), arguments


def test_every_kernel_has_a_row() -> None:
    assert {(row.domain, row.op) for row in ROWS} == set(KERNELS)


@pytest.mark.parametrize(
    ("dtype", "row"), in_turn([np.float32, np.float64], named(lambda row: row.op, ROWS))
)
def test_a_kernel_agrees_with_numpys_in_every_run(row: Row, dtype: Any) -> None:
    operands = [a.astype(dtype) for a in row.operands]
    for array in operands:
        array.flags.writeable = False
    if row.op == "LayerNormalization" and dtype == np.float64 and row.outputs > 1:
        row = Row(row.op, row.operands, "", row.outputs, {"stash_type": 11})
    results, bind, arguments = bound(row, operands)
    steps = bind(arguments)
    assert steps is not None
    for _ in range(2):
        for made in results:
            made[...] = np.nan
        for step in steps:
            step()
        found = [made.copy() for made in results]
        with np.errstate(all="ignore"):
            for step in lookup(row.op, row.domain).kernel(arguments):
                step()
        for ours, theirs in zip(results, found, strict=True):
            bound_of = (2e-5, 2e-6) if dtype == np.float32 else (1e-7, 1e-9)
            np.testing.assert_allclose(theirs, ours, *bound_of)


def test_heads_of_a_product_are_left_to_numpy() -> None:
    whole = drawn(4, 6, 3 * 8).astype(np.float32)
    heads = whole[:, :, :8].reshape(4, 6, 2, 4).transpose(0, 2, 1, 3)
    row = Row("MatMul", (heads, np.ascontiguousarray(heads.transpose(0, 1, 3, 2))))
    _, bind, arguments = bound(row, row.operands)
    assert bind(arguments) is None
    # Matrices at equal distances are taken as they lie.
    apart = whole[:, :, :8]
    row = Row("MatMul", (apart, np.ascontiguousarray(apart.transpose(0, 2, 1))))
    results, bind, arguments = bound(row, row.operands)
    for step in bind(arguments) or ():
        step()
    np.testing.assert_allclose(results[0], np.matmul(*row.operands), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "row",
    [
        Row("LayerNormalization", (drawn(6, 8), drawn(6, 1))),
        Row("MatMul", (drawn(2, 4, 6), drawn(1, 6, 5))),
        Row("MatMul", (drawn(6), drawn(6, 5))),
        Row("Erf", (drawn(9)[::-1],)),
        Row("Conv", (drawn(2, 3, 8), drawn(4, 3, 3)), attributes={"pads": (1, 0)}),
        Row("ConvTranspose", (drawn(2, 3, 8), drawn(3, 4, 3)), attributes={"pads": (0, 1)}),
        Row(
            "ConvWeightGradient",
            (drawn(2, 3, 8), drawn(2, 4, 5)),
            "stitch",
            attributes={"kernel_shape": (3,)},
        ),
        Row("BatchNormalizationGradient", (drawn(4, 3, 15), drawn(4, 3, 15), drawn(3)), "stitch"),
        Row("BatchNormalizationGradient", (drawn(40, 3), drawn(40, 3), drawn(3)), "stitch"),
    ],
    ids=[
        "a scale of other shape",
        "a batch that broadcasts",
        "a vector",
        "backwards",
        "padded at one end",
        "cut at the end",
        "windows that were not seen",
        "few places of each channel",
        "samples without places",
    ],
)
def test_forms_that_do_not_suit_it_are_left_to_numpy(row: Row) -> None:
    _, bind, arguments = bound(row, row.operands)
    assert bind(arguments) is None


CONVOLVED = [row for row in ROWS if (row.domain, row.op) in CONVOLUTIONS]


@pytest.mark.parametrize("row", CONVOLVED, ids=lambda row: row.op)
def test_a_convolution_in_pieces_is_that_of_the_whole_batch(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = [np.concatenate([a] * 2) if i == 0 or row.domain else a
                for i, a in enumerate(row.operands)]  # fmt: skip
    found = []
    for nbytes in (1 << 30, 1):
        monkeypatch.setattr(torch_executor, "PIECE_NBYTES", nbytes)
        results, bind, arguments = bound(row, operands)
        steps = bind(arguments) or ()
        assert len(steps) == (1 if nbytes > 1 else len(operands[0]))
        for step in steps:
            step()
        found.append(results[0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6, atol=1e-9)
    # The pieces are for oneDNN: not on a card, nor where there is no memory.
    inputs, outputs = (
        [torch.empty(a.shape, device="meta") for a in side if a is not None]
        for side in (arguments.inputs, arguments.outputs)
    )
    steps = KERNELS[row.domain, row.op](inputs, outputs, arguments.attributes) or ()
    assert len(steps) == 1


def layer(b: ComputationGraphBuilder) -> None:
    x = b.input("x", (256, 128), "float32")
    w, back = (b.parameter(n, (drawn(*s) * 0.1).astype(np.float32))
               for n, s in (("w", (128, 512)), ("back", (512, 128))))  # fmt: skip
    b.output("y", b.matmul(b.op("Gelu", b.matmul(x, w)), back) + x)


@pytest.mark.parametrize("with_onnxruntime", [True, False])
def test_a_layer_gives_numpys_numbers(with_onnxruntime: bool) -> None:
    executor = TorchExecutor(TABLE)
    if not with_onnxruntime:
        executor.sessions = None
    x = drawn(256, 128).astype(np.float32)
    compiled = model("layer", layer, target="host")
    with (
        stitch.open_device("host") as device,
        stitch.open_device("host", executor=executor) as fast,
    ):
        right, found = (one(d.load(compiled)(x)).numpy() for d in (device, fast))
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)
    prepared = executor.prepare(compiled.binary.programs[0], fast.machine.shape)
    assert isinstance(prepared, PreparedKernels) and prepared.chosen


def test_what_is_bound_in_inference_mode_runs_outside_of_it() -> None:
    row = Row("Gemm", (drawn(64, 6), drawn(5, 6)), attributes={"transB": 1})
    with torch.inference_mode():
        results, bind, arguments = bound(row, row.operands)
        steps = bind(arguments) or ()
    with torch.autocast("cpu", torch.bfloat16):
        for step in steps:
            step()
    np.testing.assert_allclose(results[0], row.operands[0] @ row.operands[1].T)


def test_a_convolution_keeps_its_type_where_torch_would_choose_another() -> None:
    row = Row("Conv", (drawn(2, 3, 8, 8).astype(np.float32), drawn(4, 3, 3, 3).astype(np.float32)))
    results, bind, arguments = bound(row, row.operands)
    steps = bind(arguments) or ()
    with torch.autocast("cpu", torch.bfloat16):
        for step in steps:
            step()
    right = torch.conv2d(*map(torch.from_numpy, row.operands)).numpy()
    np.testing.assert_allclose(results[0], right, rtol=1e-5, atol=1e-5)


def test_threads_are_torchs_own() -> None:
    with pytest.raises(UsageError, match="takes no number of threads") as failure:
        make_executor("torch", 2)
    assert "torch.set_num_threads" in str(failure.value)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = TorchExecutor().library
        torch.set_num_threads(2)
        made = TorchExecutor()
        # More of ONNX Runtime's would stand in the way of torch's.
        assert made.sessions.threads == 1
        assert alone is not None and made.library is not None
        one = one_operation(OneRow("MatMul", ["f32[512,512]", "f32[512,512]"]))
        prices = [by.price(one.program, one.operation, 1 << 27, 1) for by in (alone, made.library)]
        assert prices[1] < 0.6 * prices[0]
    finally:
        torch.set_num_threads(before)


def test_a_convolution_without_a_price_is_left_to_others() -> None:
    one = one_operation(OneRow("Conv", ["f32[1,3,8,8]", "f32[4,3,3,3]"]))
    library = aten_kernels(replace(ATEN_PRICES, convolutions=None))
    assert library.price(one.program, one.operation, 1, 1) == float("inf")


def test_forms_of_operations_do_not_keep_the_prices_of_a_dropped_library() -> None:
    binary = stitch.compile(np.tanh, (np.ones((3, 50), np.float32),), target="host").binary
    library = aten_kernels(ATEN_PRICES)
    OperationPrices(binary.program(0), TABLE, 1).offer(library)
    price = weakref.ref(library.price)
    del library
    gc.collect()
    assert price() is None

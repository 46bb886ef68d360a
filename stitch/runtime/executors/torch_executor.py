"""The torch executor: the automatic executor with PyTorch's kernels where they are much faster.

Layouts that ATen would copy, integers and empty arrays are left to NumPy. Needs the extra `torch`;
importing torch takes seconds and some 200 MiB.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.machine import MachineShape
from stitch.ops import (
    KernelArguments,
    Thunk,
    batch_gradient_steps,
    transposed_windows,
    windows_of,
    workspace,
)
from stitch.program import ABSENT, Array, Operation, Program, ValueType
from stitch.runtime.executors.automatic import AutomaticExecutor
from stitch.runtime.executors.executor import PreparedProgram, Workspace
from stitch.runtime.executors.host import KernelLibrary, PreparedKernels
from stitch.runtime.executors.prices import (
    AtenConvolutions,
    AtenPrices,
    Prices,
    operator_name,
    products_rate,
)

# Convolutions, transposed convolutions and weight gradients, which oneDNN computes

Shape = tuple[int, ...]
_ATEN = torch.ops.aten
CONVOLUTIONS = frozenset({("", "Conv"), ("", "ConvTranspose"), ("stitch", "ConvWeightGradient")})
#: Channels of a block.
BLOCK = 16
#: Images of at most this many channels are read in the plain layout.
FEW_CHANNELS = 3
#: Bytes of images per call: for more, oneDNN allocates and releases its converted images in each
#: call (a weight gradient of 64 samples of 64x16x16: 15 ms whole, 10 ms in pieces).
PIECE_NBYTES = 1 << 21
#: Spatial axes that ATen's convolutions have at most.
MAX_AXES = 3


@dataclass(frozen=True, slots=True)
class AtenWindows:
    """Windows as ATen's arguments; `filled` is the work with padded blocks over that without."""

    strides: Shape
    padding: Shape
    dilations: Shape
    extra: Shape
    groups: int
    filled: float


def aten_windows(
    op: str, operands: Sequence[Shape], result: Shape, attributes: Mapping[str, Any]
) -> AtenWindows | None:
    """Return a convolution's windows as ATen's arguments; None if ATen cannot express them."""
    x, other = operands[:2]
    if not 1 <= len(x) - 2 <= MAX_AXES or 0 in (*x, *other, *result):
        return None
    if op == "ConvTranspose":
        return _transposed(x, other[2:], result, attributes)
    if op == "Conv":
        return _plain(x, other[2:], result, attributes)
    return _plain(x, result[2:], other, attributes)


def _plain(x: Shape, kernel: Shape, y: Shape, attributes: Mapping[str, Any]) -> AtenWindows | None:
    """Return the windows of a convolution of `x` to `y`, or of its weight gradient."""
    windows = windows_of(attributes, x[2:], kernel)
    if windows.begin != windows.end or windows.output != y[2:]:
        return None
    groups, filled = int(attributes.get("group", 1)), 1.0
    if groups == 1:
        filled = _filled(y[1]) * (1.0 if x[1] <= FEW_CHANNELS else _filled(x[1]))
    extra = (0,) * len(kernel)
    return AtenWindows(windows.strides, windows.begin, windows.dilations, extra, groups, filled)


def _transposed(
    x: Shape, kernel: Shape, result: Shape, attributes: Mapping[str, Any]
) -> AtenWindows | None:
    """Return the windows of a transposed convolution, which may leave elements at the end."""
    windows = transposed_windows(attributes, x[2:], kernel)
    strides, dilations = windows.strides, windows.dilations
    extra = tuple(
        size - (places - 1) * stride + 2 * begin - dilation * (length - 1) - 1
        for size, places, stride, begin, dilation, length in zip(
            result[2:], x[2:], strides, windows.begin, dilations, kernel, strict=True
        )
    )
    bounds = map(max, strides, dilations)
    if not all(0 <= more < bound for more, bound in zip(extra, bounds, strict=True)):
        return None
    groups = int(attributes.get("group", 1))
    filled = _filled(x[1]) * _filled(result[1]) if groups == 1 else 1.0
    return AtenWindows(strides, windows.begin, dilations, extra, groups, filled)


def _filled(channels: int) -> float:
    return -(-channels // BLOCK) * BLOCK / channels


def convolution(
    op: str, x: Sequence[Any], results: Sequence[Any], attributes: Mapping[str, Any]
) -> Sequence[Thunk] | None:
    """Return a convolution's steps, some samples at a time; None if ATen cannot express it."""
    first, second, out = *x[:2], results[0]
    windows = aten_windows(
        op, [tuple(first.shape), tuple(second.shape)], tuple(out.shape), attributes
    )
    if windows is None:
        return None
    sizes = windows.strides, windows.padding, windows.dilations
    if op == "ConvWeightGradient":
        samples = _samples_per_piece(first, second)
        # ATen reads only the shape of the weights, which `out` has.
        rest = out, None, *sizes, False, windows.extra, windows.groups, [False, True, False]
        pairs = zip(first.split(samples), second.split(samples), strict=True)
        return [
            partial(_add_to if index else copy_to, out, _weight_gradient, gradient, image, *rest)
            for index, (image, gradient) in enumerate(pairs)
        ]
    samples, bias = _samples_per_piece(first, out), (*x, None)[2]
    kernel = second, bias, *sizes, op == "ConvTranspose", windows.extra, windows.groups
    pairs = zip(first.split(samples), out.split(samples), strict=True)
    return [partial(copy_to, part, _ATEN.convolution, image, *kernel) for image, part in pairs]


def _samples_per_piece(*images: Any) -> int:
    if images[0].device.type != "cpu":
        return len(images[0])  # oneDNN computes on the processor only.
    samples, nbytes = len(images[0]), sum(int(image.nbytes) for image in images)
    pieces = -(-nbytes // PIECE_NBYTES)
    return -(-samples // pieces)


def _weight_gradient(*operands: Any) -> Any:
    return _ATEN.convolution_backward(*operands)[1]


def copy_to(out: Any, function: Callable[..., Any], *operands: Any) -> None:
    """Call a function without an `out=` overload."""
    out.copy_(function(*operands))


def _add_to(out: Any, function: Callable[..., Any], *operands: Any) -> None:
    out.add_(function(*operands))


#: (operands, results, attributes) to steps, on tensors; None to leave the operation to NumPy.
Binding = Callable[[list[Any], list[Any], Mapping[str, Any]], Sequence[Thunk] | None]

#: Rows per column of a transposed right operand from which it is copied.
LONG = 8
#: Elements of a channel below which ATen is slower than NumPy.
MIN_CHANNEL_SIZE = 16


def _unary(function: Callable[..., Any]) -> Binding:
    def bind(x: list[Any], results: list[Any], _: Mapping[str, Any]) -> Sequence[Thunk]:
        return (partial(function, x[0], out=results[0]),)

    return bind


def _matmul(x: list[Any], results: list[Any], _: Mapping[str, Any]) -> Sequence[Thunk] | None:
    (a, b), out = x, results[0]
    if b.ndim == 2 and a.ndim >= 2:
        # All rows on the left form one tall matrix.
        return (partial(torch.mm, a.reshape(-1, a.shape[-1]), b, out=out.view(-1, b.shape[1])),)
    if a.ndim < 3 or a.shape[:-2] != b.shape[:-2]:
        return None
    # Raises if the matrices of a batch are not at equal distances.
    a, b, out = (m.view(-1, *m.shape[-2:]) for m in (a, b, out))
    return (partial(torch.bmm, a, b, out=out),)


def _gemm(x: list[Any], results: list[Any], attributes: Mapping[str, Any]) -> Sequence[Thunk]:
    before: list[Thunk] = []
    a = x[0].t() if attributes["transA"] else x[0]
    b = x[1]
    if attributes["transB"]:
        b = b.t()
        if len(a) >= LONG * b.shape[1] and b.shape[0] > b.shape[1]:
            # Reading it by columns costs a tenth of the product, more than a copy.
            b = _tensor(workspace(tuple(b.shape), b.numpy().dtype))
            before.append(partial(b.copy_, x[1].t()))
    alpha, beta, bias = attributes["alpha"], attributes["beta"], x[2] if len(x) > 2 else None
    if bias is not None and beta == alpha == 1.0:
        # addmm would first copy the bias over the result: a little slower.
        product = partial(torch.mm, a, b, out=results[0])
        return (*before, product, partial(torch.add, results[0], bias, out=results[0]))
    if bias is not None and beta != 0.0:
        product = partial(torch.addmm, bias, a, b, beta=beta, alpha=alpha, out=results[0])
        return (*before, product)
    product = partial(torch.mm, a, b, out=results[0])
    scaled = () if alpha == 1.0 else (partial(torch.mul, results[0], alpha, out=results[0]),)
    return (*before, product, *scaled)


def _gelu(x: list[Any], results: list[Any], attributes: Mapping[str, Any]) -> Sequence[Thunk]:
    return (partial(_ATEN.gelu.out, x[0], approximate=attributes["approximate"], out=results[0]),)


def _gelu_gradient(
    x: list[Any], results: list[Any], attributes: Mapping[str, Any]
) -> Sequence[Thunk]:
    how = attributes["approximate"]
    function = _ATEN.gelu_backward.grad_input
    return (partial(function, x[0], x[1], approximate=how, grad_input=results[0]),)


def _layer(
    x: list[Any], results: list[Any], attributes: Mapping[str, Any]
) -> Sequence[Thunk] | None:
    operand, scale, shift = (*x, None)[:3]
    normalized = _normalized(operand, attributes)
    if any(v is not None and v.shape != normalized for v in (scale, shift)):
        return None
    epsilon = attributes["epsilon"]
    function = partial(_ATEN.native_layer_norm, operand, normalized, scale, shift, epsilon)
    return (partial(copy_results, function, results),)


def _layer_gradient(
    x: list[Any], results: list[Any], attributes: Mapping[str, Any]
) -> Sequence[Thunk]:
    gradient, operand, mean, inverse, scale = x
    normalized = _normalized(operand, attributes)
    # Of the shift, ATen reads only that it exists: pass the scale.
    function = partial(
        _ATEN.native_layer_norm_backward, gradient, operand, normalized, mean, inverse,
        scale, scale, [True] * 3,
    )  # fmt: skip
    return (partial(copy_results, function, results),)


def _batch_gradient(
    x: list[Any], results: list[Any], attributes: Mapping[str, Any]
) -> Sequence[Thunk] | None:
    """Use NumPy's sums and ATen's last pass: its own gradient allocates, and is no faster."""
    operand = x[1]
    if operand.ndim < 3 or math.prod(operand.shape[2:]) < MIN_CHANNEL_SIZE:
        return None
    inputs, outputs = (tuple(tensor.numpy() for tensor in side) for side in (x, results))
    return batch_gradient_steps(KernelArguments(inputs, outputs, attributes, ()), _last_pass)


def _last_pass(
    x: Array, gradient: Array, out: Array, along: Array, offset: Array, factor: Array
) -> Sequence[Thunk]:
    """Compute x along + offset as a normalization by means of 0 and variances of 1."""
    image, upstream, result, slope, shift, share = map(
        _tensor, (x, gradient, out, along, offset, factor)
    )
    zeros, ones = torch.zeros_like(slope), torch.ones_like(slope)
    unused = {name: slope.new_empty(0) for name in ("save_mean", "save_invstd")}
    return (
        partial(
            _ATEN.native_batch_norm.out, image, slope, shift, zeros, ones, False, 0.0, 0.0,
            out=result, **unused,
        ),
        partial(torch.addcmul, result, upstream, share.view(1, -1, 1), out=result),
    )  # fmt: skip


def copy_results(function: Callable[[], Sequence[Any]], outputs: Sequence[Any]) -> None:
    """Copy a function's results; its `out=` overload copies too, and is slower by a quarter."""
    for output, result in zip(outputs, function(), strict=False):
        output.copy_(result)


def _normalized(operand: Any, attributes: Mapping[str, Any]) -> Any:
    return operand.shape[attributes["axis"] % operand.ndim :]


def _softmax(function: Any) -> Binding:
    def bind(x: list[Any], results: list[Any], attributes: Mapping[str, Any]) -> Sequence[Thunk]:
        return (partial(function, x[0], attributes["axis"], False, out=results[0]),)

    return bind


def _softmax_gradient(
    x: list[Any], results: list[Any], attributes: Mapping[str, Any]
) -> Sequence[Thunk]:
    function = _ATEN._softmax_backward_data.out
    return (partial(function, *x, attributes["axis"], x[0].dtype, grad_input=results[0]),)


#: The binding of each operator, by domain and name.
KERNELS: Mapping[tuple[str, str], Binding] = {
    **{(domain, op): partial(convolution, op) for domain, op in sorted(CONVOLUTIONS)},
    ("", "Erf"): _unary(torch.erf),
    ("", "Gelu"): _gelu,
    ("", "Gemm"): _gemm,
    ("", "LayerNormalization"): _layer,
    ("", "LogSoftmax"): _softmax(_ATEN._log_softmax.out),
    ("", "MatMul"): _matmul,
    ("", "Sigmoid"): _unary(torch.sigmoid),
    ("", "Softmax"): _softmax(_ATEN._softmax.out),
    ("", "Softplus"): _unary(_ATEN.softplus.out),
    ("", "Tanh"): _unary(torch.tanh),
    ("stitch", "BatchNormalizationGradient"): _batch_gradient,
    ("stitch", "GeluGradient"): _gelu_gradient,
    ("stitch", "LayerNormalizationGradient"): _layer_gradient,
    ("stitch", "SoftmaxGradient"): _softmax_gradient,
}
#: Operators priced by multiply-adds; others by the elements of the longest operand or result.
PRODUCTS = frozenset({"Gemm", "MatMul"})


def aten_kernels(prices: AtenPrices, threads: int = 1) -> KernelLibrary:
    """Return PyTorch's kernels as a library, priced for `threads` threads."""
    return KernelLibrary(partial(_price, prices, threads), _bind)


def _price(
    prices: AtenPrices, threads: int, program: Program, operation: Operation, products: int,
    batch: int,
) -> float:  # fmt: skip
    kinds = [program.values[v].type for v in (*operation.inputs, *operation.outputs) if v != ABSENT]
    if (operation.domain, operation.op) not in KERNELS or any(map(_is_unsupported, kinds)):
        return math.inf
    if (operation.domain, operation.op) in CONVOLUTIONS:
        return _convolution_price(prices.convolutions, threads, program, operation, products)
    if operation.op in PRODUCTS:
        spent = products / products_rate(prices, program, operation).at(products)
        spent += batch * prices.matrix_us if batch > 1 else 0.0
    else:
        size = max(math.prod(k.shape) for k in kinds)
        figure = prices.functions_ns.get(operator_name(operation))
        spent = math.inf if figure is None else size * figure.at(size) / 1000
    return prices.call_us + spent / threads


def _convolution_price(
    prices: AtenConvolutions | None, threads: int, program: Program, operation: Operation,
    products: int,
) -> float:  # fmt: skip
    *operands, result = (
        program.values[v].type.shape for v in (*operation.inputs[:2], operation.outputs[0])
    )
    windows = aten_windows(operation.op, operands, result, operation.attributes)
    if prices is None or windows is None:
        return math.inf
    size, computed = sum(map(math.prod, (*operands, result))), products * windows.filled
    spent = size * prices.element_ns.at(size) / 1000
    spent += computed / prices.products_per_us.at(int(computed))
    return prices.call_us + spent / threads


def _bind(operation: Operation, arguments: KernelArguments) -> Sequence[Thunk] | None:
    """Return an operation's steps; None if ATen would copy its arrays."""
    results = [array for array in arguments.outputs if array is not None]
    if len({a.dtype for a in (*arguments.inputs, *results) if a is not None}) != 1:
        return None
    binding = KERNELS[operation.domain, operation.op]
    # Tensors of inference mode cannot be written outside of it.
    with suppress(RuntimeError, ValueError), torch.inference_mode(False):
        operands = [None if a is None else _tensor(a) for a in arguments.inputs]
        return binding(operands, [_tensor(a) for a in results], arguments.attributes)
    return None


def _is_unsupported(kind: ValueType) -> bool:
    return 0 in kind.shape or kind.data_type.compute_dtype.kind != "f"


def _tensor(array: Array) -> Any:
    """Return a tensor over an array's bytes; raises `ValueError` for negative strides."""
    with warnings.catch_warnings():
        # Read-only arrays are operands, which are never written.
        warnings.simplefilter("ignore")
        return torch.from_numpy(np.asarray(array))


class TorchExecutor(AutomaticExecutor):
    """Also chooses PyTorch's kernels, on the threads of `torch.set_num_threads`.

    ONNX Runtime has one thread here: others would spin on the cores of PyTorch's threads.
    """

    name = "torch"

    def __init__(self, prices: Prices | None = None) -> None:
        super().__init__(1, prices=prices)
        if self.prices.torch is not None:
            self.library = aten_kernels(self.prices.torch, torch.get_num_threads())

    def takes_foreign(self) -> bool:
        # ONNX Runtime is optional here.
        return False

    def prepare_alone(self, program: Program, machine: MachineShape) -> PreparedProgram:
        """Compute by ATen whatever it has a kernel for; raises `CompileError` if it has none."""
        chosen = [i for i, o in enumerate(program.operations) if (o.domain, o.op) in KERNELS]
        if not chosen:
            raise CompileError(
                "the torch executor has no PyTorch kernel for this program", where=program.name
            )
        return PreparedKernels(program, machine, Workspace(), (), self.library, chosen)

    def link_obstacle(self, programs: Sequence[Program]) -> str:
        # The order of a sum depends on the operations around it.
        return "the sums of PyTorch's kernels would differ by 2e-7"

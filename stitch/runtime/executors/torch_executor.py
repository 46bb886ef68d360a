"""The torch executor: as the automatic one, with PyTorch's kernels beside NumPy's, for operators
where ATen is much faster; forms that it would have to copy, integers, and arrays without elements
are left to NumPy.

It imports torch, which takes seconds and some 200 MiB; a process that has it already pays nothing.
Needs the extra `torch`; imported only when asked for.
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
from stitch.runtime.executors.executor import LinkTerms, PreparedProgram, Workspace
from stitch.runtime.executors.host import KernelLibrary, PreparedKernels
from stitch.runtime.executors.prices import AtenPrices, Prices, operator_name, products_rate

# --------------------------------------------------------------------------------------------------
# PyTorch's convolutions, transposed ones, and the gradients of weights, which oneDNN computes.

Shape = tuple[int, ...]
_ATEN = torch.ops.aten
CONVOLUTIONS = frozenset({("", "Conv"), ("", "ConvTranspose"), ("stitch", "ConvWeightGradient")})
#: Channels of a block.
BLOCK = 16
#: Images of so few channels are read as they are.
FEW_CHANNELS = 3
#: As many samples are handled at a time as have images of this many bytes (at least one): what is
#: arranged lies in memory that the system is asked for, and given back, call by call, where there
#: is more of it. A gradient of 64 samples of 64x16x16 took 15 ms whole, 10 in pieces of 4 MiB; one
#: of 64 of 16x14x14, 2.3 MiB with its results, 2.0 ms whole, 1.3 in two pieces.
PIECE_NBYTES = 1 << 21
#: The most axes of places that ATen's convolutions have.
MOST_AXES = 3


@dataclass(frozen=True, slots=True)
class WindowsOfAten:
    """Where windows lie, in ATen's words; `filled`: how many times as much full blocks compute."""

    strides: Shape
    padding: Shape
    dilations: Shape
    extra: Shape
    groups: int
    filled: float


def laid(
    op: str, operands: Sequence[Shape], result: Shape, attributes: Mapping[str, Any]
) -> WindowsOfAten | None:
    """How a convolution's windows lie; None where ATen has no words for it."""
    x, other = operands[:2]
    if not 1 <= len(x) - 2 <= MOST_AXES or 0 in (*x, *other, *result):
        return None
    if op == "ConvTranspose":
        return _spread(x, other[2:], result, attributes)
    if op == "Conv":
        return _seen(x, other[2:], result, attributes)
    return _seen(x, result[2:], other, attributes)


def _seen(
    x: Shape, kernel: Shape, seen: Shape, attributes: Mapping[str, Any]
) -> WindowsOfAten | None:
    """Of an image in which windows are seen, or were."""
    windows = windows_of(attributes, x[2:], kernel)
    if windows.begin != windows.end or windows.output != seen[2:]:
        return None
    groups, filled = int(attributes.get("group", 1)), 1.0
    if groups == 1:
        filled = _filled(seen[1]) * (1.0 if x[1] <= FEW_CHANNELS else _filled(x[1]))
    extra = (0,) * len(kernel)
    return WindowsOfAten(windows.strides, windows.begin, windows.dilations, extra, groups, filled)


def _spread(
    x: Shape, kernel: Shape, result: Shape, attributes: Mapping[str, Any]
) -> WindowsOfAten | None:
    """Of an image that windows are spread over; what they do not reach is at its end."""
    windows = transposed_windows(attributes, x[2:], kernel)
    strides, dilations = windows.strides, windows.dilations
    extra = tuple(
        size - (places - 1) * stride + 2 * begin - dilation * (length - 1) - 1
        for size, places, stride, begin, dilation, length in zip(
            result[2:], x[2:], strides, windows.begin, dilations, kernel, strict=True
        )
    )
    most = map(max, strides, dilations)
    if not all(0 <= more < bound for more, bound in zip(extra, most, strict=True)):
        return None
    groups = int(attributes.get("group", 1))
    filled = _filled(x[1]) * _filled(result[1]) if groups == 1 else 1.0
    return WindowsOfAten(strides, windows.begin, dilations, extra, groups, filled)


def _filled(channels: int) -> float:
    return -(-channels // BLOCK) * BLOCK / channels


def convolution(
    op: str, x: Sequence[Any], results: Sequence[Any], attributes: Mapping[str, Any]
) -> Sequence[Thunk] | None:
    """The steps of one, some samples at a time; None where ATen cannot be told how windows lie."""
    first, second, place = *x[:2], results[0]
    how = laid(op, [tuple(first.shape), tuple(second.shape)], tuple(place.shape), attributes)
    if how is None:
        return None
    places = how.strides, how.padding, how.dilations
    if op == "ConvWeightGradient":
        at_once = _at_once(first, second)
        # Of the weights only the shape is looked at: their gradient's place has it.
        rest = place, None, *places, False, how.extra, how.groups, [False, True, False]
        pairs = zip(first.split(at_once), second.split(at_once), strict=True)
        return [
            partial(
                _add_onto if index else _write_into, place, _weight_gradient, seen, image, *rest
            )
            for index, (image, seen) in enumerate(pairs)
        ]
    at_once, bias, is_transposed = _at_once(first, place), (*x, None)[2], op == "ConvTranspose"
    kernel = second, bias, *places, is_transposed, how.extra, how.groups
    pairs = zip(first.split(at_once), place.split(at_once), strict=True)
    return [partial(_write_into, made, _ATEN.convolution, image, *kernel) for image, made in pairs]


def _at_once(*images: Any) -> int:
    """Samples of a piece: about as many in each."""
    samples, nbytes = len(images[0]), sum(int(image.nbytes) for image in images)
    pieces = -(-nbytes // PIECE_NBYTES)
    return -(-samples // pieces)


def _weight_gradient(*operands: Any) -> Any:
    return _ATEN.convolution_backward(*operands)[1]


def _write_into(place: Any, function: Callable[..., Any], *operands: Any) -> None:
    """The result of a function that has no form which writes into a place."""
    place.copy_(function(*operands))


def _add_onto(place: Any, function: Callable[..., Any], *operands: Any) -> None:
    place.add_(function(*operands))


#: Tensors over the operands and results, and the attributes, to steps; None where NumPy shall.
Binding = Callable[[list[Any], list[Any], Mapping[str, Any]], Sequence[Thunk] | None]

#: From so many rows for each column of the right operand on its transpose is copied.
LONG = 8
#: ATen takes longer where a channel has fewer places in an image.
FEW_PLACES = 16


def _unary(function: Callable[..., Any]) -> Binding:
    def bind(x: list[Any], results: list[Any], _: Mapping[str, Any]) -> Sequence[Thunk]:
        return (partial(function, x[0], out=results[0]),)

    return bind


def _matmul(x: list[Any], results: list[Any], _: Mapping[str, Any]) -> Sequence[Thunk] | None:
    (a, b), out = x, results[0]
    if b.ndim == 2 and a.ndim >= 2:
        # One matrix on the right: all rows on the left are one tall matrix.
        return (partial(torch.mm, a.reshape(-1, a.shape[-1]), b, out=out.view(-1, b.shape[1])),)
    if a.ndim < 3 or a.shape[:-2] != b.shape[:-2]:
        return None
    # Raises where the matrices of a batch do not lie at equal distances.
    a, b, out = (m.view(-1, *m.shape[-2:]) for m in (a, b, out))
    return (partial(torch.bmm, a, b, out=out),)


def _gemm(x: list[Any], results: list[Any], attributes: Mapping[str, Any]) -> Sequence[Thunk]:
    before: list[Thunk] = []
    a = x[0].t() if attributes["transA"] else x[0]
    b = x[1]
    if attributes["transB"]:
        b = b.t()
        if len(a) >= LONG * b.shape[1] and b.shape[0] > b.shape[1]:
            # Read by columns it costs a tenth more of the product than to copy it costs.
            b = _tensor(workspace(tuple(b.shape), b.numpy().dtype))
            before.append(partial(b.copy_, x[1].t()))
    alpha, beta, bias = attributes["alpha"], attributes["beta"], x[2] if len(x) > 2 else None
    if bias is not None and beta == alpha == 1.0:
        # In one call it spreads the bias over the result first, and adds to that: a little slower.
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
    return (partial(_copied, function, results),)


def _layer_gradient(
    x: list[Any], results: list[Any], attributes: Mapping[str, Any]
) -> Sequence[Thunk]:
    gradient, operand, mean, inverse, scale = x
    normalized = _normalized(operand, attributes)
    # In the shift's place, which decides nothing but that there is one, stands the scale again.
    function = partial(
        _ATEN.native_layer_norm_backward, gradient, operand, normalized, mean, inverse,
        scale, scale, [True] * 3,
    )  # fmt: skip
    return (partial(_copied, function, results),)


def _batch_gradient(
    x: list[Any], results: list[Any], attributes: Mapping[str, Any]
) -> Sequence[Thunk] | None:
    """Our sums, and ATen's last pass: its own gradient makes all results anew, and is no faster."""
    operand = x[1]
    if operand.ndim < 3 or math.prod(operand.shape[2:]) < FEW_PLACES:
        return None
    inputs, outputs = (tuple(tensor.numpy() for tensor in side) for side in (x, results))
    return batch_gradient_steps(KernelArguments(inputs, outputs, attributes, ()), _last_pass)


def _last_pass(
    x: Array, gradient: Array, out: Array, along: Array, offset: Array, factor: Array
) -> Sequence[Thunk]:
    """A normalization by means of zero and variances of one is x along + offset."""
    image, given, place, slope, shift, share = map(
        _tensor, (x, gradient, out, along, offset, factor)
    )
    zeros, ones = torch.zeros_like(slope), torch.ones_like(slope)
    unused = {name: torch.empty(0, dtype=slope.dtype) for name in ("save_mean", "save_invstd")}
    return (
        partial(
            _ATEN.native_batch_norm.out, image, slope, shift, zeros, ones, False, 0.0, 0.0,
            out=place, **unused,
        ),
        partial(torch.addcmul, place, given, share.view(1, -1, 1), out=place),
    )  # fmt: skip


def _copied(function: Callable[[], Sequence[Any]], places: Sequence[Any]) -> None:
    """Results of a function that has no form which writes into places.

    Its `out=` overload copies too, and takes a quarter longer (0.57 and 0.45 ms for 1 MiB).
    """
    for place, result in zip(places, function(), strict=False):
        place.copy_(result)


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
#: Priced by their multiply-adds; the others by elements of the longest operand or result.
PRODUCTS = frozenset({"Gemm", "MatMul"})


@dataclass(frozen=True, slots=True)
class AtenKernels(KernelLibrary):
    """PyTorch's kernels as a library, priced for so many threads."""

    prices: AtenPrices
    threads: int = 1

    def price(self, program: Program, operation: Operation, products: int, batch: int) -> float:
        """Microseconds of an operation; infinite where there is no kernel for it, or no price.

        `products` are its multiply-adds, `batch` how many matrices it multiplies.
        """
        kinds = [
            program.values[v].type for v in (*operation.inputs, *operation.outputs) if v != ABSENT
        ]
        if (operation.domain, operation.op) not in KERNELS or any(map(_is_left, kinds)):
            return math.inf
        if (operation.domain, operation.op) in CONVOLUTIONS:
            return self._convolution_price(program, operation, products)
        if operation.op in PRODUCTS:
            spent = products / products_rate(self.prices, program, operation).at(products)
            spent += batch * self.prices.matrix_us if batch > 1 else 0.0
        else:
            size, figures = max(math.prod(k.shape) for k in kinds), self.prices.functions_ns
            figure = figures.get(operator_name(operation))
            spent = math.inf if figure is None else size * figure.at(size) / 1000
        return self.prices.call_us + spent / self.threads

    def _convolution_price(self, program: Program, operation: Operation, products: int) -> float:
        prices = self.prices.convolutions
        if prices is None:
            return math.inf
        *operands, result = (
            program.values[v].type.shape for v in (*operation.inputs[:2], operation.outputs[0])
        )
        how = laid(operation.op, operands, result, operation.attributes)
        if how is None:
            return math.inf
        # Nothing of the weights is as long as the images are.
        size, computed = sum(map(math.prod, (*operands, result))), products * how.filled
        spent = size * prices.element_ns.at(size) / 1000
        spent += computed / prices.products_per_us.at(int(computed))
        return prices.call_us + spent / self.threads

    def bind(self, operation: Operation, arguments: KernelArguments) -> Sequence[Thunk] | None:
        """The steps of an operation; None where its arrays have a form that ATen would copy."""
        results = [array for array in arguments.outputs if array is not None]
        if len({a.dtype for a in (*arguments.inputs, *results) if a is not None}) != 1:
            return None
        binding = KERNELS[operation.domain, operation.op]
        # Tensors of inference mode could not be written to by a later call outside of it.
        with suppress(RuntimeError, ValueError), torch.inference_mode(False):
            operands = [None if a is None else _tensor(a) for a in arguments.inputs]
            return binding(operands, [_tensor(a) for a in results], arguments.attributes)
        return None


def _is_left(kind: ValueType) -> bool:
    return 0 in kind.shape or kind.data_type.compute_dtype.kind != "f"


def _tensor(array: Array) -> Any:
    """A tensor over an array's bytes; raises `ValueError` for strides that tensors do not have."""
    with warnings.catch_warnings():
        # That it may be read-only: operands are never written.
        warnings.simplefilter("ignore")
        return torch.from_numpy(np.asarray(array))


class TorchExecutor(AutomaticExecutor):
    """Chooses among PyTorch's kernels too, on as many threads as `torch.set_num_threads` said.

    ONNX Runtime, which gets little here, has one: its threads would wait in loops for their next
    call, on the cores on which PyTorch's then run.
    """

    name = "torch"

    def __init__(self, prices: Prices | None = None) -> None:
        super().__init__(1, prices=prices)
        # Without prices they are not used, as any library.
        if self.prices.torch is not None:
            self.library = AtenKernels(self.prices.torch, torch.get_num_threads())

    def takes_foreign(self) -> bool:
        """What ONNX Runtime gets here depends on what is installed beside it."""
        return False

    def prepare_alone(self, program: Program, machine: MachineShape) -> PreparedProgram:
        """Every operation by ATen that it has a kernel for; raises `CompileError` if there is
        none."""
        known = [i for i, o in enumerate(program.operations) if (o.domain, o.op) in KERNELS]
        if not known:
            raise CompileError("PyTorch's kernels compute none of it", where=program.name)
        return PreparedKernels(program, machine, Workspace(), (), self.library, known)

    def link_terms(self, programs: Sequence[Program]) -> LinkTerms:
        """Never the same bits: a sum is taken in another order where what is around it differs."""
        return LinkTerms("the sums of PyTorch's kernels would differ by 2e-7")

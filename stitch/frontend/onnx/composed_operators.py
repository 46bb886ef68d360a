"""Operators that are a few operations of others: rare ones of ONNX, ONNX's optimizer steps, those
that ONNX Runtime's optimizer writes into most models (`com.microsoft`), and two of `ai.onnx.ml`
that ONNX Runtime does not compute for every type. Every executor runs these, and they have
gradients. All others are foreign operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from stitch import ops
from stitch.frontend.onnx.calls import Lowering, NodeCall, to_one, to_several
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType

#: Activations that follow a Conv or Gemm, with the numbers that each takes, in this order.
_ACTIVATIONS = {
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "HardSwish": (),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Selu": ("alpha", "gamma"),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "ThresholdedRelu": ("alpha",),
}


def _as_own_operator(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """ONNX's operator of this name: it means the same, and has come to take the same types."""
    return builder.apply(call.op, call.inputs, 1, call.attributes)[0]


def _cast_like(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """Cast to the type of the second operand."""
    code = ops.onnx_code(call.required(1).data_type)
    return builder.apply("Cast", [call.required(0)], 1, {**call.attributes, "to": code})[0]


def _product(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """A scaled product of matrices, perhaps transposed."""
    both = [call.required(0), call.required(1)]
    batched = call.whole("transBatchA") or call.whole("transBatchB")
    if batched and (both[0].ndim != both[1].ndim or both[0].ndim < 3):
        raise call.malformed(
            f"{call.op} takes transBatchA and transBatchB on operands of one rank, 3 or more",
            got=", ".join(str(list(one.shape)) for one in both),
        )  # fmt: skip
    sides = [
        _turned(builder, both[index], call.whole(f"transBatch{side}") != 0,
                call.whole(f"trans{side}") != 0)
        for index, side in enumerate("AB")
    ]  # fmt: skip
    product_of_sides = builder.op("MatMul", *sides)
    alpha = call.real("alpha", 1.0)
    return product_of_sides if alpha == 1 else product_of_sides * alpha


def _turned(
    builder: ComputationGraphBuilder, x: SymbolicTensor, batch: bool, matrix: bool
) -> SymbolicTensor:
    """With its first axis behind those of the batch, then the matrices transposed."""
    axes = list(range(x.ndim))
    if batch:
        axes = [*axes[1:-1], 0, axes[-1]]
    if matrix and x.ndim > 1:
        axes[-2:] = axes[:-3:-1]
    return x if axes == sorted(axes) else builder.op("Transpose", x, perm=axes)


def _gemm(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """Gemm, then an activation."""
    sums = builder.apply("Gemm", call.inputs, 1, _without_activation(call))[0]
    numbers = {
        known: call.real(f"activation_{known}")
        for known in ("alpha", "beta", "gamma") if f"activation_{known}" in call.attributes
    }  # fmt: skip
    return _activated(builder, call, sums, numbers)


def _convolution(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """Conv, then another tensor added, then an activation."""
    result = builder.apply("Conv", call.inputs[:3], 1, _without_activation(call))[0]
    added = call.operand(3)
    result = result if added is None else result + added
    name = str(call.attributes.get("activation", ""))
    numbers = [float(number) for number in call.reals("activation_params")]
    if name == "":
        return result
    if name == "Clip" and len(numbers) == 2:
        return builder.op("Clip", result, *numbers)
    takes = _ACTIVATIONS.get(name)
    if takes is not None and len(takes) != len(numbers):
        raise call.unfit("activation_params", f"{len(takes)} numbers", len(numbers))
    return _activated(builder, call, result, dict(zip(takes or (), numbers, strict=False)))


def _without_activation(call: NodeCall) -> dict[str, Any]:
    return {k: v for k, v in call.attributes.items() if not k.startswith("activation")}


def _activated(
    builder: ComputationGraphBuilder, call: NodeCall, x: SymbolicTensor, numbers: dict[str, float]
) -> SymbolicTensor:
    """The activation that a node names, with those of the numbers that it takes."""
    name = str(call.attributes.get("activation"))
    takes = _ACTIVATIONS.get(name)
    if takes is None:
        raise call.refused(
            f"operator {call.op} is not supported with this activation",
            expected=f"one of {', '.join(_ACTIVATIONS)}", got=name[:80],
        )  # fmt: skip
    return builder.apply(name, [x], 1, {k: v for k, v in numbers.items() if k in takes})[0]


def _gelu(builder: ComputationGraphBuilder, call: NodeCall, **attributes: str) -> SymbolicTensor:
    """Gelu, of a sum if there are two operands."""
    return builder.apply("Gelu", [_sum(call, 0, 1)], 1, attributes)[0]


def _quick_gelu(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """Gelu by a Sigmoid; with alpha 1 it is Swish."""
    x = call.required(0)
    return builder.op("Swish", x, alpha=call.real("alpha", 1.702))


def _sum(call: NodeCall, *indices: int) -> SymbolicTensor:
    """The sum of the operands that are there; the first must be."""
    total = call.required(indices[0])
    for index in indices[1:]:
        more = call.operand(index)
        total = total if more is None else total + more
    return total


def _normalized_sum(
    op: str, bias: int, builder: ComputationGraphBuilder, call: NodeCall
) -> list[SymbolicTensor | None]:
    """A sum of up to three, normalized; and the sum. Operand `bias` is the third to be added; scale
    and shift, if the operator has one, stand before it."""
    call.required(1)
    added, epsilon = _sum(call, 0, 1, bias), call.real("epsilon", 1e-12)
    operands = (added, call.required(2), *map(call.operand, range(3, bias)))
    normalized = builder.op(op, *operands, axis=-1, epsilon=epsilon)
    return [normalized, None, None, added]


def _root_mean_square(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """RMSNormalization, as ONNX Runtime called it before ONNX had it."""
    both = [call.required(0), call.required(1)]
    return builder.apply("RMSNormalization", both, 1, call.attributes)[0]


def _affine_grid(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """Places of a grid, as PyTorch has them: each is its homogeneous coordinates times theta.

    ONNX's body drops the batch axis where it is 1, and divides by 0 where an axis of 1 has its
    corners aligned: PyTorch has such an axis at 0.
    """
    theta = call.required(0)
    size = builder.known_data(call.required(1))
    if size is None:
        raise call.refused("the size of AffineGrid must be known at compile time")
    rank, batch = len(size) - 2, theta.shape[0]
    if rank not in (2, 3) or theta.shape != (size[0], rank, rank + 1) or size.min() < 0:
        raise call.malformed(
            "theta and size of AffineGrid do not fit",
            expected="matrices [N, 2, 3] and 4 lengths, or [N, 3, 4] and 5",
            got=f"{list(theta.shape)} and {size.tolist()}",
        )
    lengths = [int(length) for length in size[2:]]
    axes = [_places(length, bool(call.whole("align_corners"))) for length in lengths]
    # The last axis comes first.
    *places, last = np.meshgrid(*axes, indexing="ij")
    rows = np.stack([last, *places[::-1], np.ones_like(last)], -1).reshape(-1, rank + 1)
    grid = builder.constant(rows.astype(theta.type.data_type.dtype))
    turned = builder.op("Transpose", theta, perm=[0, 2, 1])
    return builder.op("Reshape", builder.op("MatMul", grid, turned), [batch, *lengths, rank],
                      allowzero=1)  # fmt: skip


def _places(length: int, corners: bool) -> Array:
    """The middles of so many equal parts of -1 to 1, or places from one end to the other."""
    if corners:
        return np.linspace(-1, 1, length) if length != 1 else np.zeros(1)
    return (2 * np.arange(length) + 1) / max(length, 1) - 1


def _mean_variance(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """As ONNX's function body, but of centred numbers; the epsilon is added to the deviation."""
    x = _wide(builder, call.required(0))
    axes = list(call.wholes("axes")) if "axes" in call.attributes else [0, 2, 3]
    centred = x - builder.op("ReduceMean", x, axes)
    deviation = builder.op("Sqrt", builder.op("ReduceMean", centred * centred, axes))
    return _in_type_of(builder, centred / (deviation + 1e-9), call)


def _lp_normalization(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """Numbers divided by their norm; a row of zeros stays zeros."""
    x, p = _wide(builder, call.required(0)), call.whole("p", 2)
    if p not in (1, 2):
        raise call.unfit("p", "1 or 2", p)
    norm = builder.op(f"ReduceL{p}", x, [call.whole("axis", -1)])
    divisor = builder.op("Where", builder.op("Equal", norm, 0.0), np.ones((), x.dtype), norm)
    return _in_type_of(builder, x / divisor, call)


def _wide(builder: ComputationGraphBuilder, x: SymbolicTensor) -> SymbolicTensor:
    """Numbers in the type in which kernels compute, so that several operations round once."""
    wide = DataType.from_dtype(x.data_type.compute_dtype)
    return x if x.data_type is wide else builder.op("Cast", x, to=ops.onnx_code(wide))


def _in_type_of(
    builder: ComputationGraphBuilder, made: SymbolicTensor, call: NodeCall
) -> SymbolicTensor:
    """A result in the type of the first operand."""
    kind = call.required(0).data_type
    return made if made.data_type is kind else builder.op("Cast", made, to=ops.onnx_code(kind))


def _eye_like(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """1 on a diagonal of a matrix of zeros."""
    x = call.required(0)
    if x.ndim != 2:
        raise call.malformed("EyeLike takes a matrix", got=x.type.text())
    rows, columns = x.shape
    k = min(max(call.whole("k"), -rows), columns)  # the sum could overflow
    down, across = _numbers(builder, k, rows), _numbers(builder, 0, columns)
    hit = builder.op("Equal", builder.op("Unsqueeze", down, [1]), across)
    return builder.op("Cast", hit, to=call.whole("dtype", ops.onnx_code(x.data_type)))


def _numbers(builder: ComputationGraphBuilder, first: int, count: int) -> SymbolicTensor:
    """So many consecutive whole numbers."""
    return builder.op("Range", *map(np.array, (first, first + count, 1)))


def _blocks(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """DepthToSpace, SpaceToDepth: blocks of pixels become channels, and back."""
    x, b = call.required(0), call.whole("blocksize")
    is_depth_first = call.word("mode", "DCR", ("DCR", "CRD")) == "DCR"
    if x.ndim != 4 or b < 1:
        raise call.malformed(f"{call.op} takes images and a blocksize of 1 or more",
                             got=f"{x.type.text()}, blocksize {b}")  # fmt: skip
    n, c, h, w = x.shape
    if call.op == "SpaceToDepth":
        fits = h % b == 0 and w % b == 0
        parts, made = (n, c, h // b, b, w // b, b), (n, c * b * b, h // b, w // b)
        order = [0, 3, 5, 1, 2, 4] if is_depth_first else [0, 1, 3, 5, 2, 4]
    else:
        deep = c // (b * b)
        fits, made = c % (b * b) == 0, (n, deep, h * b, w * b)
        parts = (n, b, b, deep, h, w) if is_depth_first else (n, deep, b, b, h, w)
        order = [0, 3, 4, 1, 5, 2] if is_depth_first else [0, 1, 4, 2, 5, 3]
    if not fits:
        raise call.malformed(f"blocksize={b} of {call.op} does not divide", got=x.type.text())
    moved = builder.op("Transpose", builder.op("Reshape", x, parts, allowzero=1), perm=order)
    return builder.op("Reshape", moved, made, allowzero=1)


def _reverse_sequence(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """Each sequence of a batch reversed up to its length; a longer one is refused when it runs."""
    x, lengths = call.required(0), call.required(1)
    time, batch = call.whole("time_axis"), call.whole("batch_axis", 1)
    if sorted((time, batch)) != [0, 1] or x.ndim < 2 or lengths.shape != (x.shape[batch],):
        raise call.malformed(
            "ReverseSequence takes time_axis and batch_axis 0 and 1, and a length per sequence",
            got=f"{time} and {batch}, {x.type.text()}, {lengths.type.text()}",
        )  # fmt: skip
    order = [batch, time, *range(2, x.ndim)]
    by_batch = x if batch == 0 else builder.op("Transpose", x, perm=order)
    numbers, rows = _numbers(builder, 0, x.shape[time]), builder.op("Unsqueeze", lengths, [1])
    is_inside = builder.op("Less", numbers, rows)
    places = builder.op("Where", is_inside, rows - 1 - numbers, numbers)
    made = builder.op("GatherND", by_batch, builder.op("Unsqueeze", places, [2]), batch_dims=1)
    return made if batch == 0 else builder.op("Transpose", made, perm=order)


def _max_unpool(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """Zeros but at the places that MaxPool gave; what an output shape has more lies at the ends."""
    x, places = call.required(0), call.required(1)
    rank = x.ndim - 2
    kernel = call.wholes("kernel_shape", max(rank, 1))
    strides = call.wholes("strides", rank) if "strides" in call.attributes else (1,) * rank
    pads = call.wholes("pads", 2 * rank) if "pads" in call.attributes else (0,) * (2 * rank)
    sides = zip(x.shape[2:], kernel, strides, pads, pads[rank:], strict=False)
    size = [(n - 1) * stride + k - begin - end for n, k, stride, begin, end in sides]
    shape = [*x.shape[:2], *size]
    wanted = call.operand(2)
    whole = shape if wanted is None else builder.known_data(wanted)
    if whole is None:
        raise call.refused("the output shape of MaxUnpool must be known at compile time")
    more = [int(w) - s for w, s in zip(whole, shape, strict=False)]
    if places.shape != x.shape or len(whole) != x.ndim or min(*shape, *more) < 0:
        raise call.malformed(
            "operands of MaxUnpool do not fit",
            expected=f"places {list(x.shape)}, an output shape of at least {shape}",
            got=f"{list(places.shape)}, {list(map(int, whole))}",
        )  # fmt: skip
    count = math.prod(shape)
    if count >= 1 << 46:
        raise call.malformed("the result of MaxUnpool is too large", got=str(shape))
    flat = builder.op("Reshape", places, [-1])
    # A negative place would count from the end.
    flat = builder.op("Where", builder.op("Less", flat, 0), np.array(count), flat)
    zeros = builder.op("Expand", np.zeros((), x.dtype), [count])
    filled = builder.op("ScatterElements", zeros, flat, builder.op("Reshape", x, [-1]))
    made = builder.op("Reshape", filled, shape, allowzero=1)
    return builder.op("Pad", made, [*(0 for _ in more), *more]) if any(more) else made


def _stft(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """The transform of each frame of a signal. Exporters leave out the last axis of a real signal,
    and ONNX Runtime takes it so."""
    signal, window = call.required(0), call.operand(2)
    if signal.ndim == 2:
        signal = builder.op("Reshape", signal, [*signal.shape, 1], allowzero=1)
    given = call.operand(3)
    step = builder.known_data(call.required(1))
    size = None if given is None else builder.known_data(given)
    if step is None or (size is None and given is not None):
        raise call.refused("frame_step and frame_length of STFT must be known at compile time")
    length = signal.shape[1:2] if window is None else window.shape
    numbers = [*step.reshape(-1).tolist(), *(length if size is None else size.reshape(-1).tolist())]
    fits = signal.ndim == 3 and len(numbers) == 2 and 1 <= numbers[1] <= signal.shape[1]
    if not fits or numbers[0] < 1 or (window is not None and window.shape != (numbers[1],)):
        raise call.malformed(
            "operands of STFT do not fit",
            expected="[batch, length, 1 or 2], frame_step >= 1, frame_length up to the length",
            got=f"{list(signal.shape)}, frame_step and frame_length {numbers}",
        )  # fmt: skip
    step_, length_ = numbers
    rows = builder.op("Transpose", signal, perm=[1, 0, 2])
    count = (signal.shape[1] - length_) // step_ + 1
    frames = builder.window_rows(rows, np.array(0), [step_, 1], (count, length_))
    if window is not None:
        frames = frames * builder.op("Reshape", window, [length_, 1, 1])
    frames = builder.op("Transpose", frames, perm=[2, 0, 1, 3])
    return builder.op("DFT", frames, None, np.array(2), onesided=call.whole("onesided", 1))


#: Most weights of a MelWeightMatrix, which becomes a constant.
MAX_WEIGHTS = 1 << 26


def _mel_weights(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """A constant: bins of a spectrogram weighted by triangles that are equal on the mel scale."""
    known = [builder.known_data(call.required(index)) for index in range(5)]
    given = [data.item() for data in known if data is not None and data.size == 1]
    if len(given) < 5:
        raise call.refused("the operands of MelWeightMatrix must be numbers known when compiled")
    bins, length, rate, low, high = given
    kind = ops.data_type_of_code(call.whole("output_datatype", 1), call.where)
    is_whole = all(isinstance(number, int) and number >= 1 for number in given[:3])
    sound = is_whole and bins * length <= MAX_WEIGHTS and 0 <= low <= high < math.inf
    if not sound or kind.is_narrow or kind is DataType.BOOL:
        raise call.malformed(
            "operands of MelWeightMatrix do not fit",
            expected="bins, dft_length and sample_rate of 1 or more, 0 <= lower <= upper edge, "
            f"at most {MAX_WEIGHTS} weights, a type of numbers",
            got=f"{given}, {kind.value}",
        )
    first, last = (2595 * np.log1p(hertz / 700) / np.log(10) for hertz in (low, high))
    mels = np.arange(bins + 2) * ((last - first) / (bins + 2)) + first
    edges = ((length + 1) * 700 * np.expm1(mels / 2595 * np.log(10)) // rate).astype(np.int64)
    if edges[-1] > length // 2:
        raise call.malformed("upper_edge_hertz of MelWeightMatrix is beyond the spectrogram",
                             expected=f"bin {length // 2} at most", got=str(edges[-1]))  # fmt: skip
    weights = np.zeros((length // 2 + 1, bins))
    for i, (left, peak, right) in enumerate(np.lib.stride_tricks.sliding_window_view(edges, 3)):
        weights[peak, i] = 1
        weights[left:peak, i] = np.arange(peak - left) / max(peak - left, 1)
        weights[peak:right, i] = np.arange(right - peak, 0, -1) / max(right - peak, 1)
    return builder.constant(weights.astype(kind.dtype))


# --------------------------------------------------------------------------------------------------
# Optimizer steps: of a parameter, its regularized gradient and its states

_Step = Callable[[NodeCall, Any, Any, Any, Any, Sequence[Any]], tuple[Any, ...]]


def _optimizer(
    states: int, step: _Step, builder: ComputationGraphBuilder, call: NodeCall
) -> list[SymbolicTensor | None]:
    """New parameters and states, from the rate, the step number, all parameters, all gradients and
    all states of each kind."""
    given = [call.required(index) for index in range(2, len(call.inputs))]
    count, rest = divmod(len(given), states + 2)
    if rest or not count:
        raise call.malformed(
            f"{call.op} has the wrong number of operands",
            expected=f"2, and {states + 2} per parameter", got=str(len(call.inputs)),
        )  # fmt: skip
    rate, number = (builder.op("Reshape", call.required(i), np.zeros(0, np.int64)) for i in (0, 1))
    made = []
    for x, gradient, *own in (given[i::count] for i in range(count)):
        speed = builder.op("Cast", rate, to=ops.onnx_code(x.data_type))
        gradient = x * call.real("norm_coefficient") + gradient
        made.append(step(call, speed, number, x, gradient, own))
    return [results[kind] for kind in range(states + 1) for results in made]


def _at_first(number: Any, first: Any, later: Any) -> Any:
    """One number in step 0, the other in later steps."""
    builder = number.builder
    return builder.op("Where", builder.op("Equal", number, 0), first, later)


def _adagrad(
    call: NodeCall, rate: Any, number: Any, x: Any, gradient: Any, states: Sequence[Any]
) -> tuple[Any, ...]:
    cast = partial(x.builder.op, "Cast", to=ops.onnx_code(x.data_type))
    decayed = rate / (cast(number) * call.real("decay_factor") + 1.0)
    squares = states[0] + gradient * gradient
    root = x.builder.op("Sqrt", squares) + call.real("epsilon", 1e-6)
    return x - decayed * gradient / root, squares


def _adam(
    call: NodeCall, rate: Any, number: Any, x: Any, gradient: Any, states: Sequence[Any]
) -> tuple[Any, ...]:
    op = x.builder.op
    alpha, beta = call.real("alpha", 0.9), call.real("beta", 0.999)
    mean = states[0] * alpha + gradient * (1 - alpha)
    squares = states[1] * beta + gradient * gradient * (1 - beta)
    times = op("Cast", number, to=ops.onnx_code(DataType.FLOAT64))
    rests = [1.0 - op("Pow", np.array(base), times) for base in (beta, alpha)]
    corrected = _at_first(number, np.ones(()), op("Sqrt", rests[0]) / rests[1])
    rate = rate * op("Cast", corrected, to=ops.onnx_code(x.data_type))
    made = x - rate * (mean / (op("Sqrt", squares) + call.real("epsilon", 1e-6)))
    return made * (1 - call.real("norm_coefficient_post")), mean, squares


def _momentum(
    call: NodeCall, rate: Any, number: Any, x: Any, gradient: Any, states: Sequence[Any]
) -> tuple[Any, ...]:
    alpha, beta = call.real("alpha"), np.array(call.real("beta"), x.dtype)
    share = _at_first(number, np.ones((), x.dtype), beta)
    velocity = states[0] * alpha + share * gradient
    is_nesterov = call.word("mode", "", ("standard", "nesterov")) == "nesterov"
    return x - rate * (gradient + velocity * alpha if is_nesterov else velocity), velocity


def _binarizer(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """1 where a number is above the threshold, else 0, in its own type (ONNX Runtime: of float32
    alone)."""
    data, threshold = call.required(0), call.real("threshold")
    code = ops.onnx_code(data.data_type)
    if not data.data_type.is_floating:
        data = builder.op("Cast", data, to=ops.onnx_code(DataType.FLOAT64))
    return builder.op("Cast", builder.op("Greater", data, threshold), to=code)


def _zip_map(builder: ComputationGraphBuilder, call: NodeCall) -> SymbolicTensor:
    """The numbers that ONNX Runtime gives as one map a row: a tensor, its columns in the order of
    the labels."""
    x = call.required(0)
    count = len(call.wholes("classlabels_int64s")) or len(call.words("classlabels_strings"))
    if count != (x.shape[-1] if x.ndim else 1):
        raise call.unfit("classlabels", f"{list(x.shape)[-1:]} labels", count)
    return builder.op("Identity", x)


ONNX_RUNTIME, CLASSICAL = "com.microsoft", "ai.onnx.ml"
_TRAINING = "ai.onnx.preview.training"
_MOST = 1 << 20
_CONV = "auto_pad dilations group kernel_shape pads strides activation activation_params"
_GEMM = "alpha beta transA transB activation activation_alpha activation_beta activation_gamma"
_PRODUCT = "alpha transA transB transBatchA transBatchB"
_LABELS = "classlabels_int64s classlabels_strings"

#: The operators by their domains and names. ONNX Runtime puts SimplifiedLayerNormalization among
#: ONNX's own; the body of ONNX's AffineGrid is wrong for some sizes.
LOWERINGS: Mapping[tuple[str, str], Lowering] = {
    ("", "AffineGrid"): replace(to_one(_affine_grid, 2, "align_corners"), decides=(1,)),
    ("", "CastLike"): to_one(_cast_like, 2, "round_mode saturate"),
    ("", "DepthToSpace"): to_one(_blocks, 1, "blocksize mode"),
    ("", "EyeLike"): to_one(_eye_like, 1, "dtype k"),
    ("", "LpNormalization"): to_one(_lp_normalization, 1, "axis p"),
    ("", "MaxUnpool"): replace(
        to_one(_max_unpool, 3, "kernel_shape pads strides"), decides=(2,)
    ),
    ("", "ReverseSequence"): to_one(_reverse_sequence, 2, "batch_axis time_axis"),
    ("", "STFT"): replace(to_one(_stft, 4, "onesided"), decides=(1, 3)),
    ("", "SpaceToDepth"): to_one(_blocks, 1, "blocksize mode"),
    ("", "MeanVarianceNormalization"): to_one(_mean_variance, 1, "axes"),
    ("", "MelWeightMatrix"): replace(
        to_one(_mel_weights, 5, "output_datatype"), decides=(0, 1, 2, 3, 4)
    ),
    ("", "SimplifiedLayerNormalization"): to_one(_root_mean_square, 2, "axis epsilon stash_type"),
    **{
        (_TRAINING, name): to_several(
            partial(_optimizer, states, step), _MOST, f"norm_coefficient {words}", range(_MOST)
        )
        for name, states, step, words in (
            ("Adagrad", 1, _adagrad, "decay_factor epsilon"),
            ("Adam", 2, _adam, "alpha beta epsilon norm_coefficient_post"),
            ("Momentum", 1, _momentum, "alpha beta mode"),
        )
    },
    (CLASSICAL, "Binarizer"): to_one(_binarizer, 1, "threshold"),
    (CLASSICAL, "ZipMap"): to_one(_zip_map, 1, _LABELS),
    (ONNX_RUNTIME, "BiasGelu"): to_one(_gelu, 2),
    (ONNX_RUNTIME, "DequantizeLinear"): to_one(_as_own_operator, 3, "axis"),
    (ONNX_RUNTIME, "FastGelu"): to_one(partial(_gelu, approximate="tanh"), 2),
    (ONNX_RUNTIME, "FusedConv"): to_one(_convolution, 4, _CONV),
    (ONNX_RUNTIME, "FusedGemm"): to_one(_gemm, 3, _GEMM),
    (ONNX_RUNTIME, "FusedMatMul"): to_one(_product, 2, _PRODUCT),
    (ONNX_RUNTIME, "Gelu"): to_one(_gelu, 1),
    (ONNX_RUNTIME, "QuantizeLinear"): to_one(_as_own_operator, 3, "axis"),
    (ONNX_RUNTIME, "QuickGelu"): to_one(_quick_gelu, 1, "alpha"),
    (ONNX_RUNTIME, "SkipLayerNormalization"): to_several(
        partial(_normalized_sum, "LayerNormalization", 4), 5, "epsilon", (0, 3)
    ),
    (ONNX_RUNTIME, "SkipSimplifiedLayerNormalization"): to_several(
        partial(_normalized_sum, "RMSNormalization", 3), 4, "epsilon", (0, 3)
    ),
    (ONNX_RUNTIME, "TransposeMatMul"): to_one(_product, 2, "alpha transA transB"),
}  # fmt: skip

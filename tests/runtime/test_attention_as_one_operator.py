"""The CUDA executor binds attention as one operator and movements as views; on `torch:cpu`, beside
the executor `numpy`."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import stitch
from stitch.errors import StitchError
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.linker import expanded
from stitch.program import Array
from stitch.runtime.executors.attention import attentions_of
from stitch.runtime.executors.host import WholeProgram
from tests.support.run_seed import SEED

Tensor = SymbolicTensor
Build = Callable[[ComputationGraphBuilder, Tensor, Tensor, Tensor, Tensor], Tensor]
BATCH, HEADS, QUERIES, KEYS, WIDTH, OUT = 2, 3, 5, 7, 4, 6
#: float32 beside the executor `numpy`.
RELATIVE = 2e-6
RNG = np.random.default_rng(SEED)


def drawn(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


def found_in(model: stitch.CompiledModel) -> list[Any]:
    (program,) = model.binary.programs
    return attentions_of(WholeProgram(expanded(program)))


@cache
def device_of(executor: str) -> stitch.Device:
    return stitch.open_device("cuda", executor=executor)


def computed(model: stitch.CompiledModel, operands: Sequence[Array], executor: str) -> list[Array]:
    results = device_of(executor).load(model)(*operands)
    return [r.numpy() for r in (results if isinstance(results, tuple) else (results,))]


def check(
    model: stitch.CompiledModel, operands: Sequence[Array], relative: float = RELATIVE
) -> None:
    pairs = zip(*(computed(model, operands, e) for e in ("numpy", "torch:cpu")), strict=True)
    for wanted, found in pairs:
        most = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=relative * float(most))


def scores(b: ComputationGraphBuilder, q: Tensor, k: Tensor) -> Tensor:
    return b.matmul(q, b.swapaxes(k, -1, -2))


CAUSAL = np.triu(np.full((QUERIES, KEYS), -np.inf, np.float32), 1)
#: The second query sees no key.
HIDDEN = np.where(np.arange(QUERIES)[:, None] == 1, -np.inf, CAUSAL).astype(np.float32)


LOWEST = np.full((QUERIES, KEYS), np.finfo(np.float32).min, np.float32)


def _zeroed(b: ComputationGraphBuilder, s: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """As the frontend of torch writes it: the second query sees no key of the mask."""
    hidden = b.equal(b.reduce_max(m, -1, keepdims=True), -math.inf)
    opened = b.where(hidden, 0.0, m)
    return b.matmul(b.where(hidden, 0.0, b.softmax(b.add(s, opened))), v)


def _zeroed_by_bool(b: ComputationGraphBuilder, s: Tensor, m: Tensor, v: Tensor) -> Tensor:
    kept = b.greater(m, -2.0)
    hidden = b.op("Not", b.reduce_max(kept, -1, keepdims=True))
    return b.matmul(b.where(hidden, 0.0, b.softmax(b.where(kept, s, -math.inf))), v)


def _nan_to_zero(b: ComputationGraphBuilder, s: Tensor, v: Tensor) -> Tensor:
    weights = b.softmax(s)
    return b.matmul(b.where(b.op("IsNaN", weights), 0.0, weights), v)


ATTENTIONS: dict[str, Build] = {
    "plain": lambda b, q, k, v, m: b.matmul(b.softmax(scores(b, q, k)), v),
    "scaled scores": lambda b, q, k, v, m: b.matmul(b.softmax(b.mul(scores(b, q, k), 0.3)), v),
    "divided": lambda b, q, k, v, m: b.matmul(b.softmax(b.div(scores(b, q, k), 2.0)), v),
    "scaled operands": lambda b, q, k, v, m: b.matmul(
        b.softmax(b.matmul(b.mul(q, 0.7), b.mul(b.swapaxes(k, -1, -2), 0.6))), v
    ),
    "added mask": lambda b, q, k, v, m: b.matmul(b.softmax(b.add(scores(b, q, k), m)), v),
    "mask first": lambda b, q, k, v, m: b.matmul(b.softmax(b.add(m, scores(b, q, k))), v),
    "causal": lambda b, q, k, v, m: b.matmul(b.softmax(b.add(scores(b, q, k), CAUSAL)), v),
    "hidden row": lambda b, q, k, v, m: b.matmul(b.softmax(b.add(scores(b, q, k), HIDDEN)), v),
    "hidden row made 0": lambda b, q, k, v, m: _zeroed(b, scores(b, q, k), b.add(m, HIDDEN), v),
    "hidden row of a boolean mask made 0": lambda b, q, k, v, m: _zeroed_by_bool(
        b, scores(b, q, k), b.add(m, HIDDEN), v
    ),
    "hidden NaN made 0": lambda b, q, k, v, m: _nan_to_zero(b, b.add(scores(b, q, k), HIDDEN), v),
    "masks that overflow": lambda b, q, k, v, m: b.matmul(
        b.softmax(b.add(b.add(scores(b, q, k), LOWEST), LOWEST)), v
    ),
    "a mask that replaces and one that overflows": lambda b, q, k, v, m: b.matmul(
        b.softmax(b.add(b.where(HIDDEN == 0, float(LOWEST[0, 0]), scores(b, q, k)), LOWEST)), v
    ),
    "kept where": lambda b, q, k, v, m: b.matmul(
        b.softmax(b.where(b.less(m, 1.0), b.mul(scores(b, q, k), 0.5), -math.inf)), v
    ),
    "filled where": lambda b, q, k, v, m: b.matmul(
        b.softmax(b.where(b.less(m, 0.0), -math.inf, scores(b, q, k))), v
    ),
    "filled with the lowest": lambda b, q, k, v, m: b.matmul(
        b.softmax(b.where(b.less(m, 0.5), float(np.finfo(np.float32).min), scores(b, q, k))), v
    ),
    "three masks": lambda b, q, k, v, m: b.matmul(
        b.softmax(
            b.where(b.less(m, 1.0), b.add(b.add(b.mul(scores(b, q, k), 0.5), m), CAUSAL), -math.inf)
        ),
        v,
    ),
    "transposed result": lambda b, q, k, v, m: b.transpose(
        b.matmul(b.softmax(scores(b, q, k)), v), (0, 2, 1, 3)
    ),
}


def built(
    build: Build, *, q: Sequence[int] = (), k: Sequence[int] = (), v: Sequence[int] = (),
    m: Sequence[int] = (), data_type: str = "float32",
) -> tuple[stitch.CompiledModel, list[Array]]:  # fmt: skip
    shapes = [
        tuple(q or (BATCH, HEADS, QUERIES, WIDTH)), tuple(k or (BATCH, HEADS, KEYS, WIDTH)),
        tuple(v or (BATCH, HEADS, KEYS, OUT)), tuple(m or (BATCH, 1, QUERIES, KEYS)),
    ]  # fmt: skip
    b = ComputationGraphBuilder("attention")
    inputs = [b.input(n, s, data_type) for n, s in zip("qkvm", shapes, strict=True)]
    b.output("y", build(b, *inputs))
    b.output("unused", b.neg(inputs[3]))
    return stitch.compile(b.build(), target="cuda"), [
        drawn(*shape).astype(data_type) for shape in shapes
    ]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_one_operator_with_the_results_of_numpy(name: str) -> None:
    model, operands = built(ATTENTIONS[name])
    (one,) = found_in(model)
    assert one.hides_rows == (name.endswith("made 0"))
    check(model, operands)


@pytest.mark.parametrize(
    "shapes",
    [
        {"q": (3, 5, 4), "k": (3, 7, 4), "v": (3, 7, 6), "m": (3, 1, 7)},
        {"k": (BATCH, 1, KEYS, WIDTH), "v": (1, HEADS, KEYS, OUT), "m": (KEYS,)},
        {"m": (1, HEADS, 1, KEYS)},
        {"q": (1, 1, 1, 1), "k": (1, 1, 1, 1), "v": (1, 1, 1, 1), "m": (1, 1, 1, 1)},
        {"data_type": "float64"},
    ],
)
def test_operands_of_other_ranks_and_broadcast_ones(shapes: dict[str, Any]) -> None:
    for name in ("added mask", "filled where"):
        model, operands = built(ATTENTIONS[name], **shapes)
        assert len(found_in(model)) == 1
        check(model, operands)


@pytest.mark.parametrize("name", ["added mask", "kept where", "filled where", "plain"])
def test_rows_without_a_key_and_not_a_number_are_as_numpy_has_them(name: str) -> None:
    model, operands = built(ATTENTIONS[name], m=(BATCH, HEADS, QUERIES, KEYS))
    q, k, v, mask = operands
    mask[0, 1, 2] = {"added mask": -np.inf, "kept where": 2, "filled where": -2, "plain": 0}[name]
    mask[1, 0, 0, 3:] = -np.inf if name == "added mask" else 0
    check(model, operands)
    q[1, 2, 3, 0] = np.nan
    v[0, 0, 2, 1] = np.nan
    check(model, operands)
    k[1, 1, 4] = np.nan
    if name in ("plain", "added mask"):  # A boolean mask hides a NaN score from NumPy's kernels.
        check(model, operands)


@pytest.mark.parametrize("other", ["of another mask", "of one of two masks"])
def test_rows_made_0_by_another_mask_stay_operations(other: str) -> None:
    def build(b: ComputationGraphBuilder, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        if other == "of one of two masks":
            return _zeroed(b, b.add(scores(b, q, k), CAUSAL), b.add(m, HIDDEN), v)
        hidden = b.equal(b.reduce_max(b.add(m, HIDDEN), -1, keepdims=True), -math.inf)
        return b.matmul(b.where(hidden, 0.0, b.softmax(b.add(scores(b, q, k), m))), v)

    model, operands = built(build)
    assert found_in(model) == []
    check(model, operands)


#: Elements of masks: some sums of two are -inf by overflow.
MASKED = (0.0, -np.inf, float(LOWEST[0, 0]), -1e30, -2e38, 1.5)


def drawn_masks(rng: np.random.Generator) -> tuple[Build, Array]:
    """Return attention with one to three masks, and the one that is an input."""
    weights = rng.dirichlet(np.ones(len(MASKED)))

    def values(*shape: int) -> Array:
        return rng.choice(MASKED, size=shape, p=weights).astype(np.float32)

    kinds = [tuple(rng.integers(3, size=2)) for _ in range(rng.integers(1, 4))]
    constants = [values(QUERIES, KEYS) for _ in kinds]
    fills = [float(rng.choice(MASKED[1:4])) for _ in kinds]
    is_zeroed = rng.integers(3) == 0

    def build(b: ComputationGraphBuilder, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        s = scores(b, q, k)
        for (how, which), constant, fill in zip(kinds, constants, fills, strict=True):
            mask: Any = m if which else constant
            hidden = b.less(m, -1.0) if which else constant < -1.0
            s = (b.add(s, mask), b.where(hidden, fill, s), b.where(hidden, s, fill))[how]
        return _nan_to_zero(b, s, v) if is_zeroed else b.matmul(b.softmax(s), v)

    return build, values(BATCH, 1, QUERIES, KEYS)


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(10_000 * SEED, 6, id="few"),
        pytest.param(
            10_000 * SEED + 6, 300, id="many", marks=pytest.mark.campaign("torch_devices")
        ),
    ],
)
def test_rows_that_several_masks_hide_are_as_numpy_has_them(first: int, count: int) -> None:
    for seed in range(first, first + count):
        build, mask = drawn_masks(np.random.default_rng(seed))
        model, operands = built(build)
        assert len(found_in(model)) == 1
        try:
            check(model, [*operands[:3], mask], 2 * RELATIVE)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("is_masked", [False, True])
def test_scores_beyond_float32_are_as_pytorch_has_them(is_masked: bool) -> None:
    """NumPy's kernels give NaN there, PyTorch's attention 0."""
    model, operands = built(ATTENTIONS["added mask" if is_masked else "plain"])
    operands[0][0, 0], operands[1][0, 0] = -1e20, 1e20
    tensors = [torch.from_numpy(operand) for operand in operands]
    wanted = nn.functional.scaled_dot_product_attention(
        *tensors[:3], tensors[3] if is_masked else None, scale=1.0
    ).numpy()
    (found, _) = computed(model, operands, "torch:cpu")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=RELATIVE * abs(wanted).max())
    by_numpy = computed(model, operands, "numpy")[0]
    assert np.isnan(by_numpy[0, 0]).all() and not found[0, 0].any()


def _read_elsewhere(b: ComputationGraphBuilder, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Any:
    weights = b.softmax(scores(b, q, k))
    b.output("weights", weights)
    return b.matmul(weights, v)


OTHERS: dict[str, tuple[Build, dict[str, Any]]] = {
    "weights are returned": (_read_elsewhere, {}),
    "another axis": (lambda b, q, k, v, m: b.matmul(b.softmax(scores(b, q, k), 2), v), {}),
    "a scaled mask": (
        lambda b, q, k, v, m: b.matmul(b.softmax(b.mul(b.add(scores(b, q, k), m), 2.0)), v),
        {},
    ),
    "a number that does not hide": (
        lambda b, q, k, v, m: b.matmul(
            b.softmax(b.where(b.less(m, 0.0), -1e4, scores(b, q, k))), v
        ),
        {},
    ),
    "two axes": (
        ATTENTIONS["plain"],
        {"q": (5, 4), "k": (7, 4), "v": (7, 6), "m": (5, 7)},
    ),
    "no heads": (
        ATTENTIONS["plain"],
        {"q": (2, 0, 5, 4), "k": (2, 0, 7, 4), "v": (2, 0, 7, 6)},
    ),
    "half precision": (ATTENTIONS["plain"], {"data_type": "float16"}),
    "a mask of one column": (ATTENTIONS["added mask"], {"m": (BATCH, 1, QUERIES, 1)}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_attention_stays_several_operators(name: str) -> None:
    build, shapes = OTHERS[name]
    model, operands = built(build, **shapes)
    assert found_in(model) == []
    check(model, operands, 2e-3 if "half" in name else RELATIVE)


def test_negative_scales_are_left_to_their_own_operators() -> None:
    for build in (
        lambda b, q, k, v, m: b.matmul(b.softmax(scores(b, b.mul(q, -0.5), k)), v),
        lambda b, q, k, v, m: b.matmul(b.softmax(b.mul(scores(b, q, k), -0.5)), v),
    ):
        model, operands = built(build)
        assert [one.scale for one in found_in(model)] in ([], [1.0])
        check(model, operands)


def test_hooks_see_the_values_between() -> None:
    model, operands = built(ATTENTIONS["added mask"])
    seen: dict[str, int] = {}
    with stitch.open_device("torch:cpu") as device:
        program = device.load(model)
        first = program(*operands)[0].numpy()

        def note(call: Any) -> None:
            seen[call.operation.op] = seen.get(call.operation.op, 0) + 1

        end = device.hooks.register(after_operation=note)
        observed = program(*operands)[0].numpy()
        end()
        np.testing.assert_allclose(observed, first, rtol=0, atol=RELATIVE * abs(first).max())
        again = program(*operands)[0].numpy()
        np.testing.assert_array_equal(again, first)
    assert seen["MatMul"] == 2 and seen["Softmax"] == seen["Add"] == seen["Transpose"] == 1


class Block(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Self-attention of one sequence, by one of several ways to write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.outer = how, nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("causal", torch.ones(8, 8, dtype=torch.bool).tril())

    def forward(self, x: Any, mask: Any) -> Any:
        parts = self.inner(x).split(16, -1)
        q, k, v = (part.view(*x.shape[:2], 2, 8).transpose(1, 2) for part in parts)
        attend = torch.nn.functional.scaled_dot_product_attention
        if self.how == "causal":
            y = attend(q, k, v, is_causal=True)
        elif self.how == "boolean":
            y = attend(q, k, v, mask > 0)
        elif self.how == "added":
            y = attend(q, k, v, mask)
        else:
            weights = (q @ k.transpose(-2, -1) / math.sqrt(8)).masked_fill(~self.causal, -torch.inf)
            y = weights.softmax(-1) @ v
        return self.outer(y.transpose(1, 2).reshape(x.shape)) + 0 * mask.sum()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["causal", "boolean", "added", "by hand"])
def test_modules_and_graphs_of_the_exporter_have_one_attention(how: str) -> None:
    torch.manual_seed(SEED)
    module = Block(how).eval()
    examples = torch.randn(2, 8, 16), torch.randn(2, 1, 8, 8)
    file = io.BytesIO()
    names = {"input_names": ["x", "mask"], "output_names": ["y"]}
    torch.onnx.export(module, examples, file, dynamo=False, **names)
    with torch.no_grad():
        wanted = module(*examples).numpy()
    for source in (module, onnx.load_from_string(file.getvalue())):
        model = stitch.compile(source, examples, target="cuda")
        assert len(found_in(model)) == 1
        operands = [example.numpy() for example in examples]
        check(model, operands)
        (found,) = computed(model, operands, "torch:cpu")
        np.testing.assert_allclose(found, wanted, rtol=0, atol=3 * RELATIVE * abs(wanted).max())


# Views --------------------------------------------------------------------------------------------


def random_program(seed: int) -> tuple[stitch.CompiledModel, list[Array]] | None:
    """A program of movements with others in between, whose places are used again and again."""
    rng = np.random.default_rng(seed)
    b = ComputationGraphBuilder(f"moves{seed}")
    shape = tuple(int(x) for x in rng.choice([1, 2, 3, 4, 4, 6], 3))
    values = [b.input(f"x{i}", shape, "float32") for i in range(2)]

    def reshaped(x: Tensor) -> Tensor:
        size = math.prod(x.shape)
        rows = int(rng.choice([n for n in (1, 2, 3, 4, 6) if size % n == 0]))
        return b.reshape(x, (rows, size // rows, 1)[: int(rng.integers(2, 4))])

    kinds: list[Callable[[Tensor], Any]] = [
        lambda x: b.op("Relu", x), lambda x: b.mul(x, 0.5), b.softmax, reshaped, reshaped,
        lambda x: b.add(x, values[int(rng.integers(len(values)))]),
        lambda x: b.transpose(x, tuple(rng.permutation(len(x.shape)).tolist())),
        lambda x: b.transpose(x, tuple(rng.permutation(len(x.shape)).tolist())),
        lambda x: b.split(x, x.shape[-1] // 2, -1), lambda x: x[1:], lambda x: x[..., ::2],
        lambda x: b.matmul(x, b.swapaxes(x, -1, -2)),
    ]  # fmt: skip
    for _ in range(int(rng.integers(5, 40))):
        x = values[int(rng.integers(max(0, len(values) - 6), len(values)))]
        try:
            made = kinds[int(rng.integers(len(kinds)))](x)
        except (StitchError, ValueError, ZeroDivisionError):
            continue  # Sizes that do not fit.
        made = made if isinstance(made, tuple | list) else [made]
        values += [y for y in made if 0 < math.prod(y.shape) < 500]
    for index in sorted({*rng.integers(2, len(values), 3).tolist()} if len(values) > 2 else ()):
        b.output(f"y{index}", values[index])
    graph = b.build() if len(values) > 2 else None
    if graph is None:
        return None
    model = stitch.compile(graph, target="cuda")
    count = len(model.binary.programs[0].inputs)
    return model, [drawn(*shape) * np.float32(0.3) for _ in range(count)]


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(100_000 * SEED, 10, id="few"),
        pytest.param(
            100_000 * SEED + 10, 500, id="many", marks=pytest.mark.campaign("torch_devices")
        ),
    ],
)
def test_random_movements_have_the_results_of_numpy(first: int, count: int) -> None:
    ran = 0
    for seed in range(first, first + count):
        made = random_program(seed)
        if made is not None:
            try:
                check(*made, relative=1e-5)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}") from error
            ran += 1
    assert ran > count // 2


@pytest.mark.parametrize(("length", "depth", "chain"), [(4, 4, 1), (8, 8, 1), (8, 4, 2), (4, 8, 0)])
def test_a_mask_that_two_layers_share_is_read_where_it_is_then(
    length: int, depth: int, chain: int
) -> None:
    b = ComputationGraphBuilder("shared")
    x, pad = (b.input(n, (2, length, w), "float32") for n, w in (("x", depth), ("pad", length)))
    mask = (1 - pad) * -3
    hidden: Tensor = x
    for _ in range(2):
        keys = b.swapaxes(b.matmul(hidden, drawn(depth, depth)), -1, -2)
        added = b.matmul(b.matmul(hidden, drawn(depth, depth)), keys) + mask
        beside = b.op("Tanh", b.matmul(x, drawn(depth, length)))
        weights = b.op("Softmax", added, axis=-1)
        values = b.matmul(hidden, drawn(depth, depth))
        for _ in range(chain):
            values = b.op("Tanh", values)
        hidden = b.matmul(weights, values) + b.matmul(beside, drawn(length, depth))
    b.output("y", hidden)
    model = stitch.compile(b.build(), target="cuda")
    assert len(found_in(model)) == 2
    check(model, [drawn(2, length, depth), drawn(2, length, length)], 1e-5)


def test_attention_of_values_that_it_computes_itself_is_not_found() -> None:
    b = ComputationGraphBuilder("own")
    x, keys = b.input("x", (1, 4, 4), "float32"), b.input("keys", (1, 4, 4), "float32")
    product = b.matmul(x, keys)
    b.output("square", b.matmul(b.op("Softmax", product, axis=-1), product))
    b.output("sum", b.matmul(b.op("Softmax", b.matmul(keys, x) * 2 + x, axis=-1), keys))
    scaled = x * 0.5
    b.output("query", b.matmul(b.op("Softmax", b.matmul(scaled, keys), axis=-1), scaled))
    check(stitch.compile(b.build(), target="cuda"), [drawn(1, 4, 4), drawn(1, 4, 4)])


def test_what_the_caller_sets_for_pytorch_changes_no_numbers() -> None:
    b = ComputationGraphBuilder("plain")
    q, k, v = (b.input(n, (1, 8, 8), "float32") for n in "qkv")
    b.output("y", b.matmul(b.op("Softmax", scores(b, q, k), axis=-1), v))
    model, operands = stitch.compile(b.build(), target="cuda"), [drawn(1, 8, 8) for _ in range(3)]
    with stitch.open_device("torch:cpu") as device:
        wanted = device.load(model)(*operands).numpy()
    for setting in torch.autocast("cpu"), torch.device("meta"):
        with setting, stitch.open_device("torch:cpu") as device:
            np.testing.assert_array_equal(device.load(model)(*operands).numpy(), wanted)

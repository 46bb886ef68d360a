"""Graphs of torch.compile with symbolic sizes are compiled once, and give what eager torch gives at
all sizes; `generate()` with a cache that grows compiles nothing for a further token."""

from __future__ import annotations

import gc
import linecache
import random
import threading
from typing import Any

import pytest
import torch
import transformers as tr

from stitch.compiler import dynamic_program, pass_cache
from stitch.compiler.compile_graph import prepare_graph
from stitch.program import Space
from stitch.torch import explain
from tests.support.torch.compiled import assert_same, compiled, storage_of

CONFIG = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 60}


def llama() -> Any:
    return tr.LlamaForCausalLM(
        tr.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
            num_hidden_layers=1, max_position_embeddings=256, **CONFIG,
        )
    )  # fmt: skip


def gpt2() -> Any:
    return tr.GPT2LMHeadModel(tr.GPT2Config(n_embd=16, n_head=2, n_layer=2, **CONFIG))


def compilations() -> int:
    counts = storage_of().counts
    return counts.graphs + counts.recompilations


def generated(model: Any, prompt: Any, tokens: int) -> Any:
    return model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                          num_beams=1, use_cache=True, disable_compile=True)  # fmt: skip


def assert_generates(model: Any, tokens: int, dynamic: bool | None, most: int) -> None:
    """The tokens of eager torch, and no compilation for a later token or another length."""
    rows = torch.randint(3, 60, (2, 23))
    eager = model.forward
    wanted = [generated(model, rows[:, :length], tokens) for length in (6, 23)]
    torch._dynamo.reset()
    before = compilations()
    model.forward = torch.compile(eager, backend="stitch", dynamic=dynamic)
    assert torch.equal(generated(model, rows[:, :6], 4), wanted[0][:, :10])
    first = compilations() - before
    assert 2 <= first <= most
    assert torch.equal(generated(model, rows[:, :6], tokens), wanted[0])
    assert compilations() - before == first
    assert torch.equal(generated(model, rows, tokens), wanted[1])
    # The automatic setting compiles the prompt's length again once, as a symbol.
    assert compilations() - before <= first + (dynamic is None)


@pytest.mark.campaign("networks")
@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_generate_with_a_growing_cache_compiles_nothing_for_a_further_token(
    make: Any, dynamic: bool | None, dtype: Any
) -> None:
    torch.manual_seed(3)
    assert_generates(make().eval().to(dtype), 40, dynamic, 3)


def test_a_size_that_a_lowering_needs_as_a_number_is_compiled_again_and_reported() -> None:
    def function(x: Any) -> Any:
        return (x * x.shape[0]).relu() + 1

    run, before = compiled(function, dynamic=True), compilations()
    for rows in (5, 6, 7, 6):
        x = torch.randn(rows, 3)
        assert_same(run(x), function(x))
    assert compilations() - before == 3
    (graph,) = explain(function, dynamic=True)(torch.randn(5, 3)).graphs
    (why,) = graph.recompiles
    assert "== 5" in why and "test_torch_symbolic_graphs.py" in why


def test_masks_and_positions_from_a_size_are_compiled_once() -> None:
    def function(x: Any) -> Any:
        n = x.shape[0]
        mask = torch.ones(3, n).tril(n - 3) * (torch.arange(n) != n - 2)
        return mask @ x, torch.arange(n - 1, n + 2), (torch.arange(n - 1, n + 2) // n).clamp(max=n)

    run, before = compiled(function, dynamic=True), compilations()
    for rows in (5, 6, 4, 9):
        x = torch.randn(rows, 3)
        for found, wanted in zip(run(x), function(x), strict=True):
            assert_same(found, wanted)
    assert compilations() - before == 1


def test_passes_run_once_for_sizes_on_which_a_mask_depends(monkeypatch: Any) -> None:
    layer, calls = torch.nn.Linear(3, 4), []

    def function(x: Any) -> Any:
        n = x.shape[0]
        return torch.ones(n, n).tril() @ layer(x)

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return prepare_graph(*arguments)

    for module in (dynamic_program, pass_cache):
        monkeypatch.setattr(module, "prepare_graph", counted)
    run, counts = compiled(function, dynamic=True), []
    with torch.no_grad():
        for rows in (5, 6, 9):
            x = torch.randn(rows, 3)
            assert_same(run(x), function(x))
            counts.append(len(calls))
    assert len(set(counts)) == 1


def test_a_graph_does_not_keep_the_results_of_another_that_it_was_given() -> None:
    def add(x: Any) -> Any:
        return x + 1

    def double(x: Any) -> Any:
        return x * 2

    first, second, device = compiled(add), compiled(double), storage_of().device

    def used() -> int:
        gc.collect()
        return device.memory_use()[Space.HOST].used_nbytes

    before, x = used(), torch.ones(300, 200)
    with torch.no_grad():
        for _ in range(2):
            assert_same(second(first(x)), (x + 1) * 2)
    assert used() - before < x.nbytes


def test_what_no_named_size_expresses_is_that_of_each_size() -> None:
    """Views of arguments and numbers, which no program computes, and those beside one."""

    def views(x: Any) -> Any:
        least = min(x.shape[0], x.shape[1])
        return least, x[least:].T, x.shape[0] ** 9, x.shape[0] > 3

    def both(x: Any) -> Any:
        return *views(x), x * abs(x.shape[0] - x.shape[1]) + int(x.shape[0] * 0.5)

    for function in (views, both):
        run = compiled(function, dynamic=True)
        for shape in ((6, 5), (3, 7), (7, 4)):
            x = torch.randn(shape)
            for found, wanted in zip(run(x), function(x), strict=True):
                assert type(found) is type(wanted)
                assert torch.equal(torch.as_tensor(found), torch.as_tensor(wanted))


def test_a_size_on_which_the_function_branches_is_another_graph_of_dynamo() -> None:
    def function(x: Any) -> Any:
        return x.relu() * 2 if x.shape[0] > 4 else x.exp() - 1

    run, before = compiled(function, dynamic=True), compilations()
    for rows in (8, 3, 5, 2, 9, 1, 4):
        x = torch.randn(rows, 3)
        assert_same(run(x), function(x))
    assert 2 <= compilations() - before <= 3  # A graph for each side, and one for size 1.


def test_threads_share_a_graph_with_symbolic_sizes() -> None:
    def function(x: Any) -> Any:
        return (x.softmax(-1) @ x.mT).cumsum(0)

    run = compiled(function, dynamic=True)
    run(torch.randn(4, 3))
    before, failures = compilations(), list[BaseException]()

    def work(first: int) -> None:
        try:
            for rows in range(first, first + 6):
                x = torch.randn(rows, 3)
                assert_same(run(x), function(x))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (2, 3, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert compilations() == before


# Random functions ---------------------------------------------------------------------------------

#: Expressions of [n, m, 4] from one or two tensors of that shape.
STEPS = (
    "A.relu()", "A * 1.5 + 0.25", "A + B", "A.softmax(-1)", "A - A.mean(0, keepdim=True)",
    "A.cumsum(0)", "A.roll(1, 0)", "A.flip(0)", "(A.reshape(-1, 4) @ w).reshape(A.shape)",
    "A.transpose(0, 1).contiguous().transpose(0, 1)", "(A @ B.mT).softmax(-1) @ A",
    "torch.cat([A, B], 0)[: A.shape[0]]", "torch.cat([A, B], 1)[:, 1 : 1 + A.shape[1]]",
    "A + torch.arange(A.shape[0])[:, None, None]", "F.pad(A, (0, 0, 1, 1))[:, 1:-1]",
    "A - A[-1:]", "A * A.shape[0] / 3", "(A @ B.mT).tril() @ A", "A.sort(0).values",
    "F.scaled_dot_product_attention(A[:, None], B[:, None], A[:, None], is_causal=True)[:, 0]",
    "A[:1].expand(A.shape[0], -1, -1) + B", "A.masked_fill(B > 0.5, 0.0)",
    "torch.where(A > B, A, B * 2)", "torch.einsum('nmi,ij->nmj', A, w)",
    "(A * 2 if A.shape[0] > 4 else A - 1)", "torch.cat(A.chunk(2, 1)[::-1], 1)",
    "A.repeat(2, 1, 1)[A.shape[0] :]", "A.flatten(0, 1).cumsum(0).view(A.shape[0], -1, 4)",
    "A / (A.var(1, keepdim=True) + 1)", "(A * 1).add_(1).mul_(B)", "F.layer_norm(A, (4,), w[0])",
    "A + torch.bincount((B > 0).flatten().long(), minlength=2)[0]",
)  # fmt: skip
RESULTS = (
    "A", "A.sum()", "A.transpose(0, 1)", "A.shape[0] * 2", "A[1:]", "A.argmax(0)", "x[1:]", "x",
    "A.reshape(A.shape[0], -1)", "A > 0", "A.permute(2, 0, 1)", "A.double()",
)  # fmt: skip


def random_function(draw: random.Random, seed: int) -> Any:
    """A function of x, y and w; tracers read its lines."""
    names, lines = ["x", "y"], ["def function(x, y, w):"]
    for number in range(draw.randint(1, 7)):
        step = draw.choice(STEPS).replace("A", draw.choice(names[-3:]))
        lines.append(f"    v{number} = " + step.replace("B", draw.choice(names)))
        names.append(f"v{number}")
    results = [draw.choice(RESULTS).replace("A", draw.choice(names)) for _ in range(2)]
    text, file = "\n".join([*lines, f"    return {', '.join(results)}, {names[-1]}\n"]), f"<{seed}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    namespace: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(text, file, "exec"), namespace)
    return namespace["function"]


# Dynamo asks intermediate tensors for their gradient after a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.campaign("dynamic_sizes")
@pytest.mark.parametrize("seed", range(12))
def test_random_functions_give_what_eager_torch_gives_at_random_sizes(seed: int) -> None:
    draw = random.Random(seed)
    function, trains = random_function(draw, seed), seed % 3 == 0
    run = compiled(function, dynamic=draw.choice([True, None]), fallback="torch", min_operations=1)
    torch.manual_seed(seed)
    w = torch.randn(4, 4)
    sizes = [(draw.randint(2, 9), draw.randint(2, 9)) for _ in range(6)]
    for n, m in (*sizes, (5, 5), (1, 3), (3, 1), (3, 40)):
        x, y = torch.randn(n, m, 4), torch.randn(n, m, 4)
        if draw.random() < 0.2:
            x = torch.randn(m, n, 4).transpose(0, 1)
        found, wanted = (
            _results_and_gradients(each, x, y, w, trains=trains) for each in (run, function)
        )
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3, equal_nan=True)


def _results_and_gradients(function: Any, x: Any, y: Any, w: Any, *, trains: bool) -> list[Any]:
    inputs = [x.clone().requires_grad_(trains), y.clone().requires_grad_(trains)]
    results = list(function(*inputs, w))
    losses = [r.sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if losses:
        gradients = torch.autograd.grad(sum(losses), inputs, allow_unused=True)
        results += [0 if gradient is None else gradient for gradient in gradients]
    return [r.detach() if isinstance(r, torch.Tensor) else r for r in results]


def test_random_operators_keep_sizes_named_and_draw_what_they_draw_at_a_size() -> None:
    def function(x: Any) -> Any:
        kept = torch.nn.functional.dropout(x, 0.4, True)
        return kept * torch.rand_like(x) + torch.bernoulli(torch.full_like(x, 0.5))

    run, before = compiled(function, dynamic=True), compilations()
    static = compiled(function, dynamic=False)
    counts = []
    for shape in ((5, 3), (6, 4), (4, 9)):
        drawn = []
        for way in (run, static):
            torch.manual_seed(shape[0])
            x = torch.ones(shape, requires_grad=True)
            result = way(x)
            result.sum().backward()
            drawn += [result.detach(), x.grad]
            counts.append(compilations() - before)
        assert all(map(torch.equal, drawn[:2], drawn[2:]))
        assert 0 < int((drawn[0] == 0).sum()) < x.numel()
    # The later shapes compile for the static way only: a forward and a backward graph.
    assert [after - first for first, after in zip(counts[1::2], counts[2::2], strict=False)] == [
        0,
        0,
    ]

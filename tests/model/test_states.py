"""Buffers that a module writes are states of its program: a cache of keys and values, a counter."""

from __future__ import annotations

import copy
import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.compiler import split_graph
from stitch.errors import CompileError, LinkError, StitchError, UsageError
from stitch.program import InputKind
from tests.support.grids import every, in_turn

EXECUTORS = ("numpy", "onnxruntime", "auto")
LAYERS, HEADS, WIDTH, WORDS, LENGTH = 2, 2, 16, 40, 32
PROMPT = (3, 17, 5, 29)


class Attention(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """Self-attention over a static cache of keys and values, which it writes at `position`."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.projections = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        shape = (HEADS, LENGTH, WIDTH // HEADS)
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape))

    def forward(self, x: Any, position: Any) -> Any:
        query, key, value = (
            part.view(-1, HEADS, WIDTH // HEADS).transpose(0, 1)
            for part in self.projections(x).chunk(3, -1)
        )
        self.keys.index_copy_(1, position, key)
        self.values[:, position] = value
        scores = query @ self.keys.transpose(1, 2) / (WIDTH // HEADS) ** 0.5
        seen = torch.arange(LENGTH) <= position[:, None]
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
        return self.out((weights @ self.values).transpose(0, 1).reshape(-1, WIDTH))


class Llama(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """A decoder of the Llama shape: RMSNorm, attention over a cache, a gated feed-forward net."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.attention = torch.nn.ModuleList(Attention() for _ in range(LAYERS))
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(WIDTH) for _ in range(2 * LAYERS + 1))
        self.gate, self.up, self.down = (
            torch.nn.ModuleList(torch.nn.Linear(a, b, bias=False) for _ in range(LAYERS))
            for a, b in ((WIDTH, 32), (WIDTH, 32), (32, WIDTH))
        )
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: Any, position: Any) -> Any:
        self.seen += tokens.shape[0]
        x = self.words(tokens)
        for n in range(LAYERS):
            x = x + self.attention[n](self.norms[2 * n](x), position)
            y = self.norms[2 * n + 1](x)
            x = x + self.down[n](torch.nn.functional.silu(self.gate[n](y)) * self.up[n](y))
        return self.head(self.norms[-1](x)[-1])


def tokens_of(prompt: Any, word: Any, after_prompt: Callable[[], object] = lambda: None) -> Any:
    """The 24 tokens that come after the prompt, each the likeliest."""
    logits = prompt(torch.tensor(PROMPT), torch.arange(len(PROMPT)))
    after_prompt()
    found = []
    for at in range(len(PROMPT), len(PROMPT) + 24):
        found.append(int(np.argmax(np.asarray(logits))))
        logits = word(torch.tensor([found[-1]]), torch.tensor([at]))
    return found


@pytest.fixture(scope="module")
def llama() -> Llama:
    module: Llama = Llama().eval().requires_grad_(False)
    return module


@pytest.fixture(scope="module")
def expected(llama: Llama) -> list[int]:
    twin = copy.deepcopy(llama)
    return list(tokens_of(twin, twin))


def prompt_and_word(llama: Llama, **options: Any) -> tuple[Any, Any]:
    """The module compiled for a prompt, and for one word."""
    count = len(PROMPT)
    prompt = stitch.compile(llama, (torch.zeros(count, dtype=torch.int64), torch.arange(count)),
                            name="prompt", **options)  # fmt: skip
    one = torch.zeros(1, dtype=torch.int64)
    return prompt, stitch.compile(llama, (one, one), name="word", **options)


@pytest.mark.parametrize(("target", "executor"), in_turn(["wormhole_n150", "host"], EXECUTORS))
def test_a_llama_with_a_cache_in_buffers_gives_eagers_tokens(
    llama: Llama, expected: list[int], executor: str, target: str
) -> None:
    prompt, word = prompt_and_word(llama, executor=executor, target=target)
    found = tokens_of(prompt, word, lambda: word.reset_state(prompt.state()))
    assert found == expected
    assert llama.seen == 0
    assert word.state()["seen"].item() == len(PROMPT) + 24
    assert len(set(expected)) > 4


@pytest.mark.parametrize("executor", every(3, EXECUTORS))
def test_two_loaded_programs_share_the_cache_on_one_device(
    llama: Llama, expected: list[int], executor: str, tmp_path: Path
) -> None:
    for model, name in zip(prompt_and_word(llama), ("prompt", "word"), strict=True):
        model.save(tmp_path / f"{name}.ttb")
    with stitch.open_device("wormhole_n150", executor=executor) as device:
        programs = [device.load(tmp_path / f"{name}.ttb") for name in ("prompt", "word")]
        prompt, word = programs
        state: Any = prompt.initial_state()
        names = prompt.state_names
        assert names == word.state_names

        def call(program: Any) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                nonlocal state
                logits, *after = program(*arguments, *(state[name] for name in names))
                state = dict(zip(names, after, strict=True))
                return logits

            return run

        assert tokens_of(call(prompt), call(word)) == expected
        copied = [line for line in device.explain().splitlines() if "'word' wants" in line]
        assert copied
        assert not any(name in line for line in copied for name in names)


# -- one state -------------------------------------------------------------------------------------


class Buffers(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """Buffers of several types, written in place; each is read after it was written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.full((3,), 0.5))
        self.register_buffer("count", torch.tensor(0), persistent=False)
        self.register_buffer("bytes", torch.tensor([250, 3], dtype=torch.uint8))
        self.register_buffer("past", torch.tensor([False, True]))
        self.register_buffer("brain", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("unread", torch.zeros(3))
        self.register_buffer("rate", torch.tensor(2.0))

    def forward(self, x: Any) -> Any:
        self.total.mul_(0.5).add_(x)
        self.count += 1
        self.bytes.add_(3)
        self.past[0] = self.count > 1
        self.brain.mul_(1.5)
        self.unread.copy_(x)
        return self.total * self.rate + self.count + self.brain.float().sum() + self.bytes[0]


def inputs(count: int = 4) -> list[Any]:
    return [torch.arange(3.0) * n - 1 for n in range(count)]


def compiled(module: Any = None, **options: Any) -> Any:
    return stitch.compile(Buffers() if module is None else module, (torch.zeros(3),), **options)


def buffers_of(module: torch.nn.Module) -> dict[str, Any]:
    return {name: np.asarray(b.float()) for name, b in module.named_buffers() if name != "rate"}


def state_of(model: Any) -> dict[str, Any]:
    return {name: np.asarray(t.numpy(), np.float32) for name, t in model.state().items()}


def test_missing_inputs_are_told_without_the_states_that_a_model_carries_itself() -> None:
    model = compiled(Buffers(), target="tiny")
    (name, *_) = model.state()
    with pytest.raises(UsageError, match=r"(?s)missing: x.*0 by position, 0 by name") as caught:
        model()
    assert name not in str(caught.value)
    with pytest.raises(UsageError, match=f"surplus: {name}"):
        model(inputs()[0], **{name: 0})
    with stitch.open_device("tiny") as device:
        program = device.load(model)
        with pytest.raises(UsageError, match=r"(?s)missing: .*try: initial_state\(\)"):
            program(inputs()[0])


@pytest.mark.parametrize("executor", [*EXECUTORS, "torch"])
@pytest.mark.parametrize("target", ["tiny", "host"])
def test_a_model_carries_its_buffers_from_call_to_call_and_leaves_the_modules_own(
    executor: str, target: str
) -> None:
    module, eager = Buffers(), Buffers()
    model = compiled(module, executor=executor, target=target)
    for x in inputs():
        np.testing.assert_array_equal(model(x).numpy(), eager(x))
    np.testing.assert_equal(state_of(model), buffers_of(eager))
    np.testing.assert_equal(buffers_of(module), buffers_of(Buffers()))
    model.reset_state()
    np.testing.assert_equal(state_of(model), buffers_of(Buffers()))
    np.testing.assert_array_equal(model(inputs()[2]).numpy(), Buffers()(inputs()[2]))


def test_states_are_slots_and_constants_are_none() -> None:
    model = compiled()
    kinds = {slot.name: slot.kind for slot in model.program.inputs}
    names = ["total", "count", "bytes", "past", "brain", "unread"]
    assert kinds == {"x": InputKind.ACTIVATION, **dict.fromkeys(names, InputKind.STATE)}
    assert [slot.name for slot in model.program.outputs] == ["output", *names]
    assert [*model.state()] == names
    with pytest.raises(UsageError, match=r"'past' is a state(.*\n)*.*model\.state\(\)\['past'\]"):
        model.get_tensor("past")
    with pytest.raises(UsageError, match=r"'past' is a state(.*\n)*.*model\.reset_state"):
        model.set_tensor("past", 0.0)
    assert stitch.compile(torch.nn.Linear(3, 3), (torch.zeros(3),)).state() == {}


def test_a_state_stays_as_it_is_when_the_model_is_called_again() -> None:
    model, eager = compiled(), Buffers()
    for x in inputs(2):
        model(x)
        eager(x)
    before = model.state()
    kept = state_of(model)
    model(inputs()[1])
    np.testing.assert_equal({n: np.asarray(t.numpy(), np.float32) for n, t in before.items()}, kept)
    model.reset_state(before)
    np.testing.assert_array_equal(model(inputs()[3]).numpy(), eager(inputs()[3]))
    model.reset_state({"count": np.int64(10)})
    assert model.state()["count"].item() == 10
    np.testing.assert_array_equal(model.state()["total"].numpy(), [0.5] * 3)
    with pytest.raises(UsageError, match=r"no state 'totl'(.|\n)*total"):
        model.reset_state({"totl": np.zeros(3)})
    with pytest.raises(LinkError, match=r"another shape(.|\n)*\[3\]"):
        model.reset_state({"total": np.zeros(4)})


def test_the_file_and_the_json_hold_what_the_states_begin_with(tmp_path: Path) -> None:
    module, eager = Buffers(), Buffers()
    module(inputs()[3])
    eager(inputs()[3])
    model = compiled(module, target="tiny")
    model(inputs()[1]).numpy()
    text = io.StringIO()
    model.dump(text)
    again: Any = stitch.CompiledModel.load(io.StringIO(text.getvalue()))
    assert again.encode() == model.encode()
    expected = eager(inputs()[2]).numpy()
    np.testing.assert_array_equal(again(inputs()[2]).numpy(), expected)
    np.testing.assert_array_equal(copy.copy(model)(inputs()[2]).numpy(), expected)
    model.save(tmp_path / "m.ttb")
    with stitch.open_device("tiny") as device:
        program: Any = device.load(tmp_path / "m.ttb")
        found, *after = program(inputs()[2], **program.initial_state())
        np.testing.assert_array_equal(found.numpy(), expected)
        names = program.state_names
        second, *_ = program(inputs()[3], **dict(zip(names, after, strict=True)))
        np.testing.assert_array_equal(second.numpy(), eager(inputs()[3]))
        with pytest.raises(UsageError, match="total"):
            program(inputs()[2])


def test_a_compile_cache_gives_each_module_its_own_initial_state(tmp_path: Path) -> None:
    cache, module = stitch.CompileCache(tmp_path), Buffers()
    compiled(cache=cache)
    module(inputs()[1])
    model = compiled(module, cache=cache)
    assert cache.hits == 1
    np.testing.assert_array_equal(model(inputs()[2]).numpy(), module(inputs()[2]))


class Cache(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """A table that is written at an index, which may lie beyond it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4, 2))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, at: Any, x: Any) -> Any:
        self.count += 1
        self.table.index_copy_(0, at, x)
        return self.table.sum(0) + self.count


@pytest.mark.parametrize("window", [1, 64])
def test_a_call_that_fails_leaves_the_state_as_it_was(window: int) -> None:
    model: Any = stitch.compile(Cache(), (torch.tensor([0]), torch.ones(1, 2)), target="tiny")
    eager, x = Cache(), torch.ones(1, 2)
    with stitch.open_device("tiny", window=window) as device:
        for at in (0, 1):
            found = model(device.tensor(np.array([at])), x).numpy()
            np.testing.assert_array_equal(found, eager(torch.tensor([at]), x))
        with pytest.raises((StitchError, IndexError)):
            model(device.tensor(np.array([9])), x).numpy()
        found = model(device.tensor(np.array([2])), x).numpy()
        np.testing.assert_array_equal(found, eager(torch.tensor([2]), x))


@pytest.mark.parametrize("window", [1, 2, 3, 64])
def test_calls_that_wait_when_a_later_one_fails_stay_in_the_state(window: int) -> None:
    model: Any = stitch.compile(Cache(), (torch.tensor([0]), torch.ones(1, 2)), target="tiny")
    eager, x = Cache(), torch.ones(1, 2)
    with stitch.open_device("tiny", window=window) as device:
        for at in (0, 1, 2):
            model(device.tensor(np.array([at])), x)
            eager(torch.tensor([at]), x)
        with pytest.raises((StitchError, IndexError)):
            model(device.tensor(np.array([9])), x)
            device.flush()
        found = model(device.tensor(np.array([3])), x).numpy()
        np.testing.assert_array_equal(found, eager(torch.tensor([3]), x))


def test_a_state_is_lost_where_calls_wait_on_one_that_fails_until_it_is_reset() -> None:
    model: Any = stitch.compile(Cache(), (torch.tensor([0]), torch.ones(1, 2)), target="tiny")
    x = torch.ones(1, 2)
    with stitch.open_device("tiny", window=64) as device:
        for at in (0, 9, 1):
            model(device.tensor(np.array([at])), x)
        with pytest.raises((StitchError, IndexError)):
            device.flush()
        for ask in (model.state, lambda: model(device.tensor(np.array([2])), x)):
            with pytest.raises(UsageError, match=r"state of 'Cache' is lost(.|\n)*reset_state"):
                ask()
        model.reset_state()
        found = model(device.tensor(np.array([2])), x).numpy()
        np.testing.assert_array_equal(found, Cache()(torch.tensor([2]), x))


def test_no_call_is_lost_where_threads_call_one_model() -> None:
    model = compiled(target="tiny")
    x, calls = np.zeros(3, np.float32), 60
    before = sys.getswitchinterval()

    def call() -> None:
        for _ in range(calls):
            model(x)

    threads = [threading.Thread(target=call) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert model.state()["count"].item() == 4 * calls


def test_a_state_is_reset_to_whatever_a_call_takes_and_to_nothing_else() -> None:
    model = compiled(target="tiny")
    for values in (torch.full((2,), 3.0, dtype=torch.bfloat16), np.full(2, 3.0), [3.0, 3.0]):
        model.reset_state({"brain": values})
        assert state_of(model)["brain"].tolist() == [3, 3]
    model.reset_state({"total": torch.ones(3, requires_grad=True)})
    kept = model.state()
    for values in (
        {"count": 1.5}, {"count": True}, {"total": np.ones(3, complex)}, {"total": ["a"] * 3},
        {"total": [[1], [1, 2]]}, {"total": np.arange(3)}, {"total": kept["count"]},
        {"bytes": kept["past"]},
    ):  # fmt: skip
        with pytest.raises(StitchError, match=f"'{next(iter(values))}'"):
            model.reset_state(values)
    assert state_of(model)["total"].tolist() == [1, 1, 1]
    with stitch.open_device("tiny") as device:
        gone = device.tensor(np.ones(3, np.float32))
        gone.deallocate()
        with pytest.raises(StitchError, match="freed"):
            model.reset_state({"total": gone})


def test_a_state_takes_the_buffer_of_the_one_before_where_a_option_says_so() -> None:
    placement = ["input.count.ownership=donate", "output.count.alias=count"]
    model, eager = compiled(target="tiny", placement=placement), Buffers()
    assert model.program.outputs[2].aliases_input == 2
    for x in (*inputs(), *inputs()):
        np.testing.assert_array_equal(model(x).numpy(), eager(x))
    np.testing.assert_equal(state_of(model), buffers_of(eager))


def test_a_state_moves_with_the_inputs_to_another_device() -> None:
    model, eager = compiled(), Buffers()
    xs = inputs()
    np.testing.assert_array_equal(model(xs[0]).numpy(), eager(xs[0]))
    with stitch.open_device("wormhole_n150") as device:
        x = device.tensor(xs[1].numpy())
        np.testing.assert_array_equal(model(x).numpy(), eager(xs[1]))
        np.testing.assert_array_equal(model(xs[2]).numpy(), eager(xs[2]))
        model(x).numpy()
    with pytest.raises(StitchError, match="closed"):
        model(xs[3])
    model.reset_state()
    np.testing.assert_array_equal(model(xs[3]).numpy(), Buffers()(xs[3]))


def test_normalization_in_training_mode_keeps_its_running_statistics() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).train()
    eager = copy.deepcopy(module)
    model: Any = stitch.compile(module, (torch.zeros(5, 4),))
    for _ in range(3):
        x = torch.randn(5, 4)
        np.testing.assert_allclose(model(x).numpy(), eager(x).detach(), atol=1e-5)
    for name, tensor in model.state().items():
        np.testing.assert_allclose(tensor.numpy(), dict(eager.named_buffers())[name], atol=1e-5)
    assert model.state()["1.num_batches_tracked"].item() == 3


def test_two_names_of_written_bytes_are_refused() -> None:
    class Aliased(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            table = torch.zeros(4)
            self.register_buffer("a", table)
            self.register_buffer("b", table[1:])

        def forward(self, x: Any) -> Any:
            self.a.add_(x)
            return self.b + 1

    with pytest.raises(CompileError, match=r"'a' and 'b' share memory(.|\n)*clone"):
        stitch.compile(Aliased(), (torch.zeros(4),))


# -- stitched and split ----------------------------------------------------------------------------


class Twice(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """Two caches, one after the other, and a counter that is read at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        for name in ("a", "b"):
            self.register_buffer(name, torch.zeros(6, 4))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Any, at: Any) -> Any:
        self.count += 1
        self.a.index_copy_(0, at, self.first(x))
        x = torch.tanh(self.a.sum(0, keepdim=True))
        self.b.index_copy_(0, at, self.last(x))
        return self.b.sum(0) * self.count


AT = [torch.tensor([n]) for n in (0, 3, 1, 5, 2)]
ROWS = [torch.full((1, 4), n / 4) for n in range(5)]


def results_of_twice() -> list[Any]:
    eager = Twice().requires_grad_(False)
    return [eager(x, at).numpy() for x, at in zip(ROWS, AT, strict=True)]


def test_a_pipeline_takes_and_gives_the_states_of_all_its_programs() -> None:
    double = stitch.compile(lambda x: x * 2.0, [np.zeros(3, np.float32)], target="tiny")
    model = compiled(target="tiny")
    first, second = Buffers(), Buffers()
    with stitch.open_device("tiny") as device:
        programs: Any = [device.load(one) for one in (double, model, model, double)]
        pipeline: Any = stitch.Pipeline(programs)
        starts = [program.initial_state() for program in programs]
        state: Any = [tensor for start in starts for tensor in start.values()]
        for x in inputs():
            y, *state = pipeline(x, *state)
            np.testing.assert_array_equal(y.numpy(), second(first(x * 2)) * 2)
        with pytest.raises(UsageError, match="total"):
            pipeline(inputs()[0])


@pytest.mark.parametrize("cuts", [2, 3, 4])
def test_the_parts_of_a_split_module_carry_their_states(cuts: int) -> None:
    graph = stitch.compile(Twice(), (ROWS[0], AT[0]), target="tiny").graph
    parts = split_graph(graph, cuts)
    assert len(parts) == cuts
    assert sorted(name for part in parts for name in part.initial_state) == ["a", "b", "count"]
    models: Any = [stitch.compile(part, target="tiny") for part in parts]
    for x, at, expected in zip(ROWS, AT, results_of_twice(), strict=True):
        given: dict[str, Any] = {"x": x, "at": at}
        for part, model in zip(parts, models, strict=True):
            taken = [s.name for s in part.inputs if s.kind is InputKind.ACTIVATION]
            made = model(**{name: given[name] for name in taken})
            names = [s.name for s in part.outputs if s.name not in part.initial_state]
            given |= dict(zip(names, made if isinstance(made, tuple) else (made,), strict=True))
        np.testing.assert_allclose(given["output"].numpy(), expected, atol=1e-6)
    with stitch.open_device("tiny") as device:
        programs = [device.load(model) for model in models]
        pipeline: Any = stitch.Pipeline(programs)
        state: Any = [t for program in programs for t in program.initial_state().values()]
        order = [n for *others, last in [parts] for p in (last, *others) for n in p.initial_state]
        names = [name for part in parts for name in part.initial_state]
        for x, at, expected in zip(ROWS, AT, results_of_twice(), strict=True):
            y, *after = pipeline(**dict(zip(names, state, strict=True)), x=x, at=at)
            left = dict(zip(order, after, strict=True))
            state = [left[name] for name in names]
            np.testing.assert_allclose(y.numpy(), expected, atol=1e-6)


def test_a_cut_between_what_reads_and_what_writes_a_state_is_refused() -> None:
    class Norm(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Any) -> Any:
            half = self.mean * 0.5
            self.mean.copy_(torch.tanh(half) + x)
            return torch.exp(self.mean)

    graph = stitch.compile(Norm(), (torch.zeros(3),), target="tiny").graph
    with pytest.raises(CompileError, match=r"'mean' replaces input 'mean'(.|\n)*cut elsewhere"):
        split_graph(graph, ["tanh"])
    assert [*split_graph(graph, 2)[0].initial_state] == ["mean"]


def test_a_pipeline_file_begins_with_the_state_and_carries_it(tmp_path: Path) -> None:
    stitch.compile(Twice(), (ROWS[0], AT[0]), target="tiny", name="m").save(tmp_path / "m.ttb")
    (tmp_path / "p.yaml").write_text("""
modules:
  start: {file: m.ttb, program: m.initial_state}
  m: m.ttb
inputs:
  xs: {shape: [5, 1, 4], type: float32}
  at: {shape: [5, 1], type: int64}
steps:
  - {run: start, outputs: {a: a, b: b, count: count}}
  - repeat: 5
    carry: {a: a2, b: b2, count: count2}
    collect: {ys: y}
    steps:
      - run: m
        inputs: {x: "xs[i]", at: "at[i]", a: a, b: b, count: count}
        outputs: {output: y, a: a2, b: b2, count: count2}
outputs: {ys: ys, count: count}
""")
    with stitch.open_device("tiny") as device:
        pipeline: Any = stitch.Pipeline.from_yaml(tmp_path / "p.yaml", device=device)
        for _ in range(2):
            ys, count = pipeline(torch.stack(ROWS), torch.stack(AT))
            np.testing.assert_allclose(ys.numpy(), np.stack(results_of_twice()), atol=1e-6)
            assert count.item() == 5

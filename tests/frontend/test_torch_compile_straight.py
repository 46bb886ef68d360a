"""Calls that go straight to a program, and those that must not: all give what eager torch gives."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch.autograd import forward_ad

from stitch.errors import TaskError, UsageError
from stitch.frontend.torch.compile import aot_trace, aot_wrappers
from stitch.frontend.torch.compile.aot_trace import by_aot_autograd
from stitch.frontend.torch.compile.outer_graph import OuterGraph
from stitch.frontend.torch.compile.program_arguments import ProgramArguments
from stitch.frontend.torch.compile.shared_storage import MAX_IDLE_PARTS, ArgumentSlot
from stitch.runtime import Repeat
from tests.support.torch.compiled import assert_same, compiled, storage_of

Function = Callable[..., Any]
lacking = torch.special.i0
#: Whose lines are interrupted.
INTERRUPTED = ("program_arguments.py", "graph_program.py", "shared_storage.py")


@pytest.fixture()
def straight(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each graph without gradients whether it is called without aot_autograd's wrappers."""
    seen: list[bool] = []
    unwrapped = aot_wrappers.Inference.unwrapped

    def noted(self: Any, run: Any, wrapped: Any, examples: Sequence[Any]) -> Any:
        called = unwrapped(self, run, wrapped, examples)
        seen.append(called is not wrapped)
        return called

    monkeypatch.setattr(aot_wrappers.Inference, "unwrapped", noted)
    return seen


# Without aot_autograd's wrappers ------------------------------------------------------------------


@pytest.mark.parametrize("operator", [torch.sin, lacking], ids=["ours", "torch's"])
def test_a_call_of_plain_tensors_goes_straight(operator: Function, straight: list[bool]) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    run = compiled(lambda x: second(operator(first(x))), fallback="torch", min_operations=1)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 8)
            assert_same(run(x), second(operator(first(x))))
    assert straight == [True]


def _writes(x: Any) -> Any:
    x.add_(1)
    return x * 2


def _gives_its_argument(x: Any) -> Any:
    return x, x * 2


def _gives_a_view(x: Any) -> Any:
    return x.view(-1), x * 2


def _gives_views_of_one(x: Any) -> Any:
    made = x * 2
    return made, made.view(-1)


def _turns_gradients_off(x: Any) -> Any:
    torch.set_grad_enabled(False)
    return x * 2


@pytest.mark.parametrize(
    "function",
    [_writes, _gives_its_argument, _gives_a_view, _gives_views_of_one, _turns_gradients_off],
)
def test_what_aot_autograd_does_after_a_graph_is_done(
    function: Function, straight: list[bool]
) -> None:
    run = compiled(function)
    for _ in range(4):
        mine, theirs = torch.randn(2, 4), torch.randn(2, 4)
        mine.copy_(theirs)
        on = torch.is_grad_enabled()
        try:
            made, on_mine = run(mine), torch.is_grad_enabled()
            torch.set_grad_enabled(on)
            wanted, on_theirs = function(theirs), torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(on)
        made, wanted = (v if isinstance(v, tuple) else (v,) for v in (made, wanted))
        for one, other in zip(made, wanted, strict=True):
            assert_same(one, other)
        assert torch.equal(mine, theirs)
        assert on_mine == on_theirs
        storages = {v.untyped_storage().data_ptr() for v in (mine, *made)}
        assert len(storages) == len({v.untyped_storage().data_ptr() for v in (theirs, *wanted)})
    # The others dynamo has seen to, or our own outputs do.
    if function in (_writes, _gives_a_view):
        assert straight == [False]


def test_one_tensor_given_twice_is_read_twice() -> None:
    run = compiled(lambda x, y: x - y * 2)
    x, y = torch.randn(3), torch.randn(3)
    for pair in ((x, x), (x, y), (y, y)):
        assert_same(run(*pair), pair[0] - pair[1] * 2)


def test_a_tensor_of_another_class_goes_through_the_wrappers(straight: list[bool]) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    run = compiled(lambda x: x * 2 + 1)
    with torch.no_grad():
        made = run(TwoTensor(torch.ones(3), torch.zeros(3)))
    assert torch.equal(made.a, torch.full((3,), 3.0))
    assert torch.equal(made.b, torch.ones(3))
    assert straight == [False]


def test_operators_of_somebody_else_go_through_the_wrappers(straight: list[bool]) -> None:
    @torch.library.custom_op("stitch_tests::doubled_straight", mutates_args=())  # type: ignore[untyped-decorator]  # torch's
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @doubled.register_fake  # type: ignore[untyped-decorator]  # torch's
    def _(x: Any) -> Any:
        return torch.empty_like(x)

    run = compiled(lambda x: doubled(x.sin()).cos(), fallback="torch")
    x = torch.randn(4)
    assert_same(run(x), (x.sin() * 2).cos())
    assert straight == [False]


def test_what_torch_runs_between_programs_heeds_no_mode_of_the_caller() -> None:
    """Gradients and autocast are turned off in a graph: what they do is in it already."""
    weight = torch.randn(4, 4)
    run = compiled(lambda x: (lacking(x) @ weight).sin(), fallback="torch")
    x = torch.rand(4, 4)
    wanted = (lacking(x) @ weight).sin()
    for _ in range(3):
        made = run(x)
        assert_same(made, wanted)
        assert not made.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        inside = (lacking(x) @ weight).sin()
        assert inside.dtype is torch.bfloat16
        for _ in range(3):
            assert run(x).dtype is torch.bfloat16
    assert_same(run(x), wanted)


# By aot_autograd ----------------------------------------------------------------------------------


def _left_whole(module: Any, _: Any) -> Any:
    return make_boxed_func(module.forward)


_HOW: dict[str, Any] = {
    "fw_compiler": _left_whole, "bw_compiler": _left_whole, "inference_compiler": _left_whole,
    "partition_fn": default_partition, "decompositions": {},
}  # fmt: skip


def test_a_process_that_compiles_does_not_load_inductors_scheduler() -> None:
    program = """
import sys, torch
run = torch.compile(torch.nn.Linear(4, 4), backend="stitch")
with torch.no_grad():
    run(torch.ones(2, 4))
print([name for name in sys.modules if name in ("torch._inductor.scheduler", "torch._inductor.ir")])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-W", "ignore", "-c", program]
    found = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_arguments_in_lists_reach_a_graph() -> None:
    module = torch.fx.symbolic_trace(lambda xs: (xs[0] - xs[1] * 2,))
    x, y = torch.randn(3), torch.randn(3)
    run = by_aot_autograd(module, [[x, y]], **_HOW)
    assert torch.equal(run([x, y])[0], x - y * 2)


def test_torchs_own_class_writes_the_log_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    def by_torch() -> None: ...

    def class_of(**how: Any) -> Any:
        asked.append(how)
        return lambda module, examples: by_torch

    monkeypatch.setattr(aot_trace, "aot_autograd", class_of)
    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    assert by_aot_autograd(None, [], **_HOW) is by_torch
    assert asked == [_HOW]


def test_graphs_are_counted_as_torch_counts_them() -> None:
    counted = torch._dynamo.utils.counters["aot_autograd"]
    run = compiled(lambda x: x * 2)
    counted.clear()
    run(torch.ones(2))
    assert counted == {"total": 1, "ok": 1}
    lacks = compiled(lambda x: lacking(x))
    counted.clear()
    with pytest.raises(BackendCompilerFailed):
        lacks(torch.ones(2))
    assert counted == {"total": 1, "not_ok": 1}


@pytest.mark.parametrize(
    "function",
    [lambda x: x.t() * 2, lambda x: x[:0] * 2, lambda x: nn.functional.dropout(x, 0.5) * 0,
     lambda x: lacking((x * 2).t()) + 1],
    ids=["strides", "empty", "dropout", "torch's"],
)  # fmt: skip
def test_results_lie_on_the_cpu_whatever_device_is_the_default(function: Function) -> None:
    run = compiled(function, fallback="torch", min_operations=1)
    with torch.no_grad(), torch.device("meta"):
        for _ in range(4):
            x = torch.rand(3, 4, device="cpu")
            assert_same(run(x), function(x))


# What stands for arguments ------------------------------------------------------------------------


def _arguments(*kinds: str) -> tuple[Any, ProgramArguments]:
    account = storage_of(executor="numpy")
    slots = [ArgumentSlot(at, kind == "static", kind == "fresh") for at, kind in enumerate(kinds)]
    return account, ProgramArguments(account, slots)


def _given(account: Any, arguments: ProgramArguments, *tensors: Any) -> list[Any]:
    with account.device.lock:
        return arguments.all_of(arguments.arrays(tensors))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_lasts_is_given_again_until_it_lies_elsewhere(count: int) -> None:
    account, arguments = _arguments(*["static"] * count)
    tensors = [torch.randn(4) for _ in range(count)]
    first = _given(account, arguments, *tensors)
    assert not arguments.stay
    recognised = account.recognised
    for _ in range(2):
        again = _given(account, arguments, *tensors)
        assert [a is b for a, b in zip(first, again, strict=True)] == [True] * count
        assert arguments.stay
    assert account.recognised - recognised == 2 * count
    kept, tensors[-1] = tensors[-1], torch.randn(4)
    other = _given(account, arguments, *tensors)
    assert not arguments.stay
    assert other[-1] is not first[-1]
    assert all(a is b for a, b in zip(first[:-1], other[:-1], strict=True))
    _given(account, arguments, *tensors)
    assert arguments.stay
    del kept


def test_an_array_where_a_lent_one_was_does_not_stay() -> None:
    account, arguments = _arguments("other")
    x = torch.randn(4)
    for _ in range(3):
        _given(account, arguments, x)
    assert arguments.stay
    y = torch.randn(4)
    (array,) = _given(account, arguments, y)
    assert not arguments.stay
    assert array.tolist() == y.tolist()
    _given(account, arguments, torch.randn(4))
    assert arguments.stay  # An array is another in every call.


def test_the_same_bytes_in_other_strides_are_not_the_same() -> None:
    account, arguments = _arguments("other")
    x = torch.arange(4.0).view(2, 2)
    for _ in range(3):
        _given(account, arguments, x)
    (array,) = _given(account, arguments, x.t())
    assert not arguments.stay
    assert array.tolist() == x.t().tolist()
    (array,) = _given(account, arguments, torch._neg_view(x))
    assert array.tolist() == (-x).tolist()


def test_what_was_taken_back_is_lent_anew() -> None:
    account, arguments = _arguments("static", "other")
    x, y = torch.randn(4), torch.randn(4)
    for _ in range(4):
        first = _given(account, arguments, x, y)
    with account.device.lock:
        for lender in account._lenders.values():
            for lent in lender.parts.values():
                account._take_back(lent)
        account._lenders.clear()
    again = _given(account, arguments, x, y)
    assert not arguments.stay
    assert again[0] is not first[0]
    for _ in range(2):
        again = _given(account, arguments, x, y)
    assert again[0].numpy().tolist() == x.tolist()
    with account.device.lock:
        account.device.run_queue()


def test_what_is_asked_for_all_at_once_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"{ArgumentSlot.__module__}.MAX_IDLE_PARTS"
    monkeypatch.setattr(module, 0)
    assert MAX_IDLE_PARTS > 0
    account, arguments = _arguments("static", "static")
    x, y = torch.randn(4), torch.randn(4)
    first = _given(account, arguments, x, y)
    for _ in range(300):
        again = _given(account, arguments, x, y)
    assert again[0] is first[0]


def test_what_another_thread_compiles_during_a_look_is_asked_from_then_on() -> None:
    asked: list[str] = []

    class Asker:
        def look(self) -> None:
            asked.append("early")
            other.start()
            # It comes to its end only where nothing keeps it out.
            other.join(0.2)

    class Late:
        def look(self) -> None:
            asked.append("late")

    account, early, late = storage_of(executor="numpy"), Asker(), Late()
    other = threading.Thread(target=account.await_looks, args=(late,))
    account.await_looks(early)
    with account.device.lock:
        account.look()
    other.join()
    del early
    assert asked == ["early"]
    with account.device.lock:
        account.look()
    assert asked == ["early", "late"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_is_made_anew_is_an_array(dtype: torch.dtype) -> None:
    account, arguments = _arguments("fresh")
    tensor = torch.arange(4).to(dtype)
    for given in (tensor, tensor.clone(), tensor.view(2, 2).t().reshape(4), tensor[::2]):
        (array,) = _given(account, arguments, given)
        assert array.astype(float).tolist() == given.tolist()
    leaf = torch.ones(2, requires_grad=True)
    (array,) = _given(account, arguments, leaf * 2)
    assert array.tolist() == [2.0, 2.0]


# Runs that repeat ---------------------------------------------------------------------------------


@pytest.fixture()
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each attempt to repeat a run whether it was."""
    seen: list[bool] = []
    call = Repeat.__call__

    def noted(self: Repeat, arrays: Any) -> Any:
        made = call(self, arrays)
        seen.append(made is not None)
        return made

    monkeypatch.setattr(Repeat, "__call__", noted)
    # Whatever is taken back then, no repeat outlives.
    monkeypatch.setattr(f"{ProgramArguments.__module__}.CALLS_BETWEEN_LOOKS", 1 << 30)
    return seen


def test_small_results_of_one_program_are_repeated(repeats: list[bool]) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    run, x = compiled(module), torch.randn(2, 8)
    held = []
    with torch.no_grad():
        for number in range(8):
            x.fill_(number)
            module[0].weight.mul_(1.5)
            held.append((run(x), module(x)))
    assert repeats[-4:] == [True] * 4
    for made, wanted in held:
        assert_same(made, wanted)


def test_both_parts_beside_an_operator_of_torchs_are_repeated(repeats: list[bool]) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    run = compiled(lambda x: second(lacking(first(x))), fallback="torch", min_operations=1)
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(8):
            x.normal_()
            assert_same(run(x), second(lacking(first(x))))
    assert repeats[-8:] == [True] * 8


def test_random_numbers_differ_from_repeat_to_repeat(repeats: list[bool]) -> None:
    run = compiled(lambda x: nn.functional.dropout(x, 0.5))
    x = torch.ones(64)
    with torch.no_grad():
        made = [run(x) for _ in range(8)]
    assert repeats[-1]
    assert len({tuple(one.tolist()) for one in made}) == 8


@pytest.mark.parametrize("shape", [(128, 128), (0, 4)])
def test_large_and_empty_results_are_no_copies(shape: Any, repeats: list[bool]) -> None:
    run, x = compiled(lambda x: x * 2 + 1), torch.randn(shape)
    with torch.no_grad():
        for _ in range(6):
            assert_same(run(x), x * 2 + 1)
    assert repeats == []


def test_a_result_that_is_given_again_is_read_where_it_lies(repeats: list[bool]) -> None:
    make, run = compiled(lambda x: x * 2 + 1), compiled(lambda x: x[:, :4] + 1)
    with torch.no_grad():
        made = make(torch.randn(128, 128))
        for number in range(6):
            made.fill_(number)
            assert_same(run(made), made[:, :4] + 1)
    assert repeats == []


def test_one_place_given_twice_is_none_of_the_runs_before(repeats: list[bool]) -> None:
    run = compiled(lambda x, y: x * 2 - y)
    x, y = torch.randn(4), torch.randn(4)
    with torch.no_grad():
        for _ in range(2):
            # Dynamo knows objects, and not that these two begin at one place.
            for other in (y, x.detach()):
                for _ in range(5):
                    assert_same(run(x, other), x * 2 - other)
    assert repeats[-1] is True


def test_weights_that_are_tied_by_their_data_are_read() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    run, x = compiled(lambda x: first(x) + 2 * second(x)), torch.randn(2, 4)
    own = second.weight.data
    with torch.no_grad():
        for data in (own, first.weight.data) * 2:
            second.weight.data = data
            for _ in range(5):
                assert_same(run(x), first(x) + 2 * second(x))


def test_after_a_call_that_failed_the_next_is_none_of_the_runs_before() -> None:
    run, table = compiled(lambda rows, table: table[rows] * 2), torch.randn(10, 8)
    good, bad = torch.tensor([1, 2]), torch.tensor([3, 4])
    with torch.no_grad():
        for rows in (bad, good):
            for _ in range(5):
                assert_same(run(rows, table), table[rows] * 2)
        bad[0] = 99
        with pytest.raises(TaskError, match="out of range"):
            run(bad, table)
        bad[0] = 5
        assert_same(run(bad, table), table[bad] * 2)


class _Interrupt(BaseException):
    pass


def _interrupted(call: Callable[[], object], at: int) -> bool:
    """Call, with an interrupt before so many lines of what sees to a call's arguments; whether it
    came."""
    left = at

    def local(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        # Where a lock is given back nothing interrupts.
        if event == "line" and not _line_of(frame).startswith("with "):
            left -= 1
            if not left:
                raise _Interrupt
        return local

    def entered(frame: FrameType, event: str, argument: object) -> Any:
        return local if frame.f_code.co_filename.endswith(INTERRUPTED) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    except _Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def _line_of(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


@pytest.mark.parametrize("changes", ["argument", "weights"])
def test_a_call_that_was_interrupted_anywhere_leaves_nothing_stale(changes: str) -> None:
    module = nn.Linear(4, 4)
    run, held = compiled(module), [torch.randn(2, 4) for _ in range(2)]
    at, came = 0, True
    with torch.no_grad():
        while came:
            at, x = at + 1, held[0]
            for _ in range(4):
                assert_same(run(held[1]), module(held[1]))
            for _ in range(4):
                assert_same(run(x), module(x))
            if changes == "argument":
                x = held[1]
            else:
                module.weight.data = torch.randn(4, 4)
            came = _interrupted(lambda x=x: run(x), at)  # type: ignore[misc]  # it is known
            for _ in range(3):
                assert_same(run(x), module(x))
            # What lies elsewhere is seen, too.
            module.weight.data = module.weight.data + 1
            assert_same(run(x), module(x))
    assert at > 30


# The code between programs ------------------------------------------------------------------------


def _outer(graph: Any, module: Any | None = None) -> Function:
    steps = [n for n in graph.nodes if n.op == "call_function" and n.all_input_nodes]
    run = OuterGraph(module or SimpleNamespace(graph=graph), is_backward=False).run(steps, [])
    return lambda *arguments: run(list(arguments))


def test_operands_of_every_kind_reach_an_operator() -> None:
    def echo(*given: Any, **named: Any) -> Any:
        return given, named

    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    odd = {"from": y, "dtype": torch.int8, "not a name": 1.5}
    given = ([x, (y,)], slice(x, None, 2), {"key": x}, float("inf"), "word", None, True, ())
    graph.output([graph.call_function(echo, given, odd)])
    made = _outer(graph)(3, 4)[0]
    assert made == (
        ([3, (4,)], slice(3, None, 2), {"key": 3}, float("inf"), "word", None, True, ()),
        {"from": 4, "dtype": torch.int8, "not a name": 1.5},
    )


def test_values_end_after_their_last_reader_and_arguments_are_emptied() -> None:
    alive: list[list[int]] = []
    made: list[Any] = []

    class Thing:
        pass

    def step(*_: Any) -> Thing:
        thing = Thing()
        alive.append([number for number, other in enumerate(made) if other() is not None])
        made.append(weakref.ref(thing))
        return thing

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.placeholder("nobody_reads_it")
    a = graph.call_function(step, (x,))
    b = graph.call_function(step, (a,))
    graph.call_function(step, (b,))
    d = graph.call_function(step, (b,))
    graph.output([d])
    steps = [node for node in graph.nodes if node.op == "call_function"]
    run = OuterGraph(SimpleNamespace(graph=graph), is_backward=False).run(steps, [])
    arguments: list[Any] = [1, 2]
    result = run(arguments)
    assert arguments == []
    assert run._boxed_call
    assert alive == [[], [0], [1], [1]]
    del result


def test_constants_are_read_from_the_module() -> None:
    module = nn.Module()
    module.register_buffer("held", torch.arange(3.0))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    held = graph.get_attr("held")
    full = graph.call_function(torch.ops.aten.full.default, ([3], 2.0))
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, held))
    graph.output([graph.call_function(torch.ops.aten.mul.Tensor, (total, full)), held])
    made, constant = _outer(graph, torch.fx.GraphModule(module, graph))(torch.ones(3))
    assert made.tolist() == [2.0, 4.0, 6.0]
    assert constant.tolist() == [0.0, 1.0, 2.0]


# torch's own module of such derivatives asks for it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_tangents_are_refused_and_not_lost() -> None:
    """A graph that was compiled without them is called with them."""
    run = torch.compile(lambda x, w: x @ w, backend="stitch")
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    plain = run(x, w)
    with forward_ad.dual_level():
        assert_same(run(x, w), plain)
        with pytest.raises(UsageError, match="forward-mode derivatives"):
            run(forward_ad.make_dual(x, torch.ones_like(x)), w)
    assert_same(run(x, w), plain)

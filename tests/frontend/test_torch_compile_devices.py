"""torch.compile(backend="stitch") on a device whose memory is PyTorch's: tensors stay where they
are, in both directions."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

import stitch
from stitch.frontend.torch.aten_walk import readable_type
from stitch.frontend.torch.compile.backend import CompileSettings, shared_storage_of

OPTIONS = {"target": "torch:cpu"}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def copies() -> int:
    return stitch.device_of(OPTIONS).account().total.copies


def test_a_module_runs_on_its_own_tensors_without_copies() -> None:
    module = net()
    compiled = torch.compile(module, backend="stitch", options=OPTIONS)
    before, held = copies(), []
    with torch.no_grad():
        for turn in range(12):
            x = X + turn
            y = compiled(x)
            torch.testing.assert_close(y, module(x), rtol=1e-6, atol=1e-6)
            held.append((y, y.clone(), y.t()[1:], y.t()[1:].clone()))
            if turn == 6:
                module[0].weight.mul_(0.5)  # Read in place, however it is written.
    assert copies() == before
    del y
    gc.collect()
    # Results that torch holds keep their bytes, and so do views of them alone.
    views = [(view, kept) for _, _, view, kept in held]
    for whole, kept, _, _ in held:
        assert torch.equal(whole, kept)
    del held, whole
    with torch.no_grad():
        for turn in range(12):
            compiled(X - turn)
    assert all(torch.equal(view, kept) for view, kept in views)


@pytest.mark.campaign("torch_devices")
def test_a_training_step_follows_eager_torch_without_copies() -> None:
    module, before = net(), copies()
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend="stitch", options=OPTIONS)
    for run in (compiled, reference):
        optimizer = torch.optim.AdamW(run.parameters(), lr=0.1)
        for turn in range(4):
            optimizer.zero_grad()
            run(X + turn).square().mean().backward()
            optimizer.step()
    for name, value in reference.named_parameters():
        torch.testing.assert_close(module.get_parameter(name), value, rtol=1e-5, atol=1e-6)
    assert copies() == before


def test_a_graph_is_cut_where_torch_computes_and_nothing_is_copied() -> None:
    def function(x: Any) -> Any:
        y = (x * 2).relu() @ x.t() + 1
        values, _ = torch.sort(y.contiguous().view(-1)[::2].contiguous(), stable=True)
        return values.exp() / values.sum() * 3 + 1, y.bfloat16()

    options = {**OPTIONS, "min_operations": 1}
    compiled, before = torch.compile(function, backend="stitch", options=options), copies()
    for turn in range(3):
        for found, wanted in zip(compiled(X + turn), function(X + turn), strict=True):
            torch.testing.assert_close(found, wanted)
    assert copies() == before


def test_strided_arguments_are_copied_and_the_copies_live_until_they_are_read() -> None:
    def function(x: Any) -> Any:
        return (x * 2 + 1).relu().sum(0) + x.exp()[0]

    compiled = torch.compile(function, backend="stitch", options=OPTIONS)
    for turn in range(4):
        strided = (X + turn).t().contiguous().t()
        torch.testing.assert_close(compiled(strided), function(strided))


def test_parameters_are_given_up_with_their_module() -> None:
    module = net()
    compiled = torch.compile(module, backend="stitch", options=OPTIONS)
    with torch.no_grad():
        compiled(X)
    storage = shared_storage_of(CompileSettings.of(OPTIONS))
    before = storage.places_lent
    assert before >= 4
    del compiled, module
    torch._dynamo.reset()
    gc.collect()
    storage.clean_up()
    assert storage.places_lent <= before - 4


def test_graphs_of_cards_are_compiled() -> None:
    class Elsewhere(torch.Tensor):  # type: ignore[misc]  # torch has no types here
        device = torch.device("cuda:0")

    assert readable_type(X.as_subclass(Elsewhere)).shape == (4, 8)
    with pytest.raises(stitch.CompileError, match="on meta"):
        readable_type(torch.empty(4, device="meta"))

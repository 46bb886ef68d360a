"""What the tests of torch.compile share: compile with Stitch, run beside eager torch, compare."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stitch.frontend.torch.compile import CompileSettings, shared_storage_of
from stitch.frontend.torch.shared_storage import SharedStorage
from tests.support import garbage
from tests.support.stitched_models import held_by
from tests.support.torch.agreement import TOLERANCE, tensors_of


def compiled(function: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """A function or module compiled by Stitch, forgetting what was compiled before.

    What is to be shown of programs would be shown of torch itself where torch runs it instead.
    """
    torch._dynamo.reset()
    wanted = {"fallback": "error", **options}
    return torch.compile(function, backend="stitch", options=wanted, dynamic=dynamic)


def storage_of(**options: Any) -> SharedStorage:
    """What torch shares with the device on which programs with these options run."""
    return shared_storage_of(CompileSettings.of(options))


def assert_same(results: Any, expected: Any, *, strides: bool = True) -> None:
    """The same tensors: types, shapes, strides, and numbers within the tolerance."""
    found, wanted = tensors_of(results), tensors_of(expected)
    assert len(found) == len(wanted) > 0
    for got, want in zip(found, wanted, strict=True):
        assert not strides or got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def assert_gone(make: Callable[[], Any], shape: Sequence[int], **options: Any) -> None:
    """A module that took batches of a shape and is gone leaves nothing behind: not itself, no bytes
    of the device, nothing that it shares with torch."""
    storage = storage_of(**options)
    torch._dynamo.reset()
    gc.collect()
    storage.clean_up()
    storage.device.flush()
    buffers, entries = len(held_by(storage.device)), len(storage)

    def use() -> weakref.ref[Any]:
        module = make()
        run = compiled(module, **options)
        for _ in range(3):
            run(torch.randn(*shape)).sum().backward()
        return weakref.ref(next(module.parameters()))

    with garbage.only_of_here():
        weight = use()
        torch._dynamo.reset()
        gc.collect()
    assert weight() is None
    storage.clean_up()
    storage.device.flush()
    assert len(storage) <= entries
    assert len(held_by(storage.device)) <= buffers


def gradients(function: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
    """The results of a function and the gradients of its floating operands, for fixed weights."""
    inputs = [
        o.detach().clone().requires_grad_(o.is_floating_point())
        if isinstance(o, torch.Tensor)
        else o
        for o in operands
    ]
    results = tensors_of(function(*inputs))
    total = sum(
        (r * torch.linspace(0.5, 1.5, r.numel()).view(r.shape)).sum()
        for r in results
        if r.is_floating_point() and r.requires_grad
    )
    wanted = [i for i in inputs if isinstance(i, torch.Tensor) and i.requires_grad]
    grads = torch.autograd.grad(total, wanted, allow_unused=True)
    return [*(r.detach() for r in results), *(g for g in grads if g is not None)]


def train(
    module: Any, run: Any, batches: Sequence[Any], loss: Callable[[Any], Any], optimizer: Any
) -> list[float]:
    """Losses of some steps of torch's own loop; `run` is the module, or what it was compiled to."""
    steps, losses = optimizer(module.parameters()), []
    for batch in batches:
        steps.zero_grad()
        value = loss(run(batch))
        value.backward()
        steps.step()
        losses.append(float(value.detach()))
    return losses


def assert_trains_alike(
    module: Any, batches: Sequence[Any], loss: Callable[[Any], Any], optimizer: Any, **options: Any
) -> None:
    """The same losses, parameters and buffers as eager torch after all batches."""
    eager = copy.deepcopy(module)
    found = train(module, compiled(module, **options), batches, loss, optimizer)
    wanted = train(eager, eager, batches, loss, optimizer)
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(wanted), rtol=TOLERANCE, atol=TOLERANCE
    )
    assert found[-1] != found[0]
    state = eager.state_dict()
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def without_dropout(module: Any) -> None:
    """Random masks differ from torch's: here they would be all that differs."""
    owners = [*module.modules(), *(getattr(m, "config", None) for m in module.modules())]
    for owner in owners:
        for key, value in list(vars(owner).items()) if owner is not None else ():
            if isinstance(value, float) and ("drop" in key or isinstance(owner, torch.nn.Dropout)):
                setattr(owner, key, 0.0)

"""A CUDA context that is lost, on a stand-in for a card: one error that names what is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.errors import TaskError
from stitch.graph import ComputationGraphBuilder
from stitch.runtime.executors.cuda_graphs import Graphs
from tests.support.torch.late_graphs import late_device
from tests.support.torch.lost_card import MESSAGE, LostCard
from tests.support.training.models import batches, mlp

SHAPE = (4, 8)
X = np.arange(32, dtype=np.float32).reshape(SHAPE)
LOST = f"lost all of its memory: {MESSAGE}"


def adding(name: str) -> stitch.CompiledModel:
    b = ComputationGraphBuilder(name)
    x = b.input("x", SHAPE, "float32")
    b.output("z", b.op("Abs", b.add(x, np.ones(SHAPE, np.float32))))
    compiled: stitch.CompiledModel = stitch.compile(b.build(), target="cuda")
    return compiled


def _wait(device: stitch.Device) -> bool:
    device.wait()
    return True


#: What the caller does when CUDA says it: on a pipeline, a program and a tensor in DRAM.
USES: dict[str, Callable[[stitch.Device, Any, Any, Any], object]] = {
    "replay": lambda device, pipe, add, held: pipe(X),
    "launch": lambda device, pipe, add, held: add(held).numpy(),
    "wait": lambda device, *_: _wait(device),
    "wait for queued work": lambda device, pipe, add, held: (add(X), _wait(device)),
    "read": lambda device, pipe, add, held: held.numpy(),
    "write": lambda device, pipe, add, held: device.write(held, X),
    "copy of a tensor": lambda device, pipe, add, held: device.tensor(torch.ones(SHAPE)),
    "tensor given in place": lambda device, pipe, add, held: add(torch.ones(8, 4).t()).numpy(),
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("use", USES)
def test_a_lost_context_is_one_error_that_names_the_values_in_dram(use: str, debug: bool) -> None:
    card = LostCard()
    with late_device(graphs=card, debug=debug) as device:
        add, other = device.load(adding("add")), device.load(adding("other"))
        pipe = stitch.Pipeline([add, other])
        for _ in range(8):
            found = pipe(X)
        assert bool(device.statistics().graphs_captured) is not debug
        held, on_host = add(X), device.tensor(X * 3)
        held.numpy()
        exported = torch.from_dlpack(found)
        card.is_lost = True
        with pytest.raises(TaskError, match=LOST) as caught:
            USES[use](device, pipe, add, held)
        assert isinstance(caught.value.__cause__, torch.AcceleratorError)
        lost = str(caught.value.got)
        assert "output 'z' of 'add'" in lost and "output 'z' of 'other'" in lost
        uses: list[Callable[[], object]] = [
            held.numpy, found.numpy, device.wait, lambda: add(on_host),
            lambda: pipe(X), lambda: device.load(adding("third")), lambda: device.tensor(X),
            lambda: device.write(held, X), lambda: stitch.to_layout(held, held.layout),
        ]  # fmt: skip
        for again in uses:
            with pytest.raises(TaskError, match=LOST) as caught:
                again()
            assert str(caught.value.got) == lost
        np.testing.assert_array_equal(on_host.numpy(), X * 3)
        device.close()
        device.close()
        with pytest.raises(TaskError, match=LOST):
            held.numpy()
        del exported
    with late_device(graphs=LostCard()) as device:
        np.testing.assert_array_equal(device.load(adding("add"))(X).numpy(), X + 1)


def test_a_device_on_a_lost_context_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Graphs) -> None:
        raise torch.AcceleratorError(f"{MESSAGE}\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(Graphs, "finish", refuse)
    with pytest.raises(TaskError, match="takes no work of this process: CUDA error: an illegal"):
        stitch.open_device("torch:cpu")


def test_a_training_whose_context_is_lost_says_so_and_can_be_closed() -> None:
    compiled = stitch.compile(mlp(), target="cuda", optimizer=stitch.Adam(lr=0.01), loss="mse")
    with late_device(graphs=LostCard(dies_at=2)) as device, compiled.start(device) as trained:
        with pytest.raises(TaskError, match=LOST) as caught:
            for pair in batches(12):
                trained.step([pair])
        assert caught.value.got
        for again in (trained.state_dict, lambda: trained.step([batches(1)[0]])):
            with pytest.raises(TaskError, match=LOST):
                again()


def test_an_error_of_pytorch_that_leaves_the_context_stays_its_own() -> None:
    class Refusing(LostCard):
        def replay(self, launches: Any) -> None:
            raise torch.AcceleratorError("CUDA error: invalid configuration argument")

    with late_device(graphs=Refusing()) as device:
        add = device.load(adding("add"))
        held = add(X)
        held.numpy()
        with pytest.raises(torch.AcceleratorError, match="invalid configuration"):
            for _ in range(4):
                add(X).numpy()
        np.testing.assert_array_equal(held.numpy(), X + 1)

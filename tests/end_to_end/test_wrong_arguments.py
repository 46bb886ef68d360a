"""Whatever a public function is given, an error of ours names the parameter and what it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.errors import StitchError
from stitch.report import (
    ChromeTrace,
    Recorder,
    VisualizerFolder,
)
from stitch.training import TrainingOptions

F32 = stitch.DataType.FLOAT32
LAYOUT = stitch.Layout(F32, stitch.Space.L1)
X = np.ones((2, 4), np.float32)
#: What stands where something else should, by name.
STRANGERS: dict[str, Any] = {
    "None": None, "int": 7, "float": 1.5, "str": "nowhere", "bytes": b"no", "list": [3],
    "dict": {"a": 1}, "object": object(), "class": int, "array": np.ones(3),
    "torch optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1),
    "layout": LAYOUT,
}  # fmt: skip


def net(x: Any) -> Any:
    return x * 2.0


class World:
    """One of each thing whose methods are public."""

    def __init__(self) -> None:
        self.model = stitch.compile(net, (X,), name="net")
        self.device = stitch.open_device("wormhole_n150")
        self.program = self.device.load(self.model)
        self.tensor = self.device.tensor(X)
        b = stitch.ComputationGraphBuilder("line")
        w = b.parameter("w", np.ones((4, 3), np.float32))
        b.output("y", b.op("MatMul", b.input("x", (2, 4), "float32"), w))
        self.graph = b.build()
        self.optimizer = stitch.SGD(lr=0.1)
        self.trainer = stitch.compile(self.graph, optimizer=self.optimizer, loss="mse")
        self.instance = self.trainer.start(self.device)


#: What listens to a device: its parameter after the device, and the kinds that are right there.
LISTENERS: list[tuple[Callable[..., Any], str, tuple[str, ...]]] = [
    (ChromeTrace, "path", ("None", "str")),
    (VisualizerFolder, "folder", ("str",)),
]
#: A call, the parameter that is wrong, the call itself, and the kinds that are right there.
Row = tuple[str, str, Callable[[World, Any], object], tuple[str, ...]]
TABLE: list[Row] = [
    ("compile", "module", lambda w, v: stitch.compile(v), ("str", "class")),
    ("compile", "example_inputs", lambda w, v: stitch.compile(net, v), ("list", "dict")),
    ("compile", "target", lambda w, v: stitch.compile(w.graph, target=v), ("str",)),
    ("compile", "placement", lambda w, v: stitch.compile(w.graph, placement=v), ("str",)),
    ("compile", "name", lambda w, v: stitch.compile(w.graph, name=v), ("None", "str")),
    ("compile", "role", lambda w, v: stitch.compile(w.graph, role=v), ()),
    ("compile", "input_shapes", lambda w, v: stitch.compile(w.graph, input_shapes=v),
     ("None", "dict")),
    ("compile", "unroll", lambda w, v: stitch.compile(w.graph, unroll=v), ("None", "int")),
    ("compile", "optimizer", lambda w, v: stitch.compile(w.graph, optimizer=v, loss="mse"),
     ("None", "str", "dict")),
    ("compile", "loss", lambda w, v: stitch.compile(w.graph, optimizer="sgd", loss=v),
     ("None", "str", "dict")),
    ("compile", "weights", lambda w, v: stitch.compile(
        w.graph, optimizer="sgd", loss="mse", weights=v), ("None", "dict")),
    ("compile", "trainable", lambda w, v: stitch.compile(
        w.graph, optimizer="sgd", loss="mse", trainable=v), ("None",)),
    ("compile", "algorithm", lambda w, v: stitch.compile(
        w.graph, optimizer="sgd", loss="mse", algorithm=v), ("str",)),
    ("compile", "devices", lambda w, v: stitch.compile(
        w.graph, optimizer="sgd", loss="mse", parallel={}, devices=v),
        ("None", "int", "str")),
    ("compile", "as devices", lambda w, v: stitch.compile(
        w.graph, optimizer="sgd", loss="mse", algorithm="data_parallel", devices=v),
        ("None", "int", "str")),
    ("compile", "parallel", lambda w, v: stitch.compile(
        w.graph, optimizer="sgd", loss="mse", parallel=v), ("None",)),
    ("load", "source", lambda w, v: stitch.load(v), ("str", "bytes")),
    ("load", "verify", lambda w, v: stitch.load(w.model.encode(), verify=v), ("str",)),
    ("open_device", "machine", lambda w, v: stitch.open_device(v), ("str",)),
    ("open_device", "executor", lambda w, v: stitch.open_device(
        "tiny", executor=v), ("None", "str")),
    ("open_device", "threads", lambda w, v: stitch.open_device(
        "tiny", executor="onnxruntime", threads=v), ("None", "int")),
    ("open_device", "window", lambda w, v: stitch.open_device("tiny", window=v), ("int",)),
    ("open_device", "max_memory", lambda w, v: stitch.open_device("tiny", max_memory=v),
     ("None", "int", "str")),
    ("submit", "device", lambda w, v: stitch.submit(v, w.model, 0, [X]), ()),
    ("submit", "binary", lambda w, v: stitch.submit(w.device, v, 0, [X]),
     ("str", "bytes")),
    ("submit", "program", lambda w, v: stitch.submit(w.device, w.model, v, [X]),
     ("int", "str")),
    ("submit", "inputs", lambda w, v: stitch.submit(w.device, w.model, 0, v),
     ("list",)),
    ("wait", "tensors", lambda w, v: stitch.wait(v), ()),
    ("to_layout", "tensor", lambda w, v: stitch.to_layout(v, LAYOUT), ()),
    ("to_layout", "layout", lambda w, v: stitch.to_layout(w.tensor, v), ("layout",)),
    ("has_layout", "tensor", lambda w, v: stitch.has_layout(v, LAYOUT), ()),
    ("has_layout", "layout", lambda w, v: stitch.has_layout(w.tensor, v), ("layout",)),
    ("get_layout", "binary", lambda w, v: stitch.get_layout(v), ("str", "bytes")),
    ("get_layout", "program", lambda w, v: stitch.get_layout(w.model, v), ("int", "str")),
    ("get_layout", "input", lambda w, v: stitch.get_layout(w.model, 0, v), ("int", "str")),
    ("forbid_copies", "device", lambda w, v: stitch.forbid_copies(v).__enter__(), ()),
    ("trace", "f", lambda w, v: stitch.trace(v, X), ("class",)),
    ("trace", "x", lambda w, v: stitch.trace(net, v), ("array", "int", "float")),
    ("Pipeline", "programs", lambda w, v: stitch.Pipeline(v), ()),
    ("Pipeline.from_yaml", "path", lambda w, v: stitch.Pipeline.from_yaml(v), ("str",)),
    ("device.load", "source", lambda w, v: w.device.load(v), ("str", "bytes")),
    ("device.load", "program", lambda w, v: w.device.load(w.model, v), ("int", "str")),
    ("device.empty", "desc", lambda w, v: w.device.empty(v), ()),
    ("device.tensor", "array", lambda w, v: w.device.tensor(v), ("int", "float", "list", "array")),
    ("device.write", "tensor", lambda w, v: w.device.write(v, X), ()),
    ("device.write", "array", lambda w, v: w.device.write(w.tensor, v), ()),
    ("device.to_layout", "tensor", lambda w, v: w.device.to_layout(v, LAYOUT), ()),
    ("device.to_layout", "layout", lambda w, v: w.device.to_layout(w.tensor, v), ("layout",)),
    ("device.has_layout", "tensor", lambda w, v: w.device.has_layout(v, LAYOUT), ()),
    ("device.memory", "space", lambda w, v: w.device.memory(v), ("str",)),
    ("device.footprint_of", "tensor", lambda w, v: w.device.footprint_of(v), ()),
    ("device.submit", "agent", lambda w, v: w.device.submit(v, [X]), ()),
    ("device.submit", "agent", lambda w, v: w.device.submit(v, []), ()),
    ("device.submit", "arguments", lambda w, v: w.device.submit(w.program, v), ("list",)),
    ("device.submit", "arguments", lambda w, v: w.device.submit(w.program, [X, v]), ()),
    *(
        ("hooks.register", word, lambda w, v, word=word: w.device.hooks.register(**{word: v}),
         ("class",))
        for word in ("before_program", "after_program", "before_operation", "after_operation")
    ),
    ("events.subscribe", "subscriber", lambda w, v: w.device.events.subscribe(v), ("class",)),
    *((kind.__name__, word, lambda w, v, kind=kind: kind(w.device, v), takes)
      for kind, word, takes in LISTENERS),
    *((kind.__name__, "device", lambda w, v, kind=kind: kind(v, "a.npz"), ())
      for kind, _, _ in LISTENERS),
    ("Recorder", "device", lambda w, v: Recorder(v), ()),
    ("program", "x", lambda w, v: w.program(v), ()),
    ("program.input_layout", "which", lambda w, v: w.program.input_layout(v), ("int", "str")),
    ("tensor.to_layout", "layout", lambda w, v: w.tensor.to_layout(v), ("layout",)),
    ("tensor.has_layout", "layout", lambda w, v: w.tensor.has_layout(v), ("layout",)),
    ("tensor[...]", "index", lambda w, v: w.tensor[v], ("int",)),
    ("model.save", "path", lambda w, v: w.model.save(v), ("str",)),
    ("model.save_programs", "folder", lambda w, v: w.model.save_programs(v), ("str",)),
    ("model.dump", "file", lambda w, v: w.model.dump(v), ("str",)),
    ("CompiledModel.load", "file", lambda w, v: stitch.CompiledModel.load(v), ("str",)),
    ("model.start", "device", lambda w, v: w.trainer.start(v), ("None",)),
    ("model.start", "weights", lambda w, v: w.trainer.start(w.device, weights=v),
     ("None", "dict")),
    ("model.start", "seed", lambda w, v: w.trainer.start(w.device, seed=v), ("int",)),
    ("instance.forward", "x", lambda w, v: w.instance.forward(v), ()),
    ("instance.compute_loss", "label",
     lambda w, v: (w.instance.forward(X), w.instance.compute_loss(v)), ()),
    ("instance.predict", "x", lambda w, v: w.instance.predict(v), ()),
    ("instance.load_state_dict", "state", lambda w, v: w.instance.load_state_dict(v), ("dict",)),
    *(
        (f"{kind.__name__}", word, lambda w, v, kind=kind, word=word: kind(**{word: v}), takes)
        for kind in (stitch.SGD, stitch.Adam, stitch.AdamW)
        for word, takes in (
            ("lr", ("int", "float")), ("weight_decay", ("int", "float")),
            ("schedule", ("None", "str", "dict")),
            *([("momentum", ("int", "float"))] if kind is stitch.SGD else
              [("betas", ()), ("eps", ("int", "float"))]),
        )
    ),
    *(
        ("TrainingOptions", word, lambda w, v, word=word: TrainingOptions(**{word: v}), takes)
        for word, takes in (
            ("recompute", ("str",)), ("accumulation_steps", ("int",)),
            ("clip_grad_norm", ("None", "int", "float")), ("precision", ()), ("spaces", ("dict",)),
        )
    ),
    ("StepLR", "step_size", lambda w, v: stitch.schedules.StepLR(v), ("int",)),
    ("WarmupLR", "warmup_steps", lambda w, v: stitch.schedules.WarmupLR(v), ("int",)),
    ("CosineAnnealingLR", "T_max", lambda w, v: stitch.schedules.CosineAnnealingLR(v), ("int",)),
    ("MSELoss", "reduction", lambda w, v: stitch.losses.MSELoss(v), ("str",)),
    ("builder", "name", lambda w, v: stitch.ComputationGraphBuilder(v), ("str",)),
    ("builder.input", "name", lambda w, v: stitch.ComputationGraphBuilder("g").input(
        v, (2,), "float32"), ("str",)),
    ("builder.input", "shape", lambda w, v: stitch.ComputationGraphBuilder("g").input(
        "x", v, "float32"), ("list",)),
    ("builder.input", "data_type", lambda w, v: stitch.ComputationGraphBuilder("g").input(
        "x", (2,), v), ("class", "str")),
    ("builder.output", "tensor", lambda w, v: stitch.ComputationGraphBuilder("g").output(
        "y", v), ("int", "float", "list", "array")),
    ("builder.parameter", "array", lambda w, v: stitch.ComputationGraphBuilder("g").parameter(
        "p", v), ("int", "float", "list", "array")),
    ("builder.place", "placement", lambda w, v: stitch.ComputationGraphBuilder("g").place(v), ()),
    ("builder.op", "op", lambda w, v: stitch.ComputationGraphBuilder("g").op(v, 1.0), ("str",)),
    ("TensorDesc", "shape", lambda w, v: stitch.TensorDesc(v, LAYOUT), ()),
    ("TensorDesc", "layout", lambda w, v: stitch.TensorDesc((4,), v), ("layout",)),
    ("Layout", "data_type", lambda w, v: stitch.Layout(v), ()),
    ("Layout", "space", lambda w, v: stitch.Layout(F32, v), ()),
    ("Layout", "memory_layout", lambda w, v: stitch.Layout(F32, stitch.Space.L1, None, v), ()),
    ("ShardSpec", "core_grid", lambda w, v: stitch.ShardSpec(v, (4, 8)), ()),
    ("ShardSpec", "shape", lambda w, v: stitch.ShardSpec((1, 1), v), ()),
]  # fmt: skip


def wrong_ones(takes: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    return ((kind, value) for kind, value in STRANGERS.items() if kind not in takes)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.mark.parametrize("row", TABLE, ids=[f"{call}-{word}" for call, word, *_ in TABLE])
def test_a_wrong_argument_is_answered_with_what_the_parameter_takes(row: Row, world: World) -> None:
    call, word, make, takes = row
    for kind, value in wrong_ones(takes):
        try:
            make(world, value)
        except StitchError as error:
            assert word in str(error), f"{call}({word}={kind}): {error}"
        else:
            raise AssertionError(f"{call} takes {kind} as {word}")

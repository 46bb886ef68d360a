"""The suite `chain`: programs of layers, each one Gemm and one Relu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from peer_ways.cases import BOUND, MERGED, Case, Goal, Program, Subject
from stitch import ComputationGraphBuilder, DataType
from stitch.program import Array

Layer = tuple[Array, Array]
OPSET = 17
IR_VERSION = 8


@dataclass(frozen=True, slots=True)
class Chain:
    """Programs by the widths of their layers; each layer is one Gemm and one Relu."""

    name: str
    programs: tuple[tuple[int, ...], ...]
    batch: int
    #: The most that best of ours / best peer may be.
    goal: float
    rounds: int
    #: Whether the goal is about peers that run the programs one by one only.
    stitched_only: bool = False
    more_goals: tuple[Goal, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Widths of the programs, and the batch."""
        parts = [("-".join(map(str, widths)), len(list(same)))
                 for widths, same in groupby(self.programs)]  # fmt: skip
        many = [" | ".join([text] * count) if count < 4 else f"{count} times {text}"
                for text, count in parts]  # fmt: skip
        return f"{' | '.join(many)}, batch {self.batch}"

    def subject(self) -> Subject:
        """The chain as something to measure."""
        return Subject(
            self.name, self.text(), self.goal, self.rounds, partial(make_case, self),
            self.stitched_only, self.more_goals, self.without,
        )  # fmt: skip


_SLOW = "a module each of 64 takes minutes to compile"
CHAINS = (
    Chain("tiny", ((64, 64), (64, 64)), 1, 0.65, 301, more_goals=(Goal("calls", BOUND, 1.2),)),
    Chain(
        "many",
        ((64, 64),) * 64,
        1,
        0.7,
        101,
        stitched_only=True,
        more_goals=(
            Goal("linked", BOUND, 0.2),
            Goal("linked", MERGED, 0.8),
            Goal("calls", BOUND, 0.35),
        ),
        without={"torch.compile": _SLOW, "iree": _SLOW},
    ),
    Chain("middle", ((784, 512), (512, 512, 10)), 64, 1.03, 61),
    Chain("large", ((1024, 4096, 1024), (1024, 4096, 1024)), 256, 1.03, 7),
)


@dataclass(frozen=True, slots=True, eq=False)
class Layers(Program):
    """Layers in a row: weights [in, out] and biases [out]."""

    layers: tuple[Layer, ...]
    batch: int

    def stitch_source(self, name: str) -> tuple[Any, tuple[Any, ...]]:
        builder = ComputationGraphBuilder(name)
        value = builder.input("x", (self.batch, self.layers[0][0].shape[0]), DataType.FLOAT32)
        for i, (w, b) in enumerate(self.layers):
            value = builder.op(
                "Gemm", value, builder.parameter(f"w{i}", w), builder.parameter(f"b{i}", b)
            )
            value = builder.op("Relu", value)
        builder.output("y", value)
        return builder.build(), ()

    def torch_module(self) -> Any:
        """Linear and ReLU for every layer."""
        import torch

        steps: list[Any] = []
        for w, b in self.layers:
            linear = torch.nn.Linear(*w.shape)
            with torch.no_grad():
                linear.weight.copy_(torch.from_numpy(w.T.copy()))
                linear.bias.copy_(torch.from_numpy(b))
            steps += [linear, torch.nn.ReLU()]
        return torch.nn.Sequential(*steps).eval()

    def onnx_model(self) -> bytes:
        """Gemm and Relu for every layer."""
        from onnx import TensorProto, helper, numpy_helper

        nodes, tensors, name = [], [], "x"
        for i, (w, b) in enumerate(self.layers):
            tensors += [numpy_helper.from_array(w, f"w{i}"), numpy_helper.from_array(b, f"b{i}")]
            last = "y" if i == len(self.layers) - 1 else f"h{i}"
            nodes.append(helper.make_node("Gemm", [name, f"w{i}", f"b{i}"], [f"g{i}"]))
            nodes.append(helper.make_node("Relu", [f"g{i}"], [last]))
            name = last
        ends = [("x", self.layers[0][0].shape[0]), ("y", self.layers[-1][0].shape[1])]
        x, y = (
            helper.make_tensor_value_info(n, TensorProto.FLOAT, (self.batch, width))
            for n, width in ends
        )
        model = helper.make_model(
            helper.make_graph(nodes, "chain", [x], [y], tensors),
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
        )
        data: bytes = model.SerializeToString()
        return data

    def mlir(self, name: str) -> tuple[str, str, str]:
        return linalg_text(name, self.layers, self.batch), "auto", "main"


def make_case(chain: Chain) -> Case:
    """Random numbers for a chain; the same ones every time."""
    random = np.random.default_rng(0)

    def layer(inner: int, outer: int) -> Layer:
        w = random.standard_normal((inner, outer), dtype=np.float32)
        # Keeps the values of every layer about as large as those of the one before.
        w *= np.float32(np.sqrt(2 / inner))
        return w, random.standard_normal(outer, dtype=np.float32)

    programs = tuple(tuple(layer(a, b) for a, b in pairwise(widths)) for widths in chain.programs)
    x = random.standard_normal((chain.batch, chain.programs[0][0]), dtype=np.float32)
    layers = tuple(layer for program in programs for layer in program)
    expected = x
    for w, b in layers:
        expected = np.maximum(expected @ w + b, np.float32(0))
    made = tuple(Layers(program, chain.batch) for program in programs)
    return Case(made, Layers(layers, chain.batch), x, expected)


def constant_text(name: str, array: Array) -> tuple[str, str, str]:
    """A constant in MLIR: its line, its resource, its type."""
    kind = f"tensor<{'x'.join(map(str, array.shape))}xf32>"
    line = f"    %{name} = arith.constant dense_resource<{name}> : {kind}"
    # A blob begins with its alignment, four bytes, little end first.
    return line, f'{name}: "0x04000000{array.tobytes().hex()}"', kind


def linalg_text(name: str, layers: Sequence[Layer], batch: int) -> str:
    """Matrix products that begin with the bias, and a maximum with zero, in linalg."""
    lines, blobs, value = [], [], "%x"
    wide = f"tensor<{batch}x{layers[0][0].shape[0]}xf32>"
    head = f"  func.func @main(%x: {wide}) -> tensor<{batch}x{layers[-1][1].size}xf32> {{"
    for i, (w, b) in enumerate(layers):
        (line_w, blob_w, kind_w), (line_b, blob_b, kind_b) = (
            constant_text(f"w{i}", w),
            constant_text(f"b{i}", b),
        )
        made = f"tensor<{batch}x{b.size}xf32>"
        blobs += [blob_w, blob_b]
        lines += [
            line_w,
            line_b,
            f"    %e{i} = tensor.empty() : {made}",
            f"    %c{i} = linalg.broadcast ins(%b{i} : {kind_b}) outs(%e{i} : {made}) "
            "dimensions = [0]",
            f"    %m{i} = linalg.matmul ins({value}, %w{i} : {wide}, {kind_w}) "
            f"outs(%c{i} : {made}) -> {made}",
            f"    %z{i} = arith.constant dense<0.0> : {made}",
            f"    %r{i} = arith.maximumf %m{i}, %z{i} : {made}",
        ]
        value, wide = f"%r{i}", made
    body = "\n".join(
        [f"module @{name} {{", head, *lines, f"    return {value} : {wide}", "  }", "}"]
    )
    return body + "\n{-# dialect_resources: { builtin: { " + ", ".join(blobs) + " } } #-}\n"

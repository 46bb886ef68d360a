"""Random programs that feed each other: wired as a graph, some of their outputs dropped.

All values are as many rows and columns; inside a program there are products, convolutions, pools,
normalizations, functions, and long runs of arithmetic; slots are stored in types of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

import stitch
from stitch import ComputationGraphBuilder
from stitch.graph.symbolic import SymbolicTensor
from stitch.linker import Port, Wire
from stitch.program import Array

TARGET = "wormhole_n150"
COMPUTED = ("float32", "float32", "float32", "float32", "bfloat16", "float16")
STORED = ("float32", "float32", "float32", "bfloat16", "float16")
PLAIN = ("Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Erf", "Gelu", "HardSwish", "LeakyRelu")
KINDS = (
    "plain", "plain", "scale", "sum", "gemm", "matmul", "softmax", "norm", "turn", "mean", "conv",
    "pool", "swish", "gelu", "narrow", "attention", "run",
)  # fmt: skip
#: Rows and columns; 16 channels of 8x8 are what ONNX Runtime lays out otherwise.
SHAPES = ((16, 64), (16, 64), (32, 16), (33, 40), (4, 16))
LONG = (256, 512)


@dataclass(frozen=True, slots=True)
class DrawnChain:
    """Programs in run order, their wires, the outputs that stay, and data by input of a program."""

    models: list[stitch.CompiledModel]
    wires: list[Wire]
    kept: list[Port]
    data: dict[Port, Array]


def drawn_chain(draw: Random, most: int = 8) -> DrawnChain:
    """Two programs or more."""
    shape = LONG if draw.random() < 0.08 else draw.choice(SHAPES)
    models: list[stitch.CompiledModel] = []
    wires: list[Wire] = []
    data: dict[Port, Array] = {}
    rng = np.random.default_rng(draw.randrange(1 << 30))
    ports: list[Port] = []
    for p in range(draw.randint(2, most)):
        model = _program(f"p{p}", draw, shape)
        for i in range(len(model.program.inputs)):
            if ports and (i == 0 or draw.random() < 0.8):
                # Mostly of the program before.
                port = draw.choice(ports[-2:] if draw.random() < 0.7 else ports)
                wires.append(Wire(*port, p, i))
            else:
                dtype = model.program.input_desc(i).layout.data_type.dtype
                data[p, i] = rng.standard_normal(shape).astype(dtype)
        ports += [(p, o) for o in range(len(model.program.outputs))]
        models.append(model)
    kept = {ports[-1], *(port for port in ports if draw.random() < 0.3)}
    return DrawnChain(models, wires, sorted(kept), data)


def _program(name: str, draw: Random, shape: tuple[int, int]) -> stitch.CompiledModel:
    """One to six steps, each on one of the last two values; one to three of them go out."""
    builder = ComputationGraphBuilder(name)
    inputs = draw.choice([1, 1, 2])
    kinds = [draw.choice(COMPUTED) for _ in range(inputs)]
    values = [builder.input(f"x{i}", shape, kind) for i, kind in enumerate(kinds)]
    values = [value.cast("float32") for value in values]
    writing = _Writing(builder, draw)
    for _ in range(draw.randint(1, 6)):
        values.append(writing.applied(draw.choice(KINDS), draw.choice(values[-2:])))
    more = values[inputs:-1]
    given = [values[-1], *draw.sample(more, min(len(more), draw.choice([0, 0, 1, 2])))]
    for i, value in enumerate(given):
        kinds.append(draw.choice(COMPUTED))
        if kinds[-1] != "float32":
            value = builder.op("Neg", value.cast(kinds[-1]))
        builder.output(f"y{i}", value)
    slots = [f"input.x{i}" for i in range(inputs)] + [f"output.y{i}" for i in range(len(given))]
    placement = [
        f"{slot}.data_type={draw.choice(STORED) if kind == 'float32' else kind}"
        for slot, kind in zip(slots, kinds, strict=True)
    ]
    return stitch.compile(builder.build(), target=TARGET, placement=placement)


class _Writing:
    """Steps of a program, with constants of their own."""

    def __init__(self, builder: ComputationGraphBuilder, draw: Random) -> None:
        self.builder = builder
        self.draw = draw
        self.rng = np.random.default_rng(draw.randrange(1 << 30))

    def table(self, *sizes: int) -> SymbolicTensor:
        data = self.rng.standard_normal(sizes) * sizes[-1] ** -0.5
        return self.builder.constant(data.astype(np.float32))

    def applied(self, kind: str, y: SymbolicTensor) -> SymbolicTensor:
        b, columns = self.builder, y.shape[1]
        if kind == "plain":
            return b.op(self.draw.choice(PLAIN), y)
        if kind == "scale":
            return y * self.table(columns) + 0.5
        if kind == "sum":
            return y + b.op("Tanh", y)
        if kind == "gemm":
            return b.op("Gemm", y, self.table(columns, columns), self.table(columns))
        if kind == "matmul":
            return y @ self.table(columns, columns)
        if kind == "softmax":
            return b.op("Softmax", y, axis=-1)
        if kind == "norm":
            return b.op("LayerNormalization", y, self.table(columns), self.table(columns))
        if kind == "turn":
            return b.op("Transpose", b.op("Relu", b.op("Transpose", y, perm=(1, 0))), perm=(1, 0))
        if kind == "mean":
            return y - b.op("ReduceMean", y, b.constant(np.array([1], np.int64)), keepdims=1)
        if kind == "swish":
            return y * b.op("Sigmoid", y)
        if kind == "narrow":
            return b.op("Tanh", y.cast(self.draw.choice(["bfloat16", "float16"]))).cast("float32")
        if kind == "gelu":
            return y * (b.op("Erf", y * 0.7071067811865476) + 1.0) * 0.5
        if kind == "run":
            for name in ("Tanh", "Exp", "Abs", "Sqrt", "Neg", "Sigmoid"):
                y = b.op(name, y)
            return y
        if kind == "attention":
            scores = y @ self.table(columns, columns) @ b.op("Transpose", y, perm=(1, 0))
            return b.op("Softmax", scores * columns**-0.5, axis=-1) @ y
        assert kind in ("conv", "pool")
        return self.image(kind, y)

    def image(self, kind: str, y: SymbolicTensor) -> SymbolicTensor:
        """Rows are channels, columns the pixels of a square, or of a line."""
        b, (rows, columns) = self.builder, y.shape
        side = int(columns**0.5)
        height = side if side * side == columns else 1
        image = b.op("Reshape", y, [1, rows, height, columns // height])
        if kind == "conv":
            weights = self.table(rows, rows, 3, 3)
            image = b.op("Conv", image, weights, self.table(rows), pads=(1, 1, 1, 1))
            if self.draw.random() < 0.5:
                image = b.op("Relu", image)
        else:
            image = b.op("MaxPool", image, kernel_shape=(3, 3), pads=(1, 1, 1, 1))
        return b.op("Reshape", image, [rows, columns])

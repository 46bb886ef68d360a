"""Write convolutions with ONNX Runtime's own operators for its blocked layout.

An image [N, C, H, W] is stored as [N, C / B, H, W, B], with channels padded to whole blocks, and
weights [O, I, h, w] as [O / B, I / B, h, w, B of I, B of O]; depthwise convolutions and images of
too few channels have no blocks of I.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper

from stitch.machine import round_up
from stitch.ops import attributes_of, float_of, int_of, transposed_windows, turned_windows
from stitch.program import ABSENT, Array, Operation
from stitch.runtime.executors.onnx.expansions import with_explicit_pads
from stitch.runtime.executors.onnx.model_writer import (
    IR_VERSION,
    OPSET,
    Attributes,
    ModelWriter,
    as_lists,
    value_name,
)
from stitch.runtime.executors.onnx.session import SESSION_ERRORS, tried
from stitch.runtime.executors.prices import (
    POOLS,
    REORDERED,
    BlockedConvolution,
    BlockedPart,
    filters_of,
    is_depthwise,
    is_narrow,
    is_whole,
)

DOMAIN = "com.microsoft.nchwc"


@cache
def block_channels() -> int:
    """Return the channels of a block on this processor; 0 if ONNX Runtime has no blocked layout.

    ONNX Runtime does not report it, so convert an image of 16 channels and 2 pixels and look where
    the second pixel of the first channel is.
    """
    nodes = [helper.make_node("ReorderInput", ["x"], ["y"], domain=DOMAIN)]
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 16, 1, 2)) for name in "xy"]
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(
        helper.make_graph(nodes, "blocks", sides[:1], sides[1:]),
        opset_imports=opsets, ir_version=IR_VERSION,
    )  # fmt: skip
    image = np.arange(32, dtype=np.float32).reshape(1, 16, 1, 2)
    with suppress(*SESSION_ERRORS):
        blocks = tried(model.SerializeToString(), x=image)[0].reshape(-1)
        block = int(np.flatnonzero(blocks == 1)[0])
        if block in (8, 16) and np.array_equal(blocks, _in_blocks(image, block)):
            return block
    return 0


def _in_blocks(image: Array, block: int) -> Array:
    pixels = image.reshape(image.shape[1] // block, block, -1)
    return np.ascontiguousarray(pixels.transpose(0, 2, 1)).reshape(-1)


class BlockedWriter:
    """Writes a `BlockedPart`; `names` are the blocked values of the model so far."""

    def __init__(self, writer: ModelWriter, part: BlockedPart) -> None:
        self.writer = writer
        self.part = part
        self.names: dict[int, str] = {}
        self.block = block_channels()
        self._first: list[onnx.NodeProto] = []
        program = writer.program
        self._outside = {s.value for s in program.inputs} | {c.value for c in program.constants}

    def write(self, index: int, operation: Operation) -> None:
        """Write the convolution that ends with this operation, or another operation of the part."""
        if index in self.part.convolutions:
            self._convolution(self.part.convolutions[index])
        elif index in self.part.others:
            self._other(operation)

    def _blocks(self, value: int) -> str:
        """Return the name of a blocked image, converting it on first use."""
        if value not in self.names:
            self.names[value] = self._node("ReorderInput", [self.writer.operand(value)])
        return self.names[value]

    def _add_blocked(self, value: int, name: str) -> None:
        """Register a blocked result, and convert it back for readers of the plain layout."""
        whole = is_whole(self.writer.program, value)
        if whole:
            self.names[value] = name
        if not whole or value in self.part.plain:
            self.writer.nodes.append(
                helper.make_node(
                    "ReorderOutput", [name], [value_name(value)], domain=DOMAIN,
                    channels=self.writer.type_of(value).shape[1],
                )
            )  # fmt: skip

    def _convolution(self, found: BlockedConvolution) -> None:
        operations = self.writer.program.operations
        operation = operations[found.convolution]
        attributes = attributes_of(operation)
        narrow = is_narrow(self.writer.program, operation, self.block)
        image = self.writer.operand if narrow else self._blocks
        inputs = [image(operation.inputs[0]), *self._kernel(found, operation, attributes)]
        if found.added != ABSENT:
            inputs.append(self._blocks(found.added))
        while not inputs[-1]:
            inputs.pop()
        written = self._conv_attributes(operation, attributes)
        if found.activation is not None:
            written |= self._activation(operations[found.activation])
        self._add_blocked(found.result, self._node("Conv", inputs, written))

    def _conv_attributes(self, operation: Operation, attributes: Attributes) -> dict[str, object]:
        """Return a convolution's attributes; for a transposed one those of its equivalent."""
        if operation.op != "ConvTranspose":
            return as_lists(attributes)
        size, kernel = (self.writer.type_of(v).shape[2:] for v in operation.inputs[:2])
        windows = turned_windows(transposed_windows(attributes, size, kernel))
        assert windows is not None
        return {"dilations": list(windows.dilations), "pads": [*windows.begin, *windows.end]}

    def _kernel(
        self, found: BlockedConvolution, operation: Operation, attributes: Attributes
    ) -> tuple[str, str]:
        """Write a convolution's blocked kernel and bias; return their names.

        ONNX Runtime runs the operands of a node in reverse model order. Weights from outside are
        converted at the beginning of the model, else all would be before the first convolution.
        """
        writer, operations = self.writer, self.writer.program.operations
        read = [v for v in operation.inputs[1:] if v != ABSENT]
        if found.normalization is not None:
            read += operations[found.normalization].inputs[1:]
        outer, is_from_outside = writer.nodes, self._outside.issuperset(read)
        writer.nodes = self._first if is_from_outside else outer
        kernel, *shifts = (writer.operand(v) for v in operation.inputs[1:] if v != ABSENT)
        shift = shifts[0] if shifts else ""
        if operation.op == "ConvTranspose":
            kernel = self._turned(kernel)
        if found.normalization is not None:
            kernel, shift = self._normalized(operations[found.normalization], kernel, shift)
        weight = filters_of(writer.program, operation)
        blocks_inputs = not is_narrow(writer.program, operation, self.block)
        blocks_inputs &= not is_depthwise(weight, int_of(attributes, "group"))
        kernel = self._reordered(kernel, weight, blocks_inputs=blocks_inputs)
        shift = self._padded(shift, weight[0]) if shift else ""
        writer.nodes = outer
        return kernel, shift

    def _turned(self, kernel: str) -> str:
        """Reverse the kernels and exchange input and output channels."""
        writer, back, first = self.writer, [-1, -1], [np.iinfo(np.int64).min] * 2
        bounds = (writer.ints(*v) for v in (back, first, (2, 3), back))
        return writer.node(
            "Transpose", [writer.node("Slice", [kernel, *bounds])], perm=[1, 0, 2, 3]
        )

    def finish(self) -> None:
        """Insert the conversions of outer weights at the beginning of the model."""
        self.writer.nodes[:0] = self._first

    def _normalized(self, operation: Operation, kernel: str, shift: str) -> tuple[str, str]:
        """Fold a batch normalization into a convolution's kernel and bias."""
        writer = self.writer
        scale, beta, mean, variance = (writer.operand(v) for v in operation.inputs[1:5])
        epsilon = writer.scalar(float_of(attributes_of(operation), "epsilon"), np.float32)
        deviation = writer.node("Sqrt", [writer.node("Add", [variance, epsilon])])
        factor = writer.node("Div", [scale, deviation])
        centred = writer.node("Sub", [shift, mean]) if shift else writer.node("Neg", [mean])
        shift = writer.node("Add", [writer.node("Mul", [centred, factor]), beta])
        column = writer.node("Reshape", [factor, writer.ints(-1, 1, 1, 1)])
        return writer.node("Mul", [kernel, column]), shift

    def _reordered(self, kernel: str, shape: tuple[int, ...], *, blocks_inputs: bool) -> str:
        """Convert weights to blocks: ReorderInput treats them as one image of O channels."""
        writer, block = self.writer, self.block
        outer, windows = round_up(shape[0], block), shape[2] * shape[3]
        inner = round_up(shape[1], block) if blocks_inputs else shape[1]
        rows = outer if shape[0] % REORDERED else shape[0]
        if (rows, inner) != shape[:2]:
            pads = writer.ints(0, 0, 0, 0, rows - shape[0], inner - shape[1], 0, 0)
            kernel = writer.node("Pad", [kernel, pads])
        flat = writer.node("Reshape", [kernel, writer.ints(1, rows, 1, inner * windows)])
        flat = self._node("ReorderInput", [flat])
        if blocks_inputs and windows > 1:
            split = writer.ints(outer // block, inner // block, block, windows, block)
            turned = writer.node("Reshape", [flat, split])
            flat = writer.node("Transpose", [turned], perm=[0, 1, 3, 2, 4])
        return writer.node("Reshape", [flat, writer.ints(outer, inner, *shape[2:])])

    def _padded(self, shift: str, channels: int) -> str:
        """Pad a number per channel with zeros to whole blocks."""
        more = -channels % self.block
        return self.writer.node("Pad", [shift, self.writer.ints(0, more)]) if more else shift

    def _activation(self, operation: Operation) -> dict[str, object]:
        if operation.op != "Clip":
            return {"activation": operation.op}
        bounds = [float(self.writer.constants[v].reshape(())) for v in operation.inputs[1:]]
        return {"activation": "Clip", "activation_params": bounds}

    def _other(self, operation: Operation) -> None:
        names, result = [self._blocks(v) for v in operation.inputs], operation.outputs[0]
        attributes = with_explicit_pads(self.writer, operation, attributes_of(operation))
        domain = DOMAIN if operation.op in POOLS else ""
        name = self._node(operation.op, names, as_lists(attributes), domain)
        self._add_blocked(result, name)

    def _node(
        self, op: str, inputs: Sequence[str], attributes: Mapping[str, object] | None = None,
        domain: str = DOMAIN,
    ) -> str:  # fmt: skip
        output = self.writer.fresh()
        node = helper.make_node(op, inputs, [output], domain=domain, **(attributes or {}))
        self.writer.nodes.append(node)
        return output

"""What it saves to compute convolutions in blocks of channels, and which of them lose by it.

A convolution is weighed by what would change without it: its own gain would go; an image that goes
into blocks for it alone would stay as it is, and so would its result; but what it reads in blocks
would have to leave them, and what it gives to go into them. So one that lies between others may
lose a little, and does not cut them apart. Where none is to go, all that hang together by blocks
are weighed as one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from stitch.ops import attributes_of, int_of, multiply_adds
from stitch.program import ABSENT, Program
from stitch.runtime.executors.blocked.blocked_form import (
    SMALLEST_BLOCK,
    BlockedConvolution,
    BlockedPart,
    filters_of,
    is_depthwise,
    is_narrow,
    is_whole,
)

#: Nanoseconds on one thread that blocks save: for each multiply-add of a convolution, and for each
#: element that one filter for each channel makes (3x3: 2.5 without, 0.4 with blocks).
SAVED_PRODUCT_NS = 0.004
SAVED_DEPTHWISE_NS = 2.0
#: Nanoseconds of an element of an image that goes into blocks or comes out of them; of a weight
#: that is arranged, and more where it is moved by rows besides (windows of more than one place).
IMAGE_NS, WEIGHT_NS, WINDOW_WEIGHT_NS = 0.25, 0.3, 0.7
#: Of a weight that is turned besides.
TURNED_WEIGHT_NS = 3.5


def arranging_ns(program: Program, index: int) -> float:
    """Nanoseconds in which a convolution's weights are put into blocks."""
    operation = program.operations[index]
    weight = program.values[operation.inputs[1]].type.shape
    each = TURNED_WEIGHT_NS if operation.op == "ConvTranspose" else 0.0
    each += WEIGHT_NS + (WINDOW_WEIGHT_NS if math.prod(weight[2:]) > 1 else 0)
    return math.prod(weight) * each


def losing(program: Program, part: BlockedPart, *, together: bool = False) -> set[int]:
    """The convolutions of a part, by their indices, that had better not be in blocks; `together`:
    with all that hang together with one of them."""
    return _Gains(program, part).losing(together=together)


class _Gains:
    """Who makes and reads what in blocks."""

    def __init__(self, program: Program, part: BlockedPart) -> None:
        self.program = program
        self.part = part
        self.found = tuple(part.convolutions.values())
        self.made = {c.result for c in self.found if is_whole(program, c.result)}
        self.made |= {v for i in part.others for v in program.operations[i].outputs}
        self.reads = Counter(value for _, value in self._read())
        heads = {value: value for value in (*self.made, *(c.result for c in self.found))}
        for result, value in self._read():
            if value in heads:
                heads[_head(heads, result)] = _head(heads, value)
        #: What stands for all that hangs together with a value.
        self.heads = {value: _head(heads, value) for value in heads}

    def losing(self, *, together: bool) -> set[int]:
        own = {c.convolution: self._own_ns(c) for c in self.found}
        lost = {c.convolution for c in self.found if own[c.convolution] + self._held_ns(c) <= 0}
        if not lost:
            saved = self._saved_together(own)
            return {c.convolution for c in self.found if saved[self.heads[c.result]] <= 0}
        if together:
            heads = {self.heads[c.result] for c in self.found if c.convolution in lost}
            lost = {c.convolution for c in self.found if self.heads[c.result] in heads}
        return lost

    def _saved_together(self, own: Mapping[int, float]) -> dict[int, float]:
        """What all that hangs together saves."""
        saved = dict.fromkeys(self.heads.values(), 0.0)
        for found in self.found:
            saved[self.heads[found.result]] += own[found.convolution]
            if found.result not in self.made:
                saved[self.heads[found.result]] -= self._image_ns(found.result)
        for value in self.made & self.part.plain:
            saved[self.heads[value]] -= self._image_ns(value)
        entering = {(self.heads[result], v) for result, v in self._read() if v not in self.made}
        for head, value in entering:
            saved[head] -= self._image_ns(value)
        return saved

    def _own_ns(self, found: BlockedConvolution) -> float:
        """What a convolution saves by itself, but for images that go into blocks or out."""
        operation = self.program.operations[found.convolution]
        group = int_of(attributes_of(operation), "group")
        if is_depthwise(filters_of(self.program, operation), group):
            saved = math.prod(self._shape(found.result)) * SAVED_DEPTHWISE_NS
        else:
            saved = multiply_adds(operation, self.program.values) * SAVED_PRODUCT_NS
        return saved - arranging_ns(self.program, found.convolution)

    def _held_ns(self, found: BlockedConvolution) -> float:
        """What goes in and out of blocks without a convolution, less what does with it."""
        image, held = self.program.operations[found.convolution].inputs[0], 0.0
        if image in self.made and image not in self.part.plain:
            held += self._image_ns(image)
        elif image not in self.made and self.reads[image] == 1:
            held -= self._image_ns(image)
        if found.result not in self.made or found.result in self.part.plain:
            held -= self._image_ns(found.result)
        if found.result in self.made and self.reads[found.result]:
            held += self._image_ns(found.result)
        return held

    def _read(self) -> Iterator[tuple[int, int]]:
        """What is read in blocks, each with what the reader makes."""
        for found in self.found:
            operation = self.program.operations[found.convolution]
            if not is_narrow(self.program, operation, SMALLEST_BLOCK):
                yield found.result, operation.inputs[0]
            if found.added != ABSENT:
                yield found.result, found.added
        for index in self.part.others:
            operation = self.program.operations[index]
            yield from ((operation.outputs[0], value) for value in operation.inputs)

    def _image_ns(self, value: int) -> float:
        return math.prod(self._shape(value)) * IMAGE_NS

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.program.values[value].type.shape


def _head(heads: dict[int, int], value: int) -> int:
    """The last of those that stand for each other; the way there is made shorter."""
    while heads[value] != value:
        heads[value] = value = heads[heads[value]]
    return value

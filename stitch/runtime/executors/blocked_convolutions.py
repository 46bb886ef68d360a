"""Choose the convolutions that ONNX Runtime computes in its blocked layout.

ONNX Runtime keeps images in blocks of 8 or 16 channels, where a block fills a register, from one
convolution to the next (`com.microsoft.nchwc`); normalization, an addition and an activation are
fused into the convolution. By itself it does so only for constant weights. For weights that are
operands, as in torch.compile and in training, the model rearranges them in each run, which pays
if the image has many positions for each weight.

A transposed convolution without strides and groups equals a convolution by transposed weights
(channels exchanged, kernels reversed). ONNX Runtime does not use this identity and takes half as
long again. In backward passes such convolutions are the gradients of images.

Blocks that are padded with zero channels end at a convolution: 0 x inf in one of them would be NaN
in every channel of the next.

The gain of a convolution counts what changes without it: its own gain is lost; an image converted
for it alone needs no conversion, and neither does its result; but its blocked inputs must be
converted back, and results wanted in blocks converted again. So a convolution between others may
lose a little without splitting the chain. If no single one should be left out, the whole chain is
weighed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from stitch.ops import attributes_of, int_of, multiply_adds, transposed_windows, turned_windows
from stitch.program import ABSENT, DataType, Operation, Program

# Parts in blocks

#: Channels of the largest block and of the smallest, which divides it.
BLOCK, SMALLEST_BLOCK = 16, 8
#: Images of a number of channels that is no multiple of this are not put into blocks.
REORDERED = 4
#: Computed in blocks as a convolution; a transposed one by weights that are turned.
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
#: There are kernels for images in blocks.
POOLS = frozenset({"AveragePool", "GlobalAveragePool", "MaxPool"})


@dataclass(frozen=True, slots=True)
class BlockedConvolution:
    """A convolution, by the index of its operation, and those that its kernel does after it.

    `added` is the value that is summed to it, `result` what it gives.
    """

    convolution: int
    result: int
    normalization: int | None = None
    added: int = ABSENT
    activation: int | None = None


@dataclass(frozen=True, slots=True)
class BlockedPart:
    """The convolutions by their last operation, the others that read and make blocks, and the
    operations that lie inside a convolution; of the values that are made in blocks, those that
    somebody reads `plain`."""

    convolutions: dict[int, BlockedConvolution]
    others: frozenset[int]
    inside: frozenset[int]
    plain: frozenset[int]

    @property
    def taken(self) -> frozenset[int]:
        """All operations of the part."""
        return self.others | self.inside | self.convolutions.keys()


NO_BLOCKS = BlockedPart({}, frozenset(), frozenset(), frozenset())


def is_depthwise(weight: tuple[int, ...], group: int) -> bool:
    """Whether each channel has one filter of its own."""
    return group > 1 and weight[0] == group and weight[1] == 1


def filters_of(program: Program, operation: Operation) -> tuple[int, ...]:
    """The shape of a convolution's weights: filters, the channels of each, height, width. A
    transposed one, without groups, has the first two exchanged."""
    weight = program.values[operation.inputs[1]].type.shape
    if operation.op == "ConvTranspose":
        return (weight[1], weight[0], *weight[2:])
    return weight


def is_narrow(program: Program, operation: Operation, block: int) -> bool:
    """Whether a convolution's images have too few channels to fill a block of so many."""
    image = program.values[operation.inputs[0]].type.shape
    return image[1] == filters_of(program, operation)[1] < block


def is_whole(program: Program, value: int) -> bool:
    """Whether an image's channels are whole blocks on every processor, and so stay in them."""
    return program.values[value].type.shape[1] % BLOCK == 0


# Gains

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


# Choice

#: Computed on blocks as on anything else: one operand, or two of one shape.
UNARY = frozenset({"Abs", "Neg", "Relu", "Sigmoid", "Tanh"})
BINARY = frozenset({"Add", "Mul", "Sub"})
#: What a convolution may do to its result.
ACTIVATIONS = frozenset({"Clip", "Relu"})
#: How often convolutions are left out one by one: a long row could go from its ends.
MOST_TRIES = 16


def blocked_part(program: Program, without: Collection[int] = ()) -> BlockedPart:
    """What of a program is computed in blocks, none of it `without`: what would lose by it is left
    out until nothing does."""
    if not any(operation.op in CONVOLUTIONS for operation in program.operations):
        return NO_BLOCKS
    search = _Search(program, without)
    chosen = search.able()
    tries, part = 0, search.around(chosen)
    while lost := losing(program, part, together=tries >= MOST_TRIES):
        chosen -= lost
        tries, part = tries + 1, search.around(chosen)
    return part


class _Search:
    """What is needed to know of a program."""

    def __init__(self, program: Program, without: Collection[int]) -> None:
        self.program = program
        self.without = without
        self.readers = program.readers()
        self.given = {slot.value for slot in program.outputs}
        self.makers = {v: i for i, o in enumerate(program.operations) for v in o.outputs}
        self.constants = {constant.value for constant in program.constants}
        self.fixed = program.fixed_values()

    def able(self) -> set[int]:
        """The convolutions of images of blocks of channels, by weights that are no constants."""
        return {i for i, o in enumerate(self.program.operations) if self._is_able(o)}

    def _is_able(self, operation: Operation) -> bool:
        if operation.op not in CONVOLUTIONS or operation.domain:
            return False
        image = self._shape(operation.inputs[0])
        if operation.inputs[1] in self.fixed or len(image) != 4 or not self._is_float(operation):
            return False
        weight, group = (
            filters_of(self.program, operation), int_of(attributes_of(operation), "group")
        )  # fmt: skip
        if 0 in (*image, *weight):
            return False
        if operation.op == "ConvTranspose" and (group > 1 or not self._is_turned(operation)):
            return False
        if group == 1:
            is_ordered = image[1] < SMALLEST_BLOCK or image[1] % REORDERED == 0
            return weight[0] >= BLOCK and is_ordered
        outer = weight[0] // group
        return weight[0] % BLOCK == 0 and (
            is_depthwise(weight, group) or (weight[1] % BLOCK == 0 and outer % BLOCK == 0)
        )

    def _is_turned(self, operation: Operation) -> bool:
        """Whether a transposed convolution is one by weights that are turned."""
        size, kernel = (self._shape(v)[2:] for v in operation.inputs[:2])
        windows = transposed_windows(attributes_of(operation), size, kernel)
        return turned_windows(windows) is not None

    def around(self, chosen: set[int]) -> BlockedPart:
        """These convolutions, and what comes with them."""
        program, convolutions = self.program, dict[int, BlockedConvolution]()
        blocked, inside, others = set[int](), set[int](), set[int]()
        read = {self.program.operations[i].inputs[0] for i in chosen if not self.is_narrow(i)}
        for index, operation in enumerate(program.operations):
            if index in inside or index in convolutions:
                made = convolutions.get(index)
                if made is not None and is_whole(program, made.result):
                    blocked.add(made.result)
            elif index in chosen:
                found, last = self._with_followers(index, blocked | read)
                convolutions[last] = found
                inside |= self._members(found) - {last}
                if last == index and is_whole(program, found.result):
                    blocked.add(found.result)
            elif index not in self.without and self._stays(operation, blocked):
                others.add(index)
                blocked.update(operation.outputs)
        taken = others | inside | convolutions.keys()
        plain = {v for v in blocked if v in self.given or self.readers.get(v, set()) - taken}
        plain |= {
            v for v in blocked
            if any(self._reads_plain(i, v) for i in self.readers.get(v, set()) & taken)
        }  # fmt: skip
        return BlockedPart(convolutions, frozenset(others), frozenset(inside), frozenset(plain))

    def is_narrow(self, index: int) -> bool:
        """Whether a convolution reads images of too few channels to fill any block, as they are."""
        return is_narrow(self.program, self.program.operations[index], SMALLEST_BLOCK)

    def _members(self, found: BlockedConvolution) -> set[int]:
        members = {found.convolution}
        members |= {i for i in (found.normalization, found.activation) if i is not None}
        if found.added != ABSENT:
            added = self.makers[found.result] if found.activation is None else self.makers[
                self.program.operations[found.activation].inputs[0]
            ]  # fmt: skip
            members.add(added)
        return members

    def _with_followers(self, index: int, blocked: set[int]) -> tuple[BlockedConvolution, int]:
        """A convolution with what it can do besides, and the last of these operations."""
        result, last = self.program.operations[index].outputs[0], index
        normalization, added, activation = None, ABSENT, None
        after = self._follower(result, self._is_normalization)
        if after is not None:
            normalization = last = after
            result = self.program.operations[after].outputs[0]
        after = self._follower(result, lambda o: self._other(o, result, blocked) != ABSENT)
        if after is not None:
            added = self._other(self.program.operations[after], result, blocked)
            last, result = after, self.program.operations[after].outputs[0]
        after = self._follower(result, self._is_activation)
        if after is not None:
            activation = last = after
            result = self.program.operations[after].outputs[0]
        return BlockedConvolution(index, result, normalization, added, activation), last

    def _follower(self, value: int, fits: Callable[[Operation], bool]) -> int | None:
        """The one operation that reads a value, if it fits."""
        readers = self.readers.get(value, set())
        if len(readers) != 1 or value in self.given:
            return None
        (reader,) = readers
        operation = self.program.operations[reader]
        is_free = reader not in self.without and not operation.domain
        return reader if is_free and fits(operation) else None

    def _is_normalization(self, operation: Operation) -> bool:
        return (
            operation.op == "BatchNormalization"
            and not attributes_of(operation).get("training_mode")
            and self._is_float(operation)
            and len([v for v in operation.outputs if v != ABSENT]) == 1
        )

    def _other(self, operation: Operation, value: int, blocked: set[int]) -> int:
        """What is added to a value, where that is there in whole blocks and of the same shape."""
        if operation.op != "Add" or operation.inputs[0] == operation.inputs[1]:
            return ABSENT
        other = next(v for v in operation.inputs if v != value)
        fits = other in blocked and self._shape(other) == self._shape(value)
        return other if fits and is_whole(self.program, other) else ABSENT

    def _is_activation(self, operation: Operation) -> bool:
        if operation.op == "Clip":
            return len(operation.inputs) == 3 and all(
                v in self.constants for v in operation.inputs[1:]
            )
        return operation.op in ACTIVATIONS

    def _stays(self, operation: Operation, blocked: set[int]) -> bool:
        """Whether an operation reads nothing but blocks, and can make them."""
        if operation.domain or not blocked.issuperset(operation.inputs):
            return False
        result = self.program.values[operation.outputs[0]].type
        if operation.op in UNARY or operation.op in BINARY:
            return all(self._shape(v) == result.shape for v in operation.inputs)
        if operation.op in POOLS:
            # In blocks (1.32) a last window that lies over the end counts what is not there.
            is_over = operation.op == "AveragePool" and attributes_of(operation)["ceil_mode"]
            return len(operation.outputs) == 1 and len(result.shape) == 4 and not is_over
        return operation.op == "Concat" and int_of(attributes_of(operation), "axis") in (1, -3)

    def _reads_plain(self, index: int, value: int) -> bool:
        """Whether a convolution reads images as they are, or a value as something else."""
        operation = self.program.operations[index]
        if operation.op in CONVOLUTIONS:
            return value in operation.inputs[1:] or self.is_narrow(index)
        return operation.op == "BatchNormalization" and value in operation.inputs[1:]

    def _is_float(self, operation: Operation) -> bool:
        return all(
            self.program.values[v].type.data_type.compute_dtype == DataType.FLOAT32.dtype
            for v in (*operation.inputs, *operation.outputs)
            if v != ABSENT
        )

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.program.values[value].type.shape

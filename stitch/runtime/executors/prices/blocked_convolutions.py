"""Choose the convolutions that ONNX Runtime computes in its blocked layout.

ONNX Runtime keeps images in blocks of 8 or 16 channels from one convolution to the next
(`com.microsoft.nchwc`), with normalization, addition and activation fused in, but only for constant
weights. For other weights, as in torch.compile and in training, the model converts them in each
run, which pays if the image has many positions per weight. A transposed convolution without strides
and groups is computed as a convolution by transposed weights, in two thirds of the time.

The gain of leaving out a convolution includes the conversions that its neighbours then save or
need, so chains are not split for small losses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from stitch.ops import attributes_of, int_of, multiply_adds, transposed_windows, turned_windows
from stitch.program import ABSENT, DataType, Operation, Program

#: Channels of the largest block and of the smallest, which divides it.
BLOCK, SMALLEST_BLOCK = 16, 8
#: Images are blocked only if their channels are a multiple of this.
REORDERED = 4
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
#: Pools with kernels for blocked images.
POOLS = frozenset({"AveragePool", "GlobalAveragePool", "MaxPool"})


@dataclass(frozen=True, slots=True)
class BlockedConvolution:
    """A convolution and the operations fused into it, by index.

    `added` is the value added to it (ABSENT without one), `result` the value that it computes.
    """

    convolution: int
    result: int
    normalization: int | None = None
    added: int = ABSENT
    activation: int | None = None


@dataclass(frozen=True, slots=True)
class BlockedPart:
    """The operations of a program that are computed on blocked images.

    Attributes:
        convolutions: Convolutions by their last fused operation.
        others: Operations that read and write blocked images.
        inside: Operations fused into a convolution, but the last.
        plain: Blocked values that are also read in the plain layout.
    """

    convolutions: dict[int, BlockedConvolution]
    others: frozenset[int]
    inside: frozenset[int]
    plain: frozenset[int]

    @property
    def operations(self) -> frozenset[int]:
        return self.others | self.inside | self.convolutions.keys()


NO_BLOCKS = BlockedPart({}, frozenset(), frozenset(), frozenset())


def is_depthwise(weight: tuple[int, ...], group: int) -> bool:
    return group > 1 and weight[0] == group and weight[1] == 1


def filters_of(program: Program, operation: Operation) -> tuple[int, ...]:
    """Return the weights' shape as (filters, channels of each, height, width)."""
    weight = program.values[operation.inputs[1]].type.shape
    if operation.op == "ConvTranspose":
        return (weight[1], weight[0], *weight[2:])
    return weight


def is_narrow(program: Program, operation: Operation, block: int) -> bool:
    """Whether a convolution's images have fewer channels than a block."""
    image = program.values[operation.inputs[0]].type.shape
    return image[1] == filters_of(program, operation)[1] < block


def is_whole(program: Program, value: int) -> bool:
    """Whether an image's channels are whole blocks on every processor.

    Others leave the blocked layout at once: 0 x inf in a padded channel would be NaN in all
    channels of the next convolution.
    """
    return program.values[value].type.shape[1] % BLOCK == 0


# Gains

#: Nanoseconds saved on one thread: per multiply-add, and per result of a depthwise convolution.
SAVED_PRODUCT_NS = 0.004
SAVED_DEPTHWISE_NS = 2.0
#: Nanoseconds to convert an element of an image; of a weight; of a weight of a larger window more.
IMAGE_NS, WEIGHT_NS, WINDOW_WEIGHT_NS = 0.25, 0.3, 0.7
#: Additional nanoseconds to transpose a weight.
TURNED_WEIGHT_NS = 3.5


def weight_conversion_ns(program: Program, index: int) -> float:
    """Return the nanoseconds to convert a convolution's weights to blocks."""
    operation = program.operations[index]
    weight = program.values[operation.inputs[1]].type.shape
    each = TURNED_WEIGHT_NS if operation.op == "ConvTranspose" else 0.0
    each += WEIGHT_NS + (WINDOW_WEIGHT_NS if math.prod(weight[2:]) > 1 else 0)
    return math.prod(weight) * each


class ConvolutionGains:
    """The time that the convolutions of a part save."""

    def __init__(self, program: Program, part: BlockedPart) -> None:
        self.program = program
        self.part = part
        self.convolutions = tuple(part.convolutions.values())
        self.blocked = {c.result for c in self.convolutions if is_whole(program, c.result)}
        self.blocked |= {v for i in part.others for v in program.operations[i].outputs}
        self.reads = Counter(value for _, value in self._blocked_reads())

    def unprofitable(self) -> set[int]:
        """Return the convolutions whose absence would save time."""
        return {
            c.convolution
            for c in self.convolutions
            if self._own_ns(c) + self._conversions_ns(c) <= 0
        }

    def saved_ns(self) -> float:
        """Return what the whole part saves."""
        read = {value for _, value in self._blocked_reads()}
        converted = [*(self.blocked & self.part.plain), *(read - self.blocked)]
        converted += [c.result for c in self.convolutions if c.result not in self.blocked]
        return sum(map(self._own_ns, self.convolutions)) - sum(map(self._image_ns, converted))

    def _own_ns(self, found: BlockedConvolution) -> float:
        """Return what a convolution saves, without conversions of images."""
        operation = self.program.operations[found.convolution]
        group = int_of(attributes_of(operation), "group")
        if is_depthwise(filters_of(self.program, operation), group):
            saved = math.prod(self._shape(found.result)) * SAVED_DEPTHWISE_NS
        else:
            saved = multiply_adds(operation, self.program.values) * SAVED_PRODUCT_NS
        return saved - weight_conversion_ns(self.program, found.convolution)

    def _conversions_ns(self, found: BlockedConvolution) -> float:
        """Return the time of image conversions without a convolution, less that with it."""
        image, saved = self.program.operations[found.convolution].inputs[0], 0.0
        if image in self.blocked and image not in self.part.plain:
            saved += self._image_ns(image)
        elif image not in self.blocked and self.reads[image] == 1:
            saved -= self._image_ns(image)
        if found.result not in self.blocked or found.result in self.part.plain:
            saved -= self._image_ns(found.result)
        if found.result in self.blocked and self.reads[found.result]:
            saved += self._image_ns(found.result)
        return saved

    def _blocked_reads(self) -> Iterator[tuple[int, int]]:
        """Yield (reader's result, value) for each value that is read in blocks."""
        for found in self.convolutions:
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


# Choice

#: Operators that may run on blocked images: of one operand, or of two of one shape.
UNARY = frozenset({"Abs", "Neg", "Relu", "Sigmoid", "Tanh"})
BINARY = frozenset({"Add", "Mul", "Sub"})
#: Activations that a convolution's kernel can apply.
ACTIVATIONS = frozenset({"Clip", "Relu"})
#: Rounds in which convolutions are left out; a long chain could shrink from its ends.
MAX_ROUNDS = 64


def blocked_part(program: Program, without: Collection[int] = ()) -> BlockedPart:
    """Choose the operations to compute in blocks, none of them in `without`.

    Starts with all convolutions that can be blocked, and leaves out the unprofitable ones until
    none is left.
    """
    if not any(operation.op in CONVOLUTIONS for operation in program.operations):
        return NO_BLOCKS
    search = _Search(program, without)
    chosen = search.able()
    for _ in range(MAX_ROUNDS):
        part = search.part_around(chosen)
        gains = ConvolutionGains(program, part)
        lost = gains.unprofitable()
        if not lost:
            return part if gains.saved_ns() > 0 else NO_BLOCKS
        chosen -= lost
    return NO_BLOCKS


class _Search:
    def __init__(self, program: Program, without: Collection[int]) -> None:
        self.program = program
        self.without = without
        self.readers = program.readers()
        self.returned = {slot.value for slot in program.outputs}
        self.makers = {v: i for i, o in enumerate(program.operations) for v in o.outputs}
        self.constants = {constant.value for constant in program.constants}
        self.fixed = program.fixed_values()

    def able(self) -> set[int]:
        """Return the convolutions by weights that are not constant whose shapes can be blocked."""
        return {i for i, o in enumerate(self.program.operations) if self._is_able(o)}

    def _is_able(self, operation: Operation) -> bool:
        if operation.op not in CONVOLUTIONS or operation.domain:
            return False
        image = self._shape(operation.inputs[0])
        if operation.inputs[1] in self.fixed or len(image) != 4 or not self._is_float(operation):
            return False
        weight = filters_of(self.program, operation)
        group = int_of(attributes_of(operation), "group")
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
        """Whether a transposed convolution equals a convolution by transposed weights."""
        size, kernel = (self._shape(v)[2:] for v in operation.inputs[:2])
        windows = transposed_windows(attributes_of(operation), size, kernel)
        return turned_windows(windows) is not None

    def part_around(self, chosen: set[int]) -> BlockedPart:
        """Return the part of these convolutions and of operations that can join them."""
        program, convolutions = self.program, dict[int, BlockedConvolution]()
        blocked, inside, others = set[int](), set[int](), set[int]()
        read = {self.program.operations[i].inputs[0] for i in chosen if not self.is_narrow(i)}
        for index, operation in enumerate(program.operations):
            if index in inside or index in convolutions:
                fused = convolutions.get(index)
                if fused is not None and is_whole(program, fused.result):
                    blocked.add(fused.result)
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
        plain = {v for v in blocked if v in self.returned or self.readers.get(v, set()) - taken}
        plain |= {
            v for v in blocked
            if any(self._reads_plain(i, v) for i in self.readers.get(v, set()) & taken)
        }  # fmt: skip
        return BlockedPart(convolutions, frozenset(others), frozenset(inside), frozenset(plain))

    def is_narrow(self, index: int) -> bool:
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
        """Return a convolution with the operations fused into it, and the last of these."""
        result, last = self.program.operations[index].outputs[0], index
        normalization, added, activation = None, ABSENT, None
        after = self._follower(result, self._is_normalization)
        if after is not None:
            normalization = last = after
            result = self.program.operations[after].outputs[0]
        after = self._follower(result, lambda o: self._addend(o, result, blocked) != ABSENT)
        if after is not None:
            added = self._addend(self.program.operations[after], result, blocked)
            last, result = after, self.program.operations[after].outputs[0]
        after = self._follower(result, self._is_activation)
        if after is not None:
            activation = last = after
            result = self.program.operations[after].outputs[0]
        return BlockedConvolution(index, result, normalization, added, activation), last

    def _follower(self, value: int, fits: Callable[[Operation], bool]) -> int | None:
        """Return the only operation that reads a value, if it fits."""
        readers = self.readers.get(value, set())
        if len(readers) != 1 or value in self.returned:
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

    def _addend(self, operation: Operation, value: int, blocked: set[int]) -> int:
        """Return the blocked value of the same shape that is added to a value; else ABSENT."""
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
        """Whether an operation reads only blocked values and can write blocks."""
        if operation.domain or not blocked.issuperset(operation.inputs):
            return False
        result = self.program.values[operation.outputs[0]].type
        if operation.op in UNARY or operation.op in BINARY:
            return all(self._shape(v) == result.shape for v in operation.inputs)
        if operation.op in POOLS:
            # In blocks (1.32) a last window beyond the end averages over missing elements.
            is_over = operation.op == "AveragePool" and attributes_of(operation)["ceil_mode"]
            return len(operation.outputs) == 1 and len(result.shape) == 4 and not is_over
        return operation.op == "Concat" and int_of(attributes_of(operation), "axis") in (1, -3)

    def _reads_plain(self, index: int, value: int) -> bool:
        """Whether an operation of the part reads a value in the plain layout."""
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

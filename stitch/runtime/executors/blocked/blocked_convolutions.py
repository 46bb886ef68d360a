"""Convolutions by weights that are no constants, in ONNX Runtime's blocked layout.

ONNX Runtime keeps images in blocks of 8 or 16 channels, where a block fills a register, from one
convolution to the next (`com.microsoft.nchwc`); normalization, an addition and an activation are
part of the convolution. By itself it does so only for weights that are constants. Where they are
operands, as in torch.compile and in training, the model arranges them in each run. That pays where
an image has many places for each weight.

A transposed convolution without strides and groups is one by weights that are turned, channels
exchanged and kernels reversed, which ONNX Runtime does not use: it spreads columns, and takes half
as long again. In backward passes they are the gradients of images.

Blocks that are filled up with channels of zeros end at a convolution: 0 x inf in one of them would
be NaN in every channel of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from stitch.ops import attributes_of, int_of, transposed_windows, turned_windows
from stitch.program import ABSENT, DataType, Operation, Program
from stitch.runtime.executors.blocked.blocked_form import (
    BLOCK,
    CONVOLUTIONS,
    NO_BLOCKS,
    POOLS,
    REORDERED,
    SMALLEST_BLOCK,
    BlockedConvolution,
    BlockedPart,
    filters_of,
    is_depthwise,
    is_narrow,
    is_whole,
)
from stitch.runtime.executors.blocked.blocked_gains import losing

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

"""What a program has in blocks of channels, and what fills blocks."""

from __future__ import annotations

from dataclasses import dataclass

from stitch.program import ABSENT, Operation, Program

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

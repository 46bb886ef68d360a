"""What brings messages to device servers and values between them: the protocol of carriers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from stitch.mesh.messages import Failure, Message
from stitch.program import Array, can_change

#: A value on its way: known to the carrier that made it only.
Reference: TypeAlias = Any


def unchanging(value: Array | Failure) -> Array | Failure:
    """Return an array, or a copy where it can change; a failure as it is."""
    return value.copy() if isinstance(value, np.ndarray) and can_change(value) else value


class Outcome(enum.Enum):
    """What became of a value.

    `LOST`: its server ended before it was made, or a value that it needs is lost. `SILENT`: its
    message was taken, and no answer will come, or it is `NotDone`; it may be sent again.
    """

    PENDING = "pending"
    READY = "ready"
    LOST = "lost"
    SILENT = "silent"


class Sending(NamedTuple):
    """A message with its values, and how many values its answer has."""

    message: Message
    values: Sequence[Reference] = ()
    returns: int = 1


class Carrier(Protocol):
    """Messages of one client to the device servers of a mesh.

    Messages to one device are handled one after the other, in the order in which they were sent. A
    message whose values are lost is not handled, and its own values are lost.

    Attributes:
        capacity: The bytes of values that can be under way at once; None: as many as memory holds.
    """

    capacity: int | None

    def start(self, device: str) -> None:
        """Start the server of a device; a server that was there before is ended."""

    def send(self, device: str, *sendings: Sending) -> list[tuple[Reference, ...]]:
        """Send messages that are handled one after the other, perhaps when the values of all of
        them are there; return for each a reference for each value of its answer."""

    def put(self, value: Array | Failure) -> Reference:
        """Return a reference to a value of the client, which outlives every server; an array may
        change afterwards."""

    def wait(self, references: Sequence[Reference]) -> None:
        """Wait until no reference is pending."""

    def outcome(self, reference: Reference) -> Outcome:
        """Return what became of a value by now."""

    def values(self, references: Sequence[Reference]) -> list[Any]:
        """Return values that are ready; `Outcome.LOST` for one that ended with what held it."""

    def has_ended(self, device: str) -> bool:
        """Return whether the server of a device has ended."""

    def whereabouts(self, device: str) -> str:
        """Return where the server of a device runs, for errors: pid, node, how it ended."""

    def close(self) -> None:
        """End all servers. Closing twice is allowed."""

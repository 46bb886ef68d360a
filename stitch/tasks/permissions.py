"""What a task may do with an array: a lattice of four permissions."""

from __future__ import annotations

import enum


class Permission(enum.Enum):
    """None < read-only, write-only < read-write.

    >>> Permission.READ_ONLY.join(Permission.WRITE_ONLY)
    <Permission.READ_WRITE: 'read_write'>
    """

    NONE = "none"
    READ_ONLY = "read_only"
    WRITE_ONLY = "write_only"
    READ_WRITE = "read_write"

    @property
    def reads(self) -> bool:
        """Whether it lets the bytes be seen."""
        return self in (Permission.READ_ONLY, Permission.READ_WRITE)

    @property
    def writes(self) -> bool:
        """Whether it lets the bytes be changed."""
        return self in (Permission.WRITE_ONLY, Permission.READ_WRITE)

    def join(self, other: Permission) -> Permission:
        """The least permission that allows what either allows."""
        return _OF[self.reads or other.reads, self.writes or other.writes]

    def meet(self, other: Permission) -> Permission:
        """The greatest permission that allows only what both allow."""
        return _OF[self.reads and other.reads, self.writes and other.writes]

    def allows(self, other: Permission) -> bool:
        """Whether it is at least the other one."""
        return self.meet(other) is other


_OF = {(kind.reads, kind.writes): kind for kind in Permission}

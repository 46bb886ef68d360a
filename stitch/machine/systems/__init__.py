"""System descriptors of tt-mlir (`.ttsys`), in files of their own and within other files."""

from stitch.machine.systems.system_fields import SYSTEM_FILES, system_tables
from stitch.machine.systems.system_machines import (
    Chip,
    System,
    load_system,
    machines_in,
    system_chips,
)

__all__ = [
    "SYSTEM_FILES", "Chip", "System", "load_system", "machines_in", "system_chips", "system_tables",
]  # fmt: skip

"""Both machines pass Stitch's suite."""

from typing import ClassVar

from stitch.testing import MachineSuite


class TestLab(MachineSuite):
    machine: ClassVar[str] = "lab4x4"


class TestWideLab(MachineSuite):
    machine: ClassVar[str] = "lab4x4_wide"

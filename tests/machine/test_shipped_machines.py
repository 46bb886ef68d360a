"""The shipped machines pass the suite of all machines."""

from __future__ import annotations

from typing import ClassVar

from stitch.testing import MachineSuite
from tests.support.grids import CAMPAIGN


class TestTiny(MachineSuite):
    machine: ClassVar[str] = "tiny"


class TestHost(MachineSuite):
    machine: ClassVar[str] = "host"


class TestCuda(MachineSuite):
    machine: ClassVar[str] = "cuda"


@CAMPAIGN
class TestWormhole(MachineSuite):
    machine: ClassVar[str] = "wormhole_n150"


@CAMPAIGN
class TestBlackhole(MachineSuite):
    machine: ClassVar[str] = "blackhole_p150"

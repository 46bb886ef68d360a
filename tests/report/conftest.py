"""Every test here ends with empty devices."""

from __future__ import annotations

from tests.support.stitched_models import memory_comes_back

__all__ = ["memory_comes_back"]

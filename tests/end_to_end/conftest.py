"""Every test here ends with empty devices."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = str(Path(__file__).parent.parent / "runtime")
if HERE not in sys.path:
    sys.path.insert(0, HERE)
from stitched_models import memory_comes_back  # noqa: E402

__all__ = ["memory_comes_back"]

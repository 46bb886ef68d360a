"""Collections of garbage that look at what a test makes, and at nothing else.

All that a process has imported and compiled, torch's modules among it, takes them seconds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_of_here() -> Iterator[None]:
    """Within the block, a collection looks at objects that were made in it."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

"""Collections of garbage that look at what a test makes, and at nothing else.

All that a process has imported and compiled, torch's modules among it, takes them seconds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_of_here() -> Iterator[None]:
    """Within the block, a collection looks at objects that were made in it.

    What was there before is not looked at afterwards either: `gc.unfreeze` would give the next
    collection all that the process has ever imported. So garbage goes first, while there is little.
    """
    gc.collect()
    gc.freeze()
    yield

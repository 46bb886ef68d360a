"""The seed of a run of the tests, from which long campaigns draw: each run sees other cases.

`tools/campaign` and `tools/test --full` draw and print it, `STITCH_SEED=N` repeats a run; else it
is 0.
"""

from __future__ import annotations

import os

SEED = int(os.environ.get("STITCH_SEED", "0"))

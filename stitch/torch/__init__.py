"""The tracing interface: `import stitch.torch`, `import stitch.torch.nn as nn`.

Importing this package needs no torch: its names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.torch.captured_model import (
        CapturedModel,
        Explanation,
        compile,
        explain,
        from_fx,
        graph_counts,
    )
    from stitch.torch.module_json import load
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "captured_model": "CapturedModel Explanation compile explain from_fx graph_counts",
            "module_json": "load",
        },
        modules="nn",
        others=": torch's own names, such as optim, are those of `import torch`",
    )

__all__ = [
    "CapturedModel", "Explanation", "compile", "explain", "from_fx", "graph_counts", "load",
]  # fmt: skip

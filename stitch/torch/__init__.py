"""The tracing interface: `import stitch.torch`, `import stitch.torch.nn as nn`.

Comes in: torch modules, examples, optimizers of torch.optim, losses of torch.nn. Goes out:
`compile` (a model that is captured now, or at its first call), `from_fx` (a computation graph),
`explain`, which gives an `Explanation`, and `graph_counts` (what became of the graphs of a
torch.compile, and of all of a device),
`load` (what `dump` wrote, with torch's objects in their places again), and `nn`: torch.nn with a
`Module` that compiles itself. Names are loaded when they are asked for: this face does without the
package torch (an optional extra), what it hands on does not.
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
    from stitch.torch.json_loading import load
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "captured_model": "CapturedModel Explanation compile explain from_fx graph_counts",
            "json_loading": "load",
        },
        modules="nn",
        others=": torch's own names, such as optim, are those of `import torch`",
    )

__all__ = [
    "CapturedModel", "Explanation", "compile", "explain", "from_fx", "graph_counts", "load",
]  # fmt: skip

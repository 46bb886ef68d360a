"""The shapes of an ONNX model's inputs for batches of one size.

Comes in: a path, a size. Goes out: shapes by input, for inputs whose first dimension is the only
one without a size. Must not know: what the graph computes.
"""

from __future__ import annotations

from pathlib import Path

from stitch.frontend.onnx.protos.model_file import read_model


def batched_shapes(path: Path, batch_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs that leave their first dimension open; raises `FormatError`."""
    graph = read_model(path).proto.graph
    weights = {tensor.name for tensor in graph.initializer}
    found = {}
    for info in graph.input:
        kind = info.type.tensor_type
        if info.name in weights or not kind.HasField("shape") or not kind.shape.dim:
            continue
        sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
        if sizes[0] is None and None not in sizes[1:]:
            found[info.name] = (batch_size, *(size for size in sizes[1:] if size is not None))
    return found

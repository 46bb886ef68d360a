"""What an ONNX file holds, checked before it is believed: models, tensors, attributes."""

from stitch.frontend.onnx.protos.model_file import (
    NEWEST_IR,
    NEWEST_OPSET,
    OnnxModel,
    opsets_of,
    plain_domain,
    read_model,
)
from stitch.frontend.onnx.protos.tensor_protos import (
    attribute_value,
    attributes_of,
    dense_array,
    element_type,
    tensor_array,
)

__all__ = [
    "NEWEST_IR", "NEWEST_OPSET", "OnnxModel", "attribute_value", "attributes_of",
    "dense_array", "element_type", "opsets_of", "plain_domain", "read_model", "tensor_array",
]  # fmt: skip

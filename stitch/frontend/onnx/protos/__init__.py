"""What an ONNX file holds, checked before it is believed: models, tensors, attributes.

Comes in: paths and protos. Goes out: an `OnnxModel`, arrays, Python values. Must not know: what a
graph means.
"""

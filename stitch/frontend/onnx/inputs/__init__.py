"""The inputs of an ONNX graph, with every dimension known.

Comes in: declared inputs, example inputs, shapes given by hand. Goes out: bound inputs that are all
tensors. Must not know: what the graph computes.
"""

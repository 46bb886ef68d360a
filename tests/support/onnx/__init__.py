"""ONNX: small models, and the node tests that ONNX brings."""

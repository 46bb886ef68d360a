"""Models of classical machine learning (`ai.onnx.ml`) in plain operations.

Comes in: a node. Goes out: labels, scores, probabilities; trees are walked, products taken. Must
not know: scopes, files.
"""

"""What ONNX Runtime's optimizer writes (`com.microsoft`), in plain operations.

Comes in: a node. Goes out: what plain operations make of its operands. Must not know: scopes,
files.
"""

"""How good choices by a table of prices are, on whole networks.

Comes in: networks, a table. Goes out: what each executor takes beside the best of NumPy and ONNX
Runtime. Uses the public face only; must not know how operations are priced.
"""

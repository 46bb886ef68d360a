"""One node as a call of an operator of opset 26.

Comes in: a node of any opset, a function's call, a constant. Goes out: a `NodeCall`, its settings,
the function to expand, the array that is known. Must not know: scopes.
"""

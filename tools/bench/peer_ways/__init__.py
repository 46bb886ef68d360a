"""The ways in which `peers.py` runs a chain: ours, and one module for each peer.

Comes in: a `Case` (layers, input, expected result). Goes out: `Way`s, ready to be timed. A module
of a peer imports it at its top, so that a missing package shows as `ModuleNotFoundError`. Must not
know: clocks, goals, tables.
"""

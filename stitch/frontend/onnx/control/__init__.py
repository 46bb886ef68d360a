"""Nodes with bodies: If, Loop, Scan, SequenceMap.

Comes in: a node whose attributes are graphs. Goes out: what its bodies make: branches are chosen,
loops unrolled. Must not know: files.
"""

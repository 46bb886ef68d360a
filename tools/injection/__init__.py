"""Faults at every place: runs that are stopped, and a model of what must still hold afterwards.

Uses the public face and documented inspection only; must not know how a device keeps its records.
"""

"""Recordings: work that has been planned, bound and written out once, and runs again.

Comes in: windows of tasks. Goes out: bindings that may run, and what their runs leave. Must not
know handles, or what a queue is.
"""

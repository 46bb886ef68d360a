"""The queue: the stretch of tasks that waits to be run, and what becomes of it after a failure.

Comes in: tasks on values. Goes out: windows. Must not know handles.
"""

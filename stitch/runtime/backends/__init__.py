"""Backends: what allocates, copies, prepares, executes and frees on behalf of plans.

Comes in: plans, prepared programs. Goes out: bound plans, claims on host memory. Must not know
handles, recordings, queues.
"""

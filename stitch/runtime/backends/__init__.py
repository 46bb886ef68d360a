"""Backends: memory spaces, host memory limits, threads, and binding of plans."""

from stitch.runtime.backends.host_memory import Agent, HostMemory
from stitch.runtime.backends.local_backend import BoundPlan, BoundStep, LocalBackend, Thunk, stage
from stitch.runtime.backends.thread_pool import ThreadFunction, ThreadPool, ThreadRun

__all__ = [
    "Agent", "BoundPlan", "BoundStep", "HostMemory", "ThreadFunction", "ThreadRun",
    "ThreadPool", "LocalBackend", "Thunk", "stage",
]  # fmt: skip

"""Backends: memory spaces, host memory limits, threads, and binding of plans."""

from stitch.runtime.backends.bound_plan import BoundPlan, BoundStep, OwnBytes, Thunk
from stitch.runtime.backends.host_memory import HostMemory, Taker
from stitch.runtime.backends.instance_bytes import InstanceBytes
from stitch.runtime.backends.local_backend import LocalBackend, stage
from stitch.runtime.backends.thread_pool import ThreadFunction, ThreadPool, ThreadRun

__all__ = [
    "BoundPlan", "BoundStep", "HostMemory", "InstanceBytes", "ThreadFunction", "ThreadRun",
    "ThreadPool", "LocalBackend", "OwnBytes", "Taker", "Thunk", "stage",
]  # fmt: skip

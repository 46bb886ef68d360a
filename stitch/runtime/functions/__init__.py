"""Host functions on a device: what their calls have in common, and calls in its queue.

A device is known by what a Protocol says; must not know when its queue runs.
"""

from stitch.runtime.functions.function_agents import HostAgents, queue_call
from stitch.runtime.functions.queued_calls import HostAgent, HostResult, QueuedCall

__all__ = ["HostAgent", "HostAgents", "HostResult", "QueuedCall", "queue_call"]

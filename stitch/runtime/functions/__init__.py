"""Host functions on a device: their agents, and their queued calls."""

from stitch.runtime.functions.function_agents import HostAgents, queue_call
from stitch.runtime.functions.queued_calls import HostAgent, HostResult, QueuedCall

__all__ = ["HostAgent", "HostAgents", "HostResult", "QueuedCall", "queue_call"]

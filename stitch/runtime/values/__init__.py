"""Values: what handles refer to, the buffers that they lie in, and who has leases on these.

Comes in: descriptors, host arrays, effects of plans. Goes out: records, changed all at once. Must
not know devices, bindings, queues.
"""

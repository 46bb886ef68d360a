"""Requests to the planner, and a machine of bytes that runs its plans."""

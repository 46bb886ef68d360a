"""Passes: each rewrites a computation graph and preserves what it computes."""

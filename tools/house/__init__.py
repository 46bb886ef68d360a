"""The house: what `stitch/` looks like from outside, and where it breaks its own rules.

Reads text only; must not import what it looks at.
"""

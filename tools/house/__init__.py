"""The house: what `stitch/` looks like from outside, and where it breaks its own rules.

Comes in: a folder of Python packages. Goes out: its modules with their imports, and findings.
Reads text only; must not import what it looks at.
"""

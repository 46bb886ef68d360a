"""From `schema/program.fbs` to everything that is derived from it.

Comes in: the schema's text. Goes out: the verifier's table (`stitch/ttb/generated/tables.py`),
flatc's Python code beside it, and `docs/format.md`. Must not know: programs, files.
"""

"""From `schema/program.fbs` to everything that is derived from it.

Comes in: the schema's text. Goes out: the table that encoding, verifying and decoding run
on (`stitch/ttb/generated.py`) and `docs/format.md`. Must not know: programs, files.
"""

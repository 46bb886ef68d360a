"""The commands: `stitch-compile`, `stitch-run`, `stitch-inspect`, `stitch-link`.

Comes in: words of a command line. Goes out: files, text, an exit code. Nothing imports this room.
"""

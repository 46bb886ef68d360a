"""The commands: `stitch-compile`, `stitch-run`, `stitch-inspect`, `stitch-link`.

A command is a folder whose `main` loads the command when it is called. What several commands share
lies beside them. Nothing imports this package.
"""

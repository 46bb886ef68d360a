"""The commands `stitch-compile`, `stitch-run`, `stitch-inspect` and `stitch-link`.

Each command is a folder whose `main` loads the command when it is called; the modules beside the
folders are shared by the commands.
"""

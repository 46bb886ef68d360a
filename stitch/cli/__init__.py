"""The commands: `stitch-compile`, `stitch-run`, `stitch-inspect`, `stitch-link`.

Comes in: words of a command line. Goes out: files, text, an exit code. Nothing imports this room.
A command is a folder that hands on `main`, which loads the command when it is called; trainings are
a folder by themselves, which `stitch-run` opens. What several commands share lies beside them.
"""

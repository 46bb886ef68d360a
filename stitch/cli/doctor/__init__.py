"""`stitch doctor`: check this installation, and say what each part of it gives."""

from stitch.cli.command import entry_point

#: Runs the subcommand; gives its exit code.
main = entry_point("stitch doctor", "stitch.cli.doctor.doctor_command")

__all__ = ["main"]

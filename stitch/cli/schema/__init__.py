"""`stitch schema`: print the schema of the `.ttb` format or of a form of YAML files."""

from stitch.cli.command import entry_point

#: Runs the command; gives its exit code.
main = entry_point("stitch schema", "stitch.cli.schema.schema_command")

__all__ = ["main"]

"""From `schema/program.fbs` to everything that is derived from it."""

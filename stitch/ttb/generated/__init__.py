"""Generated from schema/program.fbs by tools/generate_schema: read by `stitch.ttb` only."""

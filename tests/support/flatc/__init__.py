"""The peer of `stitch/ttb/`: what flatc generates from the schema, and an encoder written on it."""

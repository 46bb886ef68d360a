"""Stitch joins independently compiled programs at run time."""

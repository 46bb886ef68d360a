"""Which Stitch this is. `pyproject.toml` says the same, and a test compares them."""

__version__ = "0.1.0"

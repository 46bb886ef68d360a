"""The version of Stitch, equal to that in `pyproject.toml`."""

__version__ = "0.1.0"
